#pragma once
#include "common/check.h"
#include "common/math.h"
#include "device/matrix_map.cuh"

namespace ridgeline::device {

/// A matrix as tiles of rows for the copy engine. The last tile is a box of the rows that are left:
/// those past the end would be zeros, which the engine takes longer to make than to read others.
/// H200, bf16, x of 160 rows by 28672 x 4096 in tiles of 128: 161 us so, and 256 rows 103.
struct RowTiles {
  CUtensorMap whole, last;
  int count, rows, last_rows;

  static RowTiles of(const MatrixView& view, int rows, int box_cols) {
    const int count = checked_int32(ceil_div<std::int64_t>(view.rows, rows), "tiles of rows");
    const auto left = static_cast<int>(view.rows - std::int64_t{count - 1} * rows);
    return {matrix_map(view, rows, box_cols, true), matrix_map(view, left, box_cols, true), count,
            rows, left};
  }

  __device__ __forceinline__ bool is_last(int tile) const { return tile == count - 1; }
  __device__ __forceinline__ int rows_of(int tile) const {
    return is_last(tile) ? last_rows : rows;
  }
  __device__ __forceinline__ const CUtensorMap* map_of(int tile) const {
    return rows_of(tile) == rows ? &whole : &last;
  }
};

}  // namespace ridgeline::device
