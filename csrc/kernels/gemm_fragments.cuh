#pragma once
#include "device/dequant.cuh"
#include "device/fp4.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_config.h"

/// What the tensor-core kernels share: how 64 columns of x and of 16 weight rows (a strip) lie in
/// shared memory, come there, and become operands of mma.m16n8k16.
///
/// The product may take its columns in any order, as long as x and the weight agree. So each format
/// takes the order in which a thread's share of the weight is 8 or 16 consecutive bytes. Step f of
/// the four of a block multiplies, in thread t of a quad, columns
///   dense  32 (f / 2) + 8 t + 4 (f % 2) + {0, 1, 2, 3}
///   fp8    16 t + 4 f + {0, 1, 2, 3}
///   int4   16 f + 2 t + {0, 1, 8, 9}: mma's own order, which is wgmma's too.
/// int8 is taken for a dense weight of half the columns, two in one.
namespace ridgeline::gemm_detail {

using gemm_config::kBlockCols;
using gemm_config::kStripRows;

constexpr int kRowBytes = kBlockCols * 2;  // of x and of a dense weight
constexpr int kChunks = kRowBytes / 16;

/// Of a strip's block. int4: two halves of 16 scales, then of 16 zero points; fp8: one float32.
/// fp4's are in the block.
template <WeightFormat kFormat>
constexpr int kScaleBytes = kFormat == WeightFormat::kInt4 ? 96 : 16;

struct Lane {
  int index, quad, in_quad;  // g = index / 4, t = index % 4
  __device__ Lane() : index(threadIdx.x % 32), quad(index / 4), in_quad(index % 4) {}
};

template <WeightFormat kFormat>
struct Layout {
  static constexpr bool kDense =
      kFormat == WeightFormat::kDense || kFormat == WeightFormat::kInt8;
  static constexpr bool kNibbles = has_nibbles(kFormat);
  static constexpr int kWeightBytes =
      kNibbles ? block_bytes_of(kFormat) : kStripRows * (kDense ? 128 : 64);

  /// Where a row's 16-byte chunk lies, so that the chunks that eight lanes read together are in
  /// eight different bank groups: rows 2 i and 2 i + 1 differ in the bit that a format's lanes of
  /// one row do not.
  __device__ static int chunk_at(int row, int chunk) {
    return kDense ? chunk ^ ((row & 1) << 2 | (row >> 1 & 3)) : chunk ^ (row & 7);
  }
};

// ---- Global to shared ---------------------------------------------------------------------------

/// Rows [row0, row0 + kRows) of x, columns of `block`, by kThreads threads. Outside is zero.
template <class T, WeightFormat kFormat, int kRows, int kThreads>
__device__ void copy_x(char* to, const GemmParams& p, std::int64_t row0, int block, int thread) {
  const T* x = static_cast<const T*>(p.x.data);
#pragma unroll
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int column = block * kBlockCols + chunk * 8;
    const bool inside = row0 + row < p.M && column < p.K;
    const T* from = inside ? x + (row0 + row) * p.x.stride_row + column : x;
    ptx::copy_async_16(to + row * kRowBytes + Layout<kFormat>::chunk_at(row, chunk) * 16, from,
                       inside);
  }
}

/// The weight strip whose first row is `n0`, columns of `block`, by one warp.
template <class T, WeightFormat kFormat>
__device__ void copy_strip(char* to, const GemmParams& p, std::int64_t n0, int block, int lane) {
  using L = Layout<kFormat>;
  const char* weight = static_cast<const char*>(p.weight.data);
  if constexpr (L::kNibbles) {
    const std::int64_t blocks = ceil_div(p.K, kBlockCols);
    const char* from = weight + (n0 / kStripRows * blocks + block) * L::kWeightBytes;
    const bool inside = n0 < p.N;
#pragma unroll
    for (int at = lane * 16; at < L::kWeightBytes; at += 32 * 16)
      ptx::copy_async_16(to + at, inside ? from + at : weight, inside);
  } else {
    constexpr int kPerRow = L::kWeightBytes / kStripRows / 16;  // chunks
    constexpr int kElement = L::kDense ? 2 : 1;
#pragma unroll
    for (int i = lane; i < kStripRows * kPerRow; i += 32) {
      const int row = i / kPerRow, chunk = i % kPerRow;
      const int column = block * kBlockCols + chunk * (16 / kElement);
      const bool inside = n0 + row < p.N && column < p.K;
      const std::int64_t offset = ((n0 + row) * p.weight.stride_row + column) * kElement;
      const int at = L::kDense ? L::chunk_at(row, chunk) : chunk;
      ptx::copy_async_16(to + (row * kPerRow + at) * 16, inside ? weight + offset : weight, inside);
    }
  }
}

/// The scales of a strip's block, by one warp. int4: of columns [0, 32) and [32, 64) of the block,
/// a 16-bit float a row each, then the zero points, a byte each. fp8: the float32 of its 128 x 128.
template <class T, WeightFormat kFormat>
__device__ void copy_scales(char* to, const GemmParams& p, std::int64_t n0, int block, int lane) {
  if constexpr (kFormat == WeightFormat::kInt4) {
    const int half = lane / 16, row = lane % 16;
    const int column = min(block * kBlockCols + half * 32, p.K - 1);
    const std::int64_t at = static_cast<std::int64_t>(column / p.weight.group) * p.N + n0;
    // Pairs of scales and quads of zeros where their addresses allow it, else one by one.
    const T* scales = static_cast<const T*>(p.weight.scales) + at;
    if (p.N % 2 == 0 && reinterpret_cast<std::uintptr_t>(p.weight.scales) % 4 == 0) {
      if (row % 2 == 0)
        ptx::copy_async_4(to + half * 32 + row * 2, n0 + row < p.N ? scales + row : p.weight.scales,
                          n0 + row < p.N);
    } else {
      reinterpret_cast<T*>(to)[half * 16 + row] = n0 + row < p.N ? scales[row] : T(0.0f);
    }
    if (p.weight.zeros == nullptr) return;
    const std::uint8_t* zeros = p.weight.zeros + at;
    if (p.N % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.weight.zeros) % 4 == 0) {
      if (row % 4 == 0)
        ptx::copy_async_4(to + 64 + half * 16 + row, n0 + row < p.N ? zeros + row : p.weight.zeros,
                          n0 + row < p.N);
    } else {
      to[64 + half * 16 + row] = n0 + row < p.N ? zeros[row] : 0;
    }
  } else if constexpr (kFormat == WeightFormat::kFp8) {
    if (p.weight.scale_layout != ScaleLayout::kBlock || lane != 0) return;
    const int column = min(block * kBlockCols, p.K - 1) / kScaleBlock;
    const int at = first_block_scale(p, static_cast<int>(n0)) + column;
    ptx::copy_async_4(to, static_cast<const float*>(p.weight.scales) + at, true);
  }
}

// ---- Shared to registers ------------------------------------------------------------------------

/// The A operands of 16 rows of x (8, if not kBoth) for steps 2 half and 2 half + 1 of a block.
template <WeightFormat kFormat, bool kBoth>
struct XFragment {
  std::uint32_t a[2][4];

  __device__ void load(const char* x, int half, Lane lane) {
    using L = Layout<kFormat>;
    if constexpr (L::kNibbles) {
      load_matrices(x, half, lane);
    } else {
      const int chunk = L::kDense ? 4 * half + lane.in_quad : 2 * lane.in_quad + half;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint4 v{};
        const int row = lane.quad + 8 * r;
        if (r == 0 || kBoth)
          v = *reinterpret_cast<const uint4*>(x + row * kRowBytes + L::chunk_at(row, chunk) * 16);
        a[0][r] = v.x;
        a[0][r + 2] = v.y;
        a[1][r] = v.z;
        a[1][r + 2] = v.w;
      }
    }
  }

 private:
  __device__ void load_matrices(const char* x, int half, Lane lane) {
    using L = Layout<kFormat>;
    const int matrix = lane.index / 8, row_in = lane.index % 8;
    if constexpr (kBoth) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_in + 8 * (matrix % 2), chunk = 4 * half + 2 * j + matrix / 2;
        ptx::ldmatrix(a[j], x + row * kRowBytes + L::chunk_at(row, chunk) * 16);
      }
    } else {
      std::uint32_t m[4];
      ptx::ldmatrix(m, x + row_in * kRowBytes + L::chunk_at(row_in, 4 * half + matrix) * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[j][0] = m[2 * j];
        a[j][2] = m[2 * j + 1];
        a[j][1] = a[j][3] = 0;
      }
    }
  }
};

/// The B operands of a strip: two n8 tiles, rows n and n + 8. `load` once a half, then `step`.
template <class T, WeightFormat kFormat>
struct StripFragment {
  std::uint32_t words[2][4];  // dense: of a half, fp8: of the block, for each tile; int4: words[0]
  const char* exponents;      // fp4

  __device__ void load(const char* strip, int half, Lane lane) {
    using L = Layout<kFormat>;
    if (!L::kDense && half != 0) return;  // the first load took the whole block
    exponents = strip + Fp4Layout::kCodeBytes;
#pragma unroll
    for (int tile = 0; tile < (L::kNibbles ? 1 : 2); ++tile) {
      const int row = lane.quad + 8 * tile;
      const char* from =
          L::kNibbles    ? strip + lane.index * 16
          : L::kDense ? strip + row * kRowBytes + L::chunk_at(row, 4 * half + lane.in_quad) * 16
                      : strip + row * kBlockCols + lane.in_quad * 16;
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[tile][0] = v.x;
      words[tile][1] = v.y;
      words[tile][2] = v.z;
      words[tile][3] = v.w;
    }
  }

  /// Step 2 half + j of tile `tile`.
  __device__ void step(std::uint32_t (&b)[2], int tile, int half, int j, const char* scales,
                       bool has_zeros, bool block_scaled, Lane lane) const {
    if constexpr (Layout<kFormat>::kDense) {
      b[0] = words[tile][2 * j];
      b[1] = words[tile][2 * j + 1];
    } else if constexpr (kFormat == WeightFormat::kFp8) {
      device::expand_e4m3<T>(words[tile][2 * half + j], b);
      if (block_scaled) {
        const float scale = *reinterpret_cast<const float*>(scales);
        b[0] = device::scale_pair<T>(b[0], scale);
        b[1] = device::scale_pair<T>(b[1], scale);
      }
    } else {
      const int row = half * 16 + lane.quad + 8 * tile;
      const std::uint32_t word = words[0][2 * half + j];
      if constexpr (kFormat == WeightFormat::kFp4) {
        const auto factor = device::fp4_factor(exponents[row]);
        const device::Fp4Turns turns(tile == 1);
        b[0] = turns.expand(word, false, factor);
        b[1] = turns.expand(word, true, factor);
        return;
      }
      const T scale = reinterpret_cast<const T*>(scales)[row];
      const std::uint32_t zero =
          has_zeros ? static_cast<std::uint8_t>(scales[64 + row]) : Int4Layout::kSymmetricZero;
      const device::Pair<T> pair{scale, scale}, base = device::int4_zero<T>(zero);
      b[0] = device::expand_int4<T>(word, tile, base, pair);
      b[1] = device::expand_int4<T>(word, tile + 2, base, pair);
    }
  }
};

/// First weight row of a strip: in order, or gate and up strips by turns.
__device__ __forceinline__ std::int64_t strip_row(const GemmParams& p, std::int64_t strip,
                                                  bool paired) {
  if (!paired) return strip * kStripRows;
  return strip / 2 * kStripRows + (strip % 2 != 0 ? p.N / 2 : 0);
}

}  // namespace ridgeline::gemm_detail
