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

/// exp(r) * 2^n for |r| <= 0.35 and integral n. In two steps, so that results below the smallest
/// normal and above the largest number come out right.
inline float exp_times_power(float r, float n) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const auto power = static_cast<std::int32_t>(n);
  const std::int32_t half = power >> 1;
  const float low = std::bit_cast<float>((half + 127) << 23);
  const float high = std::bit_cast<float>((power - half + 127) << 23);
  return (p * r * r + r + 1.0f) * low * high;
}

/// e^x within 1 ulp or so.
inline float exp(float x) {
  x = x < -105.0f ? -105.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float n = round_small(x * kLog2E);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  return exp_times_power(r, n);
}

/// 2^x.
inline float exp2(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 129.0f ? 129.0f : x;
  const float n = round_small(x);
  return exp_times_power((x - n) * 0.693147181f, n);
}

}  // namespace ridgeline::cpu
