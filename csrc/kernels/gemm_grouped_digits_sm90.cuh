#pragma once
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_digits_sm90.cuh"
#include "kernels/gemm_grouped_walk.cuh"

/// What a warp of the digits kernel does where weights are experts': how the weight comes, and x.
namespace ridgeline::gemm_grouped {

using namespace gemm_digits;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRingStages = 2;  // of a warp, with which the next kernel's block may fit beside

struct GroupedDigitsParams {
  DigitsParams digits;  // its M: rows of x that shared memory has room for
  StripLaunch launch;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them the sums, the spans of x, x, and lists of tiles.
struct GroupedBarriers {
  std::uint64_t full[kWarps][kRingStages];  // a chunk and its scales are in
  SumBarriers sums;
};

// ---- Weights ------------------------------------------------------------------------------------

/// Where the walk's strip begins.
__device__ __forceinline__ const char* strip_of(const StripWalk& walk) {
  const GroupedGemmParams& p = walk.launch.grouped;
  const std::int64_t blocks = ceil_div(p.gemm.K, Int4Layout::kCols);
  return static_cast<const char*>(p.gemm.weight.data) + walk.rows().expert * p.stride_expert +
         walk.weight_row() / kStripRows * blocks * Int4Layout::kWords * 4;
}

struct GroupedRequests {
  const GroupedDigitsParams& params;
  std::uint64_t policy;
  WarpChunks at;

  __device__ GroupedRequests(const GroupedDigitsParams& params, const StripWalk& walk, int warp)
      : params(params), policy(ptx::evict_first()), at(walk, warp) {}

  /// Asks for the next chunk.
  __device__ void next(char* to, std::uint64_t* full) {
    if (at.walk.strips == 0) return;
    const DigitsParams& digits = params.digits;
    const GemmWeight& weight = digits.gemm.weight;
    const int blocks = ceil_div(digits.gemm.K, Int4Layout::kCols), chunk = at.chunk;
    const int row = at.walk.weight_row(), expert = at.walk.rows().expert;
    const int bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
    const int groups = kChunkCols >> digits.group_shift;
    ptx::mbarrier_expect(full, bytes + groups * (kScaleBytes + (weight.zeros ? kZeroBytes : 0)));
    ptx::copy_bulk(to, strip_of(at.walk) + chunk * kChunkBytes, bytes, full, policy);
    const int group =
        weight.group <= kChunkCols ? chunk * groups : chunk * kChunkCols / weight.group;
    ptx::copy_tensor_4d(to + kChunkBytes, &digits.scales, full, row, group, expert, 0, policy);
    if (weight.zeros)
      ptx::copy_tensor_4d(to + digits.zeros_at, &digits.zeros, full, row, group, expert, 0,
                          policy);
    at.next();
  }
};

// ---- x ------------------------------------------------------------------------------------------

/// kCount chunks of rows of x, kWarps apart, of all chunks of all rows; `row` is the row of x that
/// the lane's row of y is made of. False if some values were not finite: those count as zero.
template <class T, int kSpan, int kCount>
__device__ __forceinline__ bool stage_pieces(const DigitsParams& params, int first, int pieces,
                                             int row, char* x, Span* spans) {
  const int lane = threadIdx.x % 32;
  std::uint32_t pairs[kCount][8], largest[kCount], most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, pieces - 1);
    load_x(params.gemm, device::from_lane(row, piece / params.chunks),
              piece % params.chunks * kChunkCols + lane * 16, pairs[i]);
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
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, pieces - 1);
    store_digits<T, kSpan>(pairs[i], largest[i], piece % params.chunks,
                           static_cast<int>(params.gemm.M), piece / params.chunks,
                           first + i * kWarps < pieces, x, spans);
  }
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
      finite = stage_pieces<T, kSpan, 1>(params.digits, warp, pieces, row, x, spans);
  } else {
    for (int piece = warp; piece < pieces; piece += kTogether * kWarps)
      finite &= stage_pieces<T, kSpan, kTogether>(params.digits, piece, pieces, row, x, spans);
  }
  return finite;
}

}  // namespace ridgeline::gemm_grouped
