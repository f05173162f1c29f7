#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// Leaves the register as it is and hides from the compiler what is known of it: values computed
/// from it before are computed again after, instead of being kept in further registers.
/// https://docs.nvidia.com/cuda/inline-ptx-assembly/ (no instruction)
__device__ __forceinline__ void forget(std::uint32_t& word) { asm volatile("" : "+r"(word)); }

}  // namespace ridgeline::ptx
