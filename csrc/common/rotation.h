#pragma once

namespace ridgeline {

/// The pair (a, b) rotated by an angle. The roundings are written out, so that every backend and
/// kernel gives the same bits.
constexpr float rotated_first(float a, float b, float cosine, float sine) {
  return __builtin_fmaf(a, cosine, -(b * sine));
}
constexpr float rotated_second(float a, float b, float cosine, float sine) {
  return __builtin_fmaf(b, cosine, a * sine);
}

}  // namespace ridgeline
