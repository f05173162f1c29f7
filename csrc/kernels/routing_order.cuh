#pragma once
#include <algorithm>

#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "kernels/routing.h"

/// Choices in the order of their experts: how kernels deal them out to warps and blocks, count
/// them, rank them and give them places. Who chooses is a parameter.
namespace ridgeline::routing {

// ---- Constants --------------------------------------------------------------------------------

using device::kWarpSize;

constexpr int kThreads = 1024;     // the most of a block
constexpr int kBatch = 64;         // rounds that a block holds at a time
constexpr int kLeastChunk = 16;    // rounds that a block has of many: a warp each, at once
constexpr int kMostChunks = 128;   // about a block an SM; each adds up what all have counted
constexpr int kMaxBuckets = kMaxRoutedExperts + 1;
constexpr int kBucketBits = 10;    // of a choice before it has a place; its rank has the others
constexpr int kWarpsAWord = 4;     // that count in one word, a byte each
constexpr std::uint32_t kEachByte = 0x01010101;
static_assert(kMaxBuckets <= 1 << kBucketBits);
static_assert(kMaxBuckets <= kThreads, "a thread has one, where they are added up");
static_assert(std::max(kMaxRoutedTokens, kMaxOrderedChoices) / kMostChunks <=
                  1 << (31 - kBucketBits),
              "a rank fits: an expert has no more of a chunk's choices");
static_assert(kMaxPerToken <= kWarpSize, "a round has all choices of a token");
static_assert(ceil_div(kBatch, device::kMaxWarps) * kWarpSize < 1 << 8, "a warp counts in a byte");
// Blocks of an SM, for the compiler: for two it keeps to 32 registers, too few of 32 logits a lane.
constexpr int kBlocks = 1;

/// How choices are dealt out. A round is `width` choices side by side, one a lane of a warp; warps
/// and blocks have rounds side by side, so that lower ones have earlier choices. A choice falls
/// into a bucket: that of its expert or, behind these, of nobody.
struct Deal {
  std::int32_t rounds;
  std::int32_t width;
  std::int32_t buckets;  // experts, and nobody's where choices may be
  std::int32_t chunk;    // rounds of a block, where there are many
};

/// Who chooses says what a kernel is told, Params with an ExpertOrder, and how many buckets there
/// may be, kBuckets, and gives each lane of a warp the bucket of its choice of a round, or -1 where
/// it has none:
///   static __device__ int choose(const Params& p, int round);
template <class Params>
struct OrderLaunch {
  Params params;
  Deal deal;
};

// ---- Shared memory ----------------------------------------------------------------------------

template <int kBuckets>
struct OrderShared {
  static_assert(kBuckets <= kMaxBuckets);

  std::uint32_t counts[device::kMaxWarps / kWarpsAWord][kBuckets];  // of the batch's choices
  std::int32_t rows[kBuckets];  // of a bucket: where they begin, if the batch is all there is, else
                                // how many the batches before have
  std::int32_t of_warps[device::kMaxWarps];
  std::int32_t ranked[kBatch][kWarpSize];  // choices with their ranks among those of their warp

  static __device__ int words() {
    return ceil_div(static_cast<int>(blockDim.x), kWarpsAWord * kWarpSize);
  }
  __device__ void clear_counts(int bucket) {
    for (int word = 0; word < words(); ++word) counts[word][bucket] = 0;
  }
  __device__ int count(int bucket) const {
    std::uint32_t sum = 0;
    for (int word = 0; word < words(); ++word) sum = __dp4a(counts[word][bucket], kEachByte, sum);
    return static_cast<int>(sum);
  }
  /// How many choices of the batch the warps before this one have in the bucket.
  __device__ int count_before(int warp, int bucket) const {
    const int last = warp / kWarpsAWord;
    std::uint32_t sum = 0;
    for (int word = 0; word < last; ++word) sum = __dp4a(counts[word][bucket], kEachByte, sum);
    const std::uint32_t below = (1u << 8 * (warp % kWarpsAWord)) - 1;
    return static_cast<int>(__dp4a(counts[last][bucket] & below, kEachByte, sum));
  }
  /// Counts the warp's choices of a round. Gives the rank of this lane's among those of its bucket
  /// that the warp has had, of a round the lower lanes' first. All lanes call it; -1: no choice.
  __device__ int count_round(int warp, int bucket) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const std::uint32_t same = device::lanes_of_same(bucket);
    const int before = __popc(same & ((1u << lane) - 1));
    auto* own = reinterpret_cast<std::uint8_t*>(&counts[warp / kWarpsAWord][max(bucket, 0)]) +
                warp % kWarpsAWord;
    const int had = bucket < 0 ? 0 : *own;
    __syncwarp();  // the count has been read
    if (bucket >= 0 && before == 0) *own = static_cast<std::uint8_t>(had + __popc(same));
    __syncwarp();  // the count is the next round's
    return had + before;
  }
};

struct PlaceShared {
  std::int32_t totals[kMaxBuckets];  // rows of a bucket
  std::int32_t starts[kMaxBuckets];  // those of the chunks before; then where the chunk's begin
  std::int32_t of_warps[device::kMaxWarps];
};

// ---- Phases -----------------------------------------------------------------------------------

__device__ __forceinline__ int ranked_choice(int rank, int bucket) {
  return (rank << kBucketBits) | bucket;
}
__device__ __forceinline__ int bucket_of(int ranked) { return ranked & ((1 << kBucketBits) - 1); }
__device__ __forceinline__ int rank_of(int ranked) { return ranked >> kBucketBits; }

/// Calls fn(bucket) for each of the first `count`, those of a thread always the same ones.
template <class Fn>
__device__ __forceinline__ void for_each_bucket(int count, Fn&& fn) {
  for (int b = static_cast<int>(threadIdx.x); b < count; b += static_cast<int>(blockDim.x)) fn(b);
}

/// Calls fn(round, its number in the batch) for the rounds of this warp, which lie side by side.
template <class Fn>
__device__ __forceinline__ void for_each_round(int warp, int first, int count, Fn&& fn) {
  const int each = ceil_div(count, static_cast<int>(blockDim.x) / kWarpSize);
  const int end = min((warp + 1) * each, count);
  for (int i = warp * each; i < end; ++i) fn(first + i, i);
}

/// Chooses, counts, and ranks among the choices of a warp. Requires: the counts are clear.
template <class Chooser>
__device__ __forceinline__ void choose_batch(const typename Chooser::Params& p, int warp, int first,
                                             int count, OrderShared<Chooser::kBuckets>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_each_round(warp, first, count, [&](int round, int i) {
    const int bucket = Chooser::choose(p, round);
    const int rank = shared.count_round(warp, bucket);
    shared.ranked[i][lane] = bucket < 0 ? -1 : ranked_choice(rank, bucket);
  });
}

/// Calls fn(choice, its bucket, its rank in the batch) for the choices of this warp, which
/// choose_batch() has ranked. Requires: the counts are complete.
template <int kBuckets, class Fn>
__device__ __forceinline__ void for_each_choice(const Deal& deal, int warp, int first, int count,
                                                const OrderShared<kBuckets>& shared, Fn&& fn) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_each_round(warp, first, count, [&](int round, int i) {
    const int ranked = shared.ranked[i][lane];
    if (ranked < 0) return;
    const int bucket = bucket_of(ranked);
    fn(round * deal.width + lane, bucket, shared.count_before(warp, bucket) + rank_of(ranked));
  });
}

/// How many rows the buckets before this thread's have, of the count of its own. All threads call
/// it, of which each has one bucket or none; `of_warps` is the block's.
__device__ __forceinline__ int sum_before(int count, std::int32_t (&of_warps)[device::kMaxWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = device::warp_index();
  const int up_to = device::warp_inclusive_sum(count);
  if (lane == kWarpSize - 1) of_warps[warp] = up_to;
  __syncthreads();  // the warps' sums are there
  return device::warp_sum(lane < warp ? of_warps[lane] : 0) + up_to - count;
}

/// Gives a choice its place, and the row there its token.
__device__ __forceinline__ void place(const ExpertOrder& order, int choice, int row) {
  order.places[choice] = row;
  order.rows[row] = choice / order.per_token;
}

// ---- Kernels ----------------------------------------------------------------------------------

/// Few rounds: one block has all. Each warp counts its own choices, so that counts and ranks do not
/// depend on which warp is first. A thread has a bucket: where one warp went over all, one token of
/// 128 experts took 0.7 us more (H200, lab). Shared memory: 12.5 KiB for 128 buckets, 44 for 1024.
template <class Chooser>
__global__ void __launch_bounds__(kThreads, kBlocks)
    order_few_kernel(const __grid_constant__ OrderLaunch<typename Chooser::Params> launch) {
  __shared__ OrderShared<Chooser::kBuckets> shared;
  const Deal& deal = launch.deal;
  const ExpertOrder& order = launch.params.order;
  const int warp = device::warp_index();
  for_each_bucket(deal.buckets, [&](int b) { shared.clear_counts(b); });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  __syncthreads();  // the counts are clear
  choose_batch<Chooser>(launch.params, warp, 0, deal.rounds, shared);
  __syncthreads();  // the counts are complete
  const int bucket = static_cast<int>(threadIdx.x);
  const bool has_bucket = bucket < deal.buckets;
  const int start = sum_before(has_bucket ? shared.count(bucket) : 0, shared.of_warps);
  if (has_bucket) shared.rows[bucket] = start;
  if (bucket <= order.experts) order.offsets[bucket] = start;
  __syncthreads();  // it is known where rows begin
  for_each_choice(deal, warp, 0, deal.rounds, shared, [&](int choice, int bucket, int rank) {
    place(order, choice, shared.rows[bucket] + rank);
  });
}

/// Many rounds, a chunk of them a block, kBatch at a time: how many rows of each bucket the chunk
/// has, and in `places` what the next kernel makes places of: the bucket and the rank among the
/// chunk's rows of it. Grid: the chunks.
template <class Chooser>
__global__ void __launch_bounds__(kThreads, kBlocks)
    rank_kernel(const __grid_constant__ OrderLaunch<typename Chooser::Params> launch) {
  __shared__ OrderShared<Chooser::kBuckets> shared;
  const Deal& deal = launch.deal;
  const ExpertOrder& order = launch.params.order;
  const int warp = device::warp_index();
  for_each_bucket(deal.buckets, [&](int b) {
    shared.clear_counts(b);
    shared.rows[b] = 0;
  });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int begin = static_cast<int>(blockIdx.x) * deal.chunk;
  const int end = min(begin + deal.chunk, deal.rounds);
  for (int first = begin; first < end; first += kBatch) {
    const int count = min(kBatch, end - first);
    __syncthreads();  // the counts are clear
    choose_batch<Chooser>(launch.params, warp, first, count, shared);
    __syncthreads();  // the counts are complete
    for_each_choice(deal, warp, first, count, shared, [&](int choice, int bucket, int rank) {
      order.places[choice] = ranked_choice(shared.rows[bucket] + rank, bucket);
    });
    __syncthreads();  // the counts have been read
    for_each_bucket(deal.buckets, [&](int b) {
      shared.rows[b] += shared.count(b);
      shared.clear_counts(b);
    });
  }
  auto* counts = static_cast<std::int32_t*>(order.workspace) +
                 std::int64_t{blockIdx.x} * deal.buckets;
  for_each_bucket(deal.buckets, [&](int b) { counts[b] = shared.rows[b]; });
}

/// Adds up the counts of all chunks, each block for itself, and gives the choices of its chunk
/// their places. Reads by way of L2: the kernel starts ahead of its wait, and L1 may be older.
static __global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ OrderLaunch<ExpertOrder> launch) {
  __shared__ PlaceShared shared;
  const Deal& deal = launch.deal;
  const ExpertOrder& order = launch.params;
  const int thread = static_cast<int>(threadIdx.x), own = static_cast<int>(blockIdx.x);
  for_each_bucket(deal.buckets, [&](int b) { shared.totals[b] = shared.starts[b] = 0; });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  __syncthreads();  // the sums are zero
  // A thread has one bucket, of every so many chunks.
  const int width = round_up(deal.buckets, kWarpSize), turns = kThreads / width;
  const int turn = thread / width, bucket = thread - turn * width;
  if (turn < turns && bucket < deal.buckets) {
    const auto* counts = static_cast<const std::int32_t*>(order.workspace) + bucket;
    int total = 0, before = 0;
#pragma unroll 8
    for (int chunk = turn; chunk < static_cast<int>(gridDim.x); chunk += turns) {
      const int count = __ldcg(counts + std::int64_t{chunk} * deal.buckets);
      total += count;
      before += chunk < own ? count : 0;
    }
    atomicAdd(&shared.totals[bucket], total);
    atomicAdd(&shared.starts[bucket], before);
  }
  __syncthreads();  // the sums are complete
  const bool has_bucket = thread < deal.buckets;
  const int start = sum_before(has_bucket ? shared.totals[thread] : 0, shared.of_warps);
  if (has_bucket) shared.starts[thread] += start;
  if (own == 0 && thread <= order.experts) order.offsets[thread] = start;
  __syncthreads();  // it is known where rows begin
  const std::int64_t width_of_chunk = std::int64_t{deal.chunk} * deal.width;
  const std::int64_t first = own * width_of_chunk;
  const std::int64_t end =
      min(first + width_of_chunk, std::int64_t{order.tokens} * order.per_token);
  for (std::int64_t i = first + thread; i < end; i += kThreads) {
    const int ranked = __ldcg(order.places + i), its = bucket_of(ranked);
    place(order, static_cast<int>(i), shared.starts[its] + rank_of(ranked));
  }
}

// ---- Launch -----------------------------------------------------------------------------------

inline Deal deal_out(std::int32_t rounds, std::int32_t width, std::int32_t buckets) {
  const int chunk = std::max(ceil_div(rounds, kMostChunks), kLeastChunk);
  return {.rounds = rounds, .width = width, .buckets = buckets, .chunk = chunk};
}

inline std::size_t workspace_bytes(const Deal& deal) {
  if (deal.rounds <= kBatch) return 0;
  const auto chunks = static_cast<std::size_t>(ceil_div(deal.rounds, deal.chunk));
  return chunks * static_cast<std::size_t>(deal.buckets) * sizeof(std::int32_t);
}

/// A warp a round, and as many as what is done for each bucket takes.
inline dim3 warps_for(int rounds, int least) {
  return dim3(std::clamp(rounds, least, device::kMaxWarps) * kWarpSize);
}

/// Enqueues one kernel, or two for more than a few rounds.
template <class Chooser, class Params>
void launch_order(const Params& params, const Deal& deal, Stream stream, const char* name) {
  const OrderLaunch<Params> launch{.params = params, .deal = deal};
  if (deal.rounds <= kBatch) {
    const dim3 warps = warps_for(deal.rounds, ceil_div(params.order.experts + 1, kWarpSize));
    return device::launch_chained<order_few_kernel<Chooser>>(dim3(1), warps, 0, stream, launch,
                                                             name);
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(deal.rounds, deal.chunk)));
  device::launch_chained<rank_kernel<Chooser>>(grid, warps_for(deal.chunk, 4), 0, stream, launch,
                                               name);
  const OrderLaunch<ExpertOrder> placing{.params = params.order, .deal = deal};
  device::launch_chained<place_kernel>(grid, dim3(kThreads), 0, stream, placing, name);
}

}  // namespace ridgeline::routing
