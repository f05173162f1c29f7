#pragma once
#include <cstdint>

#include "device/ptx/address.cuh"

namespace ridgeline::ptx {

/// Four 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8, and
/// receives of each matrix the two elements at row lane / 4, columns 2 * (lane % 4) and the next.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix(std::uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

/// The same with each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

/// An 8x8 matrix of 16-bit elements transposed among the lanes, which hold it as ldmatrix gives it.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t m) {
  std::uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

}  // namespace ridgeline::ptx
