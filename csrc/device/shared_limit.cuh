#pragma once
#include "device/properties.cuh"

namespace ridgeline::device {

/// Refuses what no block of this device can have: GPUs of compute 8.6 and 8.9 have 99 KB, those of
/// 8.0 have 163 and of 9.0 227. The driver would say "invalid argument".
inline void check_shared(std::size_t bytes, const char* what) {
  constexpr std::size_t kEverywhere = 99 * 1024;
  if (bytes <= kEverywhere) return;
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  check(bytes <= static_cast<std::size_t>(most), what, " takes a kernel of ", bytes,
        " bytes of shared memory a block, this GPU has ", most);
}

}  // namespace ridgeline::device
