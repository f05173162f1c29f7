#pragma once
#include <algorithm>
#include <limits>
#include <numeric>

#include "device/launch.cuh"
#include "device/ticket.h"
#include "kernels/attention_launch.h"
#include "kernels/attention_sm90.cuh"
#include "kernels/attention_views.cuh"
#include "kernels/attention_workspace.h"

/// Launches of the Hopper prefill kernels: copies, order of the work, queue.
namespace ridgeline::attention_sm90 {

constexpr std::int64_t kCacheBytes = 32 << 20;  // of the L2 cache, for keys and values side by side
constexpr int kSequences = device::kWarpSize;   // side by side at most: one a lane of Order

/// Whose works run side by side: as many as the L2 cache holds the keys and values of. Equal works
/// have no tail to fear, and then two works an SM are enough, or four of 192 queries: more would
/// first ask memory for all keys at once and later for none. H200, full, 1024 keys, head size 128:
/// 504 TFLOP/s with as many as fit, 524 with two; 192 queries, 2k, 4k, 8k and 16k keys, us with two
/// and with four: 528, 981, 1898, 3708 and 515, 966, 1877, 3687. Causal, with 4k, 8k and 16k keys,
/// twice as many as fit are better: 497, 908, 1762 and 485, 889, 1726.
template <class Tile>
void set_order(const AttentionParams& p, Launch& launch) {
  const std::int64_t keys = p.cu_k ? ceil_div<std::int64_t>(p.total_k, p.batch) : p.max_k;
  const std::int64_t bytes = 4 * std::max<std::int64_t>(keys, 1) * p.head_dim;  // of one KV head
  const std::int64_t group = p.heads / p.kv_heads;
  const bool doubles = p.causal && Tile::kQueries == 192 && Tile::kSize == 128 && keys >= 4096;
  std::int64_t pairs = std::max<std::int64_t>((doubles ? 2 : 1) * kCacheBytes / bytes, 1);
  if (!p.causal) {
    const std::int64_t works = group * ceil_div(p.max_q, Tile::kQueries);
    const std::int64_t together = (Tile::kQueries > 128 ? 4 : 2) * device::multiprocessors();
    pairs = std::min(pairs, ceil_div(together, works));
  }
  const std::int64_t batches = p.cu_q ? kSequences : ceil_div<std::int64_t>(pairs, p.kv_heads);
  launch.batches_together =
      static_cast<int>(std::min<std::int64_t>({batches, p.batch, kSequences}));
  launch.heads_together = static_cast<int>(
      group * std::clamp<std::int64_t>(pairs / launch.batches_together, 1, p.kv_heads));
}

inline device::TensorView queries_of(const AttentionParams& p) {
  const bool packed = p.cu_q != nullptr;
  return {.dtype = p.q_scale ? DType::kFloat8E4M3 : p.dtype,
          .data = p.q,
          .sizes = {p.head_dim, packed ? p.total_q : p.max_q, p.heads, packed ? 1 : p.batch},
          .strides = {p.stride_q_row, p.stride_q_head, p.stride_q_batch}};
}

/// All but the queries and the order of the works.
template <class Tile>
Launch launch_of(const AttentionParams& p) {
  Launch launch{.attention = p};
  launch.box_rows = p.block_tables ? std::gcd(p.block_size, Tile::kKeys) : Tile::kKeys;
  launch.boxes = Tile::kKeys / launch.box_rows * Tile::kParts;
  launch.blocks = p.block_tables ? p.num_blocks : std::numeric_limits<int>::max();
  launch.block_size = device::Divisor::of(std::max(p.block_size, 1));
  launch.k = device::swizzled_map(attention_launch::keys_of(p), launch.box_rows, Tile::kColumns);
  launch.v = device::swizzled_map(attention_launch::values_of(p), launch.box_rows, Tile::kColumns);
  void* queue = static_cast<char*>(p.workspace) + config::queue_offset(p);
  launch.queue = static_cast<Queue*>(queue);
  launch.ticket = device::new_ticket();
  return launch;
}

/// Grid: at most one block an SM.
template <auto kKernel, class Tile>
void launch_works(const AttentionParams& p, Stream stream) {
  Launch launch = launch_of<Tile>(p);
  launch.q = device::swizzled_map(queries_of(p), Tile::kQueries, Tile::kColumns);
  set_order<Tile>(p, launch);
  const std::int64_t works = std::int64_t{p.heads} * p.batch * ceil_div(p.max_q, Tile::kQueries);
  checked_int32(works, "attention: tiles of queries");  // and so their numbers
  const auto blocks = std::min<std::int64_t>(works, device::multiprocessors());
  device::launch_chained<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads),
                                  sizeof(Shared<Tile>), stream, launch, "attention");
}

}  // namespace ridgeline::attention_sm90
