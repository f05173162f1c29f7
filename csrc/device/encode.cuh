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
  return static_cast<std::int8_t>(
      __float2int_rn(fminf(fmaxf(value == value ? value : 0.0f, -127.0f), 127.0f)));
}

/// Codes of several values: e4m3, or int8.
template <int kCount>
__device__ __forceinline__ Vec<std::uint8_t, kCount> encode(const Vec<float, kCount>& values,
                                                            bool is_e4m3) {
  Vec<std::uint8_t, kCount> codes;
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    codes.data[j] = is_e4m3 ? encode_e4m3(values.data[j])
                            : static_cast<std::uint8_t>(encode_int8(values.data[j]));
  return codes;
}

}  // namespace ridgeline::device
