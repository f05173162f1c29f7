#pragma once
#include <cstdint>

#include "common/math.h"
#include "common/quant_scale.h"
#include "device/encode.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"
#include "kernels/quantize.h"

/// What the kernels of quantize_fp8 share: pieces of 16 bytes, and tiles of 128 x 128 of them.
namespace ridgeline {

constexpr int kExtent = QuantizeParams::kExtent;
constexpr int kTileThreads = 512;  // of 128 x 128 elements, four 16-byte pieces of bf16 a thread

/// One scale for the tensor (quantize_tensor.cu). `vectors`: rows of whole, aligned pieces.
/// Requires: a tensor that is not empty.
void quantize_tensor(QuantizeParams params, bool vectors, Stream stream);

inline std::int64_t tiles_of(const QuantizeParams& params) {
  return ceil_div<std::int64_t>(params.rows, kExtent) * ceil_div(params.cols, kExtent);
}

/// The largest magnitude of a piece, or NaN; 16-bit values two at a time.
template <class T, int kWidth>
__device__ float magnitude(device::Vec<T, kWidth> piece) {
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    for (auto& pair : reinterpret_cast<std::uint32_t(&)[kWidth / 2]>(piece.data))
      pair &= 0x7fff7fffu;  // no signs
    return device::largest_of(piece);
  } else {
    float amax = 0.0f;
    for (const float value : device::floats(piece).data)
      amax = device::MaxOrNaN::combine(amax, fabsf(value));
    return amax;
  }
}

template <bool kE4M3, class T, int kWidth>
__device__ void store_codes(std::uint8_t* q, const device::Vec<T, kWidth>& piece, float inverse) {
  device::Vec<float, kWidth> values = device::floats(piece);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values.data[j] *= inverse;
  device::store(q, device::encode<kE4M3>(values));
}

/// A piece of kPiece elements at `data`, of which `count` exist; the others are zeros. kVector: all
/// or none exist, and the address is aligned.
template <bool kVector, int kPiece, class T>
__device__ device::Vec<T, kPiece> load_some(const T* data, int count) {
  device::Vec<T, kPiece> piece;
  if constexpr (kVector) {
    if (count > 0) return device::load_vec<kPiece>(data);
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j)
    piece.data[j] = !kVector && j < count ? data[j] : device::from_float<T>(0.0f);
  return piece;
}

template <bool kVector, int kPiece, class T>
__device__ void store_some(std::uint8_t* q, const device::Vec<T, kPiece>& piece, int count,
                           float inverse) {
  if constexpr (kVector) {
    if (count > 0) store_codes<true>(q, piece, inverse);
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      if (j < count) q[j] = device::encode_e4m3(device::to_float(piece.data[j]) * inverse);
  }
}

/// A thread's pieces of one tile of 128 x 128.
template <class T, bool kVector, int kThreads>
struct Tile {
  static constexpr int kPiece = device::Vec<T>::kSize;
  static constexpr int kAcross = kExtent / kPiece;
  static constexpr int kEach = kExtent * kAcross / kThreads;

  const QuantizeParams& params;
  std::int64_t first_row;
  int column;
  device::Vec<T, kPiece> pieces[kEach];

  __device__ Tile(const QuantizeParams& params, unsigned tile) : params(params) {
    const unsigned across = ceil_div(params.cols, kExtent);  // divided in 32 bits
    column = static_cast<int>(tile % across) * kExtent +
             static_cast<int>(threadIdx.x) % kAcross * kPiece;
    first_row = static_cast<std::int64_t>(tile / across) * kExtent + threadIdx.x / kAcross;
  }

  __device__ std::int64_t row(int i) const { return first_row + i * (kThreads / kAcross); }
  __device__ int count(int i) const { return row(i) < params.rows ? params.cols - column : 0; }

  __device__ void load() {
    const T* x = static_cast<const T*>(params.x) + column;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      pieces[i] = load_some<kVector, kPiece>(x + row(i) * params.stride_x_row, count(i));
  }

  __device__ float amax() const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      largest = device::MaxOrNaN::combine(largest, magnitude(pieces[i]));
    return largest;
  }

  __device__ void store(float scale) const {
    const float inverse = 1.0f / scale;
    auto* q = static_cast<std::uint8_t*>(params.q) + column;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      store_some<kVector>(q + row(i) * params.cols, pieces[i], count(i), inverse);
  }
};

}  // namespace ridgeline
