#pragma once
#include "device/tensor_map.cuh"

namespace ridgeline::device {

/// A matrix as the copy engine sees it: rows of contiguous elements of 1, 2 or 4 bytes.
struct MatrixView {
  const void* data;
  int element_bytes;
  std::int64_t rows, cols;
  std::int64_t stride;  // elements
  DType numbers = DType::kUInt8;  // float16 or bfloat16, if the copy engine is to add to them
};

/// What the copy engine asks of a matrix: 16-byte alignment of the address and of the stride.
inline bool is_mappable(const MatrixView& view) {
  return view.data != nullptr && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
         view.rows > 0 && view.cols > 0 &&
         (view.rows == 1 || (view.stride > 0 && view.stride * view.element_bytes % 16 == 0));
}

/// Matrices of the same size, so many elements apart; 0: no parts.
struct Parts {
  int count = 0;
  std::int64_t apart = 0;
};

/// Boxes of `box_rows` x `box_cols`, read as zeros outside the matrix and not written there. In
/// shared memory rows follow each other; if `swizzled`, those of 128 or 64 bytes carry the swizzle
/// of their size. `promotion`: how many bytes L2 fetches at once. With `parts`, of which the view
/// is the first, a map has three dimensions, and a box as much of each part, one behind the other.
/// Requires: is_mappable(view), parts as many bytes apart as a multiple of 16, box sizes <= 256.
inline CUtensorMap matrix_map(
    const MatrixView& view, int box_rows, int box_cols, bool swizzled,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, Parts parts = {}) {
  const std::array<cuuint64_t, 3> sizes{static_cast<cuuint64_t>(view.cols),
                                        static_cast<cuuint64_t>(view.rows),
                                        static_cast<cuuint64_t>(parts.count)};
  // A single row, or part, may come with any stride.
  const std::int64_t stride = view.rows == 1 ? 16 : view.stride * view.element_bytes;
  const std::int64_t apart = parts.count <= 1 ? 16 : parts.apart * view.element_bytes;
  const std::array<cuuint64_t, 2> strides{static_cast<cuuint64_t>(stride),
                                          static_cast<cuuint64_t>(apart)};
  const std::array<cuuint32_t, 3> box{static_cast<cuuint32_t>(box_cols),
                                      static_cast<cuuint32_t>(box_rows),
                                      static_cast<cuuint32_t>(parts.count)};
  const std::array<cuuint32_t, 3> steps{1, 1, 1};
  const CUtensorMapDataType bits[] = {CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                      CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                      CU_TENSOR_MAP_DATA_TYPE_UINT32};
  const CUtensorMapDataType type =
      view.numbers == DType::kFloat16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
      : view.numbers == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : bits[view.element_bytes / 2];
  const CUtensorMapSwizzle swizzle = !swizzled ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : box_cols * view.element_bytes == 128
                                         ? CU_TENSOR_MAP_SWIZZLE_128B
                                         : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, type, parts.count == 0 ? 2 : 3, const_cast<void*>(view.data), sizes.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused a matrix, code ",
        static_cast<int>(result));
  return map;
}

/// A matrix of bytes by 128 columns of 128 rows, of which 64 at a time are dealt out by pairs: row
/// 16 t + 2 h + b of them comes as row 8 h + 2 t + b. The lanes that share a row of a fragment of
/// the tensor cores, which have two of each eight columns, then have sixteen that follow each
/// other. Requires: is_mappable(view), rows a multiple of 64.
inline CUtensorMap dealt_rows_map(const MatrixView& view) {
  const auto rows = static_cast<cuuint64_t>(view.rows);
  const auto stride = static_cast<cuuint64_t>(view.stride);
  const std::array<cuuint64_t, 5> sizes{static_cast<cuuint64_t>(view.cols), 2, 4, 8, rows / 64};
  const std::array<cuuint64_t, 4> strides{stride, 16 * stride, 2 * stride, 64 * stride};
  const std::array<cuuint32_t, 5> box{128, 2, 4, 8, 2}, steps{1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, const_cast<void*>(view.data), sizes.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused dealt rows, code ",
        static_cast<int>(result));
  return map;
}

/// The row of 64 that comes in the place of row `place`.
constexpr int dealt_row(int place) {
  return place / 64 * 64 + place % 8 / 2 * 16 + place % 64 / 8 * 2 + place % 2;
}

}  // namespace ridgeline::device
