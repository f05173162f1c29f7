#pragma once
#include "common/types.h"

namespace ridgeline {

/// y[r, c] = (weight[c] + offset) * x[r, c] / sqrt(mean over c of x[r, c]^2 + eps), statistics in
/// fp32. With a residual: residual += x first, and the norm is that of the sum.
///
/// Roofline: reads x and writes y once, 2 * rows * cols * size_of(dtype) bytes (twice that with a
/// residual), about 4 flops an element: bandwidth at many rows, launch latency at few.
struct RmsNormParams {
  DType dtype;                // of x, residual and y
  DType weight_dtype;         // dtype, or fp32
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;
  float eps;
  float offset;               // added to the weight; 1 for Gemma
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  void* residual;             // [rows, cols], updated in place; or null
  std::int64_t stride_residual_row;
  const void* weight;         // [cols]
  void* y;                    // [rows, cols]; may be x
  std::int64_t stride_y_row;
  bool weights_ready;         // no kernel of the stream still writes weight: it may be read early
};

/// Throws std::invalid_argument if the shape is not covered. Enqueues one kernel; allocates nothing.
void rmsnorm(const RmsNormParams& params, Stream stream);

namespace cpu {
void rmsnorm(const RmsNormParams& params);
}

}  // namespace ridgeline
