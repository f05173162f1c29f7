#include <algorithm>
#include <cmath>
#include <vector>

#include "common/math.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "cpu/quant.h"
#include "cpu/rows.h"
#include "kernels/norm.h"

namespace ridgeline::cpu {
namespace {

/// Adds a row of x to one of the residual and gives the sum as stored.
template <class T>
void add_to_residual(const float* x, T* residual, std::int32_t cols, float* sums) {
  to_floats(residual, cols, sums);
#pragma omp simd
  for (std::int32_t c = 0; c < cols; ++c) sums[c] += x[c];
  from_floats(sums, cols, residual);
  to_floats(residual, cols, sums);
}

/// `weight` has the offset in it; `buffer` and `sums` hold a row each.
template <class T>
void rmsnorm_row(const RmsNormParams& params, std::int64_t row, const float* weight, float* buffer,
                 float* sums) {
  const std::int32_t cols = params.cols;
  const float* x =
      as_floats(static_cast<const T*>(params.x) + row * params.stride_x_row, cols, buffer);
  if (params.residual != nullptr) {
    T* residual = static_cast<T*>(params.residual) + row * params.stride_residual_row;
    add_to_residual(x, residual, cols, sums);
    x = sums;
  }
  const float sum = sum_over(cols, [&](std::int64_t c) { return x[c] * x[c]; });
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(cols) + params.eps);

  const bool quantised = params.y_scale != nullptr;
  T* y = quantised ? nullptr : static_cast<T*>(params.y) + row * cols;
  float* out = quantised ? buffer : begin_row(y, buffer);
#pragma omp simd
  for (std::int32_t c = 0; c < cols; ++c) out[c] = x[c] * scale * weight[c];
  if (!quantised) return finish_row(out, cols, y);
  const std::int64_t extent = params.by_group ? kScaleGroup : cols;
  const std::int64_t extents = params.by_group ? ceil_div<std::int64_t>(cols, extent) : 1;
  for (std::int64_t i = 0; i < extents; ++i) {
    const float* values = out + i * extent;
    const std::int64_t count = std::min(extent, cols - i * extent);
    const float amax =
        count == 0 ? 0.0f : max_over(count, [&](std::int64_t c) { return std::abs(values[c]); });
    const float y_scale = scale_of_amax(amax, params.y_dtype);
    params.y_scale[row * extents + i] = y_scale;
    encode(values, count, y_scale, params.y_dtype,
           static_cast<std::uint8_t*>(params.y) + row * cols + i * extent);
  }
}

}  // namespace

void rmsnorm(const RmsNormParams& params) {
  std::vector<float> weight(static_cast<std::size_t>(params.cols));
  dispatch_float(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    to_floats(static_cast<const W*>(params.weight), params.cols, weight.data());
  });
  for (float& w : weight) w += params.offset;
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_ranges(params.rows, params.cols, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> buffer(weight.size()), sums(weight.size());
      for (std::int64_t row = begin; row < end; ++row)
        rmsnorm_row<T>(params, row, weight.data(), buffer.data(), sums.data());
    });
  });
}

}  // namespace ridgeline::cpu
