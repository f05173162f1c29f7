#pragma once
#include <bit>
#include <cstdint>

namespace ridgeline::cpu {

constexpr float kMaxE4M3 = 448.0f;

/// e4m3 nearest to `value` (ties to even), saturated at 448; NaN stays NaN. Without branches, so
/// that loops over it are vectorised.
inline std::uint8_t float_to_e4m3(float value) {
  constexpr float kShift = 0x1p14f;  // its last bit has the weight of the smallest code, 2^-9
  constexpr std::uint32_t kRebias = (127 - 7) << 3;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const float absolute = std::bit_cast<float>(magnitude);
  const std::uint32_t rounded = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const std::uint32_t normal = rounded - kRebias > 0x7eu ? 0x7eu : rounded - kRebias;
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(absolute + kShift) - std::bit_cast<std::uint32_t>(kShift);
  std::uint32_t code = absolute < 0x1p-6f ? subnormal : normal;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<std::uint8_t>(code | (bits >> 24 & 0x80u));
}

/// e4m3 as float: exponent and mantissa move into float's place and 2^120 corrects the bias, which
/// is exact for subnormals too; 0x7f and 0xff are NaN.
inline float e4m3_to_float(std::uint8_t byte) {
  const std::uint32_t magnitude = byte & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(byte & 0x80u) << 24;
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const auto finite = std::bit_cast<std::uint32_t>(scaled);
  const std::uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : finite;
  return std::bit_cast<float>(bits | sign);
}

}  // namespace ridgeline::cpu
