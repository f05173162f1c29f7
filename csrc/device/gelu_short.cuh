#pragma once
#include "device/ptx/math.cuh"

/// GELU for results that are rounded to bfloat16, of half of x, which costs nothing where x meets a
/// scale: 8 instructions. It is within 5.7e-4 of itself down to -4, where that rounding is within
/// 3.9e-3, and within 8e-5 everywhere.
namespace ridgeline::device {

/// log2 of two upper tails of the normal distribution: log2(2 - 2 Phi(2 h)), which normal_cdf.h has
/// for more digits. It falls up to h = 8.
__device__ __forceinline__ float log2_two_tails(float h) {
  float p = 16.0f * 0.00253989576f;
  p = fmaf(p, h, -8.0f * 0.0364670149f);
  p = fmaf(p, h, -4.0f * 0.481252876f);
  p = fmaf(p, h, -2.0f * 1.14050284f);
  return fmaf(p, h, -0.00081675f);
}

/// 2 h * Phi(2 h) = h + |h| - |h| * two tails: NaN of -inf, as gelu() is, and tails of 2^-124 from
/// kFar on, as an infinity times zero would be NaN.
__device__ __forceinline__ float gelu_of_half(float h) {
  constexpr float kFar = 8.0f;
  const float a = fminf(fabsf(h), kFar);
  return fmaf(-a, ptx::exp2_approx(log2_two_tails(a)), h + fabsf(h));
}

}  // namespace ridgeline::device
