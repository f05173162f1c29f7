#pragma once
#include <cmath>

#include "bindings/backend.h"
#include "kernels/attention_workspace.h"

namespace ridgeline::bindings {

constexpr std::int64_t kNoWindow = 0;

/// What the three attention ops share.
struct AttentionOptions {
  const OptionalTensor& sinks;
  bool causal;
  double scale;
  std::int64_t window;
  double softcap;
};

/// Head vectors: last dimension contiguous, and in 16-byte pieces on CUDA.
template <class Backend>
void expect_heads(const Tensor& tensor, const char* name) {
  Expect(tensor, name).last_dim_contiguous();
  if (!Backend::kIsCuda || tensor.numel() == 0) return;
  Expect(tensor, name).aligned(tensor.element_size() == 1 ? 8 : 16);
}

inline void set_options(AttentionParams& p, const Tensor& q, const AttentionOptions& options) {
  check(options.window >= kNoWindow, "window: expected a positive number of keys or none, got ",
        options.window);
  check(options.window == kNoWindow || options.causal,
        "window: expected none where causal is false (a window ends at the query), got ",
        options.window);
  check(options.softcap >= 0.0 && std::isfinite(options.softcap),
        "softcap: expected 0 (none) or a positive number, got ", options.softcap);
  p.scale = static_cast<float>(options.scale);
  p.softcap = static_cast<float>(options.softcap);
  p.causal = options.causal;
  // A window of all keys hides nothing; the limit keeps positions in 32 bits.
  p.window = options.window >= p.max_k ? 0 : static_cast<std::int32_t>(options.window);
  if (!options.sinks) return;
  Expect(*options.sinks, "sinks").on_device_of(q, "q").shape({p.heads}).contiguous();
  Expect(*options.sinks, "sinks").dtype({p.dtype, DType::kFloat32});
  p.sinks = options.sinks->data_ptr();
  p.sinks_dtype = dtype_of(*options.sinks, "sinks");
}

/// Heads and head size of q [..., Hq, D], k and v [..., Hkv, D].
template <class Backend>
AttentionParams heads_of(const Tensor& q, const Tensor& k, const Tensor& v, const char* k_name,
                         const char* v_name, bool quantised_queries = false) {
  if (quantised_queries) Expect(q, "q").dtype(DType::kFloat8E4M3);
  if (!quantised_queries) Expect(q, "q").float_dtype();
  Expect(k, k_name).on_device_of(q, "q");
  Expect(v, v_name).on_device_of(q, "q").same_shape(k, k_name).dtype(dtype_of(k, k_name));
  expect_heads<Backend>(q, "q");
  expect_heads<Backend>(k, k_name);
  expect_heads<Backend>(v, v_name);
  AttentionParams p{};
  p.dtype = quantised_queries ? DType::kBFloat16 : dtype_of(q, "q");
  p.kv_dtype = dtype_of(k, k_name);
  p.heads = checked_int32(q.size(q.dim() - 2), "q: heads");
  p.kv_heads = checked_int32(k.size(k.dim() - 2), "k: heads");
  p.head_dim = checked_int32(q.size(q.dim() - 1), "q: head size");
  check(p.head_dim > 0 && p.head_dim <= 256 && p.head_dim % 8 == 0,
        "q: expected a head size that is a multiple of 8 from 8 to 256, got ", p.head_dim);
  check(k.size(k.dim() - 1) == p.head_dim, k_name, ": expected the head size of q, ", p.head_dim,
        ", got ", k.size(k.dim() - 1));
  check(p.kv_heads > 0 && p.heads % p.kv_heads == 0, "q: expected a multiple of the ", p.kv_heads,
        " heads of ", k_name, ", got ", p.heads, " heads");
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  return p;
}

inline const std::int32_t* int32_data(const Tensor& tensor, const char* name, const Tensor& q,
                                      std::int64_t size) {
  Expect(tensor, name).on_device_of(q, "q").dtype(DType::kInt32).shape({size}).contiguous();
  return static_cast<const std::int32_t*>(tensor.data_ptr());
}

template <class Backend>
void attend([[maybe_unused]] const Backend& on, const AttentionParams& p) {
  if constexpr (Backend::kIsCuda) {
    ridgeline::attention(p, on.stream());
  } else {
    cpu::attention(p);
  }
}

/// Allocates out and lse, and the workspace unless one is given, and runs `launch`.
template <class Backend, class Launch>
std::tuple<Tensor, Tensor> run_attention(AttentionParams& p, const Tensor& q,
                                         const std::vector<std::int64_t>& lse_sizes,
                                         const OptionalTensor& workspace, const Launch& launch) {
  const Tensor out = empty_on_device_of(q, sizes_of(q), p.dtype);
  const Tensor lse = empty_on_device_of(q, lse_sizes, DType::kFloat32);
  p.out = out.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  if constexpr (Backend::kIsCuda) {
    const std::int64_t needed = attention_config::workspace_bytes(p, p.q_scale != nullptr);
    OptionalTensor space = workspace;
    if (space) {
      Expect(*space, "workspace")
          .on_device_of(q, "q")
          .dtype(DType::kUInt8)
          .contiguous()
          .aligned(16);
      check(space->numel() >= needed, "workspace: expected at least ", needed, " bytes, got ",
            space->numel());
    } else if (needed > 0) {
      space = empty_on_device_of(q, {needed}, DType::kUInt8);
    }
    p.workspace = needed > 0 ? space->data_ptr() : nullptr;
  }
  launch();
  return {out, lse};
}

template <class Backend>
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const OptionalTensor& sinks, bool causal, double scale,
                                     std::int64_t window, double softcap) {
  const Backend on(q, "q");
  Expect(q, "q").dim(4).float_dtype();
  Expect(k, "k").dim(4).dtype(dtype_of(q, "q")).shape({q.size(0), kAny, kAny, kAny});
  AttentionParams p = heads_of<Backend>(q, k, v, "k", "v");
  p.batch = checked_int32(q.size(0), "q: batch");
  p.max_q = checked_int32(q.size(1), "q: length");
  p.max_k = checked_int32(k.size(1), "k: length");
  p.stride_q_batch = q.stride(0), p.stride_q_row = q.stride(1), p.stride_q_head = q.stride(2);
  p.stride_k_batch = k.stride(0), p.stride_k_row = k.stride(1), p.stride_k_head = k.stride(2);
  p.stride_v_batch = v.stride(0), p.stride_v_row = v.stride(1), p.stride_v_head = v.stride(2);
  p.stride_out_batch = std::int64_t{p.max_q} * p.heads * p.head_dim;
  p.stride_lse_head = p.max_q;
  p.stride_lse_batch = std::int64_t{p.heads} * p.max_q;
  set_options(p, q, {sinks, causal, scale, window, softcap});
  return run_attention<Backend>(p, q, {p.batch, p.heads, p.max_q}, {}, [&] { attend(on, p); });
}

template <class Backend>
std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_q, const Tensor& cu_k,
                                            std::int64_t max_q, std::int64_t max_k,
                                            const OptionalTensor& sinks, bool causal, double scale,
                                            std::int64_t window, double softcap) {
  const Backend on(q, "q");
  Expect(q, "q").dim(3).float_dtype();
  Expect(k, "k").dim(3).dtype(dtype_of(q, "q"));
  Expect(cu_q, "cu_q").dim(1);
  check(cu_q.size(0) >= 1, "cu_q: expected one offset more than sequences, got shape [0]");
  AttentionParams p = heads_of<Backend>(q, k, v, "k", "v");
  p.batch = checked_int32(cu_q.size(0) - 1, "cu_q: sequences");
  p.max_q = checked_int32(max_q, "max_q");
  p.max_k = checked_int32(max_k, "max_k");
  p.total_q = q.size(0);
  p.total_k = k.size(0);
  p.cu_q = int32_data(cu_q, "cu_q", q, p.batch + 1);
  p.cu_k = int32_data(cu_k, "cu_k", q, p.batch + 1);
  p.stride_q_row = q.stride(0), p.stride_q_head = q.stride(1);
  p.stride_k_row = k.stride(0), p.stride_k_head = k.stride(1);
  p.stride_v_row = v.stride(0), p.stride_v_head = v.stride(1);
  p.stride_lse_head = p.total_q;
  set_options(p, q, {sinks, causal, scale, window, softcap});
  return run_attention<Backend>(p, q, {p.heads, p.total_q}, {}, [&] { attend(on, p); });
}

/// One scale tensor a quantised cache, none otherwise.
inline void expect_kv_scale(const OptionalTensor& scale, const char* name, const Tensor& cache,
                            const Tensor& q, bool quantised) {
  check(scale.has_value() == quantised, name, ": expected ", quantised ? "a tensor" : "none",
        " beside a cache of ", name_of(dtype_of(cache, "k_cache")), ", got ",
        quantised ? "none" : "a tensor");
  if (!quantised) return;
  Expect(*scale, name)
      .on_device_of(q, "q")
      .dtype(DType::kBFloat16)
      .shape({cache.size(0), cache.size(1), cache.size(2)});
}

/// The paged part of the Params: caches, tables and lengths.
inline void set_cache(AttentionParams& p, const Tensor& q, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& block_tables, const Tensor& seq_lens,
                      const OptionalTensor& k_start) {
  Expect(k_cache, "k_cache").dtype({p.dtype, DType::kFloat8E4M3, DType::kInt8});
  p.num_blocks = checked_int32(k_cache.size(0), "k_cache: blocks");
  p.block_size = checked_int32(k_cache.size(1), "k_cache: block size");
  check(p.block_size >= 16 && p.block_size <= 256 && p.block_size % 16 == 0,
        "k_cache: expected a block size that is a multiple of 16 from 16 to 256, got ",
        p.block_size);
  check(p.num_blocks > 0, "k_cache: expected at least block 0, got none");
  Expect(block_tables, "block_tables").on_device_of(q, "q").dtype(DType::kInt32)
      .shape({p.batch, kAny}).last_dim_contiguous();
  p.block_tables = static_cast<const std::int32_t*>(block_tables.data_ptr());
  p.stride_table = block_tables.stride(0);
  p.max_blocks = checked_int32(block_tables.size(1), "block_tables: blocks");
  p.max_k = checked_int32(std::int64_t{p.max_blocks} * p.block_size, "block_tables: keys");
  p.seq_lens = int32_data(seq_lens, "seq_lens", q, p.batch);
  if (k_start) p.k_start = int32_data(*k_start, "k_start", q, p.batch);
  p.stride_k_batch = k_cache.stride(0), p.stride_k_row = k_cache.stride(1);
  p.stride_k_head = k_cache.stride(2);
  p.stride_v_batch = v_cache.stride(0), p.stride_v_row = v_cache.stride(1);
  p.stride_v_head = v_cache.stride(2);
}

inline void set_kv_scales(AttentionParams& p, const Tensor& q, const Tensor& k_cache,
                          const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const bool quantised = p.kv_dtype != p.dtype;
  expect_kv_scale(k_scale, "k_scale", k_cache, q, quantised);
  expect_kv_scale(v_scale, "v_scale", k_cache, q, quantised);
  if (!quantised) return;
  p.k_scale = k_scale->data_ptr();
  p.stride_ks_batch = k_scale->stride(0), p.stride_ks_row = k_scale->stride(1);
  p.stride_ks_head = k_scale->stride(2);
  p.v_scale = v_scale->data_ptr();
  p.stride_vs_batch = v_scale->stride(0), p.stride_vs_row = v_scale->stride(1);
  p.stride_vs_head = v_scale->stride(2);
}

/// What paged attention has beside q, the caches, tables and lengths. max_q 0: not known, and then
/// bounded by the rows of q.
struct PagedOptions {
  const OptionalTensor &cu_q, &k_start, &q_scale, &k_scale, &v_scale;
  std::int64_t max_q, shared_blocks;
  bool batch_invariant;
  const OptionalTensor& counters;
  AttentionOptions shared;
};

template <class Backend>
AttentionParams paged_params(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& block_tables, const Tensor& seq_lens,
                             const PagedOptions& options) {
  const auto& [cu_q, k_start, q_scale, k_scale, v_scale, max_q, shared_blocks, batch_invariant,
               counters, shared] = options;
  Expect(q, "q").dim(3);
  Expect(k_cache, "k_cache").dim(4);
  Expect(seq_lens, "seq_lens").dim(1);
  AttentionParams p =
      heads_of<Backend>(q, k_cache, v_cache, "k_cache", "v_cache", q_scale.has_value());
  p.batch = checked_int32(seq_lens.size(0), "seq_lens: sequences");
  const std::int64_t rows = q.size(0);
  if (cu_q) {
    p.cu_q = int32_data(*cu_q, "cu_q", q, p.batch + 1);
    p.total_q = rows;
    p.max_q = checked_int32(max_q > 0 ? std::min(max_q, rows) : rows, "max_q");
    p.stride_q_row = q.stride(0);
  } else {
    check(rows == p.batch, "q: expected one row a sequence where cu_q is none, ", p.batch,
          ", got ", rows);
    check(max_q <= 1, "max_q: expected 1 where cu_q is none, got ", max_q);
    p.max_q = 1;
    p.stride_q_batch = q.stride(0);
    p.stride_out_batch = std::int64_t{p.heads} * p.head_dim;
    p.stride_lse_batch = 1;
  }
  p.stride_q_head = q.stride(1);
  if (q_scale) {
    Expect(*q_scale, "q_scale").on_device_of(q, "q").dtype(DType::kFloat32).shape({rows, p.heads});
    p.q_scale = static_cast<const float*>(q_scale->data_ptr());
    p.stride_qs_row = q_scale->stride(0), p.stride_qs_head = q_scale->stride(1);
  }
  p.stride_lse_head = rows;
  set_cache(p, q, k_cache, v_cache, block_tables, seq_lens, k_start);
  set_kv_scales(p, q, k_cache, k_scale, v_scale);
  set_options(p, q, shared);
  check(shared_blocks >= 0 && shared_blocks <= p.max_blocks, "shared_blocks: expected 0 to ",
        p.max_blocks, ", got ", shared_blocks);
  p.shared_keys = static_cast<std::int32_t>(shared_blocks) * p.block_size;
  p.batch_invariant = batch_invariant;
  if (counters) {
    Expect(*counters, "counters").on_device_of(q, "q").dtype(DType::kInt32).contiguous();
    const std::int64_t needed = std::int64_t{p.batch} * p.kv_heads + 2;
    check(counters->numel() >= needed, "counters: expected at least ", needed,
          " (sequences x KV heads + 2), got ", counters->numel());
    p.counters = static_cast<std::int32_t*>(counters->data_ptr());
  }
  return p;
}

template <class Backend>
std::tuple<Tensor, Tensor> paged_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
    const Tensor& seq_lens, const OptionalTensor& cu_q, std::int64_t max_q,
    const OptionalTensor& k_start, const OptionalTensor& q_scale, const OptionalTensor& k_scale,
    const OptionalTensor& v_scale, const OptionalTensor& sinks, bool causal, double scale,
    std::int64_t window, double softcap, std::int64_t shared_blocks, bool batch_invariant,
    const OptionalTensor& workspace, const OptionalTensor& counters) {
  const Backend on(q, "q");
  AttentionParams p = paged_params<Backend>(
      q, k_cache, v_cache, block_tables, seq_lens,
      {cu_q, k_start, q_scale, k_scale, v_scale, max_q, shared_blocks, batch_invariant, counters,
       {sinks, causal, scale, window, softcap}});
  return run_attention<Backend>(p, q, {p.heads, q.size(0)}, workspace, [&] { attend(on, p); });
}

template <class Backend>
std::tuple<Tensor, Tensor> merge_attention(const Tensor& out_a, const Tensor& lse_a,
                                           const Tensor& out_b, const Tensor& lse_b) {
  const Backend on(out_a, "out_a");
  Expect(out_a, "out_a").float_dtype().contiguous();
  check(out_a.dim() == 3 || out_a.dim() == 4, "out_a: expected 3 or 4 dimensions, got shape ",
        to_text(out_a.sizes()));
  Expect(out_b, "out_b").on_device_of(out_a, "out_a").dtype(dtype_of(out_a, "out_a"));
  Expect(out_b, "out_b").same_shape(out_a, "out_a").contiguous();
  expect_heads<Backend>(out_a, "out_a");
  expect_heads<Backend>(out_b, "out_b");
  const bool packed = out_a.dim() == 3;
  const std::int64_t batch = packed ? 1 : out_a.size(0);
  const std::int64_t rows = out_a.size(packed ? 0 : 1), heads = out_a.size(packed ? 1 : 2);
  const Tensor* sides[] = {&lse_a, &lse_b};
  const char* names[] = {"lse_a", "lse_b"};
  for (int i = 0; i < 2; ++i) {
    Expect(*sides[i], names[i]).on_device_of(out_a, "out_a").dtype(DType::kFloat32).contiguous();
    if (packed) Expect(*sides[i], names[i]).shape({heads, rows});
    if (!packed) Expect(*sides[i], names[i]).shape({batch, heads, rows});
  }
  const Tensor out = empty_contiguous_like(out_a);
  const Tensor lse = empty_contiguous_like(lse_a);
  const MergeAttentionParams p{
      .dtype = dtype_of(out_a, "out_a"),
      .batch = batch,
      .rows = rows,
      .heads = checked_int32(heads, "out_a: heads"),
      .head_dim = checked_int32(out_a.size(out_a.dim() - 1), "out_a: head size"),
      .out_a = out_a.data_ptr(),
      .lse_a = static_cast<const float*>(lse_a.data_ptr()),
      .out_b = out_b.data_ptr(),
      .lse_b = static_cast<const float*>(lse_b.data_ptr()),
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr())};
  if constexpr (Backend::kIsCuda) {
    ridgeline::merge_attention(p, on.stream());
  } else {
    cpu::merge_attention(p);
  }
  return {out, lse};
}

template <class Backend>
void register_attention(torch::stable::detail::StableLibrary& m) {
  m.impl("attention", TORCH_BOX(&attention<Backend>));
  m.impl("attention_varlen", TORCH_BOX(&attention_varlen<Backend>));
  m.impl("paged_attention", TORCH_BOX(&paged_attention<Backend>));
  m.impl("merge_attention", TORCH_BOX(&merge_attention<Backend>));
}

}  // namespace ridgeline::bindings
