#pragma once
#include "common/types.h"

namespace ridgeline {

/// Elementwise, in fp32 between one read and one write:
///   bias_act   y[r, c] = act(x[r, c] + bias[c])
///   gated_act  y[r, c] = act(x[r, c]) * x[r, cols + c]
///
/// Roofline: bias_act 2, gated_act 3 accesses an element of y, at most 20 instructions: bandwidth
/// at many rows, launch latency at few.
struct ActivationParams {
  enum class Function : std::uint8_t { kGelu, kGeluTanh, kSilu };

  DType dtype;                // of x, bias and y
  Function function;
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // of y; 0 is legal
  const void* x;              // [rows, cols], or [rows, 2 * cols] for gated_act
  std::int64_t stride_x_row;  // elements
  const void* bias;           // [cols]; null for gated_act
  void* y;                    // [rows, cols] contiguous
  bool weights_ready;         // no kernel of the stream still writes bias: it may be read early
};

/// Each enqueues one kernel and allocates nothing. Any cols; multiples of 16 bytes on rows aligned
/// to 16 bytes are fast.
void bias_act(const ActivationParams& params, Stream stream);
void gated_act(const ActivationParams& params, Stream stream);

namespace cpu {
void bias_act(const ActivationParams& params);
void gated_act(const ActivationParams& params);
}  // namespace cpu

}  // namespace ridgeline
