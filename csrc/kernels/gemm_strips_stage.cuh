#pragma once
#include "common/quant_scale.h"
#include "device/dequant.cuh"
#include "device/digits.cuh"
#include "device/encode.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// How x comes to shared memory in the strips kernel, and where things lie there.
namespace ridgeline::gemm_strips {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kBoxBytes = 2048;  // 16 rows of 128 bytes
constexpr int kRowBytes = 128;   // of a box, with the 128-byte swizzle
constexpr int kTokens = 8;       // rows of x in a tile: columns of one mma
// H200, one row, 4096 x 28672 bf16: 59.4 us where L2 fetches 256 bytes at once, 55.1 with 128.
constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
// Of a warp's ring; 16-bit weights, and those of one row, have them all where the block's share of
// an SM has room. H200, a token of 8B products and attention, one row, us, two stages and three:
// bf16 3600 and 3570; with the next product's block beside it, fp8 2190 and 2161.
constexpr int kMostStages = 3;
constexpr int kBoxes = 2;       // of a stage, which holds a chunk
constexpr int kChunkBytes = kBoxes * kBoxBytes;

/// int8 is taken for columns of 16 bits, two in one: its bytes lie as a dense weight's.
template <WeightFormat kFormat>
constexpr int kBoxCols = kFormat == WeightFormat::kFp8 ? 128 : 64;
template <WeightFormat kFormat>
constexpr int kChunkCols = kBoxes * kBoxCols<kFormat>;

struct StripsParams {
  CUtensorMap weight;
  GemmParams gemm;
  StripOrder order;
  std::int32_t chunks;  // of a strip
  std::int32_t pitch;   // bytes of a row of x in shared memory
  std::int32_t stages;  // of a warp's ring
  std::int32_t operands_at;  // in shared memory: KeptOperands
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Of a row of x that becomes codes.
struct Codes {
  std::int32_t largest[kWarps];  // magnitude that a warp has staged, as bits: NaN is above all
  float scale;
};

/// Fixed parts; before them the rings, after them sums, x [M][pitch].
struct alignas(128) Shared {
  std::uint64_t full[kWarps][kMostStages];  // a chunk is in
  StripSums sums;
  Squares squares;
  Codes codes;
};

// ---- Phases -------------------------------------------------------------------------------------

/// Whether x is staged in fp16 in units of its own: bf16 x for fp8 weights, 256 columns of a row, a
/// chunk, each. fp8 comes as fp16 in one conversion, as bf16 in five.
template <class T, class E, bool kFp8X>
constexpr bool kUnits = !kFp8X && std::is_floating_point_v<SumOf<E>> && !std::is_same_v<T, E>;

constexpr int kStagedCols = kThreads * 8;  // of a row of x, at a time

/// The first column of a lane, of the first kStagedCols: a warp stages what it multiplies, chunks
/// kWarps apart.
template <WeightFormat kFormat>
__device__ __forceinline__ int staged_column(int warp, int lane) {
  constexpr int kLanes = kChunkCols<kFormat> / 8;  // that stage a chunk
  return (lane / kLanes * kWarps + warp) * kChunkCols<kFormat> + lane % kLanes * 8;
}

/// kRows rows of x from m on, kPieces pieces of their columns each, from `column` on, to shared
/// memory in E, zero from K on. A piece is eight columns a lane. Nothing stands between the loads,
/// but for x_requested() behind them, nor between the chains of shuffles.
template <class T, class E, WeightFormat kFormat, bool kFp8X, int kRows, int kPieces,
          class Requested>
__device__ __forceinline__ void stage_rows(const StripsParams& params, int column, int m, char* to,
                                           float* units, Squares& squares, Requested x_requested) {
  const GemmParams& p = params.gemm;
  const int rows = static_cast<int>(p.M), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t pairs[kPieces][kRows][4];
  Normed<T, 4> norm[kPieces];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int at = column + piece * kStagedCols;
    if constexpr (!kFp8X) norm[piece].load(p, at);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const char* from = static_cast<const char*>(p.x.data) +
                         ((m + i) * p.x.stride_row + at) * (kFp8X ? 1 : 2);
      uint4 raw{};
      if (at < p.K) {
        if constexpr (kFp8X) {
          const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(from));
          raw.x = codes.x, raw.y = codes.y;
        } else {
          raw = __ldcg(reinterpret_cast<const uint4*>(from));
        }
      }
      std::uint32_t(&of)[4] = pairs[piece][i];
      of[0] = raw.x, of[1] = raw.y, of[2] = raw.z, of[3] = raw.w;
    }
  }
  x_requested();
  if (!kFp8X && p.x.norm_weight)
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        norm[piece].apply(p, pairs[piece][i], squares, m + i, warp, lane);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int at = column + piece * kStagedCols;
    const bool stores = at < params.chunks * kChunkCols<kFormat>;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      std::uint32_t(&of)[4] = pairs[piece][i];
      auto* row = reinterpret_cast<uint4*>(to + (m + i) * params.pitch + at * 2);
      if constexpr (kFp8X) {
        std::uint32_t low[2], high[2];
        device::convert_e4m3<E>(of[0], low);
        device::convert_e4m3<E>(of[1], high);
        of[0] = low[0], of[1] = low[1], of[2] = high[0], of[3] = high[1];
      }
      if constexpr (kUnits<T, E, kFp8X>) {
        const auto unit = device::PowerUnit<15>::of(
            device::warp_max(static_cast<int>(device::largest_magnitude(of))), T{});
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = device::floats_of(device::as_pair<T>(of[j]));
          of[j] = device::as_bits(__floats2half2_rn(two.x * unit.inverse, two.y * unit.inverse));
        }
        if (lane == 0)
          units[min(at / kChunkCols<kFormat>, params.chunks) * rows + m + i] = unit.unit;
      }
      if (stores) *row = {of[0], of[1], of[2], of[3]};
    }
  }
}

/// All of x. Calls x_requested() when the first of a warp has been asked for.
template <class T, class E, WeightFormat kFormat, bool kFp8X, class Requested>
__device__ __forceinline__ void stage_x(char* to, float* units, Squares& squares,
                                        const StripsParams& params, Requested x_requested) {
  constexpr int kStep = kStagedCols, kOfFour = kFp8X ? 2 : 1;  // pieces of four rows together
  const int warp = threadIdx.x / 32, first = warp * kChunkCols<kFormat>;
  const int of_lane = staged_column<kFormat>(warp, threadIdx.x % 32) - first;
  const int cols = params.chunks * kChunkCols<kFormat>;
  const int rows = static_cast<int>(params.gemm.M);
  int m = 0;
  const auto stage = [&]<int kRows, int kPieces>(int start) {
    stage_rows<T, E, kFormat, kFp8X, kRows, kPieces>(params, start + of_lane, m, to, units, squares,
                                                     x_requested);
  };
  const auto stage_all = [&]<int kRows, int kPieces>() {
    for (int start = first; start < cols; start += kPieces * kStep)
      stage.template operator()<kRows, kPieces>(start);
    m += kRows;
  };
  while (m + 4 <= rows) stage_all.template operator()<4, kOfFour>();
  // Two rows are one trip to L2: fp8 by bf16, 4096 x 6144, 2 rows, H200, us: 9.3 and 8.1. More code
  // costs one row of a model, which reads it anew: of dense weights, a step of 8B shapes, ms, 3.675
  // and 3.694.
  if constexpr (kFormat == WeightFormat::kFp8 && !kFp8X)
    if (m + 2 <= rows) stage_all.template operator()<2, 2>();
  for (; m < rows; ++m) {
    int start = first;
    for (; start + 2 * kStep < cols; start += 4 * kStep) stage.template operator()<1, 4>(start);
    for (; start < cols; start += 2 * kStep) stage.template operator()<1, 2>(start);
  }
}

/// The first columns of the norm's weight, which a thread meets x with: they come ahead of it.
/// H200, a token of 8B products and attention: 2230 us, and 2200 so.
template <class T>
struct EarlyNorm {
  static constexpr int kPieces = 2;
  device::Vec<T, 8> pieces[kPieces];

  __device__ void load(const GemmParams& p) {
    if (!p.x.norm_weight || !p.weights_ready) return;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = static_cast<int>(threadIdx.x) * 8 + i * kStagedCols;
      if (at < p.K) pieces[i] = device::load(static_cast<const T*>(p.x.norm_weight) + at);
    }
  }
};

/// The row of x, normalized or not, as e4m3 with one scale, as rmsnorm and quantize_fp8 round it,
/// expanded to fp16. Registers hold it while the warps exchange its largest magnitude.
template <class T, WeightFormat kFormat, class Requested>
__device__ __forceinline__ void stage_codes(char* to, Squares& squares, Codes& codes,
                                            const StripsParams& params, const EarlyNorm<T>& early,
                                            Requested x_requested) {
  static_assert(kChunkCols<kFormat> == 256);  // a warp stages what it multiplies
  constexpr int kStep = kStagedCols, kPieces = gemm_config::kCodesCols / kStep;
  using Piece = device::Vec<T, 8>;
  const GemmParams& p = params.gemm;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(threadIdx.x) * 8, cols = params.chunks * kChunkCols<kFormat>;
  const auto* norm = static_cast<const T*>(p.x.norm_weight);
  Piece x[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    uint4 raw{};
    const int at = first + i * kStep;
    if (at < p.K)
      raw = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) + at));
    x[i] = reinterpret_cast<const Piece&>(raw);
  }
  x_requested();
  const auto weighted = [&](int i) {
    device::Vec<float, 8> values = device::floats(x[i]);
    if (norm && first + i * kStep < p.K) {
      const bool is_here = i < EarlyNorm<T>::kPieces && p.weights_ready;
      const device::Vec<float, 8> factors = device::floats(
          is_here ? early.pieces[i % early.kPieces] : device::load(norm + first + i * kStep));
#pragma unroll
      for (int j = 0; j < 8; ++j) values.data[j] *= factors.data[j];
    }
    return values;
  };
  float sum = 0.0f;
  int largest = 0;  // a magnitude's bits
  if (norm) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i * kStep >= p.K) break;
      for (const float v : device::floats(x[i]).data) sum = fmaf(v, v, sum);
      for (const float v : weighted(i).data) largest = max(largest, __float_as_int(fabsf(v)));
    }
  } else {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i * kStep >= p.K) break;
      most = max(most, device::largest_magnitude(
                           reinterpret_cast<const std::uint32_t(&)[4]>(x[i])));
    }
    const auto bits = static_cast<std::uint16_t>(most);
    largest = __float_as_int(device::to_float(reinterpret_cast<const T&>(bits)));
  }
  if (norm) sum = device::warp_reduce<device::Sum>(sum);
  largest = device::warp_max(largest);
  if (lane == 0) squares.of[0][warp] = sum, codes.largest[warp] = largest;
  ptx::named_barrier_sync(1, kThreads);  // every warp's are there
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = max(largest, codes.largest[w]);
  const float norm_of_row = norm ? norm_factor(p, squares.sum(0)) : 1.0f;
  const float scale = scale_of_amax(__int_as_float(largest) * norm_of_row, DType::kFloat8E4M3);
  const float factor = norm_of_row / scale;
  if (threadIdx.x == 0) codes.scale = scale;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = first + i * kStep;
    if (at >= cols) break;
    device::Vec<float, 8> values = weighted(i);
#pragma unroll
    for (int j = 0; j < 8; ++j) values.data[j] *= factor;
    const auto bytes = device::encode<true>(values);
    const uint2 words = reinterpret_cast<const uint2&>(bytes);
    std::uint32_t low[2], high[2];
    device::convert_e4m3<__half>(words.x, low);
    device::convert_e4m3<__half>(words.y, high);
    *reinterpret_cast<uint4*>(to + at * 2) = {low[0], low[1], high[0], high[1]};
  }
}

}  // namespace ridgeline::gemm_strips
