#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// (value & mask) | bits in one instruction, where the compiler takes two for constants.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#logic-and-shift-instructions-lop3
__device__ __forceinline__ std::uint32_t or_masked(std::uint32_t value, std::uint32_t mask,
                                                   std::uint32_t bits) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
}

}  // namespace ridgeline::ptx
