#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// Asks for `bytes` of memory to be brought to L2; nothing waits for them. The address and the size
/// are multiples of 16. Before compute 9.0 nothing happens.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
__device__ __forceinline__ void prefetch_l2(const void* data, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes) : "memory");
#endif
}

/// Asks for the line of 128 bytes at `data`, of any address.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_line(const void* data) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(data) : "memory");
}

}  // namespace ridgeline::ptx
