#pragma once
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_digits_sm90.cuh"
#include "kernels/gemm_grouped_walk_warps.cuh"

/// What a warp of the digits kernel does where weights are experts': how the weight comes, and x.
namespace ridgeline::gemm_grouped {

using namespace gemm_digits;

struct GroupedDigitsParams {
  DigitsParams digits;  // its M: rows of x that shared memory has room for; its chunks: of x
  StripLaunch launch;
  device::Divisor by_x_chunks;
  std::int32_t early;        // all rows of x are staged ahead of the weights
  std::int32_t strip_bytes;  // of the weight
  std::int32_t groups;       // of a chunk, whose scales and zero points are scale_bytes
  std::int32_t scale_bytes;
  device::Divisor by_group;  // chunks of a group
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them the sums, the spans of x, x, and lists of tiles.
struct GroupedBarriers {
  std::uint64_t full[kWarps][kDigitsStages];  // a chunk and its scales are in
  std::uint64_t free[kWarps][kDigitsStages];  // they are multiplied
  SumBarriers sums;
  Share share;
};
static_assert(sizeof(GroupedBarriers) == kDigitsFixedBytes && sizeof(Span) == kSpanBytes);
static_assert(block_bytes(3) == x_block_bytes(3) && 2 * kTokens == kDigitsTokens);
static_assert(kScaleBytes == kGroupScaleBytes && kZeroBytes == kGroupZeroBytes);

// ---- Weights ------------------------------------------------------------------------------------

/// Where an expert's strip begins.
__device__ __forceinline__ const char* strip_of(const GroupedDigitsParams& params, int expert,
                                                int weight_row) {
  const GroupedGemmParams& p = params.launch.grouped;
  return static_cast<const char*>(p.gemm.weight.data) + expert * p.stride_expert +
         std::int64_t{static_cast<unsigned>(weight_row) / kStripRows} * params.strip_bytes;
}

/// Asks for a chunk and its scales.
template <int kBlocks>
__device__ __forceinline__ void request_chunk(const GroupedDigitsParams& params,
                                              const ChunkSteps& at, char* to, std::uint64_t* full,
                                              std::uint64_t policy) {
  const DigitsParams& digits = params.digits;
  constexpr int kBytes = kBlocks * 512;
  const int row = at.weight_row(), expert = at.tile->expert, first = at.chunk * kBytes;
  const int bytes = min(kBytes, params.strip_bytes - first);
  ptx::mbarrier_expect(full, bytes + params.scale_bytes);
  ptx::copy_bulk(to, strip_of(params, expert, row) + first, bytes, full, policy);
  const int group = params.by_group.divide(at.chunk * params.groups);
  ptx::copy_tensor_4d(to + kBytes, &digits.scales, full, row, group, expert, 0, policy);
  if (digits.gemm.weight.zeros)
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
    rows[i] = params.by_x_chunks.divide(piece);
    chunks[i] = piece - rows[i] * params.digits.chunks;
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

constexpr int kTogether = 4;                    // pieces of rows that a warp loads at once
constexpr int kMostEarly = kTogether * kWarps;  // of all rows, that are staged early

/// A warp's part of `count` rows of x; `row` is the lane's. Loads go together, but those of many
/// pieces.
template <class T, int kSpan>
__device__ __forceinline__ bool stage_rows(const GroupedDigitsParams& params, int row, int count,
                                           int warp, char* x, Span* spans) {
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
