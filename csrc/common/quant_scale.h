#pragma once
#include <cstdint>

#include "common/types.h"

namespace ridgeline {

/// The largest magnitude that a symmetric 8-bit code stands for.
constexpr float largest_code(DType dtype) { return dtype == DType::kFloat8E4M3 ? 448.0f : 127.0f; }

/// Columns that share a scale where a row has several.
constexpr std::int32_t kScaleGroup = 128;

/// The scale of values with the largest magnitude `amax`: value = code * scale. All zeros: 1, so
/// that the codes are zeros and nothing divides by zero. Never below the smallest normal number, so
/// that its inverse is finite. An infinity or NaN among the values makes the scale one.
constexpr float scale_of_amax(float amax, DType dtype) {
  constexpr float kSmallest = 1.17549435e-38f;
  const float scale = amax / largest_code(dtype);
  if (amax == 0.0f) return 1.0f;
  return scale < kSmallest ? kSmallest : scale;
}

}  // namespace ridgeline
