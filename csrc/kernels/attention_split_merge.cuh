#pragma once
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_tile.cuh"

/// What blocks that share a sequence's keys leave, and the kernel that joins it.
namespace ridgeline::attention_split {

namespace config = attention_config;
using namespace attention_tile;

constexpr int kCombineRows = 4;  // rows a block of the combine kernel, one a warp

struct SplitParams {
  AttentionParams attention;
  int max_splits;  // of the longest sequence
  int max_rows;    // of a sequence and KV head
  int row_tiles;   // of 16 rows
};

/// A partial result: sums over its keys divided by their weight, and lse in units of log2.
struct Partials {
  float* out;  // [batch, kv_heads, max_rows, max_splits, head_dim]
  float* lse;  // [batch, kv_heads, max_rows, max_splits]

  __device__ explicit Partials(const SplitParams& params) {
    const AttentionParams& p = params.attention;
    out = static_cast<float*>(p.workspace);
    lse =
        out + std::int64_t{p.batch} * p.kv_heads * params.max_rows * params.max_splits * p.head_dim;
  }
  __device__ static std::int64_t index(const SplitParams& params, const Work& work, int row,
                                       int split) {
    const std::int64_t pair = std::int64_t{work.batch} * params.attention.kv_heads + work.kv_head;
    return (pair * params.max_rows + row) * params.max_splits + split;
  }
};

/// Grid: (sequence, KV head, row), a warp a row. Reads the partials that split_kernel left and
/// writes the result; rows of one split are finished already.
template <class T>
__global__ void __launch_bounds__(kCombineRows* device::kWarpSize)
    combine_kernel(const __grid_constant__ SplitParams params) {
  __shared__ float weights[kCombineRows][config::kMaxSplits];
  const AttentionParams& p = params.attention;
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  const std::int64_t item = std::int64_t{blockIdx.x} * kCombineRows + warp;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int pair = static_cast<int>(item / params.max_rows),
            row = static_cast<int>(item % params.max_rows);
  Work work{
      .batch = pair / p.kv_heads, .kv_head = pair % p.kv_heads, .group = p.heads / p.kv_heads};
  if (work.batch >= p.batch) return;
  work.sequence = config::sequence_of(p, work.batch);
  work.rows = work.sequence.q_len * work.group;
  const int splits = config::split_count(p.head_dim, p.k_scale ? 1 : 2, work.sequence.k_len);
  if (!config::is_split(p, work.sequence.q_len) || row >= work.rows || splits == 1) return;

  const Partials partials(params);
  const std::int64_t first = Partials::index(params, work, row, 0);
  constexpr int kPerLane = config::kMaxSplits / device::kWarpSize;
  float parts[kPerLane], largest = device::kMinusInfinity, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int split = lane + i * device::kWarpSize;
    parts[i] =
        split < splits ? partials.lse[first + split] * device::kLog2E : device::kMinusInfinity;
    largest = fmaxf(largest, parts[i]);
  }
  largest = device::warp_reduce<device::MaxOrNaN>(largest);
  const float base = device::exponent_base(largest);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float weight = device::part_weight(parts[i], base);
    weights[warp][lane + i * device::kWarpSize] = weight;
    total += weight;
  }
  total = device::warp_reduce<device::Sum>(total);
  __syncwarp();  // the weights are there
  const device::RowEnd end = device::end_of_row(largest, total, sink_of(p, work.head(row)));
  for (int column = lane * 4; column < p.head_dim; column += device::kWarpSize * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
      const float weight = weights[warp][split];
      if (weight == 0.0f) continue;  // an empty part's sums were not written
      const float4 part =
          *reinterpret_cast<const float4*>(partials.out + (first + split) * p.head_dim + column);
      sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z,
          sum.w += weight * part.w;
    }
    store_scaled(static_cast<T*>(p.out) + out_offset(p, work, row) + column, sum, end.factor);
  }
  if (lane == 0) store_lse(p, work, row, end.lse);
}

}  // namespace ridgeline::attention_split
