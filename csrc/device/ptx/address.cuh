#pragma once
#include <cstdint>

namespace ridgeline::ptx {

/// The address of a shared-memory object as the shared window counts it.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace ridgeline::ptx
