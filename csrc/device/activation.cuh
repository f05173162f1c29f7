#pragma once
#include "common/normal_cdf.h"
#include "device/ptx/math.cuh"

/// Activations in fp32. kFast is for results that are rounded to 16 bits: exponentials and
/// quotients within a few 2^-22, in one instruction each.
namespace ridgeline::device {

/// e^x.
template <bool kFast>
__device__ __forceinline__ float exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  if constexpr (kFast) return ptx::exp2_approx(x * kLog2E);
  return expf(x);
}

/// x / (1 + e^-y): x times the logistic function of y.
template <bool kFast>
__device__ __forceinline__ float times_logistic(float x, float y) {
  const float denominator = 1.0f + exp<kFast>(-y);
  if constexpr (kFast) return __fdividef(x, denominator);
  return x / denominator;
}

template <bool kFast>
__device__ __forceinline__ float silu(float x) {
  return times_logistic<kFast>(x, x);
}

/// x * Phi(x) = max(x, 0) - |x| * tail(|x|): 13 instructions, fast 10. The maximum is taken as
/// x/2 + |x/2|, which is NaN for NaN and for -inf, as x * Phi(x) is; from kFar on the tail is zero,
/// and an infinity times it would be NaN.
template <bool kFast>
__device__ __forceinline__ float gelu(float x) {
  constexpr float kFar = 13.0f;
  const float a = fminf(fabsf(x), kFar), half = 0.5f * x;
  const float tail = ptx::exp2_approx(kFast ? log2_upper_tail_short(a) : log2_upper_tail(a));
  return fmaf(-a, tail, half + fabsf(half));
}

/// x / 2 * (1 + tanh(u)) = x * logistic(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <bool kFast>
__device__ __forceinline__ float gelu_tanh(float x) {
  return times_logistic<kFast>(x, x * (1.59576912f + 0.0713548163f * x * x));
}

/// gate * logistic(alpha * gate) * (up + 1), gate clamped to `limit` and up to -limit and limit
/// first. NaN stays NaN.
template <bool kFast>
__device__ __forceinline__ float swiglu_clamped(float gate, float up, float limit, float alpha) {
  gate = ptx::min_nan(gate, limit);
  up = ptx::max_nan(ptx::min_nan(up, limit), -limit);
  return times_logistic<kFast>(gate, alpha * gate) * (up + 1.0f);
}

}  // namespace ridgeline::device
