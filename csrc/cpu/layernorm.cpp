#include <cmath>
#include <vector>

#include "cpu/activation.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "kernels/norm.h"

namespace ridgeline::cpu {
namespace {

using Activation = LayerNormParams::Activation;

template <Activation kActivation>
float activate(float value) {
  if constexpr (kActivation == Activation::kGelu) return gelu(value);
  if constexpr (kActivation == Activation::kGeluTanh) return gelu_tanh(value);
  return value;
}

template <class T, Activation kActivation>
void layernorm_row(const LayerNormParams& params, std::int64_t row, const float* weight,
                   const float* bias, float* buffer) {
  const std::int32_t cols = params.cols;
  const float* x =
      as_floats(static_cast<const T*>(params.x) + row * params.stride_x_row, cols, buffer);
  const auto count = static_cast<float>(cols);
  const float mean = sum_over(cols, [&](std::int64_t c) { return x[c]; }) / count;
  const float squares =
      sum_over(cols, [&](std::int64_t c) { return (x[c] - mean) * (x[c] - mean); });
  const float scale = 1.0f / std::sqrt(squares / count + params.eps);

  T* y = static_cast<T*>(params.y) + row * cols;
  float* out = begin_row(y, buffer);
#pragma omp simd
  for (std::int32_t c = 0; c < cols; ++c)
    out[c] = activate<kActivation>((x[c] - mean) * scale * weight[c] + bias[c]);
  finish_row(out, cols, y);
}

template <class T, Activation kActivation>
void layernorm_rows(const LayerNormParams& params, const std::vector<float>& weight,
                    const std::vector<float>& bias) {
  parallel_ranges(params.rows, params.cols, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> buffer(weight.size());
    for (std::int64_t row = begin; row < end; ++row)
      layernorm_row<T, kActivation>(params, row, weight.data(), bias.data(), buffer.data());
  });
}

}  // namespace

void layernorm(const LayerNormParams& params) {
  std::vector<float> weight(static_cast<std::size_t>(params.cols)), bias(weight.size());
  dispatch_float(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    to_floats(static_cast<const W*>(params.weight), params.cols, weight.data());
    if (params.bias != nullptr)
      to_floats(static_cast<const W*>(params.bias), params.cols, bias.data());
  });
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (params.activation) {
      case Activation::kNone: return layernorm_rows<T, Activation::kNone>(params, weight, bias);
      case Activation::kGelu: return layernorm_rows<T, Activation::kGelu>(params, weight, bias);
      case Activation::kGeluTanh:
        return layernorm_rows<T, Activation::kGeluTanh>(params, weight, bias);
    }
  });
}

}  // namespace ridgeline::cpu
