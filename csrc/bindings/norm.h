#pragma once
#include <string>
#include <tuple>

#include "bindings/backend.h"
#include "bindings/out_quant.h"
#include "kernels/norm.h"

namespace ridgeline::bindings {

/// Checks x and weight and fills what all root-mean-square norms share.
inline RmsNormParams rmsnorm_params(const Tensor& x, const Tensor& weight, double eps,
                                    double offset, bool weights_ready) {
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const DType dtype = dtype_of(x, "x");
  Expect(weight, "weight").on_device_of(x, "x").shape({rows.cols}).contiguous();
  Expect(weight, "weight").dtype({dtype, DType::kFloat32});
  return {.dtype = dtype,
          .weight_dtype = dtype_of(weight, "weight"),
          .y_dtype = dtype,
          .rows = rows.count,
          .cols = checked_int32(rows.cols, "x: columns"),
          .eps = static_cast<float>(eps),
          .offset = static_cast<float>(offset),
          .x = x.data_ptr(),
          .stride_x_row = rows.stride,
          .residual = nullptr,
          .stride_residual_row = 0,
          .weight = weight.data_ptr(),
          .y = nullptr,
          .y_scale = nullptr,
          .by_group = false,
          .weights_ready = weights_ready};
}

inline void set_residual(RmsNormParams& params, const Tensor& x, const Tensor& residual) {
  Expect(residual, "residual").on_device_of(x, "x").same_shape(x, "x").dtype(params.dtype);
  Expect(residual, "residual").written();
  params.residual = residual.data_ptr();
  params.stride_residual_row = rows_of(residual, "residual").stride;
}

template <class Backend>
void call_rmsnorm(const Backend& on, const RmsNormParams& params) {
  if constexpr (Backend::kIsCuda) {
    ridgeline::rmsnorm(params, on.stream());
  } else {
    cpu::rmsnorm(params);
  }
}

template <class Backend>
Tensor finish_rmsnorm(const Backend& on, RmsNormParams params, const Tensor& x) {
  const Tensor y = empty_contiguous_like(x);
  params.y = y.data_ptr();
  call_rmsnorm(on, params);
  return y;
}

/// y of the 8-bit type named, and its scales.
template <class Backend>
std::tuple<Tensor, Tensor> finish_rmsnorm_quant(const Backend& on, RmsNormParams params,
                                                const Tensor& x, const std::string& out_quant) {
  const OutQuant quant(out_quant);
  params.y_dtype = quant.dtype;
  params.by_group = quant.by_group;
  const std::vector<std::int64_t> sizes = sizes_of(x);
  const Tensor y = empty_on_device_of(x, sizes, params.y_dtype);
  const Tensor scale = empty_on_device_of(x, quant.scale_sizes(sizes), DType::kFloat32);
  params.y = y.data_ptr();
  params.y_scale = static_cast<float*>(scale.data_ptr());
  call_rmsnorm(on, params);
  return {y, scale};
}

template <class Backend>
Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, double offset,
               bool weights_ready) {
  const Backend on(x, "x");
  return finish_rmsnorm(on, rmsnorm_params(x, weight, eps, offset, weights_ready), x);
}

template <class Backend>
std::tuple<Tensor, Tensor> rmsnorm_quant(const Tensor& x, const Tensor& weight, double eps,
                                         double offset, const std::string& out_quant,
                                         bool weights_ready) {
  const Backend on(x, "x");
  const RmsNormParams params = rmsnorm_params(x, weight, eps, offset, weights_ready);
  return finish_rmsnorm_quant(on, params, x, out_quant);
}

template <class Backend>
Tensor add_rmsnorm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                   double offset, bool weights_ready) {
  const Backend on(x, "x");
  RmsNormParams params = rmsnorm_params(x, weight, eps, offset, weights_ready);
  set_residual(params, x, residual);
  return finish_rmsnorm(on, params, x);
}

template <class Backend>
std::tuple<Tensor, Tensor> add_rmsnorm_quant(const Tensor& x, const Tensor& residual,
                                             const Tensor& weight, double eps, double offset,
                                             const std::string& out_quant, bool weights_ready) {
  const Backend on(x, "x");
  RmsNormParams params = rmsnorm_params(x, weight, eps, offset, weights_ready);
  set_residual(params, x, residual);
  return finish_rmsnorm_quant(on, params, x, out_quant);
}

template <class Backend>
Tensor layernorm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double eps,
                 LayerNormParams::Activation activation, bool weights_ready) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const DType dtype = dtype_of(x, "x");
  Expect(weight, "weight").on_device_of(x, "x").shape({rows.cols}).contiguous();
  Expect(weight, "weight").dtype({dtype, DType::kFloat32});
  const DType weight_dtype = dtype_of(weight, "weight");
  if (bias) Expect(*bias, "bias").on_device_of(x, "x").shape({rows.cols}).contiguous();
  if (bias) Expect(*bias, "bias").dtype(weight_dtype);
  const Tensor y = empty_contiguous_like(x);
  const LayerNormParams params{.dtype = dtype,
                               .weight_dtype = weight_dtype,
                               .activation = activation,
                               .rows = rows.count,
                               .cols = checked_int32(rows.cols, "x: columns"),
                               .eps = static_cast<float>(eps),
                               .x = x.data_ptr(),
                               .stride_x_row = rows.stride,
                               .weight = weight.data_ptr(),
                               .bias = data_or_null(bias),
                               .y = y.data_ptr(),
                               .weights_ready = weights_ready};
  if constexpr (Backend::kIsCuda) {
    ridgeline::layernorm(params, on.stream());
  } else {
    cpu::layernorm(params);
  }
  return y;
}

template <class Backend>
Tensor plain_layernorm(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       double eps, bool weights_ready) {
  using enum LayerNormParams::Activation;
  return layernorm<Backend>(x, weight, bias, eps, kNone, weights_ready);
}

template <class Backend>
Tensor layernorm_gelu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double eps,
                      const std::string& approximate, bool weights_ready) {
  using enum LayerNormParams::Activation;
  const auto activation = gelu_is_exact(approximate) ? kGelu : kGeluTanh;
  return layernorm<Backend>(x, weight, bias, eps, activation, weights_ready);
}

template <class Backend>
void register_norm(torch::stable::detail::StableLibrary& m) {
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm<Backend>));
  m.impl("rmsnorm_quant", TORCH_BOX(&rmsnorm_quant<Backend>));
  m.impl("add_rmsnorm", TORCH_BOX(&add_rmsnorm<Backend>));
  m.impl("add_rmsnorm_quant", TORCH_BOX(&add_rmsnorm_quant<Backend>));
  m.impl("layernorm", TORCH_BOX(&plain_layernorm<Backend>));
  m.impl("layernorm_gelu", TORCH_BOX(&layernorm_gelu<Backend>));
}

}  // namespace ridgeline::bindings
