#pragma once
#include "kernels/attention_rows_sm90.cuh"

/// How partial results of the Hopper kernel of packed rows are kept and joined.
namespace ridgeline::attention_rows {

/// The results of splits: sums divided by their row's total, and apart lse. An empty one is zeros.
struct Partials {
  const Launch& launch;

  __device__ std::int64_t index(const Work& work, int row, int split) const {
    const std::int64_t pair = std::int64_t{work.batch} * launch.attention.kv_heads + work.kv_head;
    return (pair * launch.max_splits + split) * launch.max_rows + work.first_row + row;
  }
  __device__ float* sums(std::int64_t index) const {
    return static_cast<float*>(launch.workspace) + index * launch.attention.head_dim;
  }
  __device__ float* lse(std::int64_t index, int batches) const {
    const std::int64_t splits =
        std::int64_t{batches} * launch.attention.kv_heads * launch.max_splits;
    return sums(splits * launch.max_rows) + index;
  }
};

/// How a row's splits weigh, kept by a warp: lane i has those of splits i and i + 32.
struct JoinedRow {
  static constexpr int kPerLane = config::kMaxSplits / device::kWarpSize;
  static constexpr int kColumns = 4 * device::kWarpSize;  // of one pass: four a lane

  float weights[kPerLane];  // relative to the row's base
  float largest, total;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  /// `lse` of this lane's splits in units of log2, -inf past the last.
  __device__ __forceinline__ void weigh(const float (&lse)[kPerLane]) {
    largest = lse[0];
#pragma unroll
    for (float part : lse) largest = fmaxf(largest, part);
    largest = device::warp_reduce<device::MaxOrNaN>(largest);
    const float base = device::exponent_base(largest);
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) total += weights[i] = device::part_weight(lse[i], base);
    total = device::warp_reduce<device::Sum>(total);
  }
};

/// Four columns of kRows rows, the splits in their order; `from`: where they lie in the first. A
/// trip to the L2 cache takes far longer than its sums, so 16 values are on their way at once.
/// weigh() leaves the rows' weights, while the first of them come.
template <int kRows, class Weigh>
__device__ __forceinline__ void add_splits(const JoinedRow (&rows)[kRows],
                                           const float* const (&from)[kRows], std::int64_t step,
                                           int splits, Weigh&& weigh, float4 (&sums)[kRows]) {
  constexpr int kTogether = 16 / kRows;
#pragma unroll
  for (auto& sum : sums) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < splits; first += kTogether) {
    float4 values[kRows][kTogether];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        values[r][i] = ptx::load_from_l2(
            reinterpret_cast<const float4*>(from[r] + min(first + i, splits - 1) * step));
    if (first == 0) weigh();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Not an index, which would put the weights into local memory.
      const float held = first < device::kWarpSize ? rows[r].weights[0] : rows[r].weights[1];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const float weight = device::from_lane(held, first % device::kWarpSize + i);
        sums[r].x += weight * values[r][i].x, sums[r].y += weight * values[r][i].y;
        sums[r].z += weight * values[r][i].z, sums[r].w += weight * values[r][i].w;
      }
    }
  }
}

/// lse of this lane's splits of a row, as JoinedRow takes them; `from`: that of the first.
__device__ __forceinline__ void load_lse(const float* from, std::int64_t step, int splits,
                                         float (&lse)[JoinedRow::kPerLane]) {
#pragma unroll
  for (int i = 0; i < JoinedRow::kPerLane; ++i) {
    const int split = JoinedRow::lane() + i * device::kWarpSize;
    lse[i] = split < splits ? ptx::load_from_l2(from + split * step) * device::kLog2E
                            : device::kMinusInfinity;
  }
}

/// The rows of one sequence and KV head from their splits, two at a time; `warp` of `warps`.
template <class T>
__device__ __forceinline__ void merge_splits(const Launch& launch, const Work& work, int splits,
                                             int warp, int warps) {
  constexpr int kRows = 2;
  const AttentionParams& p = launch.attention;
  const Partials partials{launch};
  const std::int64_t step = launch.max_rows;
  float next[kRows][JoinedRow::kPerLane];  // of the next rows: it comes while these rows' values do
  const auto index_of = [&](int row) { return partials.index(work, min(row, work.rows - 1), 0); };
  const auto request = [&](int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (first < work.rows)
        load_lse(partials.lse(index_of(first + r), p.batch), step, splits, next[r]);
  };
  request(warp * kRows);
  for (int row = warp * kRows; row < work.rows; row += warps * kRows) {
    JoinedRow joined[kRows];
    for (int first = 0; first < p.head_dim; first += JoinedRow::kColumns) {
      const int column = first + JoinedRow::lane() * 4, here = min(column, p.head_dim - 4);
      const float* const from[kRows] = {partials.sums(index_of(row)) + here,
                                        partials.sums(index_of(row + 1)) + here};
      float4 sums[kRows];
      const auto weigh = [&] {
        if (first > 0) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) joined[r].weigh(next[r]);
        request(row + warps * kRows);
      };
      add_splits(joined, from, step * p.head_dim, splits, weigh, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row + r >= work.rows) break;
        const float sink = attention_tile::sink_of(p, work.head(row + r));
        const device::RowEnd end =
            device::quick_end_of_row(joined[r].largest, joined[r].total, sink);
        T* out = static_cast<T*>(p.out) + attention_tile::out_offset(p, work, row + r);
        if (column < p.head_dim) attention_tile::store_scaled(out + column, sums[r], end.factor);
        if (column == 0) attention_tile::store_lse(p, work, row + r, end.lse);
      }
    }
  }
}

}  // namespace ridgeline::attention_rows
