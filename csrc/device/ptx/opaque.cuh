#pragma once

namespace ridgeline::ptx {

/// The same value, of which the compiler forgets where it came from: what is computed from it is
/// computed here, and not kept in registers from far ahead.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ uint4 opaque(uint4 value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
  return value;
}

template <class T>
__device__ __forceinline__ const T* opaque(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

}  // namespace ridgeline::ptx
