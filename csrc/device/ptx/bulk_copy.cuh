#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/ptx/address.cuh"

/// Copies of bytes by the copy engine.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
namespace ridgeline::ptx {

/// An L2 policy: what is copied under it leaves the cache first.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Copies consecutive bytes to shared memory; `barrier` receives them. Addresses and size are
/// multiples of 16. One thread issues it.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes,
                                          std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// The same of bytes that are read again.
__device__ __forceinline__ void copy_bulk(void* target, const void* source, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Copies consecutive bytes of shared memory, which the copy engine has brought there.
__device__ __forceinline__ void store_bulk(void* target, const void* source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

/// Asks L2 for consecutive bytes; nothing waits for them. Address and size are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* source, int bytes, std::uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(source),
               "r"(bytes), "l"(policy)
               : "memory");
}

/// The same of the box of `map` at (column, row).
__device__ __forceinline__ void prefetch_matrix(const CUtensorMap* map, int column, int row,
                                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%0, {%1, %2}], %3;" ::"l"(
          map),
      "r"(column), "r"(row), "l"(policy)
      : "memory");
}

/// Copies the box of `map` at (column, row), the same way.
__device__ __forceinline__ void copy_matrix(void* target, const CUtensorMap* map,
                                            std::uint64_t* barrier, int column, int row,
                                            std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

/// The same of a matrix in parts: from (column, row) of each on.
__device__ __forceinline__ void prefetch_parts(const CUtensorMap* map, int column, int row,
                                               std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.3d.L2.global.tile.L2::cache_hint [%0, {%1, %2, 0}], %3;" ::"l"(
          map),
      "r"(column), "r"(row), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_parts(void* target, const CUtensorMap* map,
                                           std::uint64_t* barrier, int column, int row,
                                           std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, 0}], [%2], %5;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

}  // namespace ridgeline::ptx
