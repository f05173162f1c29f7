#pragma once
#include "device/encode.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/kv_cache.h"

/// A lane's share of a head vector: loaded, rotated, and written to the cache as it is or in codes.
namespace ridgeline::kv_vector {

/// A lane's share of a head vector is this many pairs of pieces: of 16-byte pieces one a lane
/// covers 256 elements with a warp (of fp32, the widest, in 32 pairs); of single elements, where
/// alignment allows no more, four.
template <int kVec>
constexpr int kUnits = kVec == 1 ? kMaxKvHeadDim / 2 / device::kWarpSize : 1;

/// Of a piece of the table's row, in float32.
template <int kVec>
struct Angles {
  float cosine[kVec], sine[kVec];

  template <class C>
  __device__ void load(const C* row, int index, int half) {
    const device::Vec<C, kVec> cosines = device::load_vec<kVec>(row + index * kVec);
    const device::Vec<C, kVec> sines = device::load_vec<kVec>(row + half + index * kVec);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      cosine[j] = device::to_float(cosines.data[j]);
      sine[j] = device::to_float(sines.data[j]);
    }
  }
};

/// Divides by the scale of a head vector.
struct Scale {
  float value, inverse;

  __device__ explicit Scale(float scale) : value(scale), inverse(1.0f / scale) {}

  template <int kCount>
  __device__ void divide(device::Vec<float, kCount>& x) const {
    // Markstein: from the rounded inverse two steps lead to the rounded quotient, unless something
    // on the way overflows or is subnormal. The remainder is negated: -0 stays -0. 128 tokens into
    // fp8 took 2.97 us by divisions, 2.22 so; one 2.28 and 1.60 (48 heads of 128, bf16, H200).
    if (value > 0x1p-60f && value < 0x1p60f) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float quotient = x.data[j] * inverse;
        x.data[j] = fmaf(-fmaf(quotient, value, -x.data[j]), inverse, quotient);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x.data[j] = divided(x.data[j]);
    }
  }

  __device__ __noinline__ float divided(float x) const { return value == 0.0f ? 0.0f : x / value; }
};

/// Two pieces of a head vector that rotate together, or two neighbours behind the rotated part.
template <class T, int kVec>
struct Unit {
  int first, second;  // elements; at or past the end: absent
  bool rotated;
  device::Vec<T, kVec> a, b;

  Unit() = default;
  __device__ Unit(const KvWriteParams& params, int index) {
    const int half = params.rotary_dim / 2;
    rotated = index * kVec < half;
    first = rotated && !params.interleaved ? index * kVec : 2 * index * kVec;
    second = rotated && !params.interleaved ? first + half : first + kVec;
  }

  __device__ void load(const T* vector, int head_dim) {
    if (first < head_dim) a = device::load_vec<kVec>(vector + first);
    if (second < head_dim) b = device::load_vec<kVec>(vector + second);
  }

  __device__ void store(T* vector, int head_dim) const {
    if (first < head_dim) device::store(vector + first, a);
    if (second < head_dim) device::store(vector + second, b);
  }

  /// Rotates pairs (x, y) of the two pieces: element j of both, or, interleaved, neighbours of a,
  /// then of b.
  __device__ void rotate(const Angles<kVec>& angles, bool interleaved) {
    device::Vec<float, kVec> x = device::floats(a), y = device::floats(b);
    if (interleaved && kVec > 1) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        device::Vec<float, kVec>& piece = j < kVec / 2 ? x : y;
        const int i = 2 * j % kVec;
        rotate_pair(piece.data[i], piece.data[(i + 1) % kVec], angles.cosine[j], angles.sine[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        rotate_pair(x.data[j], y.data[j], angles.cosine[j], angles.sine[j]);
    }
    a = device::rounded<T>(x);
    b = device::rounded<T>(y);
  }

  __device__ static void rotate_pair(float& x, float& y, float cosine, float sine) {
    const float first = rotated_first(x, y, cosine, sine);
    y = rotated_second(x, y, cosine, sine);
    x = first;
  }

  /// The largest magnitude as bits: NaN is above infinity and infinity above all else.
  __device__ std::uint32_t largest(int head_dim) const {
    std::uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (first < head_dim) bits = max(bits, __float_as_uint(fabsf(device::to_float(a.data[j]))));
      if (second < head_dim) bits = max(bits, __float_as_uint(fabsf(device::to_float(b.data[j]))));
    }
    return bits;
  }

  __device__ void store_codes(std::uint8_t* vector, const Scale& scale, bool fp8,
                              int head_dim) const {
    if (first < head_dim) device::store(vector + first, codes(a, scale, fp8));
    if (second < head_dim) device::store(vector + second, codes(b, scale, fp8));
  }

  __device__ static device::Vec<std::uint8_t, kVec> codes(const device::Vec<T, kVec>& piece,
                                                          const Scale& scale, bool fp8) {
    device::Vec<float, kVec> values = device::floats(piece);
    scale.divide(values);
    return fp8 ? device::encode<true>(values) : device::encode<false>(values);
  }
};

/// Where a head vector of the cache and its scale lie.
struct CachePlace {
  std::int64_t element, scale;

  __device__ CachePlace(const CacheView& cache, std::int64_t block, std::int64_t offset, int head) {
    element = block * cache.stride_block + offset * cache.stride_slot + head * cache.stride_head;
    scale = block * cache.scale_stride_block + offset * cache.scale_stride_slot +
            head * cache.scale_stride_head;
  }
};

/// Writes the units of one head vector to its slot. All lanes of the warp call it; `active` ones
/// have a vector whose slot is in the cache.
template <class T, int kVec>
__device__ void store_to_cache(const Unit<T, kVec> (&units)[kUnits<kVec>], const CacheView& cache,
                               const CachePlace& at, DType cache_dtype, int head_dim, int lanes,
                               int lane, bool active) {
  if (cache.scale == nullptr) [[likely]] {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i)
      units[i].store(static_cast<T*>(cache.data) + at.element, head_dim);
    return;
  }
  const bool fp8 = cache_dtype == DType::kFloat8E4M3;
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kUnits<kVec>; ++i)
    if (active) largest = max(largest, units[i].largest(head_dim));
  largest = device::group_max(largest, lanes);
  if (!active) return;
  const __nv_bfloat16 scale =
      __float2bfloat16_rn(__uint_as_float(largest) / (fp8 ? 448.0f : 127.0f));
  if (lane == 0) static_cast<__nv_bfloat16*>(cache.scale)[at.scale] = scale;
#pragma unroll
  for (int i = 0; i < kUnits<kVec>; ++i)
    units[i].store_codes(static_cast<std::uint8_t*>(cache.data) + at.element,
                         Scale(__bfloat162float(scale)), fp8, head_dim);
}

}  // namespace ridgeline::kv_vector
