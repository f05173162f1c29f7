#pragma once
#include "device/digits.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_cluster_finish.cuh"

/// The end of a tile of up to 64 weight rows, whose warpgroups took stages by turns, in a cluster
/// of two blocks: from registers to registers, each warpgroup its own rows of x. Same bits as by
/// Finish. H200, lab, alone, by turns, us, 4096 x 4096, Finish and so: 16 rows of int4 5.8 and 5.2,
/// 64 7.5 and 6.7; fp8 by fp8 5.9 and 5.4, 7.1 and 6.4; fp8 by bf16 6.8 and 6.2, 9.0 and 8.4; int4
/// by e4m3 5.8 and 5.2, 7.1 and 6.3; 16 rows with a norm int4 6.5 and 5.8, fp8 by bf16 7.4 and 6.7,
/// bf16 10.3 and 9.0.
namespace ridgeline::gemm_cluster {

/// Whether it can. Two columns of y are stored at once. Of one block, whose threads then store
/// twice as many rows each, 64 rows of fp8 by fp8, 4096 x 6144, took 11.0 us for 10.0.
inline bool ends_by_turns(const GemmParams& p, int row_groups, int segments, std::size_t element) {
  const auto in_pairs = [&](const void* at, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(at) % (2 * element) == 0 && stride % 2 == 0;
  };
  return row_groups == 1 && segments == 2 && in_pairs(p.y, p.out_cols()) &&
         (!p.residual || in_pairs(p.residual, p.stride_residual));
}

/// Bytes that each of the blocks receives.
constexpr int bytes_of_turns(int octets) { return octets / 2 * 8 * kGroupRows * 4; }

/// A thread's sums are octets of rows of x: two rows, lane % 4 * 2 and the next, by two weight
/// rows, lane / 4 and the eighth after it. A pair here is one row of x, of the block's own parity,
/// by both: so a warp stores whole sectors of 16 columns of y.
template <class T, int kOctets, bool kFolds>
struct TurnsEnd {
  static constexpr int kKept = kOctets / 2;  // octets, of a warpgroup; pairs, of a block

  const ClusterParams& params;
  Fixed& fixed;
  char* stages;
  float4* received;
  int first;         // column of the tile
  int row0, rows;    // of x
  int at = ptx::thread_index();  // read anew: registers are for the products until then
  int turn = at / kGroupThreads, thread = at % kGroupThreads, lane = at % 32;
  int rank = blockIdx.x;

  // The two neighbours that a lane stores of pair `i`, its own and its neighbour's: of row
  // row_of(i) of the tile, from column `column` on.
  int column = thread / 32 * kStripRows + lane / 4 % 2 * 8 + lane / 8 * 2;

  __device__ int row_of(int i) const { return (turn * kKept + i) * 8 + lane % 4 * 2 + rank; }

  __device__ bool is_there(int i, int columns) const {
    return row_of(i) < rows && column < params.box_rows && first + column < columns;
  }

  __device__ std::uint32_t residual_of(int i) const {
    const GemmParams& p = params.gemm;
    if (!is_there(i, p.out_cols())) return 0;
    return *reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(p.residual) +
                                                   (row0 + row_of(i)) * p.stride_residual +
                                                   first + column);
  }

  /// A pair, summed, as two neighbours of a row of y, scaled, plus bias.
  __device__ void bring_values(float (&values)[2], const float (&pair)[2], float x_scale,
                               float2 scale, float2 bias) const {
    const bool odd = lane / 4 % 2 == 1;
    const float got = device::shuffle_xor(odd ? pair[0] : pair[1], 4);
    values[0] = scaled({x_scale, scale.x, bias.x}, odd ? got : pair[0]);
    values[1] = scaled({x_scale, scale.y, bias.y}, odd ? pair[1] : got);
  }

  /// Two neighbours of y.
  __device__ device::Vec<T, 2> output_of(const float (&values)[2], std::uint32_t residual) const {
    device::Vec<float, 2> out{values[0], values[1]};
    if (params.gemm.residual) {
      const float2 more = device::floats_of(device::as_pair<T>(residual));
      out = {__fadd_rn(out.data[0], more.x), __fadd_rn(out.data[1], more.y)};
    }
    return device::rounded<T>(out);
  }

  /// Gates times their up rows, which other warps have: those leave them in slots of their own of
  /// `places`, which they alone have read before.
  __device__ void meet_ups(float (&values)[kKept][2], float4* places) const {
    const auto place = [&](int i, int of) {
      return reinterpret_cast<float2*>(places + i * kGroupThreads + of);
    };
    const int up = column + params.box_rows;
    if (column >= params.box_rows)
#pragma unroll
      for (int i = 0; i < kKept; ++i) *place(i, thread) = {values[i][0], values[i][1]};
    ptx::named_barrier_sync(2 + turn, kGroupThreads);  // the ups are there
    if (up >= params.tile_rows) return;
    const int of_up = up / kStripRows * 32 + up % 8 / 2 * 8 + up / 8 % 2 * 4 + lane % 4;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float2 ups = *place(i, of_up);
      values[i][0] = __fmul_rn(values[i][0], ups.x);
      values[i][1] = __fmul_rn(values[i][1], ups.y);
    }
  }

  /// Two pairs of a thread side by side, where it has two.
  __device__ int inbox_at(int i) const {
    constexpr int kTogether = kKept > 1 ? 2 : 1;
    return (i / kTogether * kConsumerThreads + at) * kTogether + i % kTogether;
  }

  /// kPlain: no activation, which is code of its own, as in Finish.
  template <bool kPlain, int kAll, class Sum>
  __device__ void run(const Sum (&sums)[kAll][4]) const {
    float kept[kKept][4];
    std::uint32_t residuals[kKept] = {};
    if (params.gemm.residual)
#pragma unroll
      for (int i = 0; i < kKept; ++i) residuals[i] = residual_of(i);
    ptx::named_barrier_sync(2 + turn, kGroupThreads);  // the warpgroup has read its last stage
    // Through a stage that is the warpgroup's own.
    auto* given = reinterpret_cast<float4*>(stages + turn * params.weight_step);
    auto* got = reinterpret_cast<float4*>(stages + (1 - turn) * params.weight_step);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      float other[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto low = static_cast<float>(sums[i][j]);
        const auto high = static_cast<float>(sums[kKept + i][j]);
        kept[i][j] = turn == 0 ? low : high;
        other[j] = turn == 0 ? high : low;
      }
      given[i * kGroupThreads + thread] = {other[0], other[1], other[2], other[3]};
    }
    ptx::named_barrier_sync(1, kConsumerThreads);  // both have given theirs
    float own[kKept][2], sent[kKept][2];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float4 part = got[i * kGroupThreads + thread];
      const float even[] = {kept[i][0] + part.x, kept[i][2] + part.z};
      const float odd[] = {kept[i][1] + part.y, kept[i][3] + part.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        own[i][j] = rank == 0 ? even[j] : odd[j];
        sent[i][j] = rank == 0 ? odd[j] : even[j];
      }
    }
    if constexpr (kKept == 1) {
      ptx::put_in_block(reinterpret_cast<float2*>(received) + inbox_at(0),
                        {sent[0][0], sent[0][1]}, &fixed.received, 1 - rank);
    } else {
#pragma unroll
      for (int i = 0; i < kKept; i += 2)
        ptx::put_in_block(received + inbox_at(i) / 2,
                          {sent[i][0], sent[i][1], sent[i + 1][0], sent[i + 1][1]},
                          &fixed.received, 1 - rank);
    }
    // What is there by now is read ahead of the wait, constants once: 64 rows of fp8 by fp8 6.7 us
    // and, so, 6.4.
    const int columns = params.gemm.out_cols();
    T* y = static_cast<T*>(params.gemm.y) + std::int64_t{row0 + row_of(0)} * columns + first +
           column;
    const auto scale = *reinterpret_cast<const float2*>(fixed.scale + column);
    const auto bias = *reinterpret_cast<const float2*>(fixed.bias + column);
    if (kFolds) ptx::mbarrier_wait(&fixed.squared, 0);
    float x_scales[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      x_scales[i] = kFolds ? params.unit * fixed.norm_of(params.gemm, row_of(i), 2)
                           : fixed.x_scale[row_of(i)];
    ptx::mbarrier_wait(&fixed.received, 0);
    const auto* inbox = reinterpret_cast<const float2*>(received);
    float values[kKept][2];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float2 part = inbox[inbox_at(i)];
      bring_values(values[i], {own[i][0] + part.x, own[i][1] + part.y}, x_scales[i], scale, bias);
    }
    if (!kPlain && column < params.box_rows) activate_all<T>(params.gemm.activation, values);
    if (!kPlain && params.paired) meet_ups(values, got);
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (is_there(i, columns))
        device::store(y + std::int64_t{i * 8} * columns, output_of(values[i], residuals[i]));
  }
};

}  // namespace ridgeline::gemm_cluster
