#include "common/dispatch.h"
#include "kernels/routing_order.cuh"

namespace ridgeline {
namespace {

using namespace routing;

// ---- Phases -----------------------------------------------------------------------------------

/// A round is 32 choices side by side, of whichever tokens: the same expert twice is two choices.
template <int kMost>
struct ChooseGiven {
  using Params = OrderParams;
  static constexpr int kBuckets = kMost;

  static __device__ __forceinline__ int choose(const OrderParams& p, int round) {
    const ExpertOrder& order = p.order;
    const int choice = round * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
    if (choice >= order.tokens * order.per_token) return -1;
    const int token = choice / order.per_token, own = choice - token * order.per_token;
    const std::int64_t at = token * p.stride_token + own * p.stride_choice;
    const std::int64_t expert = p.dtype == DType::kInt64
                                    ? __ldcg(static_cast<const long long*>(p.chosen) + at)
                                    : __ldcg(static_cast<const int*>(p.chosen) + at);
    return expert >= 0 && expert < order.experts ? static_cast<int>(expert) : order.experts;
  }
};

// ---- Launch -----------------------------------------------------------------------------------

Deal deal_out(const OrderParams& p) {
  const std::int32_t choices = p.order.tokens * p.order.per_token;
  return routing::deal_out(ceil_div(choices, kWarpSize), kWarpSize, p.order.experts + 1);
}

}  // namespace

std::size_t order_experts_workspace_bytes(const OrderParams& p) {
  return workspace_bytes(deal_out(p));
}

void order_experts(const OrderParams& p, Stream stream) {
  const Deal deal = deal_out(p);
  dispatch_at_least<256, kMaxBuckets>(deal.buckets, "experts", [&](auto most) {
    launch_order<ChooseGiven<most.value>>(p, deal, stream, "order_experts");
  });
}

}  // namespace ridgeline
