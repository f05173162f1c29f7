#pragma once
#include <cmath>

#include "common/normal_cdf.h"
#include "cpu/math.h"

/// Activations in fp32; loops over them are vectorised.
namespace ridgeline::cpu {

inline float silu(float x) { return x / (1.0f + exp(-x)); }

/// x * Phi(x).
inline float gelu(float x) {
  const float tail = exp2_of_negative(log2_upper_tail(std::abs(x)));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

/// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline float gelu_tanh(float x) {
  const float twice_u = x * (1.59576912f + 0.0713548163f * x * x);
  return x / (1.0f + exp(-twice_u));
}

/// gate * sigmoid(alpha * gate) * (up + 1), gate clamped to `limit` and up to -limit and limit
/// first. NaN compares as false and stays.
inline float swiglu_clamped(float gate, float up, float limit, float alpha) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate / (1.0f + exp(-alpha * gate)) * (up + 1.0f);
}

}  // namespace ridgeline::cpu
