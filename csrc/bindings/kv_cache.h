#pragma once
#include <algorithm>

#include "bindings/backend.h"
#include "kernels/kv_cache.h"

namespace ridgeline::bindings {

/// [tokens, heads, D] on the device and in the dtype of `like`, any stride of tokens and heads.
inline HeadsView heads_view(const Tensor& x, const char* name, const Tensor& like,
                            const char* like_name) {
  Expect(x, name)
      .on_device_of(like, like_name)
      .dtype(dtype_of(like, like_name))
      .shape({like.size(0), kAny, like.size(2)})
      .last_dim_contiguous();
  return {.data = x.data_ptr(),
          .heads = checked_int32(x.size(1), name),
          .stride_token = x.stride(0),
          .stride_head = x.stride(1)};
}

/// Keys that are the queries would be rotated twice, or while they are read.
inline void expect_apart(const Tensor& q, const Tensor& k) {
  check(q.numel() == 0 || k.numel() == 0 || q.data_ptr() != k.data_ptr(),
        "k: expected other memory than q, which is rotated in place, got the address of q");
}

/// Fills what rotation needs.
inline void set_rotation(KvWriteParams& params, const Tensor& q, const Tensor& positions,
                         const Tensor& cos_sin, bool interleaved) {
  Expect(positions, "positions")
      .on_device_of(q, "q")
      .dtype({DType::kInt32, DType::kInt64})
      .shape({q.size(0)})
      .contiguous();
  Expect(cos_sin, "cos_sin")
      .on_device_of(q, "q")
      .dim(2)
      .dtype({dtype_of(q, "q"), DType::kFloat32})
      .last_dim_contiguous();
  const std::int64_t rotary_dim = cos_sin.size(1);
  check(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= q.size(2) &&
            rotary_dim <= kMaxKvHeadDim,
        "cos_sin: expected an even number of columns in [2, ",
        std::min<std::int64_t>(q.size(2), kMaxKvHeadDim), "], got shape ",
        to_text(cos_sin.sizes()));
  check(q.size(0) == 0 || cos_sin.size(0) > 0, "cos_sin: expected at least one row, got shape ",
        to_text(cos_sin.sizes()));
  Expect(q, "q").written();
  params.index_dtype = dtype_of(positions, "positions");
  params.table_dtype = dtype_of(cos_sin, "cos_sin");
  params.rotary_dim = static_cast<std::int32_t>(rotary_dim);
  params.interleaved = interleaved;
  params.max_position = cos_sin.size(0);
  params.positions = positions.data_ptr();
  params.cos_sin = cos_sin.data_ptr();
  params.stride_cos_sin = cos_sin.stride(0);
}

inline CacheView cache_view(const Tensor& cache, const char* name, const OptionalTensor& scale,
                            const char* scale_name) {
  Expect(cache, name).written();
  CacheView view{.data = cache.data_ptr(),
                 .stride_block = cache.stride(0),
                 .stride_slot = cache.stride(1),
                 .stride_head = cache.stride(2),
                 .scale = nullptr,
                 .scale_stride_block = 0,
                 .scale_stride_slot = 0,
                 .scale_stride_head = 0};
  const DType dtype = dtype_of(cache, name);
  const bool quantised = dtype == DType::kFloat8E4M3 || dtype == DType::kInt8;
  check(scale.has_value() == quantised, scale_name, ": expected ",
        quantised ? "a tensor" : "None", " beside a ", name, " of ", name_of(dtype), ", got ",
        quantised ? "None" : "a tensor");
  if (!quantised) return view;
  Expect(*scale, scale_name)
      .on_device_of(cache, name)
      .dtype(DType::kBFloat16)
      .shape({cache.size(0), cache.size(1), cache.size(2)})
      .written();
  view.scale = scale->data_ptr();
  view.scale_stride_block = scale->stride(0);
  view.scale_stride_slot = scale->stride(1);
  view.scale_stride_head = scale->stride(2);
  return view;
}

/// Fills what writing to the cache needs; `k` is checked already.
inline void set_cache(KvWriteParams& params, const Tensor& k, const Tensor& v,
                      const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
                      const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  params.v = heads_view(v, "v", k, "k");
  Expect(v, "v").same_shape(k, "k");
  check(k.size(2) <= kMaxKvHeadDim, "k: expected at most ", kMaxKvHeadDim,
        " elements a head, got shape ", to_text(k.sizes()));
  Expect(k_cache, "k_cache")
      .on_device_of(k, "k")
      .dtype({dtype_of(k, "k"), DType::kFloat8E4M3, DType::kInt8})
      .shape({kAny, kAny, k.size(1), k.size(2)})
      .last_dim_contiguous();
  Expect(v_cache, "v_cache")
      .on_device_of(k, "k")
      .dtype(dtype_of(k_cache, "k_cache"))
      .same_shape(k_cache, "k_cache")
      .last_dim_contiguous();
  Expect(slots, "slots")
      .on_device_of(k, "k")
      .dtype({DType::kInt32, DType::kInt64})
      .shape({k.size(0)})
      .contiguous();
  check(params.positions == nullptr || params.index_dtype == dtype_of(slots, "slots"),
        "slots: expected the dtype of positions, ", name_of(params.index_dtype), ", got ",
        name_of(dtype_of(slots, "slots")));
  params.index_dtype = dtype_of(slots, "slots");
  params.cache_dtype = dtype_of(k_cache, "k_cache");
  params.slots = slots.data_ptr();
  params.block_size = checked_int32(k_cache.size(1), "k_cache: block size");
  params.num_slots = k_cache.size(0) * k_cache.size(1);
  params.k_cache = cache_view(k_cache, "k_cache", k_scale, "k_scale");
  params.v_cache = cache_view(v_cache, "v_cache", v_scale, "v_scale");
}

/// Parameters that do nothing yet, for head vectors like those of `x`.
inline KvWriteParams kv_write_params(const Tensor& x, const char* name) {
  Expect(x, name).float_dtype().dim(3).last_dim_contiguous();
  KvWriteParams params{};
  params.dtype = params.cache_dtype = params.table_dtype = dtype_of(x, name);
  params.tokens = x.size(0);
  params.head_dim = checked_int32(x.size(2), name);
  return params;
}

template <class Backend>
void run_kv_write(const Backend& on, const KvWriteParams& params) {
  if constexpr (Backend::kIsCuda) {
    ridgeline::write_kv(params, on.stream());
  } else {
    cpu::write_kv(params);
  }
}

template <class Backend>
void rope(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin,
          bool interleaved) {
  const Backend on(q, "q");
  KvWriteParams params = kv_write_params(q, "q");
  params.q = heads_view(q, "q", q, "q");
  params.k = heads_view(k, "k", q, "q");
  expect_apart(q, k);
  Expect(k, "k").written();
  set_rotation(params, q, positions, cos_sin, interleaved);
  run_kv_write(on, params);
}

template <class Backend>
void write_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slots, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Backend on(k, "k");
  KvWriteParams params = kv_write_params(k, "k");
  params.k = heads_view(k, "k", k, "k");
  set_cache(params, k, v, k_cache, v_cache, slots, k_scale, v_scale);
  run_kv_write(on, params);
}

template <class Backend>
void rope_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
                   const Tensor& cos_sin, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& slots, const OptionalTensor& k_scale,
                   const OptionalTensor& v_scale, bool interleaved, bool weights_ready) {
  const Backend on(q, "q");
  KvWriteParams params = kv_write_params(q, "q");
  params.q = heads_view(q, "q", q, "q");
  params.k = heads_view(k, "k", q, "q");
  expect_apart(q, k);
  set_rotation(params, q, positions, cos_sin, interleaved);
  set_cache(params, k, v, k_cache, v_cache, slots, k_scale, v_scale);
  params.table_ready = weights_ready;
  run_kv_write(on, params);
}

/// One block of [num_blocks, ...] as bytes: its dimensions from the smallest stride on, as many as
/// follow each other without a gap in one row, at most two left over.
inline BlockCopy block_copy(const Tensor& cache, const char* name) {
  const auto element = static_cast<std::int64_t>(cache.element_size());
  std::vector<std::array<std::int64_t, 2>> dims;  // stride and size
  for (std::int64_t i = 1; i < cache.dim(); ++i)
    if (cache.size(i) != 1) dims.push_back({cache.stride(i) * element, cache.size(i)});
  std::sort(dims.begin(), dims.end());
  std::int64_t row = element;
  std::size_t merged = 0;
  while (merged < dims.size() && dims[merged][0] == row) row *= dims[merged++][1];
  const auto left = dims.size() - merged;
  check(left <= 2, name, ": expected the last dimension contiguous, got strides ",
        to_text(cache.strides()));
  const std::array<std::int64_t, 2> one{0, 1};
  const auto& inner = left > 0 ? dims[merged] : one;
  const auto& outer = left > 1 ? dims[merged + 1] : one;
  return {.data = static_cast<char*>(cache.data_ptr()),
          .stride_block = cache.stride(0) * element,
          .stride_outer = outer[0],
          .stride_inner = inner[0],
          .outer = checked_int32(outer[1], name),
          .inner = checked_int32(inner[1], name),
          .row_bytes = checked_int32(row, name)};
}

template <class Backend>
void copy_blocks(const Tensor& k_cache, const Tensor& v_cache, const Tensor& pairs,
                 const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Backend on(k_cache, "k_cache");
  Expect(k_cache, "k_cache").dim(4).last_dim_contiguous();
  Expect(v_cache, "v_cache")
      .on_device_of(k_cache, "k_cache")
      .dtype(dtype_of(k_cache, "k_cache"))
      .same_shape(k_cache, "k_cache")
      .last_dim_contiguous();
  Expect(pairs, "pairs")
      .on_device_of(k_cache, "k_cache")
      .dtype(DType::kInt32)
      .shape({kAny, 2})
      .contiguous();
  const CacheView k_view = cache_view(k_cache, "k_cache", k_scale, "k_scale");
  cache_view(v_cache, "v_cache", v_scale, "v_scale");
  CopyBlocksParams params{.pairs = pairs.size(0),
                          .pair = static_cast<const std::int32_t*>(pairs.data_ptr()),
                          .num_blocks = k_cache.size(0),
                          .tensors = {block_copy(k_cache, "k_cache"),
                                      block_copy(v_cache, "v_cache")}};
  if (k_view.scale != nullptr) {
    params.tensors[2] = block_copy(*k_scale, "k_scale");
    params.tensors[3] = block_copy(*v_scale, "v_scale");
  }
  if constexpr (Backend::kIsCuda) {
    ridgeline::copy_blocks(params, on.stream());
  } else {
    cpu::copy_blocks(params);
  }
}

template <class Backend>
void register_kv_cache(torch::stable::detail::StableLibrary& m) {
  m.impl("rope", TORCH_BOX(&rope<Backend>));
  m.impl("write_kv", TORCH_BOX(&write_kv<Backend>));
  m.impl("rope_write_kv", TORCH_BOX(&rope_write_kv<Backend>));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks<Backend>));
}

}  // namespace ridgeline::bindings
