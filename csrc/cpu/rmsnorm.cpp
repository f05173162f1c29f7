#include <cmath>

#include "cpu/half.h"
#include "cpu/parallel.h"
#include "kernels/norm.h"

namespace ridgeline::cpu {
namespace {

template <class T, class W>
void rmsnorm_row(const RmsNormParams& params, std::int64_t row) {
  const T* x = static_cast<const T*>(params.x) + row * params.stride_x_row;
  const W* weight = static_cast<const W*>(params.weight);
  T* y = static_cast<T*>(params.y) + row * params.stride_y_row;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < params.cols; ++c) {
    const float value = static_cast<float>(x[c]);
    sum += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum / params.cols + params.eps);
#pragma omp simd
  for (int c = 0; c < params.cols; ++c) {
    const float w = static_cast<float>(weight[c]) + params.offset;
    y[c] = static_cast<T>(static_cast<float>(x[c]) * scale * w);
  }
}

}  // namespace

void rmsnorm(const RmsNormParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    dispatch_float(params.weight_dtype, [&](auto weight_type) {
      using T = typename decltype(type)::type;
      using W = typename decltype(weight_type)::type;
      parallel_for_each(params.rows, params.cols,
                        [&](std::int64_t row) { rmsnorm_row<T, W>(params, row); });
    });
  });
}

}  // namespace ridgeline::cpu
