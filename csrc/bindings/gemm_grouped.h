#pragma once
#include <string>
#include <tuple>

#include "bindings/gemm.h"
#include "kernels/gemm_grouped.h"

namespace ridgeline::bindings {

/// What products of experts take beside their operands, the same for every weight format.
struct GroupedOptions {
  const Tensor& offsets;
  const OptionalTensor& rows;
  const OptionalTensor& bias;
  const std::string& activation;
  bool batch_invariant;
};

/// The experts' weights: how many, of [N, K], and how far apart.
struct GroupedWeight {
  std::int64_t experts, N, K;
  std::int64_t stride_expert;  // bytes
  std::int64_t stride_scales = 0;  // elements
  GemmWeight first;
};

/// Weights with scales of blocks meet x with scales of groups of columns, others x of rows.
inline void scale_groups(GemmInput& x, const Tensor& scale, std::int64_t rows,
                         const GemmWeight& weight) {
  const bool blocks = weight.scale_layout == ScaleLayout::kBlock;
  // Of up to 128 columns a group is a row.
  x.scale_per_group |= blocks && scale.dim() == 2 && scale.size(0) == rows && scale.size(1) == 1;
  if (x.scale_per_group) x.scale_per_row = false;
  check(x.scale_per_group == blocks, "x_scale: expected ",
        blocks ? "one a group of columns of x for a weight_scale of blocks"
               : "one value or one a row of x",
        ", got shape ", to_text(scale.sizes()));
}

inline GroupedGemmParams grouped_params(const Tensor& x, DType dtype, const OptionalTensor& x_scale,
                                        const GroupedWeight& weight,
                                        const GroupedOptions& options) {
  Expect(x, "x").dim(2).last_dim_contiguous();
  Expect(options.offsets, "offsets").dtype(DType::kInt32).on_device_of(x, "x").contiguous();
  const auto [experts, N, K, stride_expert, stride_scales, first] = weight;
  const OptionalTensor none;
  GemmOptions plain{.bias = none,
                    .activation = options.activation,
                    .residual = none,
                    .norm_weight = none,
                    .norm_eps = 0.0,
                    .batch_invariant = false,
                    .weights_ready = false};
  GroupedGemmParams params{.experts = checked_int32(experts, "weight: experts"),
                           .stride_expert = stride_expert,
                           .stride_scales = stride_scales,
                           .offsets = static_cast<const std::int32_t*>(options.offsets.data_ptr()),
                           .x_rows = x.size(0)};
  Expect(options.offsets, "offsets").shape({experts + 1});
  std::int64_t count = x.size(0);
  if (options.rows) {
    const Tensor& rows = *options.rows;
    Expect(rows, "rows").dim(1).dtype(DType::kInt32).on_device_of(x, "x").contiguous();
    params.rows = static_cast<const std::int32_t*>(rows.data_ptr());
    count = rows.size(0);
  }
  params.gemm = {.dtype = dtype,
                 .M = checked_int32(count, "rows"),
                 .N = checked_int32(N, "weight: rows"),
                 .K = checked_int32(K, "weight: columns"),
                 .x = gemm_input(x, x_scale, K, dtype, plain),
                 .weight = first,
                 .activation = activation_of(options.activation),
                 .batch_invariant = options.batch_invariant};
  if (x_scale) scale_groups(params.gemm.x, *x_scale, x.size(0), params.gemm.weight);
  check(!is_gated(params.gemm.activation) || N % 2 == 0, "weight: expected an even number of rows ",
        "for activation '", options.activation, "', got ", N);
  if (options.bias) {
    const Tensor& bias = *options.bias;
    Expect(bias, "bias").dtype(dtype).on_device_of(x, "x").shape({experts, N}).contiguous();
    params.gemm.bias = bias.data_ptr();
  }
  return params;
}

/// Allocates the workspace and runs. `on` keeps the device of x current.
template <class Backend>
void run_grouped_gemm(const Backend& on, const Tensor& x, GroupedGemmParams& params) {
  GemmParams& p = params.gemm;
  if (p.M == 0 || p.N == 0) return;
  if constexpr (Backend::kIsCuda) {
    Expect(x, "x").aligned(16);
    const int vector = p.x.dtype == DType::kFloat8E4M3 ? 16 : 8;
    check(p.K % vector == 0, "x: expected a number of columns divisible by ", vector, ", got ",
          p.K);
    const Tensor workspace = empty_on_device_of(
        x, {static_cast<std::int64_t>(grouped_gemm_workspace_bytes(params))}, DType::kUInt8);
    p.workspace = workspace.data_ptr();
    ridgeline::grouped_gemm(params, on.stream());
  } else {
    cpu::grouped_gemm(params);
  }
}

/// Allocates y and runs.
template <class Backend>
Tensor run_grouped(const Backend& on, const Tensor& x, GroupedGemmParams& params) {
  GemmParams& p = params.gemm;
  const Tensor y = empty_on_device_of(x, {p.M, p.out_cols()}, p.dtype);
  p.y = y.data_ptr();
  run_grouped_gemm(on, x, params);
  return y;
}

/// The same to codes and their scales, by the product's kernel where it can.
template <class Backend>
std::tuple<Tensor, Tensor> run_quantized_grouped(const Backend& on, const Tensor& x,
                                                 GroupedGemmParams& params) {
  GemmParams& p = params.gemm;
  const std::int64_t cols = p.out_cols();
  const Tensor codes = empty_on_device_of(x, {p.M, cols}, DType::kFloat8E4M3);
  const Tensor scale =
      empty_on_device_of(x, {p.M, ceil_div<std::int64_t>(cols, kScaleGroup)}, DType::kFloat32);
  auto* scales = static_cast<float*>(scale.data_ptr());
  if constexpr (Backend::kIsCuda) {
    if (p.M > 0 && p.N > 0 && grouped_gemm_makes_codes(params)) {
      p.y = codes.data_ptr();
      p.y_scale = scales;
      run_grouped_gemm(on, x, params);
      return {codes, scale};
    }
  }
  const Tensor y = run_grouped(on, x, params);
  const QuantizeParams quantize{.dtype = p.dtype,
                                .granularity = QuantizeParams::Granularity::kGroup,
                                .rows = p.M,
                                .cols = p.out_cols(),
                                .x = y.data_ptr(),
                                .stride_x_row = cols,
                                .q = codes.data_ptr(),
                                .scale = scales,
                                .partials = nullptr};
  if constexpr (Backend::kIsCuda) {
    ridgeline::quantize(quantize, on.stream());
  } else {
    cpu::quantize(quantize);
  }
  return {codes, scale};
}

template <class Backend>
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      const OptionalTensor& rows, const OptionalTensor& bias,
                      const std::string& activation, bool batch_invariant) {
  const Backend on(x, "x");
  const DType dtype = dtype_of(x, "x");
  expect_quantized_dtype<Backend>(dtype, "x");
  Expect(weight, "weight").dim(3).dtype(dtype).on_device_of(x, "x").last_dim_contiguous();
  if constexpr (Backend::kIsCuda) Expect(weight, "weight").aligned(16);
  const std::int64_t experts = weight.size(0), N = weight.size(1), K = weight.size(2);
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  GroupedGemmParams params = grouped_params(
      x, dtype, {},
      {.experts = experts,
       .N = N,
       .K = K,
       .stride_expert = (experts > 1 ? weight.stride(0) : N * K) * element,
       .stride_scales = 0,
       .first = {.data = weight.data_ptr(), .stride_row = N > 1 ? weight.stride(1) : K}},
      {offsets, rows, bias, activation, batch_invariant});
  return run_grouped(on, x, params);
}

template <class Backend>
GroupedGemmParams grouped_fp8_params(const Tensor& x, const Tensor& weight,
                                     const Tensor& weight_scale, const OptionalTensor& x_scale,
                                     const std::string& out_dtype, const GroupedOptions& options) {
  const DType dtype = named_dtype(out_dtype);
  expect_quantized_dtype<Backend>(dtype, x_scale ? "out_dtype" : "x");
  Expect(weight, "weight").dim(3).dtype(DType::kFloat8E4M3).on_device_of(x, "x");
  Expect(weight, "weight").last_dim_contiguous();
  if constexpr (Backend::kIsCuda) Expect(weight, "weight").aligned(16);
  const std::int64_t experts = weight.size(0), N = weight.size(1), K = weight.size(2);
  Expect(weight_scale, "weight_scale").dtype(DType::kFloat32).on_device_of(x, "x").contiguous();
  ScaleLayout layout = ScaleLayout::kTensor;
  std::int64_t of_expert = 1;
  if (weight_scale.dim() == 3) {
    const std::int64_t down = ceil_div<std::int64_t>(N, kScaleBlock);
    const std::int64_t across = ceil_div<std::int64_t>(K, kScaleBlock);
    Expect(weight_scale, "weight_scale").shape({experts, down, across});
    layout = ScaleLayout::kBlock;
    of_expert = down * across;
  } else if (weight_scale.dim() == 2) {
    Expect(weight_scale, "weight_scale").shape({experts, N});
    layout = ScaleLayout::kRow;
    of_expert = N;
  } else {
    Expect(weight_scale, "weight_scale").shape({experts});
  }
  const GroupedGemmParams params = grouped_params(
      x, dtype, x_scale,
      {.experts = experts,
       .N = N,
       .K = K,
       .stride_expert = experts > 1 ? weight.stride(0) : N * K,
       .stride_scales = of_expert,
       .first = {.format = WeightFormat::kFp8,
                 .data = weight.data_ptr(),
                 .stride_row = N > 1 ? weight.stride(1) : K,
                 .scales = weight_scale.data_ptr(),
                 .scale_layout = layout}},
      options);
  check(!Backend::kIsCuda || K % 16 == 0, "weight: expected columns divisible by 16, got ", K);
  return params;
}

template <class Backend>
Tensor grouped_fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                          const Tensor& offsets, const OptionalTensor& rows,
                          const OptionalTensor& bias, const OptionalTensor& x_scale,
                          const std::string& out_dtype, const std::string& activation,
                          bool batch_invariant) {
  const Backend on(x, "x");
  GroupedGemmParams params =
      grouped_fp8_params<Backend>(x, weight, weight_scale, x_scale, out_dtype,
                                  {offsets, rows, bias, activation, batch_invariant});
  return run_grouped(on, x, params);
}

template <class Backend>
std::tuple<Tensor, Tensor> grouped_fp8_linear_quant(
    const Tensor& x, const Tensor& weight, const Tensor& weight_scale, const Tensor& offsets,
    const OptionalTensor& rows, const OptionalTensor& bias, const OptionalTensor& x_scale,
    const std::string& out_dtype, const std::string& activation, bool batch_invariant,
    const std::string& out_quant) {
  check(out_quant == "fp8_group", "out_quant: expected None or 'fp8_group', got '", out_quant,
        "'");
  const Backend on(x, "x");
  GroupedGemmParams params =
      grouped_fp8_params<Backend>(x, weight, weight_scale, x_scale, out_dtype,
                                  {offsets, rows, bias, activation, batch_invariant});
  return run_quantized_grouped(on, x, params);
}

/// Weights of 4 bits, less scales that are not in their blocks.
inline GroupedWeight packed_experts(const Tensor& x, const Tensor& packed, WeightFormat format,
                                    std::int64_t N, std::int64_t K,
                                    const std::string& activation) {
  check(N >= 0 && K >= 0, "weight: expected N, K >= 0, got ", N, ", ", K);
  const int strip = is_gated(activation_of(activation)) ? 32 : 16;
  check(N % strip == 0, "weight: expected rows divisible by ", strip, ", got ", N);
  const std::int64_t strips = N / Int4Layout::kRows;
  const std::int64_t blocks = ceil_div<std::int64_t>(K, Int4Layout::kCols);
  const bool fp4 = format == WeightFormat::kFp4;
  const Expect expect(packed, "weight.packed");
  expect.dim(fp4 ? 4 : 5).dtype(fp4 ? DType::kUInt8 : DType::kInt32).on_device_of(x, "x");
  expect.contiguous().aligned(16);
  const std::int64_t experts = packed.size(0);
  if (fp4) {
    expect.shape({experts, strips, blocks, Fp4Layout::kBytes});
  } else {
    expect.shape({experts, strips, blocks, 32, 4});
  }
  return {.experts = experts,
          .N = N,
          .K = K,
          .stride_expert = strips * blocks * block_bytes_of(format),
          .first = {.format = format, .data = packed.data_ptr()}};
}

template <class Backend>
Tensor grouped_int4_linear(const Tensor& x, const Tensor& packed, const Tensor& scales,
                           const OptionalTensor& zeros, const Tensor& offsets, std::int64_t N,
                           std::int64_t K, std::int64_t group, const OptionalTensor& rows,
                           const OptionalTensor& bias, const std::string& activation,
                           bool batch_invariant) {
  const Backend on(x, "x");
  check(group > 0 && (group % 32 == 0 || group >= K),
        "weight.group: expected a multiple of 32, or K = ", K, ", got ", group);
  expect_quantized_dtype<Backend>(dtype_of(scales, "weight.scales"), "weight.scales");
  GroupedWeight weight = packed_experts(x, packed, WeightFormat::kInt4, N, K, activation);
  const std::int64_t groups = ceil_div(K, group);
  Expect(scales, "weight.scales").on_device_of(x, "x").shape({weight.experts, groups, N});
  Expect(scales, "weight.scales").contiguous();
  weight.stride_scales = groups * N;
  weight.first.scales = scales.data_ptr();
  weight.first.group = checked_int32(group, "weight.group");
  if (zeros) {
    Expect(*zeros, "weight.zeros").dtype(DType::kUInt8).on_device_of(x, "x").contiguous();
    Expect(*zeros, "weight.zeros").shape({weight.experts, groups, N});
    weight.first.zeros = static_cast<const std::uint8_t*>(zeros->data_ptr());
  }
  GroupedGemmParams params =
      grouped_params(x, dtype_of(scales, "weight.scales"), {}, weight,
                     {offsets, rows, bias, activation, batch_invariant});
  return run_grouped(on, x, params);
}

template <class Backend>
Tensor grouped_fp4_linear(const Tensor& x, const Tensor& packed, const Tensor& offsets,
                          std::int64_t N, std::int64_t K, const OptionalTensor& rows,
                          const OptionalTensor& bias, const std::string& activation,
                          bool batch_invariant) {
  const Backend on(x, "x");
  const DType dtype = dtype_of(x, "x");
  // Float16 lacks most powers of two that weights have.
  check(dtype == DType::kBFloat16 || (!Backend::kIsCuda && dtype == DType::kFloat32),
        "x: expected dtype bfloat16", Backend::kIsCuda ? "" : " or float32", ", got ",
        name_of(dtype));
  check(K % kFp4Group == 0, "weight: expected columns divisible by ", kFp4Group, ", got ", K);
  const GroupedWeight weight = packed_experts(x, packed, WeightFormat::kFp4, N, K, activation);
  GroupedGemmParams params =
      grouped_params(x, dtype, {}, weight, {offsets, rows, bias, activation, batch_invariant});
  return run_grouped(on, x, params);
}

template <class Backend>
void register_grouped_gemm(torch::stable::detail::StableLibrary& m) {
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear<Backend>));
  m.impl("grouped_fp8_linear", TORCH_BOX(&grouped_fp8_linear<Backend>));
  m.impl("grouped_fp8_linear_quant", TORCH_BOX(&grouped_fp8_linear_quant<Backend>));
  m.impl("grouped_int4_linear", TORCH_BOX(&grouped_int4_linear<Backend>));
  m.impl("grouped_fp4_linear", TORCH_BOX(&grouped_fp4_linear<Backend>));
}

}  // namespace ridgeline::bindings
