#pragma once
#include "kernels/attention.h"

namespace ridgeline {

/// The last key of a sequence and its value, as the projection leaves them.
struct FreshKey {
  const void* k;  // [Hkv, D] of q's dtype
  const void* v;
  std::int64_t stride_k_head, stride_v_head;  // elements
  const std::int32_t* position;
  const float* cos_sin;  // [max_position, D]: cosines, then sines
  std::int64_t stride_cos_sin, max_position;
  const std::int32_t* slot;  // of the key: block * block_size + offset
};

/// attention() of a sequence whose queries, and last key, are not rotated yet (kernels/kv_cache.h):
/// one kernel rotates them, sees key and value, and leaves them in the cache; q stays as it is. The
/// bits are those of write_kv() and attention(). It takes positions, slots, tables, lengths and
/// older keys for written before the kernels ahead have ended.
///
/// Requires: attention_takes_fresh(params).
void attention_of_fresh(const AttentionParams& params, const FreshKey& fresh, Stream stream);

/// Whether attention() of these would be that kernel's: of one sequence, where a 16-bit cache holds
/// heads of 64 or 128.
bool attention_takes_fresh(const AttentionParams& params);

}  // namespace ridgeline
