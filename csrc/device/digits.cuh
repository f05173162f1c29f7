#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/vec.cuh"

/// 16-bit floats as integers of 14 bits and a sign, in units of a power of two that neighbours
/// share, and these as two digits: signed bytes, for which the integer tensor cores are twice as
/// fast and a weight of four bits needs no conversion.
namespace ridgeline::device {

/// From these bits on a magnitude is inf or NaN.
template <class T> constexpr std::uint32_t kNotFinite = 0x7f80;
template <> constexpr std::uint32_t kNotFinite<__half> = 0x7c00;

/// The largest magnitude of some 16-bit floats, as bits.
template <int kPairs>
__device__ __forceinline__ std::uint32_t largest_magnitude(const std::uint32_t (&pairs)[kPairs]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) largest = __vmaxu2(largest, pairs[i] & 0x7fff7fffu);
  return max(largest & 0xffffu, largest >> 16);
}

/// Values that are not finite become zero.
template <class T, int kPairs>
__device__ __forceinline__ void drop_not_finite(std::uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if ((pairs[i] & 0x7fffu) >= kNotFinite<T>) pairs[i] &= 0xffff0000u;
    if ((pairs[i] >> 16 & 0x7fffu) >= kNotFinite<T>) pairs[i] &= 0x0000ffffu;
  }
}

/// A power of two, and its inverse, in units of which `largest`, the bits of a T, has kBits bits.
template <int kBits>
struct PowerUnit {
  float unit, inverse;

  template <class T>
  __device__ __forceinline__ static PowerUnit of(std::uint32_t largest, T) {
    const auto bits = static_cast<std::uint16_t>(largest);
    const float magnitude = to_float(*reinterpret_cast<const T*>(&bits));
    // Below 2^-100 the unit stays, and that of inf is the largest number's: both must be floats.
    const std::uint32_t power =
        min(max(__float_as_uint(magnitude), 27u << 23), 254u << 23) & 0x7f800000u;
    return {__uint_as_float(power - ((kBits - 1u) << 23)),
            __uint_as_float(((253u + kBits) << 23) - power)};
  }
};

/// Four values' digits, the low ones and the high ones.
__device__ __forceinline__ uint2 digits_of(float a, float b, float c, float d, float inverse) {
  // The mantissa of 2^23 + integer + 0x8080 is the integer, its digits 128 too large.
  constexpr float kOffset = 8388608.0f + 0x8080;
  const std::uint32_t ab = __byte_perm(__float_as_uint(fmaf(a, inverse, kOffset)),
                                       __float_as_uint(fmaf(b, inverse, kOffset)), 0x5140);
  const std::uint32_t cd = __byte_perm(__float_as_uint(fmaf(c, inverse, kOffset)),
                                       __float_as_uint(fmaf(d, inverse, kOffset)), 0x5140);
  return {__byte_perm(ab, cd, 0x5410) ^ 0x80808080u, __byte_perm(ab, cd, 0x7632) ^ 0x80808080u};
}

__device__ __forceinline__ float2 floats_of(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 floats_of(__nv_bfloat162 pair) {
  const auto bits = *reinterpret_cast<const std::uint32_t*>(&pair);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

}  // namespace ridgeline::device
