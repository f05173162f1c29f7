#include "kernels/kv_cache.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/math.h"
#include "device/divisor.cuh"
#include "device/encode.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

constexpr int kThreads = 128;  // one token of 48 heads takes three SMs, 64 tokens take all

/// A lane's share of a head vector is this many pairs of pieces: of 16-byte pieces one a lane
/// covers 256 elements with a warp (of fp32, the widest, in 32 pairs); of single elements, where
/// alignment allows no more, four.
template <int kVec>
constexpr int kUnits = kVec == 1 ? kMaxKvHeadDim / 2 / device::kWarpSize : 1;

/// Instructions bound it: 4096 tokens of 48 heads of 128 took 42.3 us dividing by numbers that only
/// the host knows and rotating element by element, 35.6 without divisions, 31.1 rotating words; one
/// token 1.70, 1.50 and 1.20 (bf16, H200).
struct KvWriteLaunch {
  KvWriteParams params;
  std::int32_t lane_bits;         // 2^lane_bits lanes a head vector
  std::int32_t heads;             // a token, of q, k and v together
  std::int32_t vectors;           // tokens * heads
  device::Divisor per_token;      // by heads
  device::Divisor per_block;      // by the cache's block size
};

// ---- Phases -----------------------------------------------------------------------------------

/// From L2: L1 may hold what was there before the kernels ahead had ended.
__device__ __forceinline__ std::int64_t index_at(const void* indices, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? __ldcg(static_cast<const std::int64_t*>(indices) + i)
                                : __ldcg(static_cast<const std::int32_t*>(indices) + i);
}

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

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: enough blocks for a group of lanes to each head vector of q, k and v. A lane owns pairs of
/// pieces that rotate together, so nothing is exchanged but the largest magnitude of a vector that
/// is quantised. No shared memory.
template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    kv_write_kernel(const __grid_constant__ KvWriteLaunch launch) {
  const KvWriteParams& params = launch.params;
  const int lanes = 1 << launch.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::uint32_t wanted =
      blockIdx.x * (kThreads >> launch.lane_bits) + (threadIdx.x >> launch.lane_bits);
  // The others still join their warp's reductions.
  const bool present = wanted < static_cast<std::uint32_t>(launch.vectors);
  const int vector = present ? static_cast<int>(wanted) : 0;
  const std::int64_t token = launch.per_token.divide(vector);
  int head = vector - static_cast<int>(token) * launch.heads;
  const bool is_q = head < params.q.heads;
  if (!is_q) head -= params.q.heads;
  const bool is_v = !is_q && head >= params.k.heads;
  if (is_v) head -= params.k.heads;
  const HeadsView& view = is_q ? params.q : is_v ? params.v : params.k;
  const bool in_place = is_q || params.slots == nullptr;
  // In place, what is behind the rotated part stays as it is.
  const int head_dim = in_place ? params.rotary_dim : params.head_dim;

  const bool rotates = params.rotary_dim > 0 && !is_v && present;
  Angles<kVec> angles[kUnits<kVec>];
  const auto load_angles = [&](std::int64_t position) {
    if (position < 0 || position >= params.max_position) position = 0;
    const std::int64_t row = position * params.stride_cos_sin;
    const int half = params.rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i) {
      const int index = lane + i * lanes;
      if (index * kVec >= half) continue;
      if (params.table_dtype == params.dtype)
        angles[i].load(static_cast<const T*>(params.cos_sin) + row, index, half);
      else
        angles[i].load(static_cast<const float*>(params.cos_sin) + row, index, half);
    }
  };

  ptx::launch_dependents();
  // The position is most likely written already; then the row of the table is on its way early.
  const bool guesses = rotates && params.table_ready;
  std::int64_t guess = 0;
  if (guesses) load_angles(guess = index_at(params.positions, params.index_dtype, token));
  ptx::wait_for_dependencies();

  // Ahead of the stores, behind which the compiler leaves it: they might write it.
  const std::int64_t slot =
      present && !in_place ? index_at(params.slots, params.index_dtype, token) : -1;
  T* source = static_cast<T*>(view.data) + token * view.stride_token + head * view.stride_head;
  Unit<T, kVec> units[kUnits<kVec>];
#pragma unroll
  for (int i = 0; i < kUnits<kVec>; ++i) {
    units[i] = Unit<T, kVec>(params, lane + i * lanes);
    if (present) units[i].load(source, head_dim);
  }
  if (rotates) {
    const std::int64_t position = index_at(params.positions, params.index_dtype, token);
    if (!guesses || position != guess) load_angles(position);
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i)
      if (units[i].rotated) units[i].rotate(angles[i], params.interleaved);
  }
  if (in_place && present) {
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i) units[i].store(source, head_dim);
  }
  if (params.slots == nullptr) return;
  const bool active = slot >= 0 && slot < params.num_slots;
  const CacheView& cache = is_v ? params.v_cache : params.k_cache;
  const int within = active ? static_cast<int>(slot) : 0;
  const int block = launch.per_block.divide(within);
  const CachePlace at(cache, block, within - block * params.block_size, head);
  store_to_cache<T, kVec>(units, cache, at, params.cache_dtype, head_dim, lanes, lane, active);
}

// ---- Launch -----------------------------------------------------------------------------------

bool multiple_of(std::int64_t divisor, std::initializer_list<std::int64_t> values) {
  return std::ranges::all_of(values, [&](auto value) { return value % divisor == 0; });
}

std::int64_t address(const void* p) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p));
}

/// Whether pieces of `elements` elements are aligned everywhere.
bool takes_pieces(const KvWriteParams& p, int elements) {
  const auto bytes = static_cast<std::int64_t>(elements * size_of(p.dtype));
  const auto heads_fit = [&](const HeadsView& view) {
    return view.heads == 0 || (multiple_of(bytes, {address(view.data)}) &&
                               multiple_of(elements, {view.stride_token, view.stride_head}));
  };
  const auto cache_fits = [&](const CacheView& view) {
    return p.slots == nullptr ||
           (multiple_of(static_cast<std::int64_t>(elements * size_of(p.cache_dtype)),
                        {address(view.data)}) &&
            multiple_of(elements, {view.stride_block, view.stride_slot, view.stride_head}));
  };
  const bool table_fits = p.rotary_dim == 0 || (multiple_of(16, {address(p.cos_sin)}) &&
                                                multiple_of(elements, {p.stride_cos_sin}));
  return multiple_of(elements, {p.head_dim, p.rotary_dim / 2}) && heads_fit(p.q) &&
         heads_fit(p.k) && heads_fit(p.v) && cache_fits(p.k_cache) && cache_fits(p.v_cache) &&
         table_fits;
}

template <class T, int kVec>
void launch_write(const KvWriteParams& params, Stream stream) {
  const int covered = params.slots == nullptr ? params.rotary_dim : params.head_dim;
  const int units = ceil_div(ceil_div(covered, kVec), 2);
  int lane_bits = 0;
  while (1 << lane_bits < std::min(units, device::kWarpSize)) ++lane_bits;
  const int heads = params.q.heads + params.k.heads + params.v.heads;
  if (heads == 0 || units == 0) return;
  const std::int32_t vectors = checked_int32(params.tokens * heads, "tokens * heads");
  const auto block_size = static_cast<std::uint32_t>(std::max(params.block_size, 1));
  const KvWriteLaunch launch{params, lane_bits, heads, vectors, device::Divisor::of(heads),
                             device::Divisor::of(block_size)};
  const std::int64_t blocks = ceil_div(std::int64_t{vectors}, std::int64_t{kThreads >> lane_bits});
  device::launch_chained<kv_write_kernel<T, kVec>>(dim3(static_cast<unsigned>(blocks)),
                                                   dim3(kThreads), 0, stream, launch, "write_kv");
}

}  // namespace

void write_kv(const KvWriteParams& params, Stream stream) {
  if (params.tokens == 0) return;
  checked_int32(params.num_slots, "slots of the cache");
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = device::Vec<T>::kSize;
    if (takes_pieces(params, kVec)) {
      launch_write<T, kVec>(params, stream);
    } else {
      launch_write<T, 1>(params, stream);
    }
  });
}

}  // namespace ridgeline
