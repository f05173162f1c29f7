#include "kernels/sampling.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/philox.h"
#include "common/sampling.h"
#include "device/launch.cuh"
#include "device/mass.cuh"
#include "device/properties.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/threshold.cuh"
#include "kernels/sampling_slice.cuh"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

using device::kSampleThreads;
using device::kSampleWarps;
using device::kWarpSize;
using Four = device::Vec<float, 4>;

constexpr int kMaxBlocks = 16;           // of a cluster, a row's
constexpr int kGroups = kSampleThreads;  // of a row's logits, whose maxima are known to every block
constexpr int kMaxListed = kSampleThreads;  // candidates, a thread each
constexpr int kMaxListedK = 256;  // 256 of 512 groups: 355 logits, where the largest lie anywhere
constexpr int kBlocksOfSm = 2;    // 1024 threads load at a time

static_assert(kMaxVocabulary / kSampleThreads < 4096, "a MassSum holds a thread's shares");

struct SplitParams {
  SampleParams params;
  int resident_ids;  // of each warp's ids, kept in shared memory
};

// ---- Shared memory ----------------------------------------------------------------------------

struct RowValues {
  std::int64_t seed;
  std::int32_t position, top_k;
  float temperature, top_p, min_p;
};

struct Candidates {
  float value[kMaxListed];
  int id[kMaxListed];
};

struct alignas(16) Shared {
  RowValues row;
  std::uint32_t maxima[kGroups];  // keys of the groups' largest
  int listed;                     // candidates, and those for which there was no room
  union {
    Candidates candidates;                          // in the first block
    std::uint64_t tiles[kMaxBlocks * kSampleWarps];  // mass of each warp's ids
  };
  union {
    device::SearchScratch search;
    std::uint64_t masses[kMaxListed];  // of the candidates
  };
  std::uint64_t partial[2][kSampleWarps];
};

// ---- Phases -----------------------------------------------------------------------------------

__device__ void request_row(const SampleParams& params, std::int64_t row, RowValues& values) {
  ptx::copy_async_8(&values.seed, params.seeds + row, true);
  ptx::copy_async_4(&values.position, params.positions + row, true);
  ptx::copy_async_4(&values.top_k, params.top_k + row, true);
  ptx::copy_async_4(&values.temperature, params.temperature + row, true);
  ptx::copy_async_4(&values.top_p, params.top_p + row, true);
  ptx::copy_async_4(&values.min_p, params.min_p + row, true);
}

/// The lowest id of a logit in this block.
template <class Slice>
__device__ int lowest_id(const Slice& slice, float value, float thread_max, Shared& shared) {
  int id = device::MinIndex::identity();
  if (thread_max == value) {
    slice.for_each([&](const Four& x, int first) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (x.data[j] == value) id = min(id, first + j);
    });
  }
  return device::block_reduce<device::MinIndex>(id, reinterpret_cast<int*>(shared.partial[1]));
}

/// The logits from a bound on go to the first block. Returns how many they are.
template <class Slice>
__device__ int list_candidates(const Slice& slice, float bound, float thread_max, Shared& shared) {
  if (thread_max >= bound && thread_max > kNegativeInfinity) {
    Shared& first = *ptx::in_block(&shared, 0);
    slice.for_each([&](const Four& x, int id) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x.data[j] >= bound) || x.data[j] == kNegativeInfinity) continue;
        const int place = atomicAdd(&first.listed, 1);
        if (place >= kMaxListed) continue;
        first.candidates.value[place] = x.data[j];
        first.candidates.id[place] = id + j;
      }
    });
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block's candidates are listed
  return *ptx::in_block(&shared.listed, 0);
}

__device__ void put_token(const SampleParams& params, std::int64_t row, int id) {
  params.tokens[row] = id;
  if (params.last_tokens != nullptr) params.last_tokens[row] = id;
}

/// Draws from the listed candidates, of which the first top_k are among: one each thread, which
/// compares it with all others.
__device__ void draw_of_list(int count, const device::Mass& mass, std::uint64_t random,
                             Shared& shared, const SampleParams& params, std::int64_t row) {
  const int own = threadIdx.x;
  const float x = own < count ? shared.candidates.value[own] : kNegativeInfinity;
  const int id = own < count ? shared.candidates.id[own] : device::MinIndex::identity();
  const std::uint64_t weight = mass(x);
  shared.candidates.value[own] = x;
  shared.candidates.id[own] = id;
  shared.masses[own] = weight;
  __syncthreads();  // masses are written, and the list is filled up
  int larger = 0;
  std::uint64_t above = 0;
  if (own < count) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const bool is_larger = shared.candidates.value[i] > x;
      larger += is_larger;
      above += is_larger ? shared.masses[i] : 0;
    }
  }
  bool kept = own < count && larger < shared.row.top_k;
  std::uint64_t total =
      device::block_reduce<device::SumU64>(kept ? weight : 0, shared.partial[0]);
  if (shared.row.top_p < 1.0f) {
    const std::uint64_t wanted = scale_random(fraction_bits(shared.row.top_p), total);
    kept = kept && above < max(wanted, std::uint64_t{1});
    total = device::block_reduce<device::SumU64>(kept ? weight : 0, shared.partial[1]);
  }
  shared.masses[own] = kept ? weight : 0;  // its earlier values were read before a barrier
  __syncthreads();                         // what is kept is known
  if (!kept) return;
  const std::uint64_t target = scale_random(random, total);
  std::uint64_t before = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) before += shared.candidates.id[i] < id ? shared.masses[i] : 0;
  if (before <= target && target - before < weight) put_token(params, row, id);
}

/// Draws from all logits of at least a value: the block that has the tile of the token finds it.
template <class Slice>
__device__ void draw_of_row(const Slice& slice, float at_least, const device::Mass& mass,
                            std::uint64_t random, int rank, int blocks, Shared& shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  device::MassSum sum;
  slice.for_each([&](const Four& x, int) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.add(x.data[j] >= at_least ? mass.share(x.data[j]) : 0.0f);
  });
  const std::uint64_t own_tile = device::warp_reduce<device::SumU64>(sum.total());
  if (lane < blocks)
    ptx::in_block(&shared, lane)->tiles[rank * kSampleWarps + warp] = own_tile;
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block has the masses of all tiles

  const int tile = threadIdx.x;
  const std::uint64_t of_tile = tile < blocks * kSampleWarps ? shared.tiles[tile] : 0;
  const device::Scan tiles(of_tile, shared.partial[0]);
  const std::uint64_t target = scale_random(random, tiles.total);
  if (target >= tiles.before && target - tiles.before < of_tile)
    shared.search.range = {static_cast<std::uint32_t>(tile), 0, target - tiles.before};
  __syncthreads();  // the tile that was hit is known
  const int hit = static_cast<int>(shared.search.range.low);
  if (hit / kSampleWarps != rank) return;
  const std::uint64_t remaining = shared.search.range.above;
  const int ids = slice.warp_ids / kSampleThreads;
  const int first = slice.first + hit % kSampleWarps * slice.warp_ids + threadIdx.x * ids;
  const auto mass_at = [&](int id) {
    const float x = slice.at(id);
    return x >= at_least ? mass(x) : 0;
  };
  std::uint64_t own = 0;
  for (int id = first; id < first + ids; ++id) own += mass_at(id);
  const device::Scan scan(own, shared.partial[1]);
  if (remaining < scan.before || remaining - scan.before >= own) return;
  int id = first;
  for (std::uint64_t passed = scan.before + mass_at(id); passed <= remaining; passed += mass_at(id))
    ++id;
  put_token(slice.params, slice.row, id);
}

/// Where top_k and top_p cut, from all logits.
template <class Slice>
__device__ std::uint32_t find_cut(const Slice& slice, bool has_k, const device::Mass& mass,
                                  Shared& shared) {
  const std::uint32_t bottom = ordered_key(kNegativeInfinity), top = ordered_key(mass.largest) + 1;
  const RowValues row = shared.row;
  std::uint32_t cut = bottom;
  if (has_k) {
    const auto goal = [&](std::uint64_t) { return static_cast<std::uint64_t>(row.top_k); };
    const auto count = [](float) { return std::uint64_t{1}; };
    cut = device::find_threshold(slice, {bottom, top, 0}, goal, count, shared.search);
  }
  if (!(row.top_p < 1.0f)) return cut;
  // Below 42 / scale under the largest there is no mass.
  const float floor = clean_logit(mass.largest - 42.0f / mass.scale);
  const auto goal = [&](std::uint64_t total) {
    return max(scale_random(fraction_bits(row.top_p), total), std::uint64_t{1});
  };
  return device::find_threshold(slice, {max(max(bottom, ordered_key(floor)), cut), top, 0}, goal,
                                mass, shared.search);
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: a cluster a row, of as many blocks as keep the device busy; a block owns neighbouring ids,
/// a warp of it neighbouring ones, and keeps what fits of them in shared memory. First pass: each
/// thread's largest logit; the maxima of 512 groups go to every block, so all know the largest. A
/// greedy row ends here, in the block that has it. With a small top_k the maxima give a bound, the
/// logits above it go to the first block, and each is compared with the others there. Otherwise
/// thresholds are found by rounds of histograms over the cluster, each warp adds up the mass of its
/// ids, and the block of the warp that is hit draws. Bytes: the logits once, and twice or more what
/// does not fit where a row needs masses (two fifths of 128 rows of 128256).
template <class T>
__global__ void __launch_bounds__(kSampleThreads, kBlocksOfSm)
    sample_kernel(const __grid_constant__ SplitParams split) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  using Slice = LogitSlice<T>;
  const SampleParams& params = split.params;
  const int rank = ptx::cluster_rank(), blocks = ptx::cluster_blocks();
  const std::int64_t index = blockIdx.x / blocks;
  const int warp_ids = ids_of_warp(params.vocab, blocks);
  const Slice slice{params, index, rank * kSampleWarps * warp_ids, warp_ids, split.resident_ids,
                    reinterpret_cast<float*>(memory + sizeof(Shared))};
  if (threadIdx.x == 0) shared.listed = 0;
  ptx::cluster_arrive();
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if (threadIdx.x == 0) request_row(params, index, shared.row);

  float best = kNegativeInfinity;  // of this thread
  slice.template for_each<true>([&](const Four& x, int) {
    best = fmaxf(best, fmaxf(fmaxf(x.data[0], x.data[1]), fmaxf(x.data[2], x.data[3])));
  });
  const std::uint32_t group = device::group_max(ordered_key(best), blocks);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  ptx::cluster_wait();  // every block has started, and the list is empty
  const int own_groups = kGroups / blocks;
  ptx::in_block(&shared, threadIdx.x % blocks)
      ->maxima[rank * own_groups + static_cast<int>(threadIdx.x) / blocks] = group;
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block has all maxima
  const std::uint32_t any_group = shared.maxima[threadIdx.x];
  const std::uint64_t first = device::block_reduce<device::MaxU64>(
      std::uint64_t{any_group} << 32 | ~threadIdx.x, shared.partial[0]);
  const float largest = device::value_of_pair(first);
  const RowValues& row = shared.row;
  if (!(row.temperature >= kGreedyBelow) || largest == kNegativeInfinity) {
    if (rank != device::id_of_pair(first) / own_groups) return;
    const int id = lowest_id(slice, largest, best, shared);
    if (threadIdx.x == 0) put_token(params, index, largest == kNegativeInfinity ? -1 : id);
    return;
  }

  const device::Mass mass(largest, row.temperature, row.min_p);
  const std::uint64_t random = random_bits(static_cast<std::uint64_t>(row.seed),
                                           static_cast<std::uint32_t>(row.position));
  const bool has_k = row.top_k > 0 && row.top_k < params.vocab;
  if (has_k && row.top_k <= kMaxListedK) {
    const float bound =
        device::bound_of_largest(from_ordered_key(any_group), largest, row.top_k);
    const int count = list_candidates(slice, bound, best, shared);
    if (count <= kMaxListed) {
      ptx::cluster_arrive();
      if (rank == 0) {
        draw_of_list(count, mass, random, shared, params, index);
        ptx::cluster_wait();  // every block has read the count
      }
      return;
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();  // every block has read the count, and the list is no more needed
  }
  std::uint32_t cut = ordered_key(kNegativeInfinity);
  if (has_k || row.top_p < 1.0f) cut = find_cut(slice, has_k, mass, shared);
  draw_of_row(slice, from_ordered_key(cut), mass, random, rank, blocks, shared);
}

}  // namespace

// ---- Launch -----------------------------------------------------------------------------------

namespace {

/// Blocks of each row. While rows are few, as many blocks as there are SMs; with more rows twice as
/// many, so that two on an SM keep enough loads in flight (128 rows of 128256 on an H200, greedy:
/// 21.0 us with two blocks a row, 29.3 with one, 23.8 with four).
int blocks_of_row(const SampleParams& params, int most) {
  const int sms = device::multiprocessors();
  const std::int64_t room = params.rows <= sms / 4 ? sms : 2 * sms;
  int blocks = most;
  while (blocks > 1 && (blocks * params.rows > room ||
                        blocks / 2 * kSampleWarps * kSliceIds >= params.vocab))
    blocks /= 2;
  return blocks;
}

}  // namespace

void sample(const SampleParams& params, Stream stream) {
  if (params.rows == 0) return;
  const auto start = [&](auto type) {
    constexpr auto kKernel = sample_kernel<typename decltype(type)::type>;
    static const bool is_new = device::can_wait(kKernel);  // the code knows clusters
    const bool has_clusters = is_new && device::attribute(cudaDevAttrClusterLaunch) != 0;
    const bool is_hopper = device::attribute(cudaDevAttrComputeCapabilityMajor) == 9;
    const int blocks =
        blocks_of_row(params, !has_clusters ? 1 : is_hopper ? kMaxBlocks : kMaxBlocks / 2);
    if (blocks > 8)  // more than every device takes
      device::cuda_check(
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "sample");
    constexpr int kReserved = 1024, kStepBytes = 4 * kSampleWarps * kSliceIds;
    const int memory = device::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const int room = memory / kBlocksOfSm - kReserved - static_cast<int>(sizeof(Shared));
    const int steps = std::min(ids_of_warp(params.vocab, blocks) / kSliceIds,
                               std::max(room, 0) / kStepBytes);
    const SplitParams split{params, steps * kSliceIds};
    const dim3 grid(checked_int32(params.rows * blocks, "sample: rows"));
    device::launch_chained<kKernel>(grid, dim3(kSampleThreads),
                                    sizeof(Shared) + std::size_t{kStepBytes} * steps, stream,
                                    split, "sample", blocks);
  };
  if (params.penalties != nullptr || params.bias != nullptr || params.mask != nullptr)
    return start(Type<AdjustedLogit>{});
  device::dispatch_float(params.dtype, start);
}

}  // namespace ridgeline
