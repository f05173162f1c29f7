#include <algorithm>

#include "common/dispatch.h"
#include "common/math.h"
#include "common/routing.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/routing.h"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

using device::kWarpSize;

constexpr int kRouteThreads = 1024;  // the most of a block
constexpr int kBatch = 64;           // tokens whose choices a block holds at a time
constexpr int kBatchWords = kBatch / 32;
constexpr int kLeastChunk = 16;      // tokens that a block has of many: a warp each, at once
constexpr int kMostChunks = 128;     // about a block an SM; each adds up what all have counted
constexpr int kExpertBits = 10;      // of a choice before it has a place; its rank has the others
static_assert(kMaxRoutedExperts < 1 << kExpertBits);
static_assert(kMaxRoutedTokens / kMostChunks <= 1 << (31 - kExpertBits), "a rank fits");
static_assert(kMaxPerToken <= kWarpSize, "a lane has one choice");
// Blocks of an SM, for the compiler: for two it keeps to 32 registers, too few for 32 logits a lane.
constexpr int kRouteBlocks = 1;

struct RouteLaunch {
  RouteParams params;
  std::int32_t chunk;  // tokens of a block
};

// ---- Shared memory ----------------------------------------------------------------------------

struct RouteShared {
  std::uint32_t takers[kBatchWords][kMaxRoutedExperts];  // a bit for each token of the batch
  std::int32_t rows[kMaxRoutedExperts + 1];  // of an expert: where they begin, if the batch is all
                                             // there is, else how many the batches before have
  std::uint16_t choices[kBatch][kMaxPerToken];

  __device__ void clear_takers(int expert) {
#pragma unroll
    for (int word = 0; word < kBatchWords; ++word) takers[word][expert] = 0;
  }
  __device__ int count(int expert) const {
    int sum = 0;
#pragma unroll
    for (int word = 0; word < kBatchWords; ++word) sum += __popc(takers[word][expert]);
    return sum;
  }
  /// How many tokens of the batch before this one chose the expert.
  __device__ int count_before(int token, int expert) const {
    int sum = 0;
#pragma unroll
    for (int word = 0; word < kBatchWords; ++word) {
      const int bits = min(max(token - 32 * word, 0), 32);
      const auto below = static_cast<std::uint32_t>((std::uint64_t{1} << bits) - 1);
      sum += __popc(takers[word][expert] & below);
    }
    return sum;
  }
};

struct PlaceShared {
  std::int32_t totals[kMaxRoutedExperts];      // rows of an expert
  std::int32_t before[kMaxRoutedExperts];      // those of the chunks before
  std::int32_t starts[kMaxRoutedExperts + 1];  // where they begin
};

// ---- Phases -----------------------------------------------------------------------------------

/// The logits of a token as keys, a lane those of experts 32 apart; 0 where there is no expert.
template <class T, int kEach>
__device__ __forceinline__ void load_keys(std::uint32_t (&keys)[kEach], const RouteParams& p,
                                          int token) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const T* own = static_cast<const T*>(p.logits) + token * p.stride_logits + lane;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int base = i * kWarpSize;
    keys[i] = base < p.experts - lane ? routing_key(device::to_float(__ldcg(own + base))) : 0;
  }
}

template <int kEach>
__device__ __forceinline__ std::uint32_t largest_key(const std::uint32_t (&keys)[kEach]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = max(largest, keys[i]);
  return device::warp_max(largest);
}

/// The sum of exp(logit - largest) over all experts.
template <int kEach>
__device__ __forceinline__ float sum_of_exponentials(const std::uint32_t (&keys)[kEach]) {
  const float largest = from_ordered_key(largest_key(keys));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (keys[i] != 0) sum += expf(from_ordered_key(keys[i]) - largest);
  return device::warp_reduce<device::Sum>(sum);
}

/// Takes out the largest key, of equal ones that of the lowest expert. Requires: there is one.
template <int kEach>
__device__ __forceinline__ int take_expert(std::uint32_t (&keys)[kEach], std::uint32_t largest) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int base = kWarpSize * kEach;  // of this lane's lowest expert with that key: none
#pragma unroll
  for (int i = kEach - 1; i >= 0; --i)
    if (keys[i] == largest) base = i * kWarpSize;
  const int expert = device::warp_min(base + lane);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i * kWarpSize == expert - lane) keys[i] = 0;
  return expert;
}

/// One choice in each of the first per_token lanes.
struct Choice {
  int expert;
  float weight;
};

template <int kEach>
__device__ __forceinline__ Choice choose(const RouteParams& p, int token) {
  std::uint32_t keys[kEach];
  switch (p.dtype) {
    case DType::kFloat16: load_keys<__half>(keys, p, token); break;
    case DType::kBFloat16: load_keys<__nv_bfloat16>(keys, p, token); break;
    default: load_keys<float>(keys, p, token);
  }
  float sum = p.normalized ? 0.0f : sum_of_exponentials(keys);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int expert = 0;
  std::uint32_t key = 0;
  for (int j = 0; j < p.per_token; ++j) {
    const std::uint32_t largest = largest_key(keys);
    const int taken = take_expert(keys, largest);
    if (lane == j) expert = taken, key = largest;
  }
  const float logit = from_ordered_key(key), largest = device::from_lane(logit, 0);
  const float exponential = lane < p.per_token ? expf(logit - largest) : 0.0f;
  if (p.normalized) sum = device::warp_reduce<device::Sum>(exponential);
  return {expert, exponential / sum};
}

/// Calls fn(token, its number in the batch) for the tokens of this warp.
template <class Fn>
__device__ __forceinline__ void for_each_token(int first, int count, Fn&& fn) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  for (int i = device::warp_index(); i < count; i += warps) fn(first + i, i);
}

/// A warp a token. Requires: the takers are clear.
template <int kEach>
__device__ __forceinline__ void choose_batch(const RouteParams& p, int first, int count,
                                             RouteShared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_each_token(first, count, [&](int token, int i) {
    const Choice choice = choose<kEach>(p, token);
    if (lane < p.per_token) {
      shared.choices[i][lane] = static_cast<std::uint16_t>(choice.expert);
      atomicOr(&shared.takers[i / 32][choice.expert], 1u << i % 32);
      p.weights[token * p.per_token + lane] = choice.weight;
    }
  });
}

/// Calls fn(expert) for each expert, those of a thread always the same ones.
template <class Fn>
__device__ __forceinline__ void for_each_expert(int experts, Fn&& fn) {
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
    fn(e);
}

/// Where the rows of each expert begin, of counts; starts[experts] is the number of all. By one
/// warp, whose lanes have experts side by side: an odd number, so that no two meet in a bank.
template <class Count>
__device__ __forceinline__ void sum_counts(int experts, std::int32_t* starts, const Count& count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int each = ceil_div(experts, kWarpSize) | 1;
  const int first = min(lane * each, experts), end = min(first + each, experts);
  int own = 0;
  for (int e = first; e < end; ++e) own += count(e);
  int start = device::warp_inclusive_sum(own) - own;
  for (int e = first; e < end; ++e) {
    starts[e] = start;
    start += count(e);
  }
  if (lane == kWarpSize - 1) starts[experts] = start;
}

// ---- Kernels ----------------------------------------------------------------------------------

/// Few tokens: one block has all. A warp chooses for a token, and each choice sets the token's bit
/// at its expert, so that counts and ranks do not depend on which warp is first.
/// Bytes: see RouteParams. What takes the time is per_token rounds of two reductions of a warp.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocks)
    route_few_kernel(const __grid_constant__ RouteParams p) {
  __shared__ RouteShared shared;
  for_each_expert(p.experts, [&](int e) { shared.clear_takers(e); });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  __syncthreads();  // the takers are clear
  choose_batch<kEach>(p, 0, p.tokens, shared);
  __syncthreads();  // the takers are complete
  if (device::warp_index() == 0)
    sum_counts(p.experts, shared.rows, [&](int e) { return shared.count(e); });
  __syncthreads();  // it is known where rows begin
  for_each_expert(p.experts + 1, [&](int e) { p.offsets[e] = shared.rows[e]; });
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for_each_token(0, p.tokens, [&](int token, int i) {
    if (lane >= p.per_token) return;
    const int expert = shared.choices[i][lane];
    const int place = shared.rows[expert] + shared.count_before(i, expert);
    p.places[token * p.per_token + lane] = place;
    p.rows[place] = token;
  });
}

/// Many tokens, a chunk of them a block, kBatch at a time: the weights, how many rows of each
/// expert the chunk has, and in `places` what the next kernel makes places of: the expert and the
/// rank among the chunk's rows of it. Grid: the chunks.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocks)
    choose_kernel(const __grid_constant__ RouteLaunch launch) {
  __shared__ RouteShared shared;
  const RouteParams& p = launch.params;
  for_each_expert(p.experts, [&](int e) {
    shared.clear_takers(e);
    shared.rows[e] = 0;
  });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int begin = static_cast<int>(blockIdx.x) * launch.chunk;
  const int end = min(begin + launch.chunk, p.tokens);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int first = begin; first < end; first += kBatch) {
    const int count = min(kBatch, end - first);
    __syncthreads();  // the takers are clear
    choose_batch<kEach>(p, first, count, shared);
    __syncthreads();  // the takers are complete
    for_each_token(first, count, [&](int token, int i) {
      if (lane >= p.per_token) return;
      const int expert = shared.choices[i][lane];
      const int rank = shared.rows[expert] + shared.count_before(i, expert);
      p.places[token * p.per_token + lane] = (rank << kExpertBits) | expert;
    });
    __syncthreads();  // the takers have been read
    for_each_expert(p.experts, [&](int e) {
      shared.rows[e] += shared.count(e);
      shared.clear_takers(e);
    });
  }
  auto* counts = static_cast<std::int32_t*>(p.workspace) + std::int64_t{blockIdx.x} * p.experts;
  for_each_expert(p.experts, [&](int e) { counts[e] = shared.rows[e]; });
}

/// Adds up the counts of all chunks, each block for itself, and gives the choices of its chunk
/// their places. Reads by way of L2: the kernel starts ahead of its wait, and L1 may be older.
__global__ void __launch_bounds__(kRouteThreads)
    place_kernel(const __grid_constant__ RouteLaunch launch) {
  __shared__ PlaceShared shared;
  const RouteParams& p = launch.params;
  const int thread = static_cast<int>(threadIdx.x), own = static_cast<int>(blockIdx.x);
  for_each_expert(p.experts, [&](int e) { shared.totals[e] = shared.before[e] = 0; });
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  __syncthreads();  // the sums are zero
  // A thread has one expert, of every so many chunks.
  const int width = round_up(p.experts, kWarpSize), turns = kRouteThreads / width;
  const int turn = thread / width, expert = thread - turn * width;
  if (turn < turns && expert < p.experts) {
    const auto* counts = static_cast<const std::int32_t*>(p.workspace) + expert;
    int total = 0, before = 0;
#pragma unroll 8
    for (int chunk = turn; chunk < static_cast<int>(gridDim.x); chunk += turns) {
      const int count = __ldcg(counts + std::int64_t{chunk} * p.experts);
      total += count;
      before += chunk < own ? count : 0;
    }
    atomicAdd(&shared.totals[expert], total);
    atomicAdd(&shared.before[expert], before);
  }
  __syncthreads();  // the sums are complete
  if (device::warp_index() == 0)
    sum_counts(p.experts, shared.starts, [&](int e) { return shared.totals[e]; });
  __syncthreads();  // it is known where rows begin
  if (own == 0) for_each_expert(p.experts + 1, [&](int e) { p.offsets[e] = shared.starts[e]; });
  const std::int64_t first = std::int64_t{own} * launch.chunk;
  const std::int64_t end = min(first + launch.chunk, std::int64_t{p.tokens}) * p.per_token;
  for (std::int64_t i = first * p.per_token + thread; i < end; i += kRouteThreads) {
    const int choice = __ldcg(p.places + i);
    const int chosen = choice & ((1 << kExpertBits) - 1);
    const int place = shared.starts[chosen] + shared.before[chosen] + (choice >> kExpertBits);
    p.places[i] = place;
    p.rows[place] = static_cast<std::int32_t>(i) / p.per_token;
  }
}

// ---- Launch -----------------------------------------------------------------------------------

int chunk_of(std::int32_t tokens) {
  return std::max(ceil_div(tokens, kMostChunks), kLeastChunk);
}

/// A warp a token, but enough threads for what is done for each expert.
dim3 warps_for(int tokens) { return dim3(std::clamp(tokens, 4, 32) * kWarpSize); }

}  // namespace

std::size_t route_experts_workspace_bytes(const RouteParams& p) {
  if (p.tokens <= kBatch) return 0;
  const auto chunks = static_cast<std::size_t>(ceil_div(p.tokens, chunk_of(p.tokens)));
  return chunks * static_cast<std::size_t>(p.experts) * sizeof(std::int32_t);
}

void route_experts(const RouteParams& p, Stream stream) {
  const char* name = "route_experts";
  dispatch_at_least<1, 2, 4, 8, 16, 32>(
      ceil_div(p.experts, kWarpSize), "logits: experts a lane", [&](auto each) {
        constexpr int kEach = each.value;
        if (p.tokens <= kBatch)
          return device::launch_chained<route_few_kernel<kEach>>(
              dim3(1), warps_for(p.tokens), 0, stream, p, name);
        const RouteLaunch launch{.params = p, .chunk = chunk_of(p.tokens)};
        const dim3 grid(static_cast<unsigned>(ceil_div(p.tokens, launch.chunk)));
        device::launch_chained<choose_kernel<kEach>>(grid, warps_for(launch.chunk), 0, stream,
                                                     launch, name);
        device::launch_chained<place_kernel>(grid, dim3(kRouteThreads), 0, stream, launch, name);
      });
}

}  // namespace ridgeline
