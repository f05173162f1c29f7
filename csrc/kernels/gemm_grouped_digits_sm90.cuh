#pragma once
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_digits_sm90.cuh"
#include "kernels/gemm_grouped_walk_warps.cuh"

/// What a warp of the digits kernel does where weights are experts': how the weight comes, and x.
namespace ridgeline::gemm_grouped {

using namespace gemm_digits;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRingStages = 2;  // of a warp: with three 4 tokens of 2048 x 1536 17.2 us and 18.5

struct GroupedDigitsParams {
  DigitsParams digits;  // its M: rows of x that shared memory has room for
  StripLaunch launch;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them the sums, the spans of x, x, and lists of tiles.
struct GroupedBarriers {
  std::uint64_t full[kWarps][kRingStages];  // a chunk and its scales are in
  std::uint64_t free[kWarps][kRingStages];  // they are multiplied
  SumBarriers sums;
};

// ---- Weights ------------------------------------------------------------------------------------

/// Where an expert's strip begins.
__device__ __forceinline__ const char* strip_of(const GroupedGemmParams& p, int expert,
                                                int weight_row) {
  const std::int64_t blocks = ceil_div(p.gemm.K, Int4Layout::kCols);
  return static_cast<const char*>(p.gemm.weight.data) + expert * p.stride_expert +
         weight_row / kStripRows * blocks * Int4Layout::kWords * 4;
}

/// Asks for a chunk and its scales.
__device__ __forceinline__ void request_chunk(const GroupedDigitsParams& params,
                                              const ChunkSteps& at, char* to, std::uint64_t* full,
                                              std::uint64_t policy) {
  const DigitsParams& digits = params.digits;
  const GemmWeight& weight = digits.gemm.weight;
  const int blocks = ceil_div(digits.gemm.K, Int4Layout::kCols), chunk = at.chunk;
  const int row = at.weight_row(), expert = at.tile->expert;
  const int bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
  const int groups = kChunkCols >> digits.group_shift;
  ptx::mbarrier_expect(full, bytes + groups * (kScaleBytes + (weight.zeros ? kZeroBytes : 0)));
  ptx::copy_bulk(to, strip_of(params.launch.grouped, expert, row) + chunk * kChunkBytes, bytes,
                 full, policy);
  const int group = weight.group <= kChunkCols ? chunk * groups : chunk * kChunkCols / weight.group;
  ptx::copy_tensor_4d(to + kChunkBytes, &digits.scales, full, row, group, expert, 0, policy);
  if (weight.zeros)
    ptx::copy_tensor_4d(to + digits.zeros_at, &digits.zeros, full, row, group, expert, 0, policy);
}

// ---- x ------------------------------------------------------------------------------------------

/// kCount chunks of rows of x, kWarps apart, of all chunks of all rows; `row` is the row of x that
/// the lane's row of y is made of. False if some values were not finite: those count as zero.
template <class T, int kSpan, int kCount>
__device__ __forceinline__ bool stage_pieces(const GroupedDigitsParams& params, int first,
                                             int pieces, int row, char* x, Span* spans) {
  const int lane = threadIdx.x % 32;
  std::uint32_t pairs[kCount][8], largest[kCount], most = 0;
  int chunks[kCount], rows[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, pieces - 1);
    rows[i] = params.launch.by_chunks.divide(piece);
    chunks[i] = piece - rows[i] * params.launch.chunks;
    load_x(params.digits.gemm, device::from_lane(row, rows[i]), chunks[i] * kChunkCols + lane * 16,
           pairs[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest[i] = device::largest_magnitude(pairs[i]);
    most = max(most, largest[i]);
  }
  const bool finite = !device::any_lane(most >= device::kNotFinite<T>);
  if (!finite)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      device::drop_not_finite<T>(pairs[i]);
      largest[i] = device::largest_magnitude(pairs[i]);
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    store_digits<T, kSpan>(pairs[i], largest[i], chunks[i], params.launch.row_tile, rows[i],
                           first + i * kWarps < pieces, x, spans);
  return finite;
}

/// A warp's part of `count` rows of x; `row` is the lane's. Loads go together, but those of many
/// pieces.
template <class T, int kSpan>
__device__ __forceinline__ bool stage_rows(const GroupedDigitsParams& params, int row, int count,
                                           int warp, char* x, Span* spans) {
  constexpr int kTogether = 4;
  const int pieces = count * params.digits.chunks;
  bool finite = true;
  if (pieces <= kWarps) {
    if (warp < pieces)
      finite = stage_pieces<T, kSpan, 1>(params, warp, pieces, row, x, spans);
  } else {
    for (int piece = warp; piece < pieces; piece += kTogether * kWarps)
      finite &= stage_pieces<T, kSpan, kTogether>(params, piece, pieces, row, x, spans);
  }
  return finite;
}

}  // namespace ridgeline::gemm_grouped
