#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// Makes the compiler compute `word` here, not in the branch that its only use may stand in.
__device__ __forceinline__ void compute_here(std::uint32_t& word) {
  asm volatile("" : "+r"(word));
}
__device__ __forceinline__ void compute_here(std::uint16_t& half) {
  asm volatile("" : "+h"(half));
}

}  // namespace ridgeline::ptx
