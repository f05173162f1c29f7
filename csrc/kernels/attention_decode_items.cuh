#pragma once
#include "kernels/attention_decode_sm90.cuh"

/// How the keys of a launch's sequences become the items of the Hopper decode kernel.
namespace ridgeline::attention_decode {

template <class Tile>
__device__ __forceinline__ int row_blocks(int rows) {
  return ceil_div(rows, Tile::kRows);
}

/// The keys that a sequence's queries see, from `begin`, a multiple of kKeyTile, on. They are cut
/// into leaves of `leaf` keys, a function of the sequence and of the heads alone, and a row is its
/// leaves joined by pairs, then pairs of pairs, and so on. An item is `keys` of them, leaves by a
/// power of two: so a row's bits do not know how many items it was.
struct Cut {
  std::int32_t begin, end, leaf, keys, splits;
};

/// What they see.
__device__ __forceinline__ config::KeyRange range_of(const AttentionParams& p,
                                                     const config::Sequence& s) {
  const config::KeyRange first = config::visible_keys(p, s, 0);
  const config::KeyRange last = config::visible_keys(p, s, s.q_len - 1);
  return {.begin = first.begin / config::kKeyTile * config::kKeyTile,
          .end = config::lesser(last.end, s.k_len)};
}

/// limit: keys of the largest item that is wanted.
template <class Tile>
__device__ __forceinline__ Cut cut_of(const Launch& launch, const config::Sequence& s, int limit) {
  const config::KeyRange range = range_of(launch.attention, s);
  const int span = config::greater(range.end - range.begin, 1);
  const int one = launch.one.divide(span - 1) + 1, half = launch.half.divide(span - 1) + 1;
  const int leaf = span <= config::kDecodeWhole
                       ? span
                       : config::decode_keys(one, half, s.q_len * launch.group_size);
  Cut cut{.begin = range.begin, .end = range.end, .leaf = round_up(leaf, Tile::kKeys)};
  cut.keys = cut.leaf;
#pragma unroll
  for (int level = 0; level < Tile::kLevels; ++level)
    if (cut.keys < span && 2 * cut.keys <= limit) cut.keys *= 2;
  // Exact: the quotient is small, and the correction undoes its rounding.
  cut.splits = static_cast<int>(__fdividef(static_cast<float>(span), static_cast<float>(cut.keys)));
  while (cut.splits * cut.keys < span) ++cut.splits;
  while ((cut.splits - 1) * cut.keys >= span) --cut.splits;
  return cut;
}

/// Runs of rows and keys of the sequence that are one item each; 0: it is not of this kernel.
template <class Tile>
__device__ __forceinline__ int runs_of(const Launch& launch, const config::Sequence& s) {
  if (launch.attention.batch_invariant || !config::is_split(s.q_len, launch.group_size)) return 0;
  return launch.attention.kv_heads * row_blocks<Tile>(s.q_len * launch.group_size);
}

/// How much the sequence brings, in tiles of kKeyTile keys.
template <class Tile>
__device__ __forceinline__ int load_of(const Launch& launch, const config::Sequence& s) {
  const config::KeyRange range = range_of(launch.attention, s);
  return runs_of<Tile>(launch, s) *
         (config::greater(range.end - range.begin, 0) / config::kKeyTile + 1);
}

/// Keys of the largest item wanted, where sequences bring `load` in all: a block's share and an
/// eighth, so that equal sequences are one wave.
__device__ __forceinline__ int item_limit(const Launch& launch, int load) {
  constexpr int kMost = config::kKeyTile * 9 / 8;
  return load / launch.blocks * kMost + load % launch.blocks * kMost / launch.blocks;
}

/// How many items the sequence is; those of a KV head and split are its blocks of rows.
template <class Tile>
__device__ __forceinline__ int items_of(const Launch& launch, const config::Sequence& s,
                                        int limit) {
  const int runs = runs_of<Tile>(launch, s);
  return runs == 0 ? 0 : cut_of<Tile>(launch, s, limit).splits * runs;
}

/// Neighbours are the heads of one split: they share the block table's entries and the scales.
template <class Tile>
__device__ __forceinline__ Item item_of(const Launch& launch, const config::Sequence& sequence,
                                        int limit, int batch, int index) {
  Item item{
      .work = {.sequence = sequence, .batch = batch, .group = launch.group_size}};
  Work& work = item.work;
  work.rows = work.sequence.q_len * work.group;
  const int blocks = row_blocks<Tile>(work.rows), rest = blocks == 1 ? index : index / blocks;
  work.first_row = (index - rest * blocks) * Tile::kRows;
  item.split = launch.kv_heads.divide(rest);
  work.kv_head = rest - item.split * launch.attention.kv_heads;
  const Cut cut = cut_of<Tile>(launch, work.sequence, limit);
  item.leaf = cut.leaf;
  item.splits = cut.splits;
  item.arrivals = cut.splits * blocks;
  item.keys.begin = cut.begin + item.split * cut.keys;
  item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
  return item;
}

/// Keys of the largest item wanted. One warp.
template <class Tile>
__device__ __forceinline__ int find_limit(const Launch& launch) {
  int load = 0;
  for (int b = threadIdx.x % device::kWarpSize; b < launch.sequences; b += device::kWarpSize)
    load += load_of<Tile>(launch,
                          config::sequence_of(launch.attention, launch.first_sequence + b));
  return item_limit(
      launch, device::from_lane(device::warp_inclusive_sum(load), device::kWarpSize - 1));
}

/// first_items[b]: the number of the first item of sequence b. One warp.
template <class Tile>
__device__ __forceinline__ void number_items(const Launch& launch, int limit, int* first_items) {
  const int lane = threadIdx.x % device::kWarpSize;
  int before = 0;
  for (int first = 0; first < launch.sequences; first += device::kWarpSize) {
    const int b = first + lane;
    int count = 0;
    if (b < launch.sequences)
      count = items_of<Tile>(
          launch, config::sequence_of(launch.attention, launch.first_sequence + b), limit);
    const int sum = before + device::warp_inclusive_sum(count);
    if (b < launch.sequences) first_items[b + 1] = sum;
    before = device::from_lane(sum, device::kWarpSize - 1);
  }
  if (lane == 0) first_items[0] = 0;
  __syncwarp();  // the sums are there
}

}  // namespace ridgeline::attention_decode
