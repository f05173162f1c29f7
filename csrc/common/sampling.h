#pragma once
#include <bit>
#include <cstdint>
#include <limits>

namespace ridgeline {

/// The arithmetic of sampling, shared by host and device so that both draw the same token. Masses
/// are integers: their sums do not depend on an order, so any split of the work gives the same
/// bits. Each float operation here is rounded once on its own (a fused one is written as such), so
/// no compiler's contraction can change a bit.

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int kMassBits = 40;  // the most likely token weighs 2^40; 2^20 tokens fit in 61 bits
constexpr float kGreedyBelow = 1e-5f;  // a lower temperature takes the most likely token
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to an integer

/// Orders as the float does, for values without NaN and with one zero.
constexpr std::uint32_t ordered_key(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

constexpr float from_ordered_key(std::uint32_t key) {
  return std::bit_cast<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

/// What sampling sees of a logit: NaN counts as -inf, and -0 as 0.
constexpr float clean_logit(float value) {
  return value == value ? value + 0.0f : kNegativeInfinity;
}

/// Penalties as vLLM defines them: the repetition penalty divides a positive logit and multiplies
/// a negative one of a token that is in the prompt or the output; frequency, times the count in
/// the output, and presence are subtracted. `count` is twice the count in the output, plus one if
/// the token is in the prompt.
constexpr float penalised_logit(float value, std::int32_t count, float repetition, float presence,
                                float frequency) {
  if (count == 0) return value;
  const float repeated = value > 0.0f ? value / repetition : value * repetition;
  const std::int32_t in_output = count >> 1;
  const float lowered = __builtin_fmaf(-frequency, static_cast<float>(in_output), repeated);
  return lowered - (in_output > 0 ? presence : 0.0f);
}

/// log2(e) / temperature, kept above what makes a difference of two logits vanish.
constexpr float mass_scale(float temperature) {
  const float scale = 1.4426950408889634f / temperature;
  return scale > 1e-35f ? scale : 1e-35f;
}

/// 2^f for f in [-1/2, 1/2], as in Cephes' exp2f: in [1/2, 2), so that 2^24 of it is an integer.
constexpr float exp2_of_fraction(float f) {
  float p = 1.535336188319500e-4f;
  p = __builtin_fmaf(p, f, 1.339887440266574e-3f);
  p = __builtin_fmaf(p, f, 9.618437357674640e-3f);
  p = __builtin_fmaf(p, f, 5.550332471162809e-2f);
  p = __builtin_fmaf(p, f, 2.402264791363012e-1f);
  p = __builtin_fmaf(p, f, 6.931472028550421e-1f);
  return __builtin_fmaf(p, f, 1.0f);
}

/// 2^40 * exp((value - largest) / temperature), rounded down; `scale` is that of mass_scale.
/// Relative error below 2^-22 where the result is above 2^22.
constexpr std::uint64_t mass_of(float value, float largest, float scale) {
  if (value == kNegativeInfinity) return 0;
  const float below = value == largest ? 0.0f : value - largest;
  const float whole = __builtin_fmaf(below, scale, kRound) - kRound;
  if (!(whole > -64.0f)) return 0;
  const float p = exp2_of_fraction(__builtin_fmaf(below, scale, -whole));
  const auto mantissa = static_cast<std::uint64_t>(static_cast<std::int32_t>(p * 16777216.0f));
  return (mantissa << (kMassBits - 24)) >> -static_cast<std::int32_t>(whole);
}

/// 2^64 * fraction for a fraction in [0, 1), 0 below and the largest value above.
constexpr std::uint64_t fraction_bits(float fraction) {
  if (!(fraction > 0.0f)) return 0;
  if (fraction >= 1.0f) return ~std::uint64_t{0};
  return static_cast<std::uint64_t>(fraction * 18446744073709551616.0f);
}

/// Masses below this are dropped by min_p.
constexpr std::uint64_t least_mass(float min_p) {
  return fraction_bits(min_p) >> (64 - kMassBits);
}

}  // namespace ridgeline
