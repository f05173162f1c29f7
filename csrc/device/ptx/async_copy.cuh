#pragma once
#include <cstdint>

#include "device/ptx/address.cuh"

namespace ridgeline::ptx {

/// Copies 16 bytes from global to shared memory without registers, past L1; zeros if not `valid`
/// (then nothing is read). Both addresses are aligned to 16.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

/// Copies 8 bytes, aligned to 8; zeros if not `valid`.
__device__ __forceinline__ void copy_async_8(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

/// Copies 4 bytes, aligned to 4; zeros if not `valid`.
__device__ __forceinline__ void copy_async_4(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}

/// Closes the group of the copies this thread issued since the last call; it may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the kPending newest groups of this thread are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ridgeline::ptx
