#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "cpu/float8.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "kernels/kv_cache.h"

namespace ridgeline::cpu {
namespace {

std::int64_t index_at(const void* indices, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? static_cast<const std::int64_t*>(indices)[i]
                                : static_cast<const std::int32_t*>(indices)[i];
}

void check_indices(const KvWriteParams& params) {
  for (std::int64_t t = 0; t < params.tokens; ++t) {
    if (params.rotary_dim > 0) {
      const std::int64_t position = index_at(params.positions, params.index_dtype, t);
      check(position >= 0 && position < params.max_position, "positions: expected values in [0, ",
            params.max_position, "), got ", position, " at ", t);
    }
    if (params.slots != nullptr) {
      const std::int64_t slot = index_at(params.slots, params.index_dtype, t);
      check(slot >= 0 && slot < params.num_slots, "slots: expected values in [0, ",
            params.num_slots, "), got ", slot, " at ", t);
    }
  }
}

template <class T>
T* head_vector(const HeadsView& view, std::int64_t token, int head) {
  return static_cast<T*>(view.data) + token * view.stride_token + head * view.stride_head;
}

/// The cosines and sines of one token in fp32.
struct Angles {
  float cosine[kMaxKvHeadDim / 2], sine[kMaxKvHeadDim / 2];

  template <class C>
  void load(const KvWriteParams& params, std::int64_t token) {
    const std::int64_t position = index_at(params.positions, params.index_dtype, token);
    const C* row = static_cast<const C*>(params.cos_sin) + position * params.stride_cos_sin;
    const int half = params.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
      cosine[i] = static_cast<float>(row[i]);
      sine[i] = static_cast<float>(row[half + i]);
    }
  }
};

/// y = x rotated; y may be x.
template <class T>
void rotate(const T* x, T* y, const Angles& angles, const KvWriteParams& params) {
  const int half = params.rotary_dim / 2;
  const int step = params.interleaved ? 2 : 1, other = params.interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float a = static_cast<float>(x[i * step]);
    const float b = static_cast<float>(x[i * step + other]);
    y[i * step] = static_cast<T>(rotated_first(a, b, angles.cosine[i], angles.sine[i]));
    y[i * step + other] = static_cast<T>(rotated_second(a, b, angles.cosine[i], angles.sine[i]));
  }
  if (x != y) std::copy(x + params.rotary_dim, x + params.head_dim, y + params.rotary_dim);
}

/// The scale as it is stored; its value as it is used is the float of it.
template <class T>
BFloat16 scale_of(const T* x, int count, float largest_code) {
  std::uint32_t largest = 0;  // as bits, NaN is above infinity and infinity above all else
  for (int i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(std::fabs(static_cast<float>(x[i]))));
  return BFloat16(std::bit_cast<float>(largest) / largest_code);
}

std::int8_t float_to_int8(float value) {
  if (std::isnan(value)) return 0;  // its scale is not finite and marks the whole vector
  return static_cast<std::int8_t>(std::nearbyint(std::clamp(value, -127.0f, 127.0f)));
}

template <class T>
void store_vector(const T* x, const KvWriteParams& params, const CacheView& cache,
                  std::int64_t slot, int head) {
  const std::int64_t block = slot / params.block_size, offset = slot % params.block_size;
  const std::int64_t at =
      block * cache.stride_block + offset * cache.stride_slot + head * cache.stride_head;
  if (cache.scale == nullptr) {
    std::copy(x, x + params.head_dim, static_cast<T*>(cache.data) + at);
    return;
  }
  const bool fp8 = params.cache_dtype == DType::kFloat8E4M3;
  const BFloat16 stored = scale_of(x, params.head_dim, fp8 ? kMaxE4M3 : 127.0f);
  static_cast<BFloat16*>(cache.scale)[block * cache.scale_stride_block +
                                      offset * cache.scale_stride_slot +
                                      head * cache.scale_stride_head] = stored;
  const float scale = static_cast<float>(stored);
  auto* codes = static_cast<std::uint8_t*>(cache.data) + at;
  for (int i = 0; i < params.head_dim; ++i) {
    const float value = scale == 0.0f ? 0.0f : static_cast<float>(x[i]) / scale;
    codes[i] = fp8 ? float_to_e4m3(value) : static_cast<std::uint8_t>(float_to_int8(value));
  }
}

template <class T, class C>
void write_token(const KvWriteParams& params, std::int64_t token) {
  Angles angles;
  if (params.rotary_dim > 0) angles.load<C>(params, token);
  for (int head = 0; head < params.q.heads; ++head) {
    T* x = head_vector<T>(params.q, token, head);
    rotate(x, x, angles, params);
  }
  if (params.slots == nullptr) {
    for (int head = 0; head < params.k.heads; ++head) {
      T* x = head_vector<T>(params.k, token, head);
      rotate(x, x, angles, params);
    }
    return;
  }
  const std::int64_t slot = index_at(params.slots, params.index_dtype, token);
  T rotated[kMaxKvHeadDim];
  for (int head = 0; head < params.k.heads; ++head) {
    const T* x = head_vector<T>(params.k, token, head);
    if (params.rotary_dim > 0) {
      rotate(x, rotated, angles, params);
      x = rotated;
    }
    store_vector(x, params, params.k_cache, slot, head);
    store_vector(head_vector<T>(params.v, token, head), params, params.v_cache, slot, head);
  }
}

}  // namespace

void write_kv(const KvWriteParams& params) {
  check_indices(params);
  const std::int64_t cost =
      std::int64_t{params.q.heads + params.k.heads + params.v.heads} * params.head_dim;
  dispatch_float(params.dtype, [&](auto type) {
    dispatch_float(params.table_dtype, [&](auto table_type) {
      using T = typename decltype(type)::type;
      using C = typename decltype(table_type)::type;
      parallel_for_each(params.tokens, cost,
                        [&](std::int64_t token) { write_token<T, C>(params, token); });
    });
  });
}

namespace {

void check_pairs(const CopyBlocksParams& params) {
  std::unordered_set<std::int32_t> sources, destinations;
  for (std::int64_t i = 0; i < params.pairs; ++i) {
    const std::int32_t source = params.pair[2 * i], destination = params.pair[2 * i + 1];
    for (const std::int32_t block : {source, destination})
      check(block >= 0 && block < params.num_blocks, "pairs: expected blocks in [0, ",
            params.num_blocks, "), got ", block, " in pair ", i);
    if (destination == 0) continue;
    sources.insert(source);
    check(destinations.insert(destination).second, "pairs: expected each destination once, got ",
          destination, " again in pair ", i);
  }
  for (const std::int32_t block : destinations)
    check(!sources.contains(block), "pairs: expected no destination among the sources, got ", block,
          " as both");
}

void copy_block(const BlockCopy& copy, std::int64_t source, std::int64_t destination) {
  for (std::int64_t outer = 0; outer < copy.outer; ++outer)
    for (std::int64_t inner = 0; inner < copy.inner; ++inner) {
      char* base = copy.data + outer * copy.stride_outer + inner * copy.stride_inner;
      std::memcpy(base + destination * copy.stride_block, base + source * copy.stride_block,
                  static_cast<std::size_t>(copy.row_bytes));
    }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& params) {
  check_pairs(params);
  const BlockCopy& first = params.tensors[0];
  const std::int64_t cost = std::int64_t{first.outer} * first.inner * first.row_bytes / 8;
  parallel_for_each(params.pairs, cost, [&](std::int64_t i) {
    const std::int32_t destination = params.pair[2 * i + 1];
    if (destination == 0) return;
    for (const BlockCopy& copy : params.tensors)
      if (copy.data != nullptr) copy_block(copy, params.pair[2 * i], destination);
  });
}

}  // namespace ridgeline::cpu
