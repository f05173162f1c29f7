#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx/address.cuh"

/// Warpgroup matrix multiply-accumulate: 64 x N x 16, operands of 16 bits, accumulators of 32.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
namespace ridgeline::ptx {

/// Orders this warpgroup's register and shared-memory writes before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Closes a group of wgmma.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most `kPending` groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of these registers across this point: the tensor cores
/// write them behind its back.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&registers)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(registers[i][j])::"memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(int (&registers)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(std::uint32_t (&registers)[kCount][2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
}

template <int kCount>
__device__ __forceinline__ void hold_registers(std::uint32_t (&registers)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(registers[i][j])::"memory");
}

/// The accumulators d of N columns are d[i][0..1] of row lane / 4 and d[i][2..3] of row lane / 4 +
/// 8 of the warp's 16 rows, columns 8 i + lane % 4 * 2 and the next: as of the warp-level m16n8.

/// Descriptor of an operand in shared memory whose rows of 128 bytes carry the 128-byte swizzle.
/// `leading` and `stride` are the byte distances that the layout calls so.
__device__ __forceinline__ std::uint64_t swizzled_operand(const void* start, int leading,
                                                          int stride) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return ((shared_address(start) & 0x3ffff) >> 4) |
         (static_cast<std::uint64_t>(leading >> 4) << 16) |
         (static_cast<std::uint64_t>(stride >> 4) << 32) | kSwizzle128;
}

}  // namespace ridgeline::ptx
