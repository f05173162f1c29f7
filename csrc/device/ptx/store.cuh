#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// Stores to global memory by the threads that are `chosen`, without a branch.
__device__ __forceinline__ void store_if(bool chosen, float* to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "setp.ne.s32 chosen, %2, 0;\n"
      "@chosen st.global.f32 [%0], %1;\n"
      "}" ::"l"(to),
      "f"(value), "r"(static_cast<int>(chosen))
      : "memory");
}

}  // namespace ridgeline::ptx
