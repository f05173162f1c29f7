#pragma once
#include "device/dequant.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/mma.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_config.h"
#include "kernels/gemm_epilogue.cuh"

/// What a warp of the strips kernel does: where things lie in shared memory, how they come there,
/// and how 16 weight rows meet up to eight rows of x.
namespace ridgeline::gemm_strips {

using gemm_config::kStripRows;
using namespace gemm_detail;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kBoxBytes = 2048;  // 16 rows of 128 bytes, or four int4 blocks
constexpr int kRowBytes = 128;   // of a box, with the 128-byte swizzle
constexpr int kTokens = 8;       // rows of x in a tile: columns of one mma
// H200, one row, 4096 x 28672 bf16: 59.4 us where L2 fetches 256 bytes at once, 55.1 with 128.
constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
constexpr int kScaleBuffers = 4;  // strips whose scales are in flight or in use, at most
constexpr int kManyGroups = 64;   // with more than these, half the strips
constexpr int kBoxGroups = 256;   // groups of scales that one request brings, at most
constexpr int kScaleBytes = kStripRows * 2;  // of a group: 16 scales, ...
constexpr int kZeroBytes = kStripRows;       // ... and as many zero points

template <WeightFormat kFormat>
constexpr int kBoxCols = kFormat == WeightFormat::kDense ? 64
                         : kFormat == WeightFormat::kFp8 ? 128
                                                         : 256;

struct StripsParams {
  CUtensorMap weight;          // dense or fp8
  CUtensorMap scales, zeros;   // int4
  GemmParams gemm;
  std::int32_t items;          // strips, or pairs of gate and up strips
  std::int32_t paired;         // 2 if gate and up strips come by turns, else 1
  std::int32_t chunks;         // of a strip
  std::int32_t groups;         // int4: of a row
  std::int32_t room;           // int4: for so many, whole boxes
  std::int32_t ahead;          // int4: strips whose scales are in flight or in use: 2 or 4
  std::uint32_t block_groups;  // int4: 2^31 times the groups a block of 64 columns is, rounded up
  std::int32_t pitch;          // bytes of a row of x in shared memory
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts first; then sums [2][warps][16][M], scales and zeros [ahead][room], x [M][pitch].
template <int kWarps, int kStages, int kBoxes>
struct alignas(128) Shared {
  char weight[kWarps][kStages][kBoxes * kBoxBytes];
  std::uint64_t full[kWarps][kStages];  // a chunk is in
  std::uint64_t scaled[kScaleBuffers];  // the scales of a strip are in
  std::uint64_t done[2];                // every warp has left its sums of a strip
  std::uint64_t free[2];                // these sums are added up
};

// ---- Phases -------------------------------------------------------------------------------------

/// Rows of x to shared memory, in E, zero from K on.
template <class E, bool kFp8X, int kThreads>
__device__ void stage_x(char* to, const StripsParams& params, int columns) {
  const GemmParams& p = params.gemm;
  constexpr int kEach = kFp8X ? 16 : 8;
  const int rows = static_cast<int>(p.M);
  for (int column = threadIdx.x * kEach; column < columns; column += kThreads * kEach) {
#pragma unroll 4
    for (int m = 0; m < rows; ++m) {
      uint4 raw{};
      const auto at = m * p.x.stride_row + column;
      if (column < p.K)
        raw = __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(p.x.data) +
                                                    at * (kFp8X ? 1 : 2)));
      char* row = to + m * params.pitch;
      if constexpr (kFp8X) {
        const uint2 halves[2] = {{raw.x, raw.y}, {raw.z, raw.w}};
#pragma unroll
        for (int i = 0; i < 2; ++i)
          device::store(reinterpret_cast<E*>(row + column * 2 + i * 16),
                        device::dequantise8<E>(halves[i], DType::kFloat8E4M3, 1.0f));
      } else {
        *reinterpret_cast<uint4*>(row + column * 2) = raw;
      }
    }
  }
}

/// 16 weight rows by kTiles * 8 rows of x. Even and odd steps have sums of their own: a product
/// need not wait for the one before.
template <int kTiles>
struct Sums {
  float of[kTiles][2][4] = {};

  __device__ float get(int tile, int i) const { return of[tile][0][i] + of[tile][1][i]; }
};

/// Where a thread finds its part of x: for ldmatrix the row of a tile that it addresses, for fp8
/// its own columns of a row. Rows past the last repeat it; their sums are not kept.
template <int kTiles>
struct XOfLane {
  const char* tile[kTiles];

  __device__ XOfLane(const char* x, int row, int rows, int pitch, int offset) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      tile[t] = x + min(row + t * kTokens, rows - 1) * pitch + offset;
  }
};

/// 64 columns of bf16 or fp16, from byte `at` of a row of x.
template <class E, int kTiles>
__device__ void multiply_dense(const char* weight, const XOfLane<kTiles>& x, int at,
                               Sums<kTiles>& sums, int lane) {
  const char* row = weight + lane % 16 * kRowBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step)
      ptx::ldmatrix(a[step], row + (((half * 2 + step) * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      std::uint32_t b[4];
      ptx::ldmatrix(b, x.tile[t] + at + half * 64);
#pragma unroll
      for (int step = 0; step < 2; ++step)
        ptx::mma_m16n8k16<E>(sums.of[t][step], a[step], b[2 * step], b[2 * step + 1]);
    }
  }
}

/// 128 columns of fp8. Step s multiplies, in thread t of a quad, columns 16 s + 4 t + {0, 1, 2, 3}.
template <class E, int kTiles>
__device__ void multiply_fp8(const char* weight, const XOfLane<kTiles>& x, int at,
                             Sums<kTiles>& sums, int lane) {
  const char* row = weight + lane % 16 * kRowBytes;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    std::uint32_t raw[4];
    ptx::ldmatrix(raw, row + ((pair * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t low[2], high[2];
      device::convert_e4m3<E>(raw[2 * step], low);
      device::convert_e4m3<E>(raw[2 * step + 1], high);
      const std::uint32_t a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint2 b =
            *reinterpret_cast<const uint2*>(x.tile[t] + at + (pair * 2 + step) * 32);
        ptx::mma_m16n8k16<E>(sums.of[t][step], a, b.x, b.y);
      }
    }
  }
}

/// 64 columns of int4; the scale is the caller's. Differences are exact: q - zero.
template <class E, int kTiles>
__device__ void multiply_int4(const char* weight, const XOfLane<kTiles>& x, int at,
                              const device::Pair<E> (&zero)[2], Sums<kTiles>& sums, int lane) {
  const uint4 raw = *reinterpret_cast<const uint4*>(weight + lane * 16);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      a[i / 4][i % 4] = device::expand_int4<E>(words[half * 2 + i / 4], i % 4, zero[i % 2]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      std::uint32_t b[4];
      ptx::ldmatrix(b, x.tile[t] + at + half * 64);
#pragma unroll
      for (int step = 0; step < 2; ++step)
        ptx::mma_m16n8k16<E>(sums.of[t][step], a[step], b[2 * step], b[2 * step + 1]);
    }
  }
}

/// What one warp requests, in order: of each strip of the block its chunks, kWarps apart.
template <WeightFormat kFormat, int kWarps, int kBoxes>
struct Requests {
  static constexpr int kChunkBytes = kBoxes * kBoxBytes;
  const StripsParams& params;
  std::uint64_t policy;
  int warp, strips, chunk, row;
  bool up;

  __device__ Requests(const StripsParams& params, int warp, int row, int strips)
      : params(params), policy(ptx::evict_first()), warp(warp),
        strips(warp < params.chunks ? strips : 0), chunk(warp), row(row), up(false) {}

  __device__ void next(char* to, std::uint64_t* full) {
    if (strips == 0) return;
    if constexpr (kFormat == WeightFormat::kInt4) {
      const int blocks = ceil_div(params.gemm.K, Int4Layout::kCols);
      const int bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
      const auto from = static_cast<std::int64_t>(row / kStripRows) * blocks * 512;
      ptx::mbarrier_expect(full, bytes);
      ptx::copy_bulk(to,
                     static_cast<const char*>(params.gemm.weight.data) + from + chunk * kChunkBytes,
                     bytes, full, policy);
    } else {
      ptx::mbarrier_expect(full, kChunkBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        ptx::copy_matrix(to + box * kBoxBytes, &params.weight, full,
                         (chunk * kBoxes + box) * kBoxCols<kFormat>, row, policy);
    }
    chunk += kWarps;
    if (chunk < params.chunks) return;
    chunk = warp;
    --strips;
    row = next_row(params, row, up);
    up = !up;
  }

  __device__ static int next_row(const StripsParams& params, int row, bool up) {
    if (params.paired == 1) return row + kStripRows;
    return up ? row + kStripRows - params.gemm.N / 2 : row + params.gemm.N / 2;
  }
};

/// Adds up the sums of kWarps warps.
template <int kWarps>
__device__ float total_of(const float* sums, int each) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w * each];
  return total;
}

/// Where a thread finds the scales and zero points of its two weight rows in those of a strip.
struct ScalesOfLane {
  const char *scales, *zeros;
};

/// 256 columns of int4, from block `block0` on. A group's sum is scaled in float32.
template <class T, int kSpan, int kTiles>
__device__ void multiply_int4_box(const StripsParams& params, const char* weight,
                                  const XOfLane<kTiles>& x, int block0, ScalesOfLane of_lane,
                                  float (&sums)[kTiles][4], int lane) {
#pragma unroll
  for (int block = 0; block < 4; block += kSpan) {
    const auto scaled = static_cast<std::uint64_t>(block0 + block) * params.block_groups;
    const int group = min(static_cast<int>(scaled >> 31), params.groups - 1);
    const auto* zeros = reinterpret_cast<const std::uint8_t*>(of_lane.zeros + group * kZeroBytes);
    const T* scales = reinterpret_cast<const T*>(of_lane.scales + group * kScaleBytes);
    const device::Pair<T> zero[2] = {device::int4_zero<T>(zeros[0]),
                                     device::int4_zero<T>(zeros[8])};
    Sums<kTiles> part;
#pragma unroll
    for (int i = block; i < block + kSpan; ++i)
      multiply_int4<T>(weight + i * 512, x, (block0 + i) * 128, zero, part, lane);
    const float scale[2] = {device::to_float(scales[0]), device::to_float(scales[8])};
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += scale[i / 2] * part.get(t, i);
  }
}

/// y of sum `i` of a strip, [weight row][row of x]; paired, of it and its gate's.
template <class T, int kWarps>
__device__ void finish_sum(const StripsParams& params, const float* gate, const float* sums, int i,
                           int row) {
  const GemmParams& p = params.gemm;
  const int rows = static_cast<int>(p.M), each = kStripRows * rows;
  if (i >= each) return;
  const int n = i / rows, m = i % rows;
  const float sum = total_of<kWarps>(sums + i, each);
  if (params.paired == 2) {
    finish_gated<T>(p, total_of<kWarps>(gate + i, each), sum, m, row - p.N / 2 + n);
  } else if (row + n < p.N) {
    finish<T>(p, sum, m, row + n);
  }
}

}  // namespace ridgeline::gemm_strips
