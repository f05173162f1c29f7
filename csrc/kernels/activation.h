#pragma once
#include "common/quant_scale.h"
#include "common/types.h"

namespace ridgeline {

/// Elementwise, in fp32 between one read and one write:
///   bias_act   y[r, c] = act(x[r, c] + bias[c])
///   gated_act  y[r, c] = act(x[r, c]) * x[r, cols + c]
///              of kSwigluClamped g * logistic(alpha * g) * (u + 1), where g = min(x[r, c], limit)
///              and u = x[r, cols + c] clamped to -limit and limit; NaN stays NaN
///
/// Roofline: bias_act 2, gated_act 3 accesses an element of y, at most 20 instructions: bandwidth
/// at many rows, launch latency at few.
struct ActivationParams {
  enum class Function : std::uint8_t { kGelu, kGeluTanh, kSilu, kSwigluClamped };

  DType dtype;                // of x, bias and y
  Function function;
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // of y; 0 is legal
  const void* x;              // [rows, cols], or [rows, 2 * cols] for gated_act
  std::int64_t stride_x_row;  // elements
  const void* bias;           // [cols]; null for gated_act
  void* y;                    // [rows, cols] contiguous
  bool weights_ready;         // no kernel of the stream still writes bias: it may be read early
  float limit = 0.0f;         // of kSwigluClamped: above zero; infinity clamps nothing
  float alpha = 0.0f;         // of kSwigluClamped: finite
};

/// silu(x[r, c]) * x[r, cols + c] as 8-bit codes: value = y * y_scale, the scale being the largest
/// |value| of the row, or of a group of kScaleGroup columns, / 448 or 127; 1 if all are zero.
///
/// Roofline: 5 bytes an element of y of 16 bits, where another pass would move 3 more.
struct GatedQuantParams {
  DType dtype;                // of x
  DType y_dtype;              // fp8 e4m3 or int8
  bool by_group;
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // of y; 0 is legal; a row's last group may be narrower
  const void* x;              // [rows, 2 * cols]
  std::int64_t stride_x_row;  // elements
  void* y;                    // [rows, cols] contiguous
  float* y_scale;             // [rows], or [rows, ceil(cols / kScaleGroup)]
};

/// Each enqueues one kernel and allocates nothing. Any cols; multiples of 16 bytes on rows aligned
/// to 16 bytes are fast.
void bias_act(const ActivationParams& params, Stream stream);
void gated_act(const ActivationParams& params, Stream stream);
void gated_act_quant(const GatedQuantParams& params, Stream stream);

namespace cpu {
void bias_act(const ActivationParams& params);
void gated_act(const ActivationParams& params);
void gated_act_quant(const GatedQuantParams& params);
}  // namespace cpu

}  // namespace ridgeline
