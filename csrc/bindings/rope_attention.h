#pragma once
#include "bindings/attention.h"
#include "bindings/kv_cache.h"
#include "kernels/attention_fresh.h"

namespace ridgeline::bindings {

/// Whether rows can be read 16 bytes at a time.
inline bool has_aligned_rows(const Tensor& x) {
  bool aligned = reinterpret_cast<std::uintptr_t>(x.data_ptr()) % 16 == 0;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i)
    aligned &= x.stride(i) * static_cast<std::int64_t>(x.element_size()) % 16 == 0;
  return aligned;
}

/// rope_write_kv, then paged_attention; one kernel where that takes the keys as they are.
template <class Backend>
std::tuple<Tensor, Tensor> rope_paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
    const Tensor& cos_sin, const Tensor& slots, bool interleaved, const Tensor& k_cache,
    const Tensor& v_cache, const Tensor& block_tables, const Tensor& seq_lens,
    const OptionalTensor& cu_q, std::int64_t max_q, const OptionalTensor& k_scale,
    const OptionalTensor& v_scale, const OptionalTensor& sinks, double scale, std::int64_t window,
    double softcap, std::int64_t shared_blocks, bool batch_invariant,
    const OptionalTensor& workspace, const OptionalTensor& counters, bool weights_ready) {
  const Backend on(q, "q");
  KvWriteParams write = kv_write_params(q, "q");
  write.q = heads_view(q, "q", q, "q");
  write.k = heads_view(k, "k", q, "q");
  expect_apart(q, k);
  set_rotation(write, q, positions, cos_sin, interleaved);
  set_cache(write, k, v, k_cache, v_cache, slots, k_scale, v_scale);
  write.table_ready = weights_ready;
  AttentionParams p = paged_params<Backend>(
      q, k_cache, v_cache, block_tables, seq_lens,
      {cu_q, std::nullopt, std::nullopt, k_scale, v_scale, max_q, shared_blocks, batch_invariant,
       counters, {sinks, true, scale, window, softcap}});
  return run_attention<Backend>(p, q, {p.heads, q.size(0)}, workspace, [&] {
    if constexpr (Backend::kIsCuda) {
      const bool fits = weights_ready && !interleaved && write.rotary_dim == p.head_dim &&
                        write.table_dtype == DType::kFloat32 &&
                        write.index_dtype == DType::kInt32 && has_aligned_rows(cos_sin) &&
                        has_aligned_rows(k) && has_aligned_rows(v);
      if (fits && attention_takes_fresh(p)) {
        const FreshKey fresh{.k = k.data_ptr(),
                             .v = v.data_ptr(),
                             .stride_k_head = k.stride(1),
                             .stride_v_head = v.stride(1),
                             .position = static_cast<const std::int32_t*>(positions.data_ptr()),
                             .cos_sin = static_cast<const float*>(cos_sin.data_ptr()),
                             .stride_cos_sin = cos_sin.stride(0),
                             .max_position = cos_sin.size(0),
                             .slot = static_cast<const std::int32_t*>(slots.data_ptr())};
        return attention_of_fresh(p, fresh, on.stream());
      }
    } else {
      cpu::check_attention(p);  // ahead of what the op writes
    }
    run_kv_write(on, write);
    attend(on, p);
  });
}

template <class Backend>
void register_rope_attention(torch::stable::detail::StableLibrary& m) {
  m.impl("rope_paged_attention", TORCH_BOX(&rope_paged_attention<Backend>));
}

}  // namespace ridgeline::bindings
