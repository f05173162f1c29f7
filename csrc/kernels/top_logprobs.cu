#include "common/dispatch.h"
#include "common/sampling.h"
#include "device/launch.cuh"
#include "device/logits.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/math.cuh"
#include "kernels/sampling.h"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

using device::kLogitThreads;
using device::kLogitWarps;
using device::kWarpSize;

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kMaxBound = kLogitThreads / 2;  // the largest count that thread maxima bound usefully

// ---- Shared memory ----------------------------------------------------------------------------

struct Shared {
  device::Candidates candidates;
  std::uint64_t keys[2][kLogitWarps];  // two, used in turn: one barrier a reduction
  float sums[kLogitWarps];
};

// ---- Phases -----------------------------------------------------------------------------------

/// Writes the most likely tokens in falling order, one pass over the row each: only where a list
/// does not hold them.
template <class T, class Put>
__device__ void put_from_row(const T* row, int vocab, int count, Shared& shared, const Put& put) {
  std::uint64_t last = ~std::uint64_t{0};
  for (int place = 0; place < count; ++place) {
    std::uint64_t best = 0;
    device::for_each_logit<1>(
        row, vocab,
        [&](float x, int id) {
          const std::uint64_t key = device::pair_key(clean_logit(x), id);
          if (id < vocab && key < last && key > best) best = key;
        });
    last = device::block_reduce<device::MaxU64>(best, shared.keys[place % 2]);
    if (threadIdx.x == 0) put(1 + place, device::value_of_pair(last), device::id_of_pair(last));
  }
}

/// The same from the list, by the first warp alone.
template <class Put>
__device__ void put_from_list(const device::Candidates& list, int count, const Put& put) {
  std::uint64_t last = ~std::uint64_t{0};
  for (int place = 0; place < count; ++place) {
    std::uint64_t best = 0;
    for (int i = threadIdx.x; i < list.count; i += kWarpSize) {
      const std::uint64_t key = device::pair_key(list.value[i], list.id[i]);
      if (key < last && key > best) best = key;
    }
    last = device::warp_reduce<device::MaxU64>(best);
    if (threadIdx.x == 0) put(1 + place, device::value_of_pair(last), device::id_of_pair(last));
  }
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: one block a row. First pass: the largest logit; second: the sum of exponentials, in fp32,
/// and the logits that reach a bound given by the threads' maxima; the most likely ones are then
/// picked from those, one after another.
template <class T>
__global__ void __launch_bounds__(kLogitThreads)
    top_logprobs_kernel(const __grid_constant__ LogprobsParams params) {
  __shared__ Shared shared;
  const std::int64_t index = blockIdx.x;
  const T* row = static_cast<const T*>(params.logits) + index * params.stride_logits;
  const int vocab = params.vocab, count = params.count;
  if (threadIdx.x == 0) shared.candidates.count = 0;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();

  float best = kNegativeInfinity;
  device::for_each_logit<4>(row, vocab,
                            [&](float x, int) { best = fmaxf(best, clean_logit(x)); });
  const std::uint64_t first =
      device::block_reduce<device::MaxU64>(device::pair_key(best, 0), shared.keys[0]);
  const float largest = device::value_of_pair(first);
  const bool bounded = count > 0 && count <= kMaxBound;
  const float bound = bounded ? device::bound_of_largest(best, largest, count) : -kNegativeInfinity;

  float sum = 0.0f;
  device::for_each_logit<2>(
      row, vocab,
      [&](float x, int id) {
        const float value = clean_logit(x);
        if (id >= vocab) return;
        sum += value == largest ? 1.0f : ptx::exp2_approx((value - largest) * kLog2E);
        if (bounded && value >= bound) shared.candidates.add(value, id);
      });
  sum = device::block_reduce<device::Sum>(sum, shared.sums);  // its barrier also completes the list

  const auto put = [&](int place, float value, int id) {
    const std::int64_t at = index * (1 + count) + place;
    params.logprobs[at] = value - largest - logf(sum);
    params.ids[at] = id;
  };
  if (threadIdx.x == 0) {
    const int token = params.tokens[index];
    const int known = token >= 0 && token < vocab ? token : 0;
    put(0, clean_logit(device::to_float(row[known])), known);
  }
  if (!bounded || !shared.candidates.complete()) {
    put_from_row(row, vocab, count, shared, put);
  } else if (threadIdx.x < kWarpSize) {
    put_from_list(shared.candidates, count, put);
  }
}

}  // namespace

// ---- Launch -----------------------------------------------------------------------------------

void top_logprobs(const LogprobsParams& params, Stream stream) {
  if (params.rows == 0) return;
  const dim3 grid(checked_int32(params.rows, "top_logprobs: rows"));
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    device::launch_chained<top_logprobs_kernel<T>>(grid, dim3(kLogitThreads), 0, stream, params,
                                                   "top_logprobs");
  });
}

}  // namespace ridgeline
