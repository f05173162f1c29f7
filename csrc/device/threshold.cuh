#pragma once
#include <cstdint>

#include "device/logits.cuh"

/// The search of a block for the value that a given weight of a row's logits reaches: of top-k by
/// count, of top-p by mass. Weights are integers, so nothing depends on the order in which they are
/// added.
namespace ridgeline::device {

constexpr int kPivots = 7;        // a pass leaves an eighth of the range
constexpr int kLinearPasses = 4;  // over the row, before what is left of the range is collected

struct SearchScratch {
  std::uint64_t partial[kPivots][kLogitWarps];
  std::uint64_t totals[kPivots];
};

/// Sums kCount values of every thread into scratch.totals, for all threads to read. If the first is
/// zero, all are.
template <int kCount>
__device__ __forceinline__ void block_sums(const std::uint64_t (&values)[kCount],
                                           SearchScratch& scratch) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool any =
      __any_sync(0xffffffffu, values[0] != 0);  // of a few candidates most warps hold none
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const std::uint64_t sum = any ? warp_reduce<SumU64>(values[i]) : 0;
    if (lane == 0) scratch.partial[i][warp] = sum;
  }
  __syncthreads();  // every warp's partials are written, and no thread reads the totals of the last
                    // call any more
  if (warp < kCount) {
    const std::uint64_t sum = warp_reduce<SumU64>(scratch.partial[warp][lane]);
    if (lane == 0) scratch.totals[warp] = sum;
  }
  __syncthreads();  // the totals are written
}

/// A range of keys in which the search goes on: `target` or more of weight is at or above `low`,
/// less than `target` at or above `high`, namely `above`.
struct Range {
  std::uint32_t low, high;
  std::uint64_t above;

  __device__ bool found() const { return high - low <= 1; }

  /// Between low and high - 1, rising with i in [1, kPivots]: at even steps of value where
  /// `linear`, else of key.
  __device__ std::uint32_t pivot(int i, bool linear) const {
    if (!linear)
      return low + static_cast<std::uint32_t>((std::uint64_t{high - low} * i) / (kPivots + 1));
    const float a = from_ordered_key(low), b = from_ordered_key(high - 1);
    const float value = a + (b - a) * (static_cast<float>(i) / (kPivots + 1));
    return min(max(ordered_key(clean_logit(value)), low), high - 1);
  }

  __device__ bool finite() const {
    return low > ordered_key(kNegativeInfinity) && high - 1 < ordered_key(-kNegativeInfinity);
  }
};

/// One pass: the weight at or above each of kPivots keys says in which part of the range the
/// threshold lies.
template <class Source, class Weight>
__device__ __forceinline__ Range narrow(const Source& source, Range range, bool linear,
                                        std::uint64_t target, const Weight& weight,
                                        SearchScratch& scratch) {
  std::uint32_t pivots[kPivots];
  std::uint64_t sums[kPivots] = {};
#pragma unroll
  for (int i = 0; i < kPivots; ++i) pivots[i] = range.pivot(i + 1, linear);
  source.template for_each<1>([&](float x, int) {
    const std::uint32_t key = ordered_key(x);
    if (key < pivots[0] || key >= range.high) return;
    const std::uint64_t w = weight(x);
#pragma unroll
    for (int i = 0; i < kPivots; ++i) sums[i] += key >= pivots[i] ? w : 0;
  });
  block_sums(sums, scratch);
  Range next = range;
#pragma unroll
  for (int i = 0; i < kPivots; ++i) {
    const std::uint64_t reached = range.above + scratch.totals[i];
    if (reached >= target) {
      next.low = pivots[i];
    } else if (pivots[i] < next.high) {
      next.high = pivots[i];
      next.above = reached;
    }
  }
  return next;
}

/// The largest value in `range` which logits of `target` weight reach, itself included; the lowest
/// if all together do not. Looks among the candidates where `in_list` says that they hold the whole
/// range, otherwise over the row: a few passes, then what is left of the range is collected, and
/// only where that does not fit (very many equal logits) do passes over the row go on.
template <class Row, class Weight>
__device__ __forceinline__ float find_threshold(const Row& row, Candidates& candidates,
                                                bool in_list, Range range, std::uint64_t target,
                                                const Weight& weight, SearchScratch& scratch) {
  for (int pass = 0; !in_list && !range.found(); ++pass) {
    if (pass == kLinearPasses) {
      __syncthreads();  // no thread reads the list any more
      if (threadIdx.x == 0) candidates.count = 0;
      __syncthreads();  // it is empty
      row.template for_each<1>([&](float x, int id) {
        const std::uint32_t key = ordered_key(x);
        if (key >= range.low && key < range.high && x > kNegativeInfinity) candidates.add(x, id);
      });
      __syncthreads();  // it is complete
      in_list = candidates.complete();
    }
    if (!in_list)
      range = narrow(row, range, pass < kLinearPasses && range.finite(), target, weight, scratch);
  }
  while (!range.found()) range = narrow(candidates, range, false, target, weight, scratch);
  return from_ordered_key(range.low);
}

/// The total weight of a source at or above a value.
template <class Source, class Weight>
__device__ __forceinline__ std::uint64_t weight_from(const Source& source, float at_least,
                                                     const Weight& weight, SearchScratch& scratch) {
  std::uint64_t sum[1] = {};
  source.template for_each<1>([&](float x, int) { sum[0] += x >= at_least ? weight(x) : 0; });
  block_sums(sum, scratch);
  return scratch.totals[0];
}

}  // namespace ridgeline::device
