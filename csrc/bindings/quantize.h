#pragma once
#include <string>
#include <tuple>

#include "bindings/backend.h"
#include "common/math.h"
#include "kernels/quantize.h"

namespace ridgeline::bindings {

inline QuantizeParams::Granularity granularity_of(const std::string& name) {
  using enum QuantizeParams::Granularity;
  if (name == "tensor") return kTensor;
  if (name == "row") return kRow;
  if (name == "group") return kGroup;
  if (name == "group256") return kWideGroup;
  if (name == "block") return kBlock;
  check(false, "granularity: expected 'tensor', 'row', 'group', 'group256' or 'block', got '", name,
        "'");
  return kTensor;
}

/// tensor [1], row [..., 1], group [..., ceil(cols / 128 or 256)],
/// block [ceil(rows / 128), ceil(cols / 128)].
inline std::vector<std::int64_t> scale_sizes(const Tensor& x, const Rows& rows,
                                             QuantizeParams::Granularity granularity) {
  using enum QuantizeParams::Granularity;
  constexpr std::int64_t kExtent = QuantizeParams::kExtent;
  if (granularity == kTensor) return {1};
  if (granularity == kBlock) {
    Expect(x, "x").dim(2);
    return {ceil_div(rows.count, kExtent), ceil_div(rows.cols, kExtent)};
  }
  std::vector<std::int64_t> sizes = sizes_of(x);
  const std::int64_t extent = granularity == kGroup ? kExtent : QuantizeParams::kWideExtent;
  sizes.back() = granularity == kRow ? 1 : ceil_div(rows.cols, extent);
  return sizes;
}

template <class Backend>
std::tuple<Tensor, Tensor> quantize(const Tensor& x, QuantizeParams::Granularity granularity,
                                    DType codes) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype();
  const Rows rows = rows_of(x, "x");
  const std::vector<std::int64_t> sizes = scale_sizes(x, rows, granularity);
  const Tensor q = empty_on_device_of(x, sizes_of(x), codes);
  const Tensor scale = empty_on_device_of(x, sizes, DType::kFloat32);
  const bool has_partials =
      Backend::kIsCuda && granularity == QuantizeParams::Granularity::kTensor;
  const Tensor partials = empty_on_device_of(
      x, {has_partials ? QuantizeParams::kWorkspace : 0}, DType::kFloat32);
  const QuantizeParams params{.dtype = dtype_of(x, "x"),
                              .granularity = granularity,
                              .codes = codes,
                              .rows = rows.count,
                              .cols = checked_int32(rows.cols, "x: columns"),
                              .x = x.data_ptr(),
                              .stride_x_row = rows.stride,
                              .q = q.data_ptr(),
                              .scale = static_cast<float*>(scale.data_ptr()),
                              .partials = static_cast<float*>(partials.data_ptr())};
  if constexpr (Backend::kIsCuda) {
    ridgeline::quantize(params, on.stream());
  } else {
    cpu::quantize(params);
  }
  return {q, scale};
}

template <class Backend>
std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const std::string& granularity) {
  return quantize<Backend>(x, granularity_of(granularity), DType::kFloat8E4M3);
}

template <class Backend>
std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x) {
  return quantize<Backend>(x, QuantizeParams::Granularity::kRow, DType::kInt8);
}

template <class Backend>
void register_quantize(torch::stable::detail::StableLibrary& m) {
  m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8<Backend>));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8<Backend>));
}

}  // namespace ridgeline::bindings
