#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/ptx/address.cuh"

/// The bulk tensor copy engine (TMA).
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
namespace ridgeline::ptx {

/// Fetches the descriptor ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box of `map` at these coordinates (innermost first) to shared memory; `barrier`
/// receives its bytes. One thread issues it.
__device__ __forceinline__ void copy_tensor_4d(void* target, const CUtensorMap* map,
                                               std::uint64_t* barrier, int c0, int c1, int c2,
                                               int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// The same of five dimensions.
__device__ __forceinline__ void copy_tensor_5d(void* target, const CUtensorMap* map,
                                               std::uint64_t* barrier, int c0, int c1, int c2,
                                               int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// The same under an L2 policy.
__device__ __forceinline__ void copy_tensor_4d(void* target, const CUtensorMap* map,
                                               std::uint64_t* barrier, int c0, int c1, int c2,
                                               int c3, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_tensor_5d(void* target, const CUtensorMap* map,
                                               std::uint64_t* barrier, int c0, int c1, int c2,
                                               int c3, int c4, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(policy)
      : "memory");
}

/// Brings the box to L2; nothing waits for it.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch-tensor
__device__ __forceinline__ void prefetch_tensor_4d(const CUtensorMap* map, int c0, int c1, int c2,
                                                   int c3, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3, %4}], %5;"
      ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

}  // namespace ridgeline::ptx
