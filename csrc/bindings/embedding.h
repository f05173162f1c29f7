#pragma once
#include "bindings/backend.h"
#include "kernels/embed.h"

namespace ridgeline::bindings {

template <class Backend>
Tensor embed(const Tensor& ids, const Tensor& weight, const OptionalTensor& last_tokens,
             double scale, const OptionalTensor& positions,
             const OptionalTensor& position_weight, bool inputs_ready) {
  const Backend on(weight, "weight");
  Expect(weight, "weight")
      .dim(2)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt32})
      .last_dim_contiguous();
  Expect(ids, "ids")
      .on_device_of(weight, "weight")
      .dtype({DType::kInt32, DType::kInt64})
      .dim(1)
      .contiguous();
  EmbedParams params{};
  params.dtype = dtype_of(weight, "weight");
  params.index_dtype = dtype_of(ids, "ids");
  params.tokens = ids.size(0);
  params.width = weight.size(1);
  params.ids = ids.data_ptr();
  params.weight = weight.data_ptr();
  params.rows = weight.size(0);
  params.stride = weight.stride(0);
  params.scale = static_cast<float>(scale);
  check(params.tokens == 0 || params.rows > 0, "weight: expected at least one row, got shape ",
        to_text(weight.sizes()));
  if (last_tokens) {
    Expect(*last_tokens, "last_tokens")
        .on_device_of(weight, "weight")
        .dtype(DType::kInt32)
        .dim(1)
        .contiguous();
    params.last_tokens = static_cast<const std::int32_t*>(last_tokens->data_ptr());
    params.last_count = last_tokens->size(0);
  }
  check(positions.has_value() == position_weight.has_value(),
        "positions, position_weight: expected both or neither, got only ",
        positions ? "positions" : "position_weight");
  const bool is_plain = scale == 1.0 && !positions;
  check(is_plain || params.dtype != DType::kInt32,
        "weight: expected a floating dtype beside a scale or positions, got int32");
  if (positions) {
    Expect(*position_weight, "position_weight")
        .on_device_of(weight, "weight")
        .dtype(params.dtype)
        .shape({kAny, weight.size(1)})
        .last_dim_contiguous();
    check(params.tokens == 0 || position_weight->size(0) > 0,
          "position_weight: expected at least one row, got shape ",
          to_text(position_weight->sizes()));
    Expect(*positions, "positions")
        .on_device_of(weight, "weight")
        .dtype(params.index_dtype)
        .shape({ids.size(0)})
        .contiguous();
    params.positions = positions->data_ptr();
    params.position_weight = position_weight->data_ptr();
    params.position_rows = position_weight->size(0);
    params.position_stride = position_weight->stride(0);
  }
  const Tensor out = empty_on_device_of(weight, {params.tokens, params.width}, params.dtype);
  params.out = out.data_ptr();
  params.inputs_ready = inputs_ready;
  if constexpr (Backend::kIsCuda) {
    ridgeline::embed(params, on.stream());
  } else {
    cpu::embed(params);
  }
  return out;
}

template <class Backend>
void register_embedding(torch::stable::detail::StableLibrary& m) {
  m.impl("embed", TORCH_BOX(&embed<Backend>));
}

}  // namespace ridgeline::bindings
