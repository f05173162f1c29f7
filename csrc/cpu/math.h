#pragma once
#include <bit>
#include <cstdint>

/// Elementary functions without branches or tables, so that loops over them are vectorised. NaN in
/// gives NaN out, infinities give the limits.
namespace ridgeline::cpu {

constexpr float kLog2E = 1.44269504f;

/// x rounded to the nearest integer, for |x| < 2^22.
inline float round_small(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: its last bit has the weight one
  return (x + kShift) - kShift;
}

/// e^r for |r| <= 0.35.
inline float exp_near_zero(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

/// 2^n for integral n of -127 (which gives 0) to 127.
inline float power_of_two(std::int32_t n) { return std::bit_cast<float>((n + 127) << 23); }

/// e^x within 1 ulp or so.
inline float exp(float x) {
  x = x < -105.0f ? -105.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float n = round_small(x * kLog2E);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  // In two steps, so that results below the smallest normal and above the largest come out right.
  const auto power = static_cast<std::int32_t>(n);
  const std::int32_t half = power >> 1;
  return exp_near_zero(r) * power_of_two(half) * power_of_two(power - half);
}

/// 2^x for x <= 0; results below the smallest normal are 0.
inline float exp2_of_negative(float x) {
  x = x < -127.0f ? -127.0f : x;
  const float n = round_small(x);
  return exp_near_zero((x - n) * 0.693147181f) * power_of_two(static_cast<std::int32_t>(n));
}

}  // namespace ridgeline::cpu
