#pragma once
#include <bit>
#include <cstdint>

#include "common/quant_scale.h"
#include "cpu/float8.h"

namespace ridgeline::cpu {

/// The nearest integer in [-127, 127], ties to even; NaN gives 0.
inline std::int8_t encode_int8(float value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: its last bit has the weight one
  float clamped = value > -127.0f ? value : -127.0f;
  clamped = clamped < 127.0f ? clamped : 127.0f;
  clamped = value == value ? clamped : 0.0f;
  const auto bits = std::bit_cast<std::uint32_t>(clamped + kShift);
  return static_cast<std::int8_t>(bits - std::bit_cast<std::uint32_t>(kShift));
}

/// Writes codes of values / scale as `dtype` (8 bits).
inline void encode(const float* values, std::int64_t count, float scale, DType dtype, void* codes) {
  const float inverse = 1.0f / scale;
  if (dtype == DType::kFloat8E4M3) {
    auto* out = static_cast<std::uint8_t*>(codes);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = float_to_e4m3(values[i] * inverse);
  } else {
    auto* out = static_cast<std::int8_t*>(codes);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = encode_int8(values[i] * inverse);
  }
}

}  // namespace ridgeline::cpu
