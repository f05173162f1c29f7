#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <array>
#include <string>

#include "bindings/gemm_params.h"
#include "bindings/norm.h"
#include "bindings/quantize.h"

namespace ridgeline::bindings {

/// x weight^T + bias by the BLAS that comes with PyTorch, the CPU's counterpart of cuBLASLt.
inline Tensor torch_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

/// The CPU's linear by the BLAS, with norm and epilogue around it. The BLAS's bits depend on the
/// alignment of x: rows that a fresh allocation would not give are copied into one.
inline Tensor linear_by_blas(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                             const GemmParams& params, const Tensor& y) {
  constexpr std::uintptr_t kAlignment = 64;  // of PyTorch's CPU allocations
  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data_ptr()) % kAlignment == 0;
  Tensor input = x;
  if (params.x.norm_weight || !aligned || !x.is_contiguous()) {
    input = empty_contiguous_like(x);
    cpu::gemm_prepare(params, input.data_ptr());
  }
  const Tensor product = torch_linear(input, weight, bias);
  if (params.activation == Activation::kNone && !params.residual) return product;
  Expect(product, "the product").contiguous();
  cpu::gemm_finish(params, product.data_ptr());
  return y;
}

template <class Backend>
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const std::string& activation, const OptionalTensor& residual,
              const OptionalTensor& norm_weight, double norm_eps, bool batch_invariant,
              bool weights_ready) {
  const Backend on(x, "x");
  const GemmOptions options{bias,     activation,      residual,     norm_weight,
                            norm_eps, batch_invariant, weights_ready};
  Expect(x, "x").float_dtype();
  const DType dtype = dtype_of(x, "x");
  Expect(weight, "weight").dim(2).dtype(dtype).on_device_of(x, "x").last_dim_contiguous();
  const std::int64_t N = weight.size(0), K = weight.size(1);
  Tensor y;
  GemmParams params =
      gemm_params(x, gemm_input(x, {}, K, dtype, options), dtype, N, K, options, y);
  params.weight = {.format = WeightFormat::kDense,
                   .data = weight.data_ptr(),
                   .stride_row = N > 1 ? weight.stride(0) : K};
  if constexpr (!Backend::kIsCuda) {
    if (!batch_invariant && params.M > 0 && N > 0 && K > 0)
      return linear_by_blas(x, weight, bias, params, y);
  }
  run_gemm(on, x, params);
  return y;
}

/// The output's dtype of a quantised op: half precision on CUDA, float32 on the CPU too.
template <class Backend>
void expect_quantized_dtype(DType dtype, const char* name) {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  check(half || (!Backend::kIsCuda && dtype == DType::kFloat32), name,
        ": expected dtype float16 or bfloat16", Backend::kIsCuda ? "" : " or float32", ", got ",
        name_of(dtype));
}

/// The CPU checks what the GPU cannot read without waiting: an index outside reads x[0] there.
inline void check_perm(const Tensor& perm, std::int64_t K) {
  const auto* values = static_cast<const std::int32_t*>(perm.data_ptr());
  for (std::int64_t k = 0; k < K; ++k)
    check(values[k] >= 0 && values[k] < K, "weight.perm: expected columns in [0, ", K, "), got ",
          values[k], " at ", k);
}

template <class Backend>
Tensor int4_linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const OptionalTensor& zeros, const OptionalTensor& perm, std::int64_t N,
                   std::int64_t K, std::int64_t group, const OptionalTensor& bias,
                   const OptionalTensor& x_scale, const std::string& activation,
                   const OptionalTensor& residual, const OptionalTensor& norm_weight,
                   double norm_eps, bool batch_invariant, bool weights_ready, bool x_made_ahead) {
  const Backend on(x, "x");
  const GemmOptions options{.bias = bias,
                            .activation = activation,
                            .residual = residual,
                            .norm_weight = norm_weight,
                            .norm_eps = norm_eps,
                            .batch_invariant = batch_invariant,
                            .weights_ready = weights_ready,
                            .made_ahead = x_made_ahead};
  const DType dtype = dtype_of(scales, "weight.scales");
  expect_quantized_dtype<Backend>(dtype, "weight.scales");
  check(N >= 0 && K >= 0, "weight: expected N, K >= 0, got ", N, ", ", K);
  check(group > 0 && (group % 32 == 0 || group >= K),
        "weight.group: expected a multiple of 32, or K = ", K, ", got ", group);
  const std::int64_t groups = ceil_div(K, group);
  Expect(packed, "weight.packed").dtype(DType::kInt32).on_device_of(x, "x").contiguous();
  Expect(packed, "weight.packed").aligned(16);
  Expect(packed, "weight.packed")
      .shape({ceil_div<std::int64_t>(N, Int4Layout::kRows),
              ceil_div<std::int64_t>(K, Int4Layout::kCols), 32, 4});
  Expect(scales, "weight.scales").on_device_of(x, "x").shape({groups, N}).contiguous();
  Tensor y;
  GemmInput input = gemm_input(x, x_scale, K, dtype, options);
  if (perm) {
    Expect(*perm, "weight.perm").dtype(DType::kInt32).on_device_of(x, "x").shape({K}).contiguous();
    if constexpr (!Backend::kIsCuda) check_perm(*perm, K);
    input.perm = static_cast<const std::int32_t*>(perm->data_ptr());
  }
  GemmParams params = gemm_params(x, input, dtype, N, K, options, y);
  params.weight = {.format = WeightFormat::kInt4,
                   .data = packed.data_ptr(),
                   .scales = scales.data_ptr(),
                   .group = checked_int32(group, "weight.group")};
  if (zeros) {
    Expect(*zeros, "weight.zeros").dtype(DType::kUInt8).on_device_of(x, "x").contiguous();
    Expect(*zeros, "weight.zeros").shape({groups, N});
    params.weight.zeros = static_cast<const std::uint8_t*>(zeros->data_ptr());
  }
  run_gemm(on, x, params);
  return y;
}

inline ScaleLayout scale_layout_of(const Tensor& scale, std::int64_t N, std::int64_t K) {
  const std::int64_t row_blocks = ceil_div<std::int64_t>(N, kScaleBlock);
  const std::int64_t col_blocks = ceil_div<std::int64_t>(K, kScaleBlock);
  if (scale.numel() == 1 && scale.dim() <= 1) return ScaleLayout::kTensor;
  if (scale.size(0) == N && scale.numel() == N) return ScaleLayout::kRow;
  check(scale.dim() == 2 && scale.size(0) == row_blocks && scale.size(1) == col_blocks,
        "weight_scale: expected one value, [", N, "] or [", row_blocks, ", ", col_blocks,
        "] (128 x 128 blocks), got shape ", to_text(scale.sizes()));
  return ScaleLayout::kBlock;
}

inline DType named_dtype(const std::string& name, const char* argument = "out_dtype") {
  if (name == "float32") return DType::kFloat32;
  if (name == "float16") return DType::kFloat16;
  check(name == "bfloat16", argument, ": expected float32, float16 or bfloat16, got ", name);
  return DType::kBFloat16;
}

template <class Backend>
Tensor fp8_product(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                   const OptionalTensor& x_scale, DType dtype, bool quantize_x,
                   const GemmOptions& options) {
  const Backend on(x, "x");
  const bool is_fp8 = dtype_of(x, "x") == DType::kFloat8E4M3;
  expect_quantized_dtype<Backend>(dtype, options.total ? "residual" : is_fp8 ? "out_dtype" : "x");
  Expect(weight, "weight").dim(2).dtype(DType::kFloat8E4M3).on_device_of(x, "x");
  Expect(weight, "weight").last_dim_contiguous();
  Expect(weight_scale, "weight_scale").dtype(DType::kFloat32).on_device_of(x, "x").contiguous();
  const std::int64_t N = weight.size(0), K = weight.size(1);
  Tensor y;
  GemmParams params =
      gemm_params(x, gemm_input(x, x_scale, K, dtype, options), dtype, N, K, options, y);
  params.weight = {.format = WeightFormat::kFp8,
                   .data = weight.data_ptr(),
                   .stride_row = N > 1 ? weight.stride(0) : K,
                   .scales = weight_scale.data_ptr(),
                   .scale_layout = scale_layout_of(weight_scale, N, K)};
  if (quantize_x) {
    check(!is_fp8, "quantize_x: expected False for x of ", name_of(DType::kFloat8E4M3));
    if constexpr (Backend::kIsCuda)
      params.x.to_codes = params.M > 0 && N > 0 && gemm_makes_codes(params);
    if (!params.x.to_codes) {
      const auto [codes, scale] =
          options.norm_weight ? rmsnorm_quant<Backend>(x, *options.norm_weight, options.norm_eps,
                                                       0.0, "fp8", options.weights_ready)
                              : quantize_fp8<Backend>(x, "row");
      const OptionalTensor no_norm;
      const GemmOptions rest{.bias = options.bias,
                             .activation = options.activation,
                             .residual = options.residual,
                             .norm_weight = no_norm,
                             .norm_eps = 0.0,
                             .batch_invariant = options.batch_invariant,
                             .weights_ready = options.weights_ready,
                             .total = options.total,
                             .scale = options.scale,
                             .made_ahead = true};
      return fp8_product<Backend>(codes, weight, weight_scale, scale, dtype, false, rest);
    }
  }
  if (options.total) {
    run_added_gemm(on, x, params);
  } else if (options.scale) {
    run_quantized_gemm(on, x, params);
  } else {
    run_gemm(on, x, params);
  }
  return y;
}

template <class Backend>
Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                  const OptionalTensor& bias, const OptionalTensor& x_scale,
                  const std::string& out_dtype, const std::string& activation,
                  const OptionalTensor& residual, const OptionalTensor& norm_weight,
                  double norm_eps, bool quantize_x, bool batch_invariant, bool weights_ready) {
  const GemmOptions options{bias,     activation,      residual,     norm_weight,
                            norm_eps, batch_invariant, weights_ready};
  return fp8_product<Backend>(x, weight, weight_scale, x_scale, named_dtype(out_dtype), quantize_x,
                              options);
}

template <class Backend>
std::tuple<Tensor, Tensor> fp8_linear_quant(
    const Tensor& x, const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
    const OptionalTensor& x_scale, const std::string& out_dtype, const std::string& activation,
    const OptionalTensor& residual, const OptionalTensor& norm_weight, double norm_eps,
    bool quantize_x, bool batch_invariant, bool weights_ready, const std::string& out_quant) {
  check(out_quant == "fp8_group256", "out_quant: expected None or 'fp8_group256', got '", out_quant,
        "'");
  Tensor scale;
  const GemmOptions options{bias,     activation,      residual,      norm_weight,
                            norm_eps, batch_invariant, weights_ready, nullptr,
                            &scale};
  const Tensor codes = fp8_product<Backend>(x, weight, weight_scale, x_scale,
                                            named_dtype(out_dtype), quantize_x, options);
  return {codes, scale};
}

template <class Backend>
void fp8_linear_add(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                    const Tensor& residual, const OptionalTensor& bias,
                    const OptionalTensor& x_scale, bool quantize_x, bool batch_invariant,
                    bool weights_ready) {
  const OptionalTensor none;
  const std::string no_activation = "none";
  const GemmOptions options{bias, no_activation,   none,          none,
                            0.0,  batch_invariant, weights_ready, &residual};
  fp8_product<Backend>(x, weight, weight_scale, x_scale, dtype_of(residual, "residual"), quantize_x,
                       options);
}

template <class Backend>
Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                   const Tensor& x_scale, const OptionalTensor& bias,
                   const std::string& out_dtype, const std::string& activation,
                   const OptionalTensor& residual, bool batch_invariant, bool weights_ready,
                   bool x_made_ahead) {
  const Backend on(x, "x");
  const OptionalTensor no_norm;
  const GemmOptions options{.bias = bias,
                            .activation = activation,
                            .residual = residual,
                            .norm_weight = no_norm,
                            .norm_eps = 0.0,
                            .batch_invariant = batch_invariant,
                            .weights_ready = weights_ready,
                            .made_ahead = x_made_ahead};
  const DType dtype = named_dtype(out_dtype);
  Expect(x, "x").dtype(DType::kInt8);
  expect_quantized_dtype<Backend>(dtype, "out_dtype");
  Expect(weight, "weight").dim(2).dtype(DType::kInt8).on_device_of(x, "x");
  Expect(weight, "weight").last_dim_contiguous();
  Expect(weight_scale, "weight_scale").dtype(DType::kFloat32).on_device_of(x, "x").contiguous();
  const std::int64_t N = weight.size(0), K = weight.size(1);
  check(K <= kMostColumnsOfInt8, "weight: expected at most ", kMostColumnsOfInt8,
        " columns, whose products of int8 fit int32, got ", K);
  check(weight_scale.numel() == 1 || weight_scale.numel() == N,
        "weight_scale: expected one value or [", N, "], got shape ", to_text(weight_scale.sizes()));
  Tensor y;
  GemmParams params = gemm_params(x, gemm_input(x, x_scale, K, dtype, options, DType::kInt8),
                                  dtype, N, K, options, y);
  params.weight = {.format = WeightFormat::kInt8,
                   .data = weight.data_ptr(),
                   .stride_row = N > 1 ? weight.stride(0) : K,
                   .scales = weight_scale.data_ptr(),
                   .scale_layout =
                       weight_scale.numel() == N ? ScaleLayout::kRow : ScaleLayout::kTensor};
  run_gemm(on, x, params);
  return y;
}

template <class Backend>
void register_gemm(torch::stable::detail::StableLibrary& m) {
  m.impl("linear", TORCH_BOX(&linear<Backend>));
  m.impl("int4_linear", TORCH_BOX(&int4_linear<Backend>));
  m.impl("fp8_linear", TORCH_BOX(&fp8_linear<Backend>));
  m.impl("fp8_linear_quant", TORCH_BOX(&fp8_linear_quant<Backend>));
  m.impl("fp8_linear_add", TORCH_BOX(&fp8_linear_add<Backend>));
  m.impl("int8_linear", TORCH_BOX(&int8_linear<Backend>));
}

}  // namespace ridgeline::bindings
