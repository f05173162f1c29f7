#pragma once
#include <cstdint>

namespace ridgeline {

/// Works on the host and on the device: constexpr functions are callable from device code
/// (--expt-relaxed-constexpr).
template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
constexpr T round_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace ridgeline
