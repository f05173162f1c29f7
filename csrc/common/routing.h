#pragma once
#include "common/sampling.h"

namespace ridgeline {

/// Orders a router's logits as torch.topk does: NaN is the largest, zeros of either sign are equal.
/// Every key is above zero, and from_ordered_key() gives the logit back.
constexpr std::uint32_t routing_key(float logit) {
  return logit == logit ? ordered_key(logit + 0.0f) : ~0u;
}

}  // namespace ridgeline
