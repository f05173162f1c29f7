#pragma once
#include "device/reduce.cuh"

namespace ridgeline::gemm_detail {

/// The scales of 128 columns of K: of a thread's two rows of x, and of two parts of weight rows.
/// Each of the four lanes that share them requests one, a stage ahead, and has the others of its
/// neighbours: three registers, where there are none to spare. Values that a warp shares the
/// compiler moved to uniform registers as soon as they were requested, so that each stage waited
/// for them.
struct QuadScales {
  float next = 1.0f;   // requested by this lane: of row 0 or 1 of x, of part 0 or 1
  float factor[2][2];  // of the parts, by rows

  /// Makes factors of what was requested.
  __device__ __forceinline__ void take() {
    float of_x[2], of_part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of_x[i] = device::from_quad(next, i);
      of_part[i] = device::from_quad(next, 2 + i);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[part][r] = of_x[r] * of_part[part];
  }
};

}  // namespace ridgeline::gemm_detail
