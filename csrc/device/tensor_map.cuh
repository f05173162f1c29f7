#pragma once
#include <cuda.h>

#include <array>
#include <cstdint>

#include "device/launch.cuh"

namespace ridgeline::device {

/// A tensor of 16-bit or 8-bit elements as the copy engine sees it, innermost dimension first and
/// contiguous.
struct TensorView {
  DType dtype;
  const void* data;
  std::array<std::int64_t, 4> sizes;
  std::array<std::int64_t, 3> strides;  // elements, of dimensions 1 to 3
};

/// What the copy engine asks of a tensor: 16-byte alignment of the address and of every stride.
inline bool is_mappable(const TensorView& view) {
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(view.dtype));
  for (const std::int64_t stride : view.strides)
    aligned = aligned && stride * bytes % 16 == 0 && stride >= 0;
  for (const std::int64_t size : view.sizes) aligned = aligned && size > 0;
  return aligned && view.data != nullptr;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/// The driver's encoder, asked of the runtime: nothing links against the driver.
inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    check(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return encoder;
}

/// Boxes of `columns` columns (128 or 64 bytes, with the swizzle of that size), `rows` rows and
/// `planes` of these; zeros outside the tensor. Requires: is_mappable(view), rows, planes <= 256.
inline CUtensorMap swizzled_map(
    const TensorView& view, int rows, int columns = 64,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, int planes = 1) {
  const auto bytes = static_cast<cuuint64_t>(size_of(view.dtype));
  std::array<cuuint64_t, 4> sizes{};
  std::array<cuuint64_t, 3> strides{};
  for (int i = 0; i < 4; ++i) sizes[i] = static_cast<cuuint64_t>(view.sizes[i]);
  for (int i = 0; i < 3; ++i) {
    // A dimension of size 1 may come with any stride; the encoder refuses 0.
    const std::int64_t stride = view.sizes[i + 1] == 1 ? 16 : view.strides[i];
    strides[i] = static_cast<cuuint64_t>(stride) * bytes;
  }
  const std::array<cuuint32_t, 4> box{static_cast<cuuint32_t>(columns),
                                      static_cast<cuuint32_t>(rows),
                                      static_cast<cuuint32_t>(planes), 1};
  const std::array<cuuint32_t, 4> steps{1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map,
      bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
      4, const_cast<void*>(view.data), sizes.data(), strides.data(), box.data(), steps.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused a tensor, code ",
        static_cast<int>(result));
  return map;
}

}  // namespace ridgeline::device
