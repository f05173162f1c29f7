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
  std::int32_t early;        // all rows of x are loaded ahead of the weights
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
__device__ __forceinline__ void request_chunk(const GroupedDigitsParams& params,
                                              const ChunkSteps& at, char* to, std::uint64_t* full,
                                              std::uint64_t policy) {
  const DigitsParams& digits = params.digits;
  constexpr int kBytes = kChunkBlocks * 512;
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

constexpr int kTogether = 4;                    // pieces that a warp loads at once
constexpr int kMostEarly = kTogether * kWarps;  // of all rows, that are loaded early

/// A warp's pieces of rows of x, a chunk of a row each, kWarps apart. They become digits one after
/// the other, by the same code: a block runs it once or twice, and what it has not run before it
/// reads from L2. H200, lab, us, one token, and two, of top 8 in 128 experts through products of
/// 2048 x 1536 and 768 x 2048, by turns: four pieces at once, and code of their own for one, 14.6
/// and 21.1; so 13.3 and 19.2; by one kernel for both, which had chunks of 384 columns, 12.0, 17.8.
template <class T>
struct Pieces {
  std::uint32_t pairs[kTogether][8];
  int rows[kTogether], chunks[kTogether];

  /// From piece `first` of `count` on; `row` is the row of x that the lane's row of y is made of.
  __device__ __forceinline__ void load(const GroupedDigitsParams& params, int first, int count,
                                       int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int piece = first + i * kWarps;
      rows[i] = -1;
      if (piece >= count) continue;
      rows[i] = params.by_x_chunks.divide(piece);
      chunks[i] = piece - rows[i] * params.digits.chunks;
      load_x(params.digits.gemm, device::from_lane(row, rows[i]),
             chunks[i] * kChunkCols + lane * 16, pairs[i]);
    }
  }

  /// Those of rows [first, end) as digits. False if some values were not finite: those count as
  /// zero.
  template <int kSpan>
  __device__ __forceinline__ bool store(const GroupedDigitsParams& params, int first, int end,
                                        char* x, Span* spans) const {
    bool finite = true;
#pragma unroll 1
    for (int i = 0; i < kTogether; ++i) {
      std::uint32_t of[8];
      int row, chunk;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (i != j) continue;
        row = rows[j], chunk = chunks[j];
#pragma unroll
        for (int k = 0; k < 8; ++k) of[k] = pairs[j][k];
      }
      if (row < first || row >= end) continue;
      std::uint32_t largest = device::largest_magnitude(of);
      if (device::any_lane(largest >= device::kNotFinite<T>)) {
        finite = false;
        device::drop_not_finite<T>(of);
        largest = device::largest_magnitude(of);
      }
      store_digits<T, kSpan>(of, largest, chunk, params.launch.row_tile, row, true, x, spans);
    }
    return finite;
  }
};

}  // namespace ridgeline::gemm_grouped
