#pragma once
#include <string>

#include "bindings/gemm.h"
#include "kernels/gemm_grouped.h"

namespace ridgeline::bindings {

template <class Backend>
Tensor grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      const OptionalTensor& rows, const OptionalTensor& bias,
                      const std::string& activation) {
  const Backend on(x, "x");
  const DType dtype = dtype_of(x, "x");
  Expect(x, "x").dim(2).last_dim_contiguous();
  expect_quantized_dtype<Backend>(dtype, "x");
  Expect(weight, "weight").dim(3).dtype(dtype).on_device_of(x, "x").last_dim_contiguous();
  const std::int64_t experts = weight.size(0), N = weight.size(1), K = weight.size(2);
  check(x.size(1) == K, "x: expected a last dimension of ", K, " as weight has, got shape ",
        to_text(x.sizes()));
  Expect(offsets, "offsets").dtype(DType::kInt32).on_device_of(x, "x").contiguous();
  Expect(offsets, "offsets").shape({experts + 1});
  const std::int64_t x_stride = x.size(0) > 1 ? x.stride(0) : K;
  GroupedGemmParams params{.experts = checked_int32(experts, "weight: experts"),
                           .stride_expert = experts > 1 ? weight.stride(0) : N * K,
                           .offsets = static_cast<const std::int32_t*>(offsets.data_ptr()),
                           .x_rows = x.size(0)};
  std::int64_t count = x.size(0);
  if (rows) {
    Expect(*rows, "rows").dim(1).dtype(DType::kInt32).on_device_of(x, "x").contiguous();
    params.rows = static_cast<const std::int32_t*>(rows->data_ptr());
    count = rows->size(0);
  }
  params.gemm = {.dtype = dtype,
                 .M = checked_int32(count, "rows"),
                 .N = checked_int32(N, "weight: rows"),
                 .K = checked_int32(K, "weight: columns"),
                 .x = {.dtype = dtype, .data = x.data_ptr(), .stride_row = x_stride},
                 .weight = {.format = WeightFormat::kDense,
                            .data = weight.data_ptr(),
                            .stride_row = N > 1 ? weight.stride(1) : K},
                 .activation = activation_of(activation)};
  check(!is_gated(params.gemm.activation) || N % 2 == 0, "weight: expected an even number of rows ",
        "for activation '", activation, "', got ", N);
  if (bias) {
    Expect(*bias, "bias").dtype(dtype).on_device_of(x, "x").shape({experts, N}).contiguous();
    params.gemm.bias = bias->data_ptr();
  }
  const Tensor y = empty_on_device_of(x, {count, params.gemm.out_cols()}, dtype);
  params.gemm.y = y.data_ptr();
  if (count == 0 || N == 0) return y;
  if constexpr (Backend::kIsCuda) {
    Expect(x, "x").aligned(16);
    Expect(weight, "weight").aligned(16);
    check(K % 8 == 0, "x: expected a number of columns divisible by 8, got ", K);
    ridgeline::grouped_gemm(params, on.stream());
  } else {
    cpu::grouped_gemm(params);
  }
  return y;
}

template <class Backend>
void register_grouped_gemm(torch::stable::detail::StableLibrary& m) {
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear<Backend>));
}

}  // namespace ridgeline::bindings
