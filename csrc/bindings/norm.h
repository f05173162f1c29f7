#pragma once
#include "bindings/backend.h"
#include "kernels/norm.h"

namespace ridgeline::bindings {

template <class Backend>
Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, double offset,
               bool weights_ready) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  Expect(weight, "weight").on_device_of(x, "x").shape({rows.cols}).contiguous();
  const Tensor y = empty_contiguous_like(x);
  const RmsNormParams params{.dtype = dtype_of(x, "x"),
                             .weight_dtype = dtype_of(weight, "weight"),
                             .rows = rows.count,
                             .cols = checked_int32(rows.cols, "rmsnorm: cols"),
                             .eps = static_cast<float>(eps),
                             .offset = static_cast<float>(offset),
                             .x = x.data_ptr(),
                             .stride_x_row = rows.stride,
                             .residual = nullptr,
                             .stride_residual_row = 0,
                             .weight = weight.data_ptr(),
                             .y = y.data_ptr(),
                             .stride_y_row = rows.cols,
                             .weights_ready = weights_ready};
  if constexpr (Backend::kIsCuda) {
    ridgeline::rmsnorm(params, on.stream());
  } else {
    cpu::rmsnorm(params);
  }
  return y;
}

template <class Backend>
void register_norm(torch::stable::detail::StableLibrary& m) {
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm<Backend>));
}

}  // namespace ridgeline::bindings
