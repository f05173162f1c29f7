#pragma once
#include <algorithm>
#include <tuple>

#include "bindings/backend.h"
#include "kernels/routing.h"

namespace ridgeline::bindings {

/// What says the order of choices, new.
struct OrderTensors {
  Tensor offsets, rows, places;

  OrderTensors(const Tensor& like, std::int64_t tokens, std::int64_t experts,
               std::int64_t per_token)
      : offsets(empty_on_device_of(like, {experts + 1}, DType::kInt32)),
        rows(empty_on_device_of(like, {tokens * per_token}, DType::kInt32)),
        places(empty_on_device_of(like, {tokens, per_token}, DType::kInt32)) {}

  ExpertOrder order() const {
    return {.tokens = checked_int32(places.size(0), "tokens"),
            .experts = checked_int32(offsets.size(0) - 1, "experts"),
            .per_token = checked_int32(places.size(1), "per_token"),
            .offsets = static_cast<std::int32_t*>(offsets.data_ptr()),
            .rows = static_cast<std::int32_t*>(rows.data_ptr()),
            .places = static_cast<std::int32_t*>(places.data_ptr()),
            .workspace = nullptr};
  }
};

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> route_experts(const Tensor& logits,
                                                         std::int64_t per_token, bool normalized) {
  const Backend on(logits, "logits");
  Expect(logits, "logits").float_dtype().dim(2).last_dim_contiguous();
  const std::int64_t tokens = logits.size(0), experts = logits.size(1);
  check(experts >= 1 && experts <= kMaxRoutedExperts, "logits: expected 1 to ", kMaxRoutedExperts,
        " experts, got shape ", to_text(logits.sizes()));
  check(tokens <= kMaxRoutedTokens, "logits: expected at most ", kMaxRoutedTokens,
        " tokens, got shape ", to_text(logits.sizes()));
  const auto most = std::min<std::int64_t>(experts, kMaxPerToken);
  check(per_token >= 1 && per_token <= most, "per_token: expected 1 to ", most, " of ", experts,
        " experts, got ", per_token);
  checked_int32(tokens * per_token, "logits: tokens times per_token");
  const Tensor weights = empty_on_device_of(logits, {tokens, per_token}, DType::kFloat32);
  const OrderTensors out(logits, tokens, experts, per_token);
  RouteParams params{.dtype = dtype_of(logits, "logits"),
                     .normalized = normalized,
                     .logits = logits.data_ptr(),
                     .stride_logits = logits.stride(0),
                     .weights = static_cast<float*>(weights.data_ptr()),
                     .order = out.order()};
  if constexpr (Backend::kIsCuda) {
    const auto bytes = static_cast<std::int64_t>(route_experts_workspace_bytes(params));
    const Tensor workspace = empty_on_device_of(logits, {bytes}, DType::kUInt8);
    params.order.workspace = workspace.data_ptr();
    ridgeline::route_experts(params, on.stream());
  } else {
    cpu::route_experts(params);
  }
  return {weights, out.offsets, out.rows, out.places};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> order_experts(const Tensor& chosen, std::int64_t experts) {
  const Backend on(chosen, "chosen");
  Expect(chosen, "chosen").dtype({DType::kInt32, DType::kInt64}).dim(2);
  check(chosen.numel() <= kMaxOrderedChoices, "chosen: expected at most ", kMaxOrderedChoices,
        " choices, got shape ", to_text(chosen.sizes()));
  check(experts >= 1 && experts <= kMaxRoutedExperts, "experts: expected 1 to ", kMaxRoutedExperts,
        ", got ", experts);
  const OrderTensors out(chosen, chosen.size(0), experts, chosen.size(1));
  OrderParams params{.dtype = dtype_of(chosen, "chosen"),
                     .chosen = chosen.data_ptr(),
                     .stride_token = chosen.stride(0),
                     .stride_choice = chosen.stride(1),
                     .order = out.order()};
  if constexpr (Backend::kIsCuda) {
    const auto bytes = static_cast<std::int64_t>(order_experts_workspace_bytes(params));
    const Tensor workspace = empty_on_device_of(chosen, {bytes}, DType::kUInt8);
    params.order.workspace = workspace.data_ptr();
    ridgeline::order_experts(params, on.stream());
  } else {
    cpu::order_experts(params);
  }
  return {out.offsets, out.rows, out.places};
}

template <class Backend>
Tensor combine_experts(const Tensor& x, const Tensor& places, const Tensor& weights) {
  const Backend on(x, "x");
  Expect(x, "x").float_dtype().dim(2).last_dim_contiguous();
  Expect(places, "places").dtype(DType::kInt32).on_device_of(x, "x").dim(2).contiguous();
  Expect(weights, "weights")
      .dtype(DType::kFloat32)
      .on_device_of(x, "x")
      .same_shape(places, "places")
      .contiguous();
  check(x.size(0) > 0 || places.numel() == 0, "x: expected at least one row, got shape ",
        to_text(x.sizes()));
  const DType dtype = dtype_of(x, "x");
  const Tensor y = empty_on_device_of(x, {places.size(0), x.size(1)}, dtype);
  const CombineParams params{.dtype = dtype,
                             .tokens = checked_int32(places.size(0), "places: tokens"),
                             .per_token = checked_int32(places.size(1), "places: columns"),
                             .width = x.size(1),
                             .x = x.data_ptr(),
                             .rows = x.size(0),
                             .stride_x_row = x.stride(0),
                             .places = static_cast<const std::int32_t*>(places.data_ptr()),
                             .weights = static_cast<const float*>(weights.data_ptr()),
                             .y = y.data_ptr()};
  if constexpr (Backend::kIsCuda) {
    ridgeline::combine_experts(params, on.stream());
  } else {
    cpu::combine_experts(params);
  }
  return y;
}

template <class Backend>
void register_routing(torch::stable::detail::StableLibrary& m) {
  m.impl("route_experts", TORCH_BOX(&route_experts<Backend>));
  m.impl("order_experts", TORCH_BOX(&order_experts<Backend>));
  m.impl("combine_experts", TORCH_BOX(&combine_experts<Backend>));
}

}  // namespace ridgeline::bindings
