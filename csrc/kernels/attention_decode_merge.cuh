#pragma once
#include "kernels/attention_decode_warp.cuh"

/// How an item's sums are gathered, where they go, and how those of several splits become a row.
namespace ridgeline::attention_decode {

/// Where the warps that multiply are in the run of tiles.
template <class Tile>
struct Place {
  Ring<Tile::kStages> ring;
  int buffer = 0, totals = 0;  // of weights; of totals
  int held = -1;  // the stage whose values may still be read
};

/// What a tile lacks that has landed: nothing.
struct Whole {
  __device__ __forceinline__ void add_key(int /*stage*/, int /*n*/) const {}
  __device__ __forceinline__ void add_value(int /*stage*/, int /*n*/) const {}
};

/// All leaves of an item, joined. By the warps that multiply. `lacking` adds to a tile what it
/// lacks, of keys or values; n: its first key.
template <class Tile, class Lacking = Whole>
__device__ __forceinline__ void gather(const Item& item, WarpState<Tile>& warp,
                                       typename WarpState<Tile>::Parts& parts, Place<Tile>& place,
                                       const Lacking& lacking = {}) {
  Shared<Tile>& shared = warp.shared;
  const auto free_stage = [&](int stage) {
    if (warp.lane == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  // An arrival does not wait for loads of shared memory that are on their way. So a stage is given
  // back once later work has used what was loaded from it: keys when weights are stored, values
  // with the keys after them, or, by the caller, when the sums are stored.
  place.held = -1;
  int n = item.keys.begin, leaf = 0;
  do {
    const int end = config::lesser(n + item.leaf, item.keys.end);
    warp.begin_leaf();
    for (bool is_first = true; n < end;
         n += Tile::kKeys, place.buffer ^= 1, is_first = false) {
      typename WarpState<Tile>::Scores scores;
      const int keys = place.ring.place;
      ptx::mbarrier_wait(&shared.full[keys], place.ring.parity);
      lacking.add_key(keys, n);
      warp.score_keys(item, keys, n, scores);
      place.ring.next();
      const int values = place.ring.place;
      ptx::mbarrier_wait(&shared.full[values], place.ring.parity);
      lacking.add_value(values, n);
      if (!warp.all_live(n)) warp.clear_unused_values(values, n);
      warp.weigh(values, n, place.buffer, scores, is_first,
                 !Tile::kQuantised && n + Tile::kKeys >= end);
      free_stage(keys);
      if (place.held >= 0) free_stage(place.held);
      warp.add_values(values, place.buffer);
      place.held = values;
      place.ring.next();
    }
    warp.end_leaf(leaf++, n >= item.keys.end, parts, shared.totals[place.totals]);
    place.totals ^= 1;
  } while (n < item.keys.end);
}

/// The results of splits: sums in the order of the accumulators (a float4 holds two columns of two
/// rows; columns of a pair of rows follow each other), and apart each row's base and total.
template <class Tile>
struct Partials {
  const Launch& launch;

  __device__ std::int64_t split(const Work& work, int split) const {
    const std::int64_t pair = std::int64_t{work.batch} * launch.attention.kv_heads + work.kv_head;
    return pair * launch.max_splits + split;
  }
  __device__ float4* sums(std::int64_t split, int row_pair) const {
    return static_cast<float4*>(launch.attention.workspace) +
           (split * launch.row_pairs + row_pair) * Tile::kPairUnits;
  }
  __device__ float2* ends(std::int64_t split) const {
    const std::int64_t splits =
        std::int64_t{launch.attention.batch} * launch.attention.kv_heads * launch.max_splits;
    return reinterpret_cast<float2*>(sums(splits, 0)) + split * launch.row_pairs * 2;
  }
};

__device__ __forceinline__ float sink_of_row(const Launch& launch, const Work& work, int row) {
  if (launch.attention.sinks == nullptr || row >= work.rows) return device::kMinusInfinity;
  return attention_tile::sink_of(launch.attention, row_of(launch, work, row).head);
}

/// The column of the head that holds element h of float4 number `unit` of a row: 8-bit values come
/// from shared memory in pairs of columns.
template <class Tile>
__device__ __forceinline__ int column_of(int unit, int h) {
  return unit / 8 * 16 + (Tile::kQuantised ? unit % 8 * 2 + h : unit % 8 + 8 * h);
}

template <class Tile>
__device__ __forceinline__ void store_element(const AttentionParams& p, void* row, int column,
                                              float value) {
  using T = typename Tile::T;
  if (column >= p.head_dim) return;
  if (Tile::kQuantised && p.dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(row)[column] = device::from_float<__nv_bfloat16>(value);
  } else {
    static_cast<T*>(row)[column] = device::from_float<T>(value);
  }
}

/// Both elements of float4 number `unit` of a row.
template <class Tile>
__device__ __forceinline__ void store_elements(const AttentionParams& p, void* row, int unit,
                                               float first, float second) {
  if constexpr (Tile::kQuantised) {  // side by side
    const int column = column_of<Tile>(unit, 0);
    const std::uint32_t pair = p.dtype == DType::kBFloat16
                                   ? attention_tile::pack<__nv_bfloat16>(first, second)
                                   : attention_tile::pack<__half>(first, second);
    if (column < p.head_dim)
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(row) + column) = pair;
  } else {
    store_element<Tile>(p, row, column_of<Tile>(unit, 0), first);
    store_element<Tile>(p, row, column_of<Tile>(unit, 1), second);
  }
}

/// The four elements of unit `unit` of a pair of rows.
template <class Tile>
__device__ __forceinline__ void store_unit(const Launch& launch, const Work& work, int row,
                                           int unit, float4 sum) {
  const float values[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    void* out = ends_of_row(launch, work, row + r).out;
    if (out == nullptr) break;
    store_elements<Tile>(launch.attention, out, unit, values[r][0], values[r][1]);
  }
}

/// This warp's columns of the results of the item's rows.
template <class Tile>
__device__ __forceinline__ void store_rows(const Launch& launch, const Item& item, int place,
                                           const WarpState<Tile>& warp) {
#pragma unroll
  for (int j = 0; j < Tile::kQueryTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * j + 2 * warp.t + c;
      const RowEnds ends = warp.shared.ends[place][row];
      if (ends.out == nullptr) continue;
      const device::RowEnd end =
          device::quick_end_of_row(warp.softmax[j].base[c], warp.softmax[j].sum[c],
                             sink_of_row(launch, item.work, item.work.first_row + row));
      if (warp.warp == 0 && warp.g == 0) *ends.lse = end.lse;
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
        store_elements<Tile>(launch.attention, ends.out,
                             8 * (warp.warp * Tile::kSums + i) + warp.g,
                             warp.sums[i][j][c] * end.factor, warp.sums[i][j][c + 2] * end.factor);
    }
  }
}

/// This warp's columns of the item's rows: the result if there is one split, else a partial.
template <class Tile>
__device__ __forceinline__ void store_item(const Launch& launch, const Item& item, int place,
                                           const WarpState<Tile>& warp) {
  if (item.splits == 1) return store_rows<Tile>(launch, item, place, warp);
  const Work& work = item.work;
  const Partials<Tile> partials{launch};
  const std::int64_t split = partials.split(work, item.split);
  const int g = warp.g, t = warp.t;
#pragma unroll
  for (int j = 0; j < Tile::kQueryTiles; ++j) {
    const int row = work.first_row + 8 * j + 2 * t;
    if (row >= work.rows) continue;
    const device::ColumnSoftmax& gathered = warp.softmax[j];
    if (warp.warp == 0 && g == 0)
      *reinterpret_cast<float4*>(partials.ends(split) + row) = make_float4(
          gathered.base[0], gathered.sum[0], gathered.base[1], gathered.sum[1]);
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const float(&sums)[4] = warp.sums[i][j];
      partials.sums(split, row / 2)[8 * (warp.warp * Tile::kSums + i) + g] =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
}

/// What the sums of splits of up to kRows rows are multiplied with, and then those of rows.
template <class Tile>
struct PartWeights {
  float splits[Tile::kRows][config::kMaxSplits], rows[Tile::kRows];
};

/// Rows [first_row, first_row + rows): a warp a row, splits over its lanes.
template <class Tile>
__device__ __forceinline__ void weigh_splits(const Launch& launch, const Work& work, int splits,
                                             int first_row, int rows, PartWeights<Tile>& weights) {
  constexpr int kLanes = device::kWarpSize, kParts = config::kMaxSplits / kLanes;
  const Partials<Tile> partials{launch};
  const std::int64_t begin = partials.split(work, 0);
  // Lanes are numbered so that the sum over the warp joins neighbours first.
  const int first_split = static_cast<int>(__brev(threadIdx.x % kLanes) >> 27);
  for (int r = threadIdx.x / kLanes; r < rows; r += kWarps) {
    const int row = first_row + r;
    float bases[kParts], totals[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int split = first_split + i * kLanes;
      float2 end = make_float2(device::kMinusInfinity, 0.0f);
      if (split < splits) end = ptx::load_from_l2(partials.ends(begin + split) + row);
      bases[i] = end.x, totals[i] = end.y;
    }
    const device::RowEnd end = device::weigh_parts(bases, totals, sink_of_row(launch, work, row));
    if (threadIdx.x % kLanes == 0) {
      *ends_of_row(launch, work, row).lse = end.lse;
      weights.rows[r] = end.factor;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) weights.splits[r][first_split + i * kLanes] = bases[i];
  }
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/// The rows of one sequence and KV head from at most kMost splits: the upper levels of the tree whose
/// lower ones the splits are. kTogether at a time, one round trip to the L2 cache each. By
/// kConsumerThreads threads.
template <class Tile, int kMost, int kTogether>
__device__ __forceinline__ void join_splits(const Launch& launch, const Work& work, int splits,
                                            PartWeights<Tile>& weights) {
  constexpr int kLevels = kMost > kTogether ? 2 : 0;
  static_assert(kTogether << kLevels == kMost);
  const Partials<Tile> partials{launch};
  const std::int64_t begin = partials.split(work, 0);
  for (int first_row = 0; first_row < work.rows; first_row += Tile::kRows) {
    const int rows = min(work.rows - first_row, Tile::kRows);
    const int units = ceil_div(rows, 2) * Tile::kPairUnits;
    for (int first_unit = 0; first_unit < units; first_unit += kConsumerThreads) {
      const int u = first_unit + static_cast<int>(threadIdx.x);
      const int pair = min(u, units - 1) / Tile::kPairUnits, unit = u % Tile::kPairUnits;
      float4 sum, waiting[kLevels + 1];
      for (int first = 0; first < splits; first += kTogether) {
        float4 values[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          values[i] = ptx::load_from_l2(
              partials.sums(begin + min(first + i, splits - 1), first_row / 2 + pair) + unit);
        if (first == 0 && first_unit == 0) {  // while the values come
          ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // weights are read
          weigh_splits<Tile>(launch, work, splits, first_row, rows, weights);
          ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // weights are there
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float even = weights.splits[2 * pair][first + i];
          const float odd = weights.splits[2 * pair + 1][first + i];
          const float4 v = values[i];
          values[i] = first + i < splits ? make_float4(v.x * even, v.y * odd, v.z * even, v.w * odd)
                                         : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
        }
#pragma unroll
        for (int apart = 1; apart < kTogether; apart *= 2)
#pragma unroll
          for (int i = 0; i < kTogether; i += 2 * apart)
            values[i] = add(values[i], values[i + apart]);
        sum = values[0];
        const bool is_last = first + kTogether >= splits;
        bool waits = false;
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          const bool joins = (first / kTogether >> level & 1) != 0;
          if (!waits && joins) sum = add(waiting[level], sum);
          if (!waits && !joins && !is_last) waiting[level] = sum, waits = true;
        }
      }
      const float even = weights.rows[2 * pair], odd = weights.rows[2 * pair + 1];
      sum = make_float4(sum.x * even, sum.y * odd, sum.z * even, sum.w * odd);
      if (u < units) store_unit<Tile>(launch, work, first_row + 2 * pair, unit, sum);
    }
  }
}

/// Few splits are joined without loads in place of those that are not there, by the same bits, where
/// that spills no more than a number of an item. H200, bf16, us: 8 sequences of 4k keys 36.5, and so
/// 36.1; 32 of 4k 127.6 and 126.8; 128 of 4k 493.8 and 491.7.
template <class Tile>
__device__ __forceinline__ void merge_splits(const Launch& launch, const Work& work, int splits,
                                             PartWeights<Tile>& weights) {
  constexpr int kFew = 4;
  if constexpr (!Tile::kQuantised && Tile::kSize <= 128)
    if (splits <= kFew) return join_splits<Tile, kFew, kFew>(launch, work, splits, weights);
  join_splits<Tile, config::kMaxSplits, 16>(launch, work, splits, weights);
}

}  // namespace ridgeline::attention_decode
