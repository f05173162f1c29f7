#pragma once
#include <string>
#include <vector>

#include "bindings/backend.h"
#include "common/math.h"
#include "kernels/gemm.h"
#include "kernels/quantize.h"

/// What the ops of matrix products share: options, checks, the call.
namespace ridgeline::bindings {

inline Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu_mul") return Activation::kSiluMul;
  if (name == "gelu_mul") return Activation::kGeluMul;
  check(false, "activation: expected None, 'gelu', 'gelu_tanh', 'silu', 'relu', 'silu_mul' or ",
        "'gelu_mul', got '", name, "'");
  return Activation::kNone;
}

/// What follows the product and what precedes it, the same for every weight format.
struct GemmOptions {
  const OptionalTensor& bias;
  const std::string& activation;
  const OptionalTensor& residual;
  const OptionalTensor& norm_weight;
  double norm_eps;
  bool batch_invariant;
  bool weights_ready;
  const Tensor* total = nullptr;  // to which the product is added, instead of a new tensor
  Tensor* scale = nullptr;        // of groups of 256 columns of the output, which is e4m3
  bool made_ahead = false;        // x, by a kernel of this op
};

/// The rows of x and the scale of x in `codes`, of 8 bits; `dtype` is the output's.
inline GemmInput gemm_input(const Tensor& x, const OptionalTensor& x_scale, std::int64_t K,
                            DType dtype, const GemmOptions& options,
                            DType codes = DType::kFloat8E4M3) {
  const Rows rows = rows_of(x, "x");
  check(rows.cols == K, "x: expected a last dimension of ", K, " as weight has, got shape ",
        to_text(x.sizes()));
  GemmInput input{.dtype = dtype_of(x, "x"),
                  .data = x.data_ptr(),
                  .stride_row = rows.stride,
                  .made_ahead = options.made_ahead};
  const bool is_codes = input.dtype == codes, by_groups = codes == DType::kFloat8E4M3;
  check(is_codes || input.dtype == dtype, "x: expected dtype ", name_of(dtype), ", got ",
        name_of(input.dtype));
  check(is_codes == x_scale.has_value(), "x_scale: expected ", is_codes ? "a tensor" : "None",
        " for x of ", name_of(input.dtype), ", got ", x_scale ? "a tensor" : "None");
  if (x_scale) {
    Expect(*x_scale, "x_scale").dtype(DType::kFloat32).on_device_of(x, "x").contiguous();
    const std::int64_t groups = ceil_div<std::int64_t>(K, kScaleBlock), count = x_scale->numel();
    const std::int64_t wide = ceil_div<std::int64_t>(K, kWideGroup);
    const bool per_row = count == rows.count, one = count == 1;
    const auto has = [&](std::int64_t across) {
      return by_groups && !one && !per_row && count == rows.count * across &&
             x_scale->size(x_scale->dim() - 1) == across;
    };
    const bool per_group = has(groups) || has(wide);
    const std::string of_groups = by_groups ? " or [..., " + std::to_string(groups) +
                                                  "] (one a group of 128 columns) or [..., " +
                                                  std::to_string(wide) + "] (of 256)"
                                            : "";
    check(one || per_row || per_group, "x_scale: expected one value, ", rows.count,
          " (one a row of x)", of_groups, ", got shape ", to_text(x_scale->sizes()));
    input.scale = static_cast<const float*>(x_scale->data_ptr());
    input.scale_per_row = per_row && !one;
    input.scale_per_group = per_group;
    if (per_group && !has(groups)) input.scale_group = kWideGroup;
  }
  if (options.norm_weight) {
    const Tensor& norm = *options.norm_weight;
    check(!is_codes, "norm_weight: expected None for x of ", name_of(codes), ", got a tensor");
    Expect(norm, "norm_weight").dtype({dtype, DType::kFloat32}).on_device_of(x, "x").shape({K});
    Expect(norm, "norm_weight").contiguous();
    input.norm_weight = norm.data_ptr();
    input.norm_dtype = dtype_of(norm, "norm_weight");
    input.norm_eps = static_cast<float>(options.norm_eps);
  }
  return input;
}

/// Params without the weight's data, workspace and perm; allocates y, or makes it options.total.
inline GemmParams gemm_params(const Tensor& x, const GemmInput& input, DType dtype, std::int64_t N,
                              std::int64_t K, const GemmOptions& options, Tensor& y) {
  GemmParams params{.dtype = dtype,
                    .M = rows_of(x, "x").count,
                    .N = checked_int32(N, "weight: rows"),
                    .K = checked_int32(K, "weight: columns"),
                    .x = input,
                    .activation = activation_of(options.activation),
                    .batch_invariant = options.batch_invariant,
                    .weights_ready = options.weights_ready};
  check(!is_gated(params.activation) || N % 2 == 0, "weight: expected an even number of rows for ",
        "activation '", options.activation, "', got ", N);
  std::vector<std::int64_t> sizes = sizes_of(x);
  sizes.back() = params.out_cols();
  if (options.total) {
    y = *options.total;
    Expect(y, "residual").dtype(dtype).on_device_of(x, "x").contiguous();
    check(sizes_of(y) == sizes, "residual: expected shape ", to_text(sizes), ", got ",
          to_text(y.sizes()));
  } else {
    y = empty_on_device_of(x, sizes, options.scale ? DType::kFloat8E4M3 : dtype);
  }
  if (options.scale) {
    sizes.back() = ceil_div<std::int64_t>(sizes.back(), kWideGroup);
    *options.scale = empty_on_device_of(x, sizes, DType::kFloat32);
    params.y_scale = static_cast<float*>(options.scale->data_ptr());
  }
  params.y = y.data_ptr();
  if (options.bias) {
    Expect(*options.bias, "bias").dtype(dtype).on_device_of(x, "x").shape({N}).contiguous();
    params.bias = options.bias->data_ptr();
  }
  if (options.residual) {
    const Tensor& residual = *options.residual;
    Expect(residual, "residual").dtype(dtype).on_device_of(x, "x");
    Expect(residual, "residual").same_shape(y, "the output");
    params.residual = residual.data_ptr();
    params.stride_residual = rows_of(residual, "residual").stride;
  }
  return params;
}

/// Allocates the workspace and runs. `on` keeps the device of x current.
template <class Backend>
void run_gemm(const Backend& on, const Tensor& x, GemmParams& params) {
  if (params.M == 0 || params.N == 0) return;
  std::size_t bytes = 0;
  if constexpr (Backend::kIsCuda) {
    bytes = ridgeline::gemm_workspace_bytes(params);
  } else {
    bytes = cpu::gemm_workspace_bytes(params);
  }
  const Tensor workspace =
      empty_on_device_of(x, {static_cast<std::int64_t>(bytes)}, DType::kUInt8);
  params.workspace = workspace.data_ptr();
  if constexpr (Backend::kIsCuda) {
    ridgeline::gemm(params, on.stream());
  } else {
    cpu::gemm(params);
  }
}

/// The same, to be added to y, each rounded: by the product's kernel where it can.
template <class Backend>
void run_added_gemm(const Backend& on, const Tensor& x, GemmParams& params) {
  if constexpr (Backend::kIsCuda) {
    params.adds_to_y = gemm_adds(params);
    if (params.adds_to_y) return run_gemm(on, x, params);
  }
  const Tensor product = empty_on_device_of(x, {params.M, params.N}, params.dtype);
  const GemmParams rest{.dtype = params.dtype,
                        .M = params.M,
                        .N = params.N,
                        .residual = params.y,
                        .stride_residual = params.N,
                        .y = params.y};
  params.y = product.data_ptr();
  run_gemm(on, x, params);
  if constexpr (Backend::kIsCuda) {
    ridgeline::gemm_finish(rest, product.data_ptr(), on.stream());
  } else {
    cpu::gemm_finish(rest, product.data_ptr());
  }
}

/// The same to codes with `y_scale`, by the product's kernel where it can.
template <class Backend>
void run_quantized_gemm(const Backend& on, const Tensor& x, GemmParams& params) {
  if constexpr (Backend::kIsCuda)
    if (gemm_makes_groups(params)) return run_gemm(on, x, params);
  const std::int32_t cols = params.out_cols();
  const Tensor product = empty_on_device_of(x, {params.M, cols}, params.dtype);
  const QuantizeParams rest{.dtype = params.dtype,
                            .granularity = QuantizeParams::Granularity::kWideGroup,
                            .rows = params.M,
                            .cols = cols,
                            .x = product.data_ptr(),
                            .stride_x_row = cols,
                            .q = params.y,
                            .scale = params.y_scale,
                            .partials = nullptr};
  params.y = product.data_ptr();
  params.y_scale = nullptr;
  run_gemm(on, x, params);
  if constexpr (Backend::kIsCuda) {
    ridgeline::quantize(rest, on.stream());
  } else {
    cpu::quantize(rest);
  }
}

}  // namespace ridgeline::bindings
