#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// d = a b + c by one warp: a 16x32 of unsigned bytes, b 32x8 of signed bytes, c 16x8 of 32 bits.
/// With g = lane / 4 and t = lane % 4, four consecutive columns (of b: rows) a register: a = (g,
/// 4t), (g + 8, 4t), (g, 4t + 16), (g + 8, 4t + 16); b = rows 4t and 4t + 16 of column g; c as of
/// mma_m16n8k16.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1, int c0, int c1,
                                             int c2, int c3) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2),
        "r"(c3));
}

}  // namespace ridgeline::ptx
