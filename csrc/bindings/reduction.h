#pragma once
#include <string>

#include "bindings/backend.h"
#include "kernels/reduction.h"

namespace ridgeline::bindings {

inline RowReduceParams::Op row_reduce_op_of(const std::string& name) {
  using enum RowReduceParams::Op;
  if (name == "sum") return kSum;
  if (name == "mean") return kMean;
  if (name == "max") return kMax;
  if (name == "min") return kMin;
  if (name == "argmax") return kArgmax;
  if (name == "logsumexp") return kLogSumExp;
  check(false, "op: expected 'sum', 'mean', 'max', 'min', 'argmax' or 'logsumexp', got '", name,
        "'");
  return kSum;
}

template <class Backend>
Tensor row_reduce(const Tensor& x, const std::string& op_name) {
  using enum RowReduceParams::Op;
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const RowReduceParams::Op op = row_reduce_op_of(op_name);
  const bool has_identity = op == kSum || op == kMean || op == kLogSumExp;
  check(has_identity || rows.cols > 0, "x: expected at least one column for op '", op_name,
        "', got shape ", to_text(x.sizes()));
  std::vector<std::int64_t> sizes = sizes_of(x);
  sizes.pop_back();
  const DType dtype = dtype_of(x, "x");
  const Tensor y = empty_on_device_of(x, sizes, op == kArgmax ? DType::kInt64 : dtype);
  const RowReduceParams params{.dtype = dtype,
                               .op = op,
                               .rows = rows.count,
                               .cols = checked_int32(rows.cols, "x: columns"),
                               .x = x.data_ptr(),
                               .stride_x_row = rows.stride,
                               .y = y.data_ptr()};
  if constexpr (Backend::kIsCuda) {
    ridgeline::row_reduce(params, on.stream());
  } else {
    cpu::row_reduce(params);
  }
  return y;
}

template <class Backend>
Tensor softmax(const Tensor& x) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const Tensor y = empty_contiguous_like(x);
  const SoftmaxParams params{.dtype = dtype_of(x, "x"),
                             .rows = rows.count,
                             .cols = checked_int32(rows.cols, "x: columns"),
                             .x = x.data_ptr(),
                             .stride_x_row = rows.stride,
                             .y = y.data_ptr()};
  if constexpr (Backend::kIsCuda) {
    ridgeline::softmax(params, on.stream());
  } else {
    cpu::softmax(params);
  }
  return y;
}

template <class Backend>
void register_reduction(torch::stable::detail::StableLibrary& m) {
  m.impl("row_reduce", TORCH_BOX(&row_reduce<Backend>));
  m.impl("softmax", TORCH_BOX(&softmax<Backend>));
}

}  // namespace ridgeline::bindings
