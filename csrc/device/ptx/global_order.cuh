#pragma once
#include <cstdint>

/// Order among blocks through global memory.
namespace ridgeline::ptx {

/// Counts one arrival: the counter's value before; after the value `last` comes zero. What this
/// thread knows to be written comes before its arrival, and what earlier arrivals released is
/// visible after it.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
__device__ __forceinline__ unsigned count_arrival(void* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

/// Adds to a counter: what this thread knows to be written comes before.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
__device__ __forceinline__ void add_released(unsigned* counter, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

/// Orders this thread's reads and writes before and after it, for its block; for all blocks.
__device__ __forceinline__ void fence_block() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// Loads from the L2 cache what other blocks have written. In the order in which they stand: many
/// are on their way together.
__device__ __forceinline__ float4 load_from_l2(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ float2 load_from_l2(const float2* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ float load_from_l2(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ std::uint64_t load_from_l2(const unsigned long long* from) {
  std::uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ unsigned load_from_l2(const unsigned* from) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ int load_from_l2(const int* from) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

}  // namespace ridgeline::ptx
