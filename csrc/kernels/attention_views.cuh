#pragma once
#include <limits>

#include "device/properties.cuh"
#include "device/tensor_map.cuh"
#include "kernels/attention.h"

/// Keys and values of every layout as the copy engine sees them, and what keeps it from them.
namespace ridgeline::attention_launch {

inline device::TensorView cache_of(const AttentionParams& p, const void* data,
                                   std::int64_t stride_row, std::int64_t stride_head,
                                   std::int64_t stride_batch) {
  const bool paged = p.block_tables != nullptr, packed = p.cu_k != nullptr;
  return {.dtype = p.kv_dtype,
          .data = data,
          .sizes = {p.head_dim, paged ? p.block_size : packed ? p.total_k : p.max_k, p.kv_heads,
                    paged ? p.num_blocks : packed ? 1 : p.batch},
          .strides = {stride_row, stride_head, stride_batch}};
}

inline device::TensorView keys_of(const AttentionParams& p) {
  return cache_of(p, p.k, p.stride_k_row, p.stride_k_head, p.stride_k_batch);
}

inline device::TensorView values_of(const AttentionParams& p) {
  return cache_of(p, p.v, p.stride_v_row, p.stride_v_head, p.stride_v_batch);
}

/// Why no kernel of wgmma and copy engine takes these queries; null: nothing is in the way.
inline const char* obstacle_sm90(const AttentionParams& p, const device::TensorView& queries) {
  if (!device::runs_sm90a()) return "the GPU is no Hopper";
  if (queries.dtype != p.kv_dtype)
    return p.q_scale != nullptr ? "the cache is not fp8" : "the cache is quantised";
  if (!(p.scale > 0.0f && p.scale < std::numeric_limits<float>::infinity()))
    return "the scale is no positive number";
  if (!device::is_mappable(queries) || !device::is_mappable(keys_of(p)) ||
      !device::is_mappable(values_of(p)))
    return "rows of q, k or v do not begin at multiples of 16 bytes";
  return nullptr;
}

}  // namespace ridgeline::attention_launch
