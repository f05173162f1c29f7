#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace ridgeline::ptx {

/// Two e4m3 values as fp16, exactly; the low byte first. Before compute 8.9 in integer steps: the
/// bits move into fp16's place and 2^8 corrects the bias, subnormals included; 0x7f is NaN.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ __half2 e4m3x2_to_half2(std::uint16_t pair) {
  std::uint32_t bits;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(pair));
  return *reinterpret_cast<const __half2*>(&bits);
#else
  const std::uint32_t spread = (pair & 0xffu) | (static_cast<std::uint32_t>(pair & 0xff00u) << 8);
  bits = ((spread & 0x00800080u) << 8) | ((spread & 0x007f007fu) << 7);
  const __half2 moved = *reinterpret_cast<const __half2*>(&bits);
  __half2 value = __hmul2(moved, __float2half2_rn(256.0f));
  auto* words = reinterpret_cast<std::uint32_t*>(&value);
  if ((spread & 0x7fu) == 0x7fu) *words |= 0x7fffu;
  if ((spread & 0x7f0000u) == 0x7f0000u) *words |= 0x7fff0000u;
  return value;
#endif
}

/// Four e4m3 codes in one register, the first in the low byte: nearest (ties to even), saturated at
/// 448; NaN stays NaN. Compute 8.9 and later.
__device__ __forceinline__ std::uint32_t pack_e4m3(__half2 first, __half2 second) {
  std::uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "r"(reinterpret_cast<const std::uint32_t&>(first)),
        "r"(reinterpret_cast<const std::uint32_t&>(second)));
  return codes;
}

/// The same of four float32.
__device__ __forceinline__ std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  std::uint32_t codes;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

}  // namespace ridgeline::ptx
