#pragma once
#include <cuda_fp8.h>

#include <cstdint>

#include "device/vec.cuh"

namespace ridgeline::device {

/// The nearest e4m3 code (ties to even), saturated at 448; NaN stays NaN.
__device__ __forceinline__ std::uint8_t encode_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

/// The nearest integer in [-127, 127], ties to even; NaN gives 0.
__device__ __forceinline__ std::int8_t encode_int8(float value) {
  return static_cast<std::int8_t>(max(-127, min(127, __float2int_rn(value))));
}

/// Codes of several values: e4m3 (two in one conversion), or int8.
template <bool kE4M3, int kCount>
__device__ __forceinline__ Vec<std::uint8_t, kCount> encode(const Vec<float, kCount>& values) {
  Vec<std::uint8_t, kCount> codes;
  if constexpr (!kE4M3) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      codes.data[j] = static_cast<std::uint8_t>(encode_int8(values.data[j]));
  } else if constexpr (kCount % 2 == 0) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
      reinterpret_cast<__nv_fp8x2_storage_t*>(codes.data)[j / 2] = __nv_cvt_float2_to_fp8x2(
          make_float2(values.data[j], values.data[j + 1]), __NV_SATFINITE, __NV_E4M3);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) codes.data[j] = encode_e4m3(values.data[j]);
  }
  return codes;
}

}  // namespace ridgeline::device
