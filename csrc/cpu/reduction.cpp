#include <cmath>
#include <limits>
#include <vector>

#include "cpu/half.h"
#include "cpu/math.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "kernels/reduction.h"

namespace ridgeline::cpu {
namespace {

using Op = RowReduceParams::Op;

float maximum(const float* x, std::int32_t cols) {
  return max_over(cols, [&](std::int64_t c) { return x[c]; });
}

/// The place of the first NaN, else of the first maximum.
std::int64_t argmax(const float* x, std::int32_t cols) {
  const float best = maximum(x, cols);
  std::int32_t found = 0;
  if (std::isnan(best)) {
    while (!std::isnan(x[found])) ++found;
  } else {
    while (x[found] != best) ++found;
  }
  return found;
}

float log_sum_exp(const float* x, std::int32_t cols) {
  const float best = maximum(x, cols);
  const float shift = std::isinf(best) ? 0.0f : best;  // an infinity is not subtracted from itself
  return shift + std::log(sum_over(cols, [&](std::int64_t c) { return exp(x[c] - shift); }));
}

float reduce(Op op, const float* x, std::int32_t cols) {
  switch (op) {
    case Op::kSum: return sum_over(cols, [&](std::int64_t c) { return x[c]; });
    case Op::kMean:
      return sum_over(cols, [&](std::int64_t c) { return x[c]; }) / static_cast<float>(cols);
    case Op::kMax: return maximum(x, cols);
    case Op::kMin: return -max_over(cols, [&](std::int64_t c) { return -x[c]; });
    case Op::kLogSumExp: return log_sum_exp(x, cols);
    case Op::kArgmax: break;  // gives an index, not a value
  }
  return std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

void row_reduce(const RowReduceParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_ranges(params.rows, params.cols, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> buffer(static_cast<std::size_t>(params.cols));
      for (std::int64_t row = begin; row < end; ++row) {
        const T* source = static_cast<const T*>(params.x) + row * params.stride_x_row;
        const float* x = as_floats(source, params.cols, buffer.data());
        if (params.op == Op::kArgmax) {
          static_cast<std::int64_t*>(params.y)[row] = argmax(x, params.cols);
        } else {
          static_cast<T*>(params.y)[row] = static_cast<T>(reduce(params.op, x, params.cols));
        }
      }
    });
  });
}

void softmax(const SoftmaxParams& params) {
  const std::int32_t cols = params.cols;
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_ranges(params.rows, std::int64_t{cols} * 4, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> buffer(static_cast<std::size_t>(cols));
      for (std::int64_t row = begin; row < end; ++row) {
        const T* source = static_cast<const T*>(params.x) + row * params.stride_x_row;
        const float* x = as_floats(source, cols, buffer.data());
        T* y = static_cast<T*>(params.y) + row * cols;
        float* out = begin_row(y, buffer.data());
        const float best = maximum(x, cols);
#pragma omp simd
        for (std::int32_t c = 0; c < cols; ++c) out[c] = exp(x[c] - best);
        const float inverse = 1.0f / sum_over(cols, [&](std::int64_t c) { return out[c]; });
#pragma omp simd
        for (std::int32_t c = 0; c < cols; ++c) out[c] *= inverse;
        finish_row(out, cols, y);
      }
    });
  });
}

}  // namespace ridgeline::cpu
