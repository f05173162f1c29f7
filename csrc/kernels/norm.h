#pragma once
#include "common/quant_scale.h"
#include "common/types.h"

namespace ridgeline {

/// y[r, c] = (weight[c] + offset) * x[r, c] / sqrt(mean over c of x[r, c]^2 + eps), statistics in
/// fp32. With a residual: residual += x first, and the norm is that of the sum as stored.
/// With y of 8 bits: value = y * y_scale, the scale being the largest |value| of the row, or of a
/// group of kScaleGroup columns, / (448 or 127).
///
/// Roofline: reads x and writes y once, 2 * rows * cols * size_of(dtype) bytes (twice that with a
/// residual), about 4 flops an element: bandwidth at many rows, launch latency at few.
struct RmsNormParams {
  DType dtype;                // of x, residual and (unless it has 8 bits) y
  DType weight_dtype;         // dtype, or fp32
  DType y_dtype;              // dtype, or fp8 e4m3 or int8 with a scale a row
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // 0 is legal
  float eps;
  float offset;               // added to the weight; 1 for Gemma
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  void* residual;             // [rows, cols], updated in place; or null
  std::int64_t stride_residual_row;
  const void* weight;         // [cols]
  void* y;                    // [rows, cols] contiguous; may be x
  float* y_scale;             // [rows], or by group [rows, ceil(cols / kScaleGroup)], or null
  bool by_group;              // needs y_scale
  bool weights_ready;         // no kernel of the stream still writes weight: it may be read early
  bool next_at_start = false; // the next kernel's blocks do not pile up where they start early
};

/// y = act(weight * (x - mean) / sqrt(variance + eps) + bias): mean, then the centred sum of
/// squares, both in fp32 from one read of x.
///
/// Roofline: reads x and writes y once. With GELU about 30 instructions an element: still
/// bandwidth.
struct LayerNormParams {
  enum class Activation : std::uint8_t { kNone, kGelu, kGeluTanh };

  DType dtype;                // of x and y
  DType weight_dtype;         // of weight and bias: dtype, or fp32
  Activation activation;
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // 0 is legal
  float eps;
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  const void* weight;         // [cols]
  const void* bias;           // [cols], or null
  void* y;                    // [rows, cols] contiguous; not x
  bool weights_ready;         // no kernel of the stream still writes weight or bias
};

/// Each enqueues one kernel and allocates nothing. Any cols; multiples of 16 bytes on rows aligned
/// to 16 bytes are fast, and rows of up to 64 KB are read from memory once.
void rmsnorm(const RmsNormParams& params, Stream stream);
void layernorm(const LayerNormParams& params, Stream stream);

namespace cpu {
void rmsnorm(const RmsNormParams& params);
void layernorm(const LayerNormParams& params);
}  // namespace cpu

}  // namespace ridgeline
