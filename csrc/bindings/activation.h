#pragma once
#include <cmath>
#include <string>
#include <tuple>

#include "bindings/backend.h"
#include "bindings/out_quant.h"
#include "kernels/activation.h"

namespace ridgeline::bindings {

inline ActivationParams::Function gelu_function(const std::string& approximate) {
  using enum ActivationParams::Function;
  return gelu_is_exact(approximate) ? kGelu : kGeluTanh;
}

template <class Backend>
Tensor bias_gelu(const Tensor& x, const Tensor& bias, const std::string& approximate,
                 bool weights_ready) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const DType dtype = dtype_of(x, "x");
  Expect(bias, "bias").on_device_of(x, "x").shape({rows.cols}).contiguous().dtype(dtype);
  const ActivationParams::Function function = gelu_function(approximate);
  const Tensor y = empty_contiguous_like(x);
  const ActivationParams params{.dtype = dtype,
                                .function = function,
                                .rows = rows.count,
                                .cols = checked_int32(rows.cols, "x: columns"),
                                .x = x.data_ptr(),
                                .stride_x_row = rows.stride,
                                .bias = bias.data_ptr(),
                                .y = y.data_ptr(),
                                .weights_ready = weights_ready};
  if constexpr (Backend::kIsCuda) {
    ridgeline::bias_act(params, on.stream());
  } else {
    cpu::bias_act(params);
  }
  return y;
}

/// Of the output for an input of a gate and a factor.
inline std::vector<std::int64_t> gated_sizes(const Tensor& x, const Rows& rows) {
  check(rows.cols % 2 == 0, "x: expected an even last dimension (gate, then up), got shape ",
        to_text(x.sizes()));
  std::vector<std::int64_t> sizes = sizes_of(x);
  sizes.back() /= 2;
  return sizes;
}

template <class Backend>
Tensor gated(const Tensor& x, ActivationParams::Function function, float limit = 0.0f,
             float alpha = 0.0f) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const std::vector<std::int64_t> sizes = gated_sizes(x, rows);
  const Tensor y = empty_on_device_of(x, sizes, x.scalar_type());
  const ActivationParams params{.dtype = dtype_of(x, "x"),
                                .function = function,
                                .rows = rows.count,
                                .cols = checked_int32(sizes.back(), "x: half its columns"),
                                .x = x.data_ptr(),
                                .stride_x_row = rows.stride,
                                .bias = nullptr,
                                .y = y.data_ptr(),
                                .weights_ready = false,
                                .limit = limit,
                                .alpha = alpha};
  if constexpr (Backend::kIsCuda) {
    ridgeline::gated_act(params, on.stream());
  } else {
    cpu::gated_act(params);
  }
  return y;
}

/// silu_mul as 8-bit codes, and their scales.
template <class Backend>
std::tuple<Tensor, Tensor> silu_mul_quant(const Tensor& x, const std::string& out_quant) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const std::vector<std::int64_t> sizes = gated_sizes(x, rows);
  const OutQuant quant(out_quant);
  const Tensor y = empty_on_device_of(x, sizes, quant.dtype);
  const Tensor scale = empty_on_device_of(x, quant.scale_sizes(sizes), DType::kFloat32);
  const GatedQuantParams params{.dtype = dtype_of(x, "x"),
                                .y_dtype = quant.dtype,
                                .by_group = quant.by_group,
                                .rows = rows.count,
                                .cols = checked_int32(sizes.back(), "x: half its columns"),
                                .x = x.data_ptr(),
                                .stride_x_row = rows.stride,
                                .y = y.data_ptr(),
                                .y_scale = static_cast<float*>(scale.data_ptr())};
  if constexpr (Backend::kIsCuda) {
    ridgeline::gated_act_quant(params, on.stream());
  } else {
    cpu::gated_act_quant(params);
  }
  return {y, scale};
}

template <class Backend>
Tensor silu_mul(const Tensor& x) {
  return gated<Backend>(x, ActivationParams::Function::kSilu);
}

template <class Backend>
Tensor gelu_mul(const Tensor& x, const std::string& approximate) {
  return gated<Backend>(x, gelu_function(approximate));
}

template <class Backend>
Tensor swiglu_clamped(const Tensor& x, double limit, double alpha) {
  check(limit > 0.0, "limit: expected a positive number, got ", limit);
  const auto alpha32 = static_cast<float>(alpha);
  check(std::isfinite(alpha32), "alpha: expected a finite float32, got ", alpha);
  return gated<Backend>(x, ActivationParams::Function::kSwigluClamped, static_cast<float>(limit),
                        alpha32);
}

template <class Backend>
void register_activation(torch::stable::detail::StableLibrary& m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu<Backend>));
  m.impl("silu_mul", TORCH_BOX(&silu_mul<Backend>));
  m.impl("silu_mul_quant", TORCH_BOX(&silu_mul_quant<Backend>));
  m.impl("gelu_mul", TORCH_BOX(&gelu_mul<Backend>));
  m.impl("swiglu_clamped", TORCH_BOX(&swiglu_clamped<Backend>));
}

}  // namespace ridgeline::bindings
