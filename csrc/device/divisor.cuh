#pragma once
#include <cstdint>

namespace ridgeline::device {

/// Division by a number that the host knows, of numbers below 2^31.
struct Divisor {
  std::uint32_t factor, shift;

  static Divisor of(std::uint32_t value) {
    std::uint32_t shift = 0;
    while ((std::uint64_t{1} << shift) < value) ++shift;
    const std::uint64_t excess = (std::uint64_t{1} << shift) - value;
    return {static_cast<std::uint32_t>((excess << 32) / value + 1), shift};
  }
  __device__ __forceinline__ int divide(int number) const {
    const auto n = static_cast<std::uint32_t>(number);
    return static_cast<int>((__umulhi(n, factor) + n) >> shift);
  }
};

}  // namespace ridgeline::device
