#pragma once
#include "common/types.h"

namespace ridgeline {

/// y[r] = op over c of x[r, c]. NaN in a row gives NaN (argmax: the index of the first NaN); ties
/// of argmax go to the lowest index. No columns: sum 0, mean NaN, logsumexp -inf; the others need
/// one.
///
/// Roofline: reads x once: bandwidth at many rows, launch latency at few.
struct RowReduceParams {
  enum class Op : std::uint8_t { kSum, kMean, kMax, kMin, kArgmax, kLogSumExp };

  DType dtype;                // of x and, but for argmax (int64), y
  Op op;
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  void* y;                    // [rows]
};

/// y[r, c] = exp(x[r, c] - max) / sum of exp(x[r, ...] - max), in fp32. A row with NaN, with +inf
/// or of -inf alone is NaN throughout, as torch's is.
///
/// Roofline: reads x and writes y once, two exponentials an element: bandwidth.
struct SoftmaxParams {
  DType dtype;                // of x and y
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // 0 is legal
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  void* y;                    // [rows, cols] contiguous
};

/// Each enqueues one kernel and allocates nothing. Any cols; multiples of 16 bytes on rows aligned
/// to 16 bytes are fast, and rows of up to 64 KB are read from memory once.
void row_reduce(const RowReduceParams& params, Stream stream);
void softmax(const SoftmaxParams& params, Stream stream);

namespace cpu {
void row_reduce(const RowReduceParams& params);
void softmax(const SoftmaxParams& params);
}  // namespace cpu

}  // namespace ridgeline
