#include "common/dispatch.h"
#include "common/routing.h"
#include "device/vec.cuh"
#include "kernels/routing_order.cuh"

namespace ridgeline {
namespace {

using namespace routing;

// ---- Phases -----------------------------------------------------------------------------------

/// Keys of logits. Those of 16 bits leave the low bits of a key to the expert: the largest, of
/// equal ones that of the lowest expert, is one reduction of the warp, where a key of 32 bits takes
/// two, 0.1 us a choice (H200).
template <bool kNamed>
struct Keys {
  static constexpr std::uint32_t kNames = 1023;
  static_assert(kMaxRoutedExperts <= kNames);

  static __device__ __forceinline__ std::uint32_t of(float logit, int expert) {
    const std::uint32_t key = routing_key(logit);
    return kNamed ? (key & ~kNames) | (kNames - expert) : key;
  }
  static __device__ __forceinline__ float logit(std::uint32_t key) {
    if (!kNamed) return from_ordered_key(key);
    return from_ordered_key(key >> 31 ? key & ~kNames : key | kNames);  // as it was: 0s or 1s
  }
};

/// The logits of a token as keys, a lane those of experts 32 apart; 0 where there is no expert.
template <bool kNamed, class T, int kEach>
__device__ __forceinline__ void load_keys(std::uint32_t (&keys)[kEach], const RouteParams& p,
                                          int token) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const T* own = static_cast<const T*>(p.logits) + token * p.stride_logits + lane;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int base = i * kWarpSize;
    keys[i] = base < p.order.experts - lane
                  ? Keys<kNamed>::of(device::to_float(__ldcg(own + base)), base + lane)
                  : 0;
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
template <bool kNamed, int kEach>
__device__ __forceinline__ float sum_of_exponentials(const std::uint32_t (&keys)[kEach]) {
  const float largest = Keys<kNamed>::logit(largest_key(keys));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (keys[i] != 0) sum += expf(Keys<kNamed>::logit(keys[i]) - largest);
  return device::warp_reduce<device::Sum>(sum);
}

/// Takes out the largest key, of equal ones that of the lowest expert. Requires: there is one.
template <bool kNamed, int kEach>
__device__ __forceinline__ int take_expert(std::uint32_t (&keys)[kEach], std::uint32_t largest) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int expert;
  if constexpr (kNamed) {
    expert = static_cast<int>(Keys<kNamed>::kNames - (largest & Keys<kNamed>::kNames));
  } else {
    int base = kWarpSize * kEach;  // of this lane's lowest expert with that key: none
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i)
      if (keys[i] == largest) base = i * kWarpSize;
    expert = device::warp_min(base + lane);
  }
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

template <bool kNamed, int kEach>
__device__ __forceinline__ Choice choose_of(std::uint32_t (&keys)[kEach], const RouteParams& p) {
  float sum = p.normalized ? 0.0f : sum_of_exponentials<kNamed>(keys);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int expert = 0;
  std::uint32_t key = 0;
  for (int j = 0; j < p.order.per_token; ++j) {
    const std::uint32_t largest = largest_key(keys);
    const int taken = take_expert<kNamed>(keys, largest);
    if (lane == j) expert = taken, key = largest;
  }
  const float logit = Keys<kNamed>::logit(key), largest = device::from_lane(logit, 0);
  const float exponential = lane < p.order.per_token ? expf(logit - largest) : 0.0f;
  if (p.normalized) sum = device::warp_reduce<device::Sum>(exponential);
  return {expert, exponential / sum};
}

template <int kEach>
__device__ __forceinline__ Choice choose_largest(const RouteParams& p, int token) {
  std::uint32_t keys[kEach];
  if (p.dtype == DType::kFloat32) {
    load_keys<false, float>(keys, p, token);
    return choose_of<false>(keys, p);
  }
  if (p.dtype == DType::kFloat16) {
    load_keys<true, __half>(keys, p, token);
  } else {
    load_keys<true, __nv_bfloat16>(keys, p, token);
  }
  return choose_of<true>(keys, p);
}

/// A round is a token. Bytes: see RouteParams. What takes the time is per_token rounds of a
/// reduction of a warp, or two.
template <int kEach>
struct ChooseLargest {
  using Params = RouteParams;
  static constexpr int kBuckets = kEach * kWarpSize;

  static __device__ __forceinline__ int choose(const RouteParams& p, int token) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const Choice choice = choose_largest<kEach>(p, token);
    if (lane >= p.order.per_token) return -1;
    p.weights[token * p.order.per_token + lane] = choice.weight;
    return choice.expert;
  }
};

// ---- Launch -----------------------------------------------------------------------------------

Deal deal_out(const RouteParams& p) {
  return routing::deal_out(p.order.tokens, p.order.per_token, p.order.experts);
}

}  // namespace

std::size_t route_experts_workspace_bytes(const RouteParams& p) {
  return workspace_bytes(deal_out(p));
}

void route_experts(const RouteParams& p, Stream stream) {
  dispatch_at_least<1, 2, 4, 8, 16, 32>(
      ceil_div(p.order.experts, kWarpSize), "logits: experts a lane", [&](auto each) {
        launch_order<ChooseLargest<each.value>>(p, deal_out(p), stream, "route_experts");
      });
}

}  // namespace ridgeline
