#include "kernels/sampling.h"

#include "common/dispatch.h"
#include "common/philox.h"
#include "common/sampling.h"
#include "device/launch.cuh"
#include "device/logits.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/threshold.cuh"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

using device::kLogitThreads;
using device::kWarpSize;

constexpr float kLog2E = 1.4426950408889634f;
// Ids to a bin of mass: one thread a bin, then one thread an id.
constexpr int kTile = kMaxVocabulary / kLogitThreads;
constexpr int kMaxBound = kLogitThreads / 2;  // the largest top_k that thread maxima bound usefully
constexpr int kTopPBound = 256;               // candidates wanted for top_p alone
static_assert(kTile == kLogitThreads);
static_assert(kTile % device::kLogitStep<float, 4> == 0 &&
                  kTile % device::kLogitStep<__half, 4> == 0,
              "a step of a warp lies in one bin");

// ---- Shared memory ----------------------------------------------------------------------------

struct Shared {
  device::Candidates candidates;
  device::SearchScratch search;
  std::uint64_t bins[kLogitThreads];  // mass of each tile of ids
  std::uint64_t remaining;            // of the random target, inside the tile that was hit
  int hit;
};

// ---- Phases -----------------------------------------------------------------------------------

/// What is drawn from: the row's logits after penalties, bias and mask. Addresses beside the logits
/// are computed when they are needed: registers are what a block of 1024 threads is short of.
template <class T, bool kAdjusted>
struct Row {
  const SampleParams& params;
  std::int64_t index;
  const T* logits;
  int vocab;

  __device__ Row(const SampleParams& params, std::int64_t index)
      : params(params),
        index(index),
        logits(static_cast<const T*>(params.logits) + index * params.stride_logits),
        vocab(params.vocab) {}

  __device__ float adjusted(float x, int id) const {
    if constexpr (kAdjusted) {
      if (id >= vocab) return kNegativeInfinity;
      if (params.penalties != nullptr) {
        const float* penalty = params.penalties + 3 * index;
        const std::int32_t count = params.token_counts[index * params.stride_counts + id];
        x = penalised_logit(x, count, penalty[0], penalty[1], penalty[2]);
      }
      if (params.bias != nullptr) x += params.bias[index * params.stride_bias + id];
      if (params.mask != nullptr && !params.mask[index * params.stride_mask + id])
        x = kNegativeInfinity;
    }
    return clean_logit(x);
  }

  __device__ float at(int id) const { return adjusted(device::to_float(logits[id]), id); }

  /// kPieces 16-byte loads a lane in flight. Adjusted rows read up to four arrays beside, so one is
  /// enough.
  template <int kPieces, class Fn, class After>
  __device__ __forceinline__ void for_each(Fn&& fn, After&& after) const {
    device::for_each_logit<kAdjusted ? 1 : kPieces>(
        logits, vocab, [&](float x, int id) { fn(adjusted(x, id), id); }, after);
  }

  template <int kPieces, class Fn>
  __device__ __forceinline__ void for_each(Fn&& fn) const {
    for_each<kPieces>(fn, [](int) {});
  }
};

/// The weight of a token, by its logit: its mass, or one where tokens are counted.
struct Mass {
  float largest, scale;
  std::uint64_t least;  // what min_p drops weighs nothing
  bool counts;

  __device__ std::uint64_t operator()(float x) const {
    if (counts) return 1;
    const std::uint64_t mass = mass_of(x, largest, scale);
    return mass >= least ? mass : 0;
  }
};

/// Adds up the masses of tokens of at least a value, by tiles of ids.
template <class R>
__device__ void fill_bins(const R& row, bool from_candidates, float at_least, const Mass& mass,
                          Shared& shared) {
  shared.bins[threadIdx.x] = 0;
  __syncthreads();  // the bins are empty
  auto* bins = reinterpret_cast<unsigned long long*>(shared.bins);
  if (from_candidates) {
    shared.candidates.for_each<1>([&](float x, int id) {
      if (x >= at_least) atomicAdd(&bins[id / kTile], mass(x));
    });
  } else {
    std::uint64_t sum = 0;
    row.template for_each<2>([&](float x, int) { sum += x >= at_least ? mass(x) : 0; },
                             [&](int start) {
                               const std::uint64_t total = device::warp_reduce<device::SumU64>(sum);
                               if (threadIdx.x % kWarpSize == 0)
                                 atomicAdd(&bins[start / kTile], total);
                               sum = 0;
                             });
  }
  __syncthreads();  // the bins are full
}

/// The running sum of one value a thread, before this thread, and the total of all.
struct Scan {
  std::uint64_t before, total;

  __device__ Scan(std::uint64_t value, Shared& shared) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const std::uint64_t inclusive = device::warp_inclusive_sum(value);
    if (lane == kWarpSize - 1) shared.search.partial[0][warp] = inclusive;
    __syncthreads();  // every warp's sum is written
    const std::uint64_t other = shared.search.partial[0][lane];
    before = inclusive - value + device::warp_reduce<device::SumU64>(lane < warp ? other : 0);
    total = device::warp_reduce<device::SumU64>(other);
    __syncthreads();  // every thread has read the sums
  }
};

/// The first id at which the running mass passes random / 2^64 of the whole.
template <class R>
__device__ int draw(const R& row, float at_least, const Mass& mass, std::uint64_t random,
                    Shared& shared) {
  const std::uint64_t own_bin = shared.bins[threadIdx.x];
  const Scan bins(own_bin, shared);
  const std::uint64_t target = scale_random(random, bins.total);
  if (target >= bins.before && target - bins.before < own_bin) {
    shared.hit = threadIdx.x;
    shared.remaining = target - bins.before;
  }
  __syncthreads();  // the tile that was hit is known
  const int id = shared.hit * kTile + threadIdx.x;
  const std::uint64_t remaining = shared.remaining;
  const float x = id < row.vocab ? row.at(id) : kNegativeInfinity;
  const std::uint64_t own = x >= at_least ? mass(x) : 0;
  const Scan ids(own, shared);
  if (remaining >= ids.before && remaining - ids.before < own) shared.hit = id;
  __syncthreads();  // the token is known
  return shared.hit;
}

/// Masses of everything, the bound and the candidates that reach it: one pass.
template <class R>
__device__ std::uint64_t collect(const R& row, float bound, bool wants_total, const Mass& mass,
                                 Shared& shared) {
  if (threadIdx.x == 0) shared.candidates.count = 0;
  __syncthreads();  // the list is empty
  std::uint64_t sum[1] = {};
  row.template for_each<2>([&](float x, int id) {
    if (wants_total) sum[0] += mass(x);
    if (x >= bound && x > kNegativeInfinity) shared.candidates.add(x, id);
  });
  device::block_sums(sum, shared.search);  // its barriers also complete the list
  return shared.search.totals[0];
}

struct Threshold {
  float value;
  bool in_candidates;  // every token that reaches it is a candidate
};

/// Where top_k and top_p cut.
template <class R>
__device__ Threshold truncate(const R& row, int top_k, float top_p, float thread_max,
                              const Mass& mass, Shared& shared) {
  const bool has_k = top_k > 0 && top_k < row.vocab;
  const int wanted = has_k ? top_k : kTopPBound;
  const bool bounded = wanted <= kMaxBound;
  const float bound =
      bounded ? device::bound_of_largest(thread_max, mass.largest, wanted) : -kNegativeInfinity;
  std::uint64_t total = collect(row, bound, !has_k, mass, shared);
  const bool listed = bounded && shared.candidates.complete();
  const std::uint32_t bottom = ordered_key(kNegativeInfinity), top = ordered_key(mass.largest) + 1;
  const auto find = [&](bool in_list, device::Range range, std::uint64_t target,
                        const Mass& weight) {
    return device::find_threshold(row, shared.candidates, in_list, range, target, weight,
                                  shared.search);
  };

  Threshold cut{kNegativeInfinity, false};
  if (has_k) {
    const Mass count{.counts = true};
    cut = {find(listed, {listed ? ordered_key(bound) : bottom, top, 0},
                static_cast<std::uint64_t>(top_k), count),
           listed};
  }
  if (!(top_p < 1.0f)) return cut;
  const std::uint64_t listed_mass =
      listed ? device::weight_from(shared.candidates, cut.value, mass, shared.search) : 0;
  if (has_k)
    total = listed ? listed_mass : device::weight_from(row, cut.value, mass, shared.search);
  const std::uint64_t target = max(scale_random(fraction_bits(top_p), total), std::uint64_t{1});
  const bool in_list = listed_mass >= target;
  // Below 42 / scale under the largest there is no mass left.
  const float floor = in_list ? bound : clean_logit(mass.largest - 42.0f / mass.scale);
  const device::Range range{max(max(bottom, ordered_key(floor)), ordered_key(cut.value)),
                            listed && !in_list ? ordered_key(bound) : top,
                            in_list ? 0 : listed_mass};
  return {find(in_list, range, target, mass), in_list};
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: one block a row. First pass: the largest logit and each thread's own; a greedy row ends
/// here. Second pass, with top_k or top_p: the logits above a bound that the threads' maxima give
/// go to shared memory, and the rest of the work is done there; without: the mass of each tile of
/// 1024 ids. Then one tile is read again and the token drawn from it.
template <class T, bool kAdjusted>
__global__ void __launch_bounds__(kLogitThreads)
    sample_kernel(const __grid_constant__ SampleParams params) {
  __shared__ Shared shared;
  const std::int64_t index = blockIdx.x;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();

  const Row<T, kAdjusted> row(params, index);
  float best = kNegativeInfinity;
  int best_id = 0;
  row.template for_each<4>([&](float x, int id) {
    if (x > best) {
      best = x;
      best_id = id;
    }
  });
  const std::uint64_t first = device::block_reduce<device::MaxU64>(device::pair_key(best, best_id),
                                                                   shared.search.partial[0]);
  const float largest = device::value_of_pair(first), temperature = params.temperature[index];
  if (!(temperature >= kGreedyBelow) || largest == kNegativeInfinity) {
    if (threadIdx.x == 0) params.tokens[index] = device::id_of_pair(first);
    return;
  }

  __syncthreads();  // every thread has read the partials that block_reduce leaves
  const Mass mass{largest, kLog2E / temperature, least_mass(params.min_p[index]), false};
  const int top_k = params.top_k[index];
  const float top_p = params.top_p[index];
  Threshold cut{kNegativeInfinity, false};
  if ((top_k > 0 && top_k < row.vocab) || top_p < 1.0f)
    cut = truncate(row, top_k, top_p, best, mass, shared);
  fill_bins(row, cut.in_candidates, cut.value, mass, shared);
  const std::uint64_t random = random_bits(static_cast<std::uint64_t>(params.seeds[index]),
                                           static_cast<std::uint32_t>(params.positions[index]));
  const int token = draw(row, cut.value, mass, random, shared);
  if (threadIdx.x == 0) params.tokens[index] = token;
}

}  // namespace

// ---- Launch -----------------------------------------------------------------------------------

void sample(const SampleParams& params, Stream stream) {
  if (params.rows == 0) return;
  const dim3 grid(checked_int32(params.rows, "sample: rows"));
  const bool adjusted =
      params.penalties != nullptr || params.bias != nullptr || params.mask != nullptr;
  device::dispatch_float(params.dtype, [&](auto type) {
    dispatch_bool(adjusted, [&](auto is_adjusted) {
      using T = typename decltype(type)::type;
      device::launch_chained<sample_kernel<T, is_adjusted>>(grid, dim3(kLogitThreads), 0, stream,
                                                            params, "sample");
    });
  });
}

}  // namespace ridgeline
