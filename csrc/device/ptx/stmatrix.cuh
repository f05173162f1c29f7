#pragma once
#include <cstdint>

#include "device/ptx/address.cuh"

namespace ridgeline::ptx {

/// Four 8x8 matrices of 16-bit elements, as ldmatrix gives them, to shared memory: lane i gives the
/// address of row i % 8 of matrix i / 8.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void stmatrix(void* row, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

/// The same with each matrix transposed on the way.
__device__ __forceinline__ void stmatrix_transposed(void* row, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

__device__ __forceinline__ void stmatrix_transposed(void* row, const std::uint32_t (&m)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                   shared_address(row)),
               "r"(m[0]), "r"(m[1])
               : "memory");
}

}  // namespace ridgeline::ptx
