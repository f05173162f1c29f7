#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// 16 bytes by way of L2 alone, which is asked for their whole line.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ __forceinline__ uint4 load_lines(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.cg.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

}  // namespace ridgeline::ptx
