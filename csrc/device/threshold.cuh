#pragma once
#include <cstdint>

#include "common/sampling.h"
#include "device/logits.cuh"
#include "device/mass.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/vec.cuh"

/// The search of a cluster for the logit that a given weight of a row reaches: of top-k by count,
/// of top-p by mass. Weights are integers, so nothing depends on the order in which they are added.
namespace ridgeline::device {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
constexpr int kBinBits = 9;
constexpr int kBins = 1 << kBinBits;
static_assert(kBins == kSampleThreads, "a thread a bin");

/// Sums of weights, kept as two halves: shared memory adds 32 bits at a time. Lanes that meet in a
/// bin take turns, 8 cycles each, so there are several copies of each.
struct Bins {
  static constexpr int kCopies = 8;
  std::uint32_t low[kBins * kCopies], high[kBins * kCopies];

  /// Empties this thread's bin.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      low[i * kBins + threadIdx.x] = 0;
      high[i * kBins + threadIdx.x] = 0;
    }
  }

  /// Four at a time, zeros left out, so that their additions are under way together.
  __device__ __forceinline__ void add(const std::uint32_t (&bin)[4],
                                      const std::uint64_t (&weight)[4]) {
    const std::uint32_t copy = threadIdx.x % kCopies;
    std::uint32_t before[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (weight[j] > 0)
        before[j] =
            atomicAdd(&low[bin[j] * kCopies + copy], static_cast<std::uint32_t>(weight[j]));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto low_half = static_cast<std::uint32_t>(weight[j]);
      const std::uint32_t carry = before[j] + low_half < low_half;
      const std::uint32_t high_half = static_cast<std::uint32_t>(weight[j] >> 32) + carry;
      if (high_half > 0) atomicAdd(&high[bin[j] * kCopies + copy], high_half);
    }
  }

  /// The copies of a bin together.
  __device__ std::uint64_t at(int bin) const {
    std::uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      sum += (std::uint64_t{high[bin * kCopies + i]} << 32) + low[bin * kCopies + i];
    return sum;
  }
};

/// The keys in which a search goes on: the weight at or above `low` reaches the target, that at or
/// above `high`, namely `above`, does not.
struct Range {
  std::uint32_t low, high;
  std::uint64_t above;

  __device__ bool found() const { return high - low <= 1; }
};

struct SearchScratch {
  Bins bins;                    // of this block's slice
  std::uint64_t parts[kBins];   // their sums
  std::uint64_t totals[kBins];  // of the row
  std::uint64_t partial[2][kSampleWarps];
  Range range;
};

/// The sum of one value a thread, before this thread and of all.
struct Scan {
  std::uint64_t before, total;

  __device__ Scan(std::uint64_t value, std::uint64_t* partial) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const std::uint64_t inclusive = warp_inclusive_sum(value);
    if (lane == kWarpSize - 1) partial[warp] = inclusive;
    __syncthreads();  // every warp's sum is written
    const std::uint64_t other = lane < kSampleWarps ? partial[lane] : 0;
    before = inclusive - value + warp_reduce<SumU64>(lane < warp ? other : 0);
    total = warp_reduce<SumU64>(other);
  }
};

/// The key of the largest logit in `range` that logits of the target's weight reach, itself
/// included. The target is goal(weight of the whole range). Each round reads the slices once and
/// leaves one of kBins parts of the range. Requires: all threads of the cluster call it; the range
/// holds the target.
template <class Slice, class Weight, class Goal>
__device__ __forceinline__ std::uint32_t find_threshold(const Slice& slice, Range range,
                                                        const Goal& goal, const Weight& weight,
                                                        SearchScratch& scratch) {
  const int blocks = ptx::cluster_blocks(), thread = static_cast<int>(threadIdx.x);
  std::uint64_t target = 0;
  bool holds = true;  // this thread has logits in the range
  for (int round = 0; !range.found(); ++round) {
    const std::uint32_t width = range.high - range.low;
    const int shift = max(0, 32 - kBinBits - __clz(static_cast<int>(width - 1)));
    scratch.bins.clear();
    __syncthreads();  // the bins are empty
    bool held = false;
    if (holds) {
      slice.for_each([&](const Vec<float, 4>& x, int) {
        std::uint32_t bin[4];
        std::uint64_t own[4] = {};
        bool any = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t offset = ordered_key(x.data[j]) - range.low;
          bin[j] = offset >> shift;
          if (offset >= width) continue;
          own[j] = weight(x.data[j]);
          any = true;
        }
        if (any) scratch.bins.add(bin, own);
        held |= any;
      });
    }
    holds = held;
    __syncthreads();  // the bins are full
    scratch.parts[thread] = scratch.bins.at(thread);
    ptx::cluster_arrive();
    ptx::cluster_wait();  // every block's parts are written
    const int shared_bin = (ptx::cluster_rank() * kBins + thread) / blocks;
    SearchScratch& other = *ptx::in_block(&scratch, thread % blocks);
    other.totals[shared_bin] = group_sum(other.parts[shared_bin], blocks);
    ptx::cluster_arrive();
    ptx::cluster_wait();  // every block has the totals, and the parts are read
    const int bin = kBins - 1 - thread;
    const std::uint64_t own = scratch.totals[bin];
    const Scan scan(own, scratch.partial[0]);
    if (round == 0) target = goal(scan.total);
    const std::uint64_t before = range.above + scan.before;
    if (before < target && target - before <= own) {
      const std::uint32_t low = range.low + (static_cast<std::uint32_t>(bin) << shift);
      scratch.range = {low, low + min(1u << shift, range.high - low), before};
    }
    __syncthreads();  // the part of the range is known
    range = scratch.range;
  }
  return range.low;
}

}  // namespace ridgeline::device
