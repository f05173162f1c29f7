#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/ptx/address.cuh"

/// The copy engine on matrices: boxes in, boxes out.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
namespace ridgeline::ptx {

/// Copies the box at (column, row) to shared memory; `barrier` receives its bytes.
__device__ __forceinline__ void copy_matrix(void* target, const CUtensorMap* map,
                                            std::uint64_t* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

/// Copies shared memory to the box at (column, row), what of it is inside the matrix.
__device__ __forceinline__ void store_matrix(const CUtensorMap* map, const void* source, int column,
                                             int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(shared_address(source)), "r"(column), "r"(row)
               : "memory");
}

/// The same by the threads that are `chosen`, without a branch.
__device__ __forceinline__ void store_matrix_if(bool chosen, const CUtensorMap* map,
                                                const void* source, int column, int row) {
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "setp.ne.s32 chosen, %4, 0;\n"
      "@chosen cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
      "}" ::"l"(map),
      "r"(shared_address(source)), "r"(column), "r"(row), "r"(static_cast<int>(chosen))
      : "memory");
}

/// The same, added to the numbers that are there: each sum is rounded to nearest even by L2.
__device__ __forceinline__ void add_matrix_if(bool chosen, const CUtensorMap* map,
                                              const void* source, int column, int row) {
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "setp.ne.s32 chosen, %4, 0;\n"
      "@chosen cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3}], [%1];\n"
      "}" ::"l"(map),
      "r"(shared_address(source)), "r"(column), "r"(row), "r"(static_cast<int>(chosen))
      : "memory");
}

/// Closes the group of stores that this thread issued since the last call.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until what all but the kPending newest groups of this thread store is written.
template <int kPending = 0>
__device__ __forceinline__ void wait_stores_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Waits until the sources of all but the kPending newest groups of this thread have been read.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace ridgeline::ptx
