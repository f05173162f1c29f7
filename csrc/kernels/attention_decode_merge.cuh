#pragma once
#include "kernels/attention_decode_warp.cuh"

/// How the sums of four warps become a row, and those of several splits.
namespace ridgeline::attention_decode {

/// The results of splits: sums in the order of the accumulators (a float4 holds two columns of two
/// rows; columns of a pair of rows follow each other), divided by their row's total, and apart lse.
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
  __device__ float2* lse(std::int64_t split) const {
    const std::int64_t splits =
        std::int64_t{launch.attention.batch} * launch.attention.kv_heads * launch.max_splits;
    return reinterpret_cast<float2*>(sums(splits, 0)) + split * launch.row_pairs;
  }
};

__device__ __forceinline__ float sink_of_row(const AttentionParams& p, const Work& work, int row) {
  return row < work.rows ? attention_tile::sink_of(p, work.head(row)) : device::kMinusInfinity;
}

/// The four elements of unit `unit` of a pair of rows, and where they go.
template <class Tile>
__device__ __forceinline__ void store_unit(const AttentionParams& p, const Work& work, int row,
                                           int unit, float4 sum) {
  using T = typename Tile::T;
  const int g = unit % 8, i = unit / 8;
  const float values[2][2] = {{sum.x, sum.z}, {sum.y, sum.w}};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + r >= work.rows) break;
    const std::int64_t start = attention_tile::out_offset(p, work, row + r);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = WarpState<Tile>::column(i, g, h);
      if (column >= p.head_dim) continue;
      if (Tile::kQuantised && p.dtype == DType::kBFloat16) {
        static_cast<__nv_bfloat16*>(p.out)[start + column] =
            device::from_float<__nv_bfloat16>(values[r][h]);
      } else {
        static_cast<T*>(p.out)[start + column] = device::from_float<T>(values[r][h]);
      }
    }
  }
}

/// Where a warp's four sums of MMA i, query tile j lie in scratch memory: no two lanes of a group
/// of eight in one bank, whether they write (t fastest) or read (g fastest).
template <class Tile>
__device__ __forceinline__ float4* scratch_of(Stage& stage, int warp, int i, int j, int g, int t) {
  static_assert(kWarps * Tile::kQueryTiles * Tile::kSums * 32 * sizeof(float4) <= sizeof(Stage));
  const int place = t * 8 + (g ^ (2 * t));
  return reinterpret_cast<float4*>(&stage) +
         ((warp * Tile::kQueryTiles + j) * Tile::kSums + i) * 32 + place;
}

/// Leaves this warp's totals, bases and, if it had keys, sums in shared memory.
template <class Tile>
__device__ __forceinline__ void share_sums(Shared<Tile>& shared, Stage* scratch,
                                           WarpState<Tile>& warp) {
  const int g = warp.lane() / 4, t = warp.lane() % 4, w = warp.warp();
#pragma unroll
  for (int j = 0; j < Tile::kQueryTiles; ++j) {
    warp.softmax[j].join_column();
    if (g == 0) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        shared.largest[w][8 * j + 2 * t + c] = warp.softmax[j].base[c];
        shared.total[w][8 * j + 2 * t + c] = warp.softmax[j].sum[c];
      }
    }
    if (scratch == nullptr || warp.first_row + 8 * j + 2 * t >= warp.rows) continue;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const float (&sum)[4] = warp.sums[i][j];
      *scratch_of<Tile>(*scratch, w, i, j, g, t) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
  if (Tile::kQuantised && warp.lane() == 0)
    shared.value_unit[w] = exp2f(static_cast<float>(warp.value_exponent - 127));
}

/// Turns each row's bases into what its warps' sums are to be multiplied with: a thread a row.
/// Stores lse: the result's if there is one split, a partial's otherwise.
template <class Tile>
__device__ __forceinline__ void join_rows(const Launch& launch, const Item& item,
                                          Shared<Tile>& shared, int groups) {
  const Work& work = item.work;
  const int rows = min(work.rows - work.first_row, kWarps * Tile::kRows);
  for (int r = threadIdx.x; r < rows; r += kConsumerThreads) {
    const int group = r / Tile::kRows, in_warp = r % Tile::kRows, row = work.first_row + r;
    float largest = device::kMinusInfinity, total = 0.0f;
    for (int w = group; w < kWarps; w += groups)
      largest = fmaxf(largest, shared.largest[w][in_warp]);
    const float base = device::exponent_base(largest);
    for (int w = group; w < kWarps; w += groups)
      total += shared.total[w][in_warp] * device::part_weight(shared.largest[w][in_warp], base);
    const bool only = item.splits == 1;
    const float sink =
        only ? attention_tile::sink_of(launch.attention, work.head(row)) : device::kMinusInfinity;
    const device::RowEnd end = device::end_of_row(largest, total, sink);
    for (int w = group; w < kWarps; w += groups) {
      const float unit = Tile::kQuantised ? shared.value_unit[w] : 1.0f;
      shared.largest[w][in_warp] =
          device::part_weight(shared.largest[w][in_warp], base) * end.factor * unit;
    }
    if (only) {
      attention_tile::store_lse(launch.attention, work, row, end.lse);
    } else {
      const Partials<Tile> partials{launch};
      reinterpret_cast<float*>(partials.lse(partials.split(work, item.split)))[row] = end.lse;
    }
  }
}

/// The item's rows: the result if there is one split, a partial otherwise.
template <class Tile>
__device__ __forceinline__ void store_item(const Launch& launch, const Item& item,
                                           const Shared<Tile>& shared, Stage& scratch, int groups) {
  const Work& work = item.work;
  const Partials<Tile> partials{launch};
  const std::int64_t split = partials.split(work, item.split);
  const int rows = min(work.rows - work.first_row, kWarps * Tile::kRows);
  const bool has_keys = item.keys.begin < item.keys.end;
  for (int u = threadIdx.x; u < ceil_div(rows, 2) * Tile::kPairUnits; u += kConsumerThreads) {
    const int pair = u / Tile::kPairUnits, unit = u % Tile::kPairUnits,
              row = work.first_row + 2 * pair;
    const int t = pair % 4, j = pair / 4 % Tile::kQueryTiles,
              group = pair / (4 * Tile::kQueryTiles);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int w = group; has_keys && w < kWarps; w += groups) {
      const float4 part = *scratch_of<Tile>(scratch, w, unit / 8, j, unit % 8, t);
      const float2 keep = *reinterpret_cast<const float2*>(&shared.largest[w][8 * j + 2 * t]);
      sum.x += part.x * keep.x, sum.z += part.z * keep.x;
      sum.y += part.y * keep.y, sum.w += part.w * keep.y;
    }
    if (item.splits == 1) {
      store_unit<Tile>(launch.attention, work, row, unit, sum);
    } else {
      partials.sums(split, row / 2)[unit] = sum;
    }
  }
}

/// The rows of one sequence and KV head from their splits, taken kTogether at a time in their
/// order: one round trip to the L2 cache each. By kConsumerThreads threads.
template <class Tile>
__device__ __forceinline__ void merge_splits(const Launch& launch, const Work& work, int splits) {
  constexpr int kTogether = 16;
  const AttentionParams& p = launch.attention;
  const Partials<Tile> partials{launch};
  const std::int64_t begin = partials.split(work, 0);
  for (int u = threadIdx.x; u < ceil_div(work.rows, 2) * Tile::kPairUnits; u += kConsumerThreads) {
    const int pair = u / Tile::kPairUnits, unit = u % Tile::kPairUnits, row = 2 * pair;
    device::JoinedParts rows[2];
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < splits; first += kTogether) {
      float4 values[kTogether];
      float2 lse[kTogether];
      float weights[2][kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::int64_t split = begin + min(first + i, splits - 1);
        values[i] = ptx::load_from_l2(partials.sums(split, pair) + unit);
        lse[i] = ptx::load_from_l2(partials.lse(split) + pair);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const bool here = first + i < splits;
        weights[0][i] = here ? lse[i].x * device::kLog2E : device::kMinusInfinity;
        weights[1][i] = here ? lse[i].y * device::kLog2E : device::kMinusInfinity;
      }
      const float keep[2] = {rows[0].add(weights[0]), rows[1].add(weights[1])};
      sum.x *= keep[0], sum.z *= keep[0], sum.y *= keep[1], sum.w *= keep[1];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sum.x += weights[0][i] * values[i].x, sum.z += weights[0][i] * values[i].z;
        sum.y += weights[1][i] * values[i].y, sum.w += weights[1][i] * values[i].w;
      }
    }
    const device::RowEnd ends[2] = {
        device::end_of_row(rows[0].largest, rows[0].total, sink_of_row(p, work, row)),
        device::end_of_row(rows[1].largest, rows[1].total, sink_of_row(p, work, row + 1))};
    sum.x *= ends[0].factor, sum.z *= ends[0].factor, sum.y *= ends[1].factor,
        sum.w *= ends[1].factor;
    store_unit<Tile>(p, work, row, unit, sum);
    if (unit == 0) attention_tile::store_lse(p, work, row, ends[0].lse);
    if (unit == 1 && row + 1 < work.rows) attention_tile::store_lse(p, work, row + 1, ends[1].lse);
  }
}

}  // namespace ridgeline::attention_decode
