#pragma once
#include "kernels/gemm_fit.h"
#include "kernels/gemm_grouped_shape.h"

/// What the operands of products of experts allow, by their addresses, strides and formats: the
/// choice of the kernel reads it from a Shape.
namespace ridgeline::gemm_grouped {

inline Shape shape_of(const GroupedGemmParams& params, bool sm90a, std::int32_t sms) {
  using gemm_fit::is_aligned;
  const GemmParams& p = params.gemm;
  const GemmWeight& weight = p.weight;
  const auto x_bytes = static_cast<std::int64_t>(size_of(p.x.dtype));
  const bool x_strides = params.x_rows <= 1 || p.x.stride_row > 0;
  const std::int64_t weight_bytes = weight.format == WeightFormat::kFp8 ? 1 : 2;
  const bool rows_or_scales =
      has_nibbles(weight.format)
          ? is_aligned(weight.scales, 0) && is_aligned(weight.zeros, 0)
          : is_aligned(weight.data, weight.stride_row * weight_bytes);
  return {.M = p.M,
          .x_rows = params.x_rows,
          .experts = params.experts,
          .N = p.N,
          .K = p.K,
          .segments = params.segments,
          .dtype = p.dtype,
          .x_dtype = p.x.dtype,
          .format = weight.format,
          .scale_layout = weight.scale_layout,
          .x_group = p.x.scale_per_group ? p.x.scale_group : 0,
          .group = weight.group,
          .has_zeros = weight.zeros != nullptr,
          .activation = p.activation,
          .gathers = params.rows != nullptr,
          .batch_invariant = p.batch_invariant,
          .sm90a = sm90a,
          .x_aligned = x_strides && is_aligned(p.x.data, p.x.stride_row * x_bytes),
          .weight_aligned = rows_or_scales && is_aligned(weight.data, params.stride_expert),
          .sms = sms};
}

}  // namespace ridgeline::gemm_grouped
