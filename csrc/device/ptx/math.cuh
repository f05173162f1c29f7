#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace ridgeline::ptx {

/// 2^x in one instruction: 2 ulp, results below the normal range become 0.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The same of two halves, to 2^-9.9 of each; results below the normal range are kept. One by one
/// and joined by a product: of ex2.approx.f16x2, which is two instructions as well, ptxas joins the
/// results once for each use, by an instruction that takes two cycles of the integer pipe.
__device__ __forceinline__ __half2 exp2_approx(__half2 x) {
  std::uint32_t y;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 a, b;\n"
      "mov.b32 {low, high}, %1;\n"
      "ex2.approx.f16 low, low;\n"
      "ex2.approx.f16 high, high;\n"
      "cvt.u32.u16 a, low;\n"
      "cvt.u32.u16 b, high;\n"
      "mad.lo.u32 %0, b, 65536, a;\n"
      "}\n"
      : "=r"(y)
      : "r"(reinterpret_cast<const std::uint32_t&>(x)));
  return reinterpret_cast<const __half2&>(y);
}

/// 1 / x in one instruction: 1 ulp; of subnormal numbers infinity.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp-approx-ftz-f64
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The larger of two; NaN if one is NaN.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-max
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

/// The smaller of two; NaN if one is NaN.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-min
__device__ __forceinline__ float min_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

}  // namespace ridgeline::ptx
