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
  std::int32_t begin = 0, end = 0, leaf = 1, keys = 1, splits = 1;
};

/// What they see.
__device__ __forceinline__ config::KeyRange range_of(const AttentionParams& p,
                                                     const config::Sequence& s) {
  const config::KeyRange first = config::visible_keys(p, s, 0);
  const config::KeyRange last = config::visible_keys(p, s, s.q_len - 1);
  return {.begin = first.begin / config::kKeyTile * config::kKeyTile,
          .end = config::lesser(last.end, s.k_len)};
}

/// Cut into leaves, each an item.
template <class Tile>
__device__ __forceinline__ Cut leaves_of(const Launch& launch, const config::Sequence& s) {
  const config::KeyRange range = range_of(launch.attention, s);
  const int span = config::greater(range.end - range.begin, 1);
  const int one = launch.one.divide(span - 1) + 1, half = launch.half.divide(span - 1) + 1;
  const int leaf = span > config::kDecodeWhole
                       ? config::decode_keys(one, half, s.q_len * launch.group_size)
                       : config::lesser(span, Tile::kShortLeaf);
  const int keys = round_up(leaf, Tile::kKeys);
  return {.begin = range.begin, .end = range.end, .leaf = keys, .keys = keys};
}

__device__ __forceinline__ void count_splits(Cut& cut) {
  const int span = config::greater(cut.end - cut.begin, 1);
  // Exact: the quotient is small, and the correction undoes its rounding.
  cut.splits = static_cast<int>(__fdividef(static_cast<float>(span), static_cast<float>(cut.keys)));
  while (cut.splits * cut.keys < span) ++cut.splits;
  while ((cut.splits - 1) * cut.keys >= span) --cut.splits;
}

/// A short sequence is one item, for few leaves are not worth what joining takes: one of more than
/// kFewLeaves keys, where a block's share is at most kSparseKeys, is items of kSparseItem. H200,
/// us: 4 sequences of 512 keys 13.0, so 9.5; 8 13.1 and 11.2; of 384 11.0 and 10.0; but if all are,
/// 8 of 256 8.7 and 9.3, 16 of 384 12.0 and 15.6.
constexpr int kFewLeaves = 256, kSparseKeys = 160;
constexpr int kSparseItem = config::kDecodeWhole / config::kShortItems;

/// limit: keys of the largest item that is wanted.
template <class Tile>
__device__ __forceinline__ void grow(Cut& cut, int limit) {
  const int span = cut.end - cut.begin;
  if (span <= config::kDecodeWhole)
    limit = span > kFewLeaves && limit <= kSparseKeys ? kSparseItem : config::kDecodeWhole;
#pragma unroll
  for (int level = 0; level < Tile::kLevels; ++level)
    if (cut.keys < span && 2 * cut.keys <= limit) cut.keys *= 2;
  count_splits(cut);
}

template <class Tile>
__device__ __forceinline__ Cut cut_of(const Launch& launch, const config::Sequence& s, int limit) {
  Cut cut = leaves_of<Tile>(launch, s);
  grow<Tile>(cut, limit);
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
__device__ __forceinline__ int load_of(int runs, const Cut& cut) {
  return runs * (config::greater(cut.end - cut.begin, 0) / config::kKeyTile + 1);
}

/// Keys of the largest item wanted, where sequences bring `load` in all: a block's share and an
/// eighth, so that equal sequences are one wave.
__device__ __forceinline__ int item_limit(const Launch& launch, int load) {
  constexpr int kMost = config::kKeyTile * 9 / 8;
  const int share = launch.blocks_divisor.divide(load);
  const int rest = load - share * launch.blocks;
  return share * kMost + launch.blocks_divisor.divide(rest * kMost);
}

/// Where a block's share is more keys than this, items are smaller, and smaller yet those of the
/// last sixteenth of the sequences. They are dealt as blocks become free, for some SMs get an
/// eighth more of the memory's bandwidth than others: with an item a block, these end early. H200,
/// 32 sequences of 8k keys: 257 us, and 252 so; 128 of 4k: 519 and 505; 32 of 200 to 8200: 159 and
/// 144. With the last eighth, and so: 32 of 4k 129.2 and 128.2, 16 of 16k 244.9 and 243.2. Not of
/// 8-bit caches, whose bytes cost more to expand than to read: 141 us, and 149 so.
constexpr int kShareKeys = 2048, kDealtKeys = 1024, kLastKeys = 512;

/// Of a share of more keys items are that share by so many: fewer partial rows are stored and
/// joined. H200, us with items of kDealtKeys and so: 128 sequences of 4k keys 496.7 and 491.4, 256
/// of 2k 507 and 490, of 4k 1004 and 965, of 1 to 4096 520 and 509.
constexpr int kDealtItems = 6;

/// Keys of the largest item wanted but of the last sequences; `limit`: as item_limit says.
__device__ __forceinline__ int dealt_keys(int limit) {
  return config::greater(kDealtKeys, limit / kDealtItems);
}

template <class Tile>
__device__ __forceinline__ bool cuts_finer(const Launch& launch, int limit) {
  return !Tile::kQuantised && launch.attention.counters != nullptr && limit > kShareKeys;
}

/// Neighbours are the heads of one split: they share the block table's entries and the scales.
template <class Tile>
__device__ __forceinline__ Item item_of(const Launch& launch, const config::Sequence& sequence,
                                        const Cut& cut, int batch, int index) {
  Item item{
      .work = {.sequence = sequence, .batch = batch, .group = launch.group_size}};
  Work& work = item.work;
  work.rows = work.sequence.q_len * work.group;
  const int blocks = row_blocks<Tile>(work.rows), rest = blocks == 1 ? index : index / blocks;
  work.first_row = (index - rest * blocks) * Tile::kRows;
  item.split = launch.kv_heads.divide(rest);
  work.kv_head = rest - item.split * launch.attention.kv_heads;
  item.leaf = cut.leaf;
  item.splits = cut.splits;
  item.arrivals = cut.splits * blocks;
  item.keys.begin = cut.begin + item.split * cut.keys;
  item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
  return item;
}

/// How the sequences of a launch become items. One warp; the first sequences stay in its lanes'
/// registers, for few are all there are where the time until the first copy counts.
template <class Tile>
struct Plan {
  const Launch& launch;
  std::int32_t* lengths = nullptr;  // that it is for; null: what the sequences are now
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  config::Sequence sequence{};  // number `lane`
  Cut cut{};
  int runs = 0;
  int limit = 0;       // keys of the largest item wanted, ...
  int finer_from = 0;  // ... and kLastKeys from this sequence on
  bool cuts_finer = false, begins_alike = false;
  int all = 0;    // items
  int batch = 0;  // of the item that was taken last

  /// Lengths as they are now. Whether they are the same as before.
  __device__ __forceinline__ bool read_lengths() const {
    bool same = true;
#pragma unroll 4
    for (int b = lane; b < launch.sequences; b += device::kWarpSize) {
      const int length = ptx::load_from_l2(launch.attention.seq_lens + launch.first_sequence + b);
      same &= lengths[b] == length;
      lengths[b] = length;
    }
    __syncwarp();  // the lengths are there
    return !device::any_lane(!same);
  }

  /// Whether a plan of lengths that were read ahead is one of the lengths of now.
  __device__ __forceinline__ bool holds() const {
    const int block = cuts_finer ? first_block() : 0;  // on its way with the lengths
    return read_lengths() && (!cuts_finer || begins_alike == begin_alike(block));
  }

  __device__ __forceinline__ config::Sequence sequence_at(int b) const {
    const AttentionParams& p = launch.attention;
    if (lengths == nullptr) return config::sequence_of(p, launch.first_sequence + b);
    return {.q_len = 1, .k_len = config::lesser(config::greater(lengths[b], 0), p.max_k)};
  }

  __device__ __forceinline__ void cut_sequences() {
    int load = 0;
    for (int b = lane; b < launch.sequences; b += device::kWarpSize) {
      const config::Sequence s = sequence_at(b);
      const Cut leaves = leaves_of<Tile>(launch, s);
      const int runs_of_it = runs_of<Tile>(launch, s);
      load += load_of<Tile>(runs_of_it, leaves);
      if (b == lane) sequence = s, cut = leaves, runs = runs_of_it;
    }
    limit = item_limit(launch, device::group_sum(load, device::kWarpSize));
    finer_from = launch.sequences;
    cuts_finer = attention_decode::cuts_finer<Tile>(launch, limit);
    begins_alike = cuts_finer && begin_alike(first_block());
    if (cuts_finer && !begins_alike) {
      limit = dealt_keys(limit);
      finer_from -= ceil_div(launch.sequences, 16);
    }
    grow<Tile>(cut, limit_of(lane));
  }

  /// Whether most of the first sequences begin with one block. Large items then walk the same keys
  /// side by side, which L2 holds meanwhile. H200, 64 sequences, of 8k keys in common: 377 us in
  /// items of kDealtKeys, and 221 so; 4k: 146 and 119.
  __device__ __forceinline__ bool begin_alike(int block) const {
    if (launch.attention.block_tables == nullptr) return false;
    const int first = device::from_lane(block, 0);
    return 2 * device::count_lanes(lane > 0 && lane < looked() && block == first) >= looked();
  }
  /// That of this lane's sequence.
  __device__ __forceinline__ int first_block() const {
    const AttentionParams& p = launch.attention;
    if (p.block_tables == nullptr) return 0;
    const int b = launch.first_sequence + config::lesser(lane, looked() - 1);
    return ptx::load_from_l2(p.block_tables + b * p.stride_table);
  }
  __device__ __forceinline__ int looked() const {
    return config::lesser(launch.sequences, device::kWarpSize);
  }

  __device__ __forceinline__ int limit_of(int b) const {
    return b < finer_from ? limit : kLastKeys;
  }

  /// first_items[b]: the number of the first item of sequence b.
  __device__ __forceinline__ void number_items(int* first_items) {
    all = batch = 0;
    for (int first = 0; first < launch.sequences; first += device::kWarpSize) {
      const int b = first + lane;
      int count = runs * cut.splits;
      if (first > 0 && b < launch.sequences) {
        const config::Sequence s = sequence_at(b);
        count = runs_of<Tile>(launch, s) * cut_of<Tile>(launch, s, limit_of(b)).splits;
      }
      const int sum = all + device::warp_inclusive_sum(b < launch.sequences ? count : 0);
      if (b < launch.sequences) first_items[b + 1] = sum;
      all = device::from_lane(sum, device::kWarpSize - 1);
    }
    if (lane == 0) first_items[0] = 0;
    __syncwarp();  // the sums are there
  }

  /// Item number `index`, which never falls from call to call.
  __device__ __forceinline__ Item take(const int* first_items, int index) {
    if (index >= all) return {};
    for (int passed = device::kWarpSize; passed == device::kWarpSize;) {
      const int b = batch + 1 + lane;
      passed = device::count_lanes(b <= launch.sequences && first_items[b] <= index);
      batch += passed;
    }
    config::Sequence s;
    Cut c;
    if (batch < device::kWarpSize) {
      s = {.q_begin = device::from_lane(sequence.q_begin, batch),
           .k_begin = device::from_lane(sequence.k_begin, batch),
           .q_len = device::from_lane(sequence.q_len, batch),
           .k_len = device::from_lane(sequence.k_len, batch),
           .k_start = device::from_lane(sequence.k_start, batch)};
      c = {.begin = device::from_lane(cut.begin, batch),
           .end = device::from_lane(cut.end, batch),
           .leaf = device::from_lane(cut.leaf, batch),
           .keys = device::from_lane(cut.keys, batch),
           .splits = device::from_lane(cut.splits, batch)};
    } else {
      s = sequence_at(batch);
      c = cut_of<Tile>(launch, s, limit_of(batch));
    }
    return item_of<Tile>(launch, s, c, launch.first_sequence + batch, index - first_items[batch]);
  }
};

}  // namespace ridgeline::attention_decode
