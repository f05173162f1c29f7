#pragma once
#include "device/dequant.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_cluster_sm90.cuh"
#include "kernels/gemm_epilogue.cuh"

/// From the sums of a cluster's warpgroups to y. The rows of x are shared out among the blocks:
/// each sends the others its sums of their rows, and adds up what it has and gets of its own. Loops
/// stay loops: a block runs this code once, and reads it from L2. H200, fp8 by fp8, 64 rows, 4096 x
/// 4096: 41 KB of code, with all unrolled, took 12.6 us, 16 KB 8.7.
namespace ridgeline::gemm_cluster {

using namespace gemm_detail;

constexpr int kEach = 4;  // neighbouring columns that a thread finishes at once

/// Sums from a row of x to the next: a warp's go to 32 banks.
__host__ __device__ constexpr int pitch_of_sums(int row_groups) {
  return row_groups * kGroupRows + 4;
}

/// Whether y is the sums with scales, bias and residual, kEach columns of `element` bytes a vector.
inline bool stores_vectors(const GemmParams& p, std::size_t element) {
  const auto in_vectors = [&](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % (kEach * element) == 0;
  };
  return p.activation == Activation::kNone && p.out_cols() % kEach == 0 && in_vectors(p.y) &&
         (!p.residual || (in_vectors(p.residual) && p.stride_residual % kEach == 0));
}

/// Whether sums are stored so, and where the residual comes: behind them, in the `bytes` of the
/// rings, where it has room.
template <class T>
void plan_stores(ClusterParams& params, int threads, int bytes) {
  const GemmParams& p = params.gemm;
  params.plain = stores_vectors(p, sizeof(T));
  if (!params.plain || !p.residual) return;
  const int step = threads / (params.box_rows / kEach);
  const int sums = params.turns * params.rows_held * pitch_of_sums(params.row_groups) *
                   static_cast<int>(sizeof(float));
  const int residual =
      ceil_div(params.rows_each, step) * threads * kEach * static_cast<int>(sizeof(T));
  params.plain = sums + residual <= bytes;
  if (params.plain) params.residual_at = sums;
}

template <class T>
struct Finish {
  const ClusterParams& params;
  Fixed& fixed;
  float* sums;       // [turn][row of x][weight row of the tile], pitch() apart
  float4* received;  // [other block][own row of x][kEach columns]
  int first;         // column of the tile
  int row0, rows;    // of x
  int rank = blockIdx.x, blocks = gridDim.x;  // of the cluster
  float* x_scale = fixed.x_scale;  // of the rows of x
  float* scale = fixed.scale;  // of the tile's weight rows
  float* bias = fixed.bias;
  int threads = kConsumerThreads;  // that hold sums
  using Four = device::Vec<T, kEach>;
  static_assert(sizeof(Four) == 8);

  __device__ int columns() const { return params.row_groups * kGroupRows; }
  __device__ int pitch() const { return pitch_of_sums(params.row_groups); }

  /// Scales of the rows of x, but where they meet their norm, and scale and bias of the tile's
  /// weight rows, one a thread.
  __device__ void bring_factors(int up_first) const {
    const GemmParams& p = params.gemm;
    if (threadIdx.x < rows && !p.x.norm_weight)
      x_scale[threadIdx.x] =
          params.unit * (p.x.scale ? p.x.scale[p.x.scale_per_row ? row0 + threadIdx.x : 0] : 1.0f);
    const int column = threadIdx.x, up = column - params.box_rows;
    if (column >= params.tile_rows) return;
    const int n = params.paired && up >= 0 ? up_first + up : first + column;
    Operands operands;
    if (n < p.N) load_of_column<T>(operands, p, n);
    scale[column] = operands.weight_scale;
    bias[column] = operands.bias;
  }

  template <class Sum, int kOctets>
  __device__ void keep(const Sum (&values)[kOctets][4], int turn, int row) const {
    const int lane = threadIdx.x % 32;
    float* to = sums + (turn * params.rows_held + lane % 4 * 2) * pitch() + row + lane / 4;
#pragma unroll
    for (int i = 0; i < kOctets; ++i)
      if (i * 8 < params.rows_held)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          to[(i * 8 + j % 2) * pitch() + j / 2 * 8] = static_cast<float>(values[i][j]);
  }

  static __device__ void add(float4& total, const float4& part) {
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }

  __device__ float4 sum_of(int m, int column) const {
    const float* from = sums + m * pitch() + column;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 1
    for (int turn = 1; turn < params.turns; ++turn)
      add(sum, *reinterpret_cast<const float4*>(from += params.rows_held * pitch()));
    return sum;
  }

  __device__ float4* inbox(int from, int row, int column) const {
    return received + ((from * params.rows_each + row) * columns() + column) / kEach;
  }

  /// The sums of rows that other blocks finish, to those.
  __device__ void send() const {
    const int per_row = columns() / kEach, step = threads / per_row;
    const int column = threadIdx.x % per_row * kEach, row = threadIdx.x / per_row;
    if (row >= step) return;
#pragma unroll 1
    for (int s = 1; s < blocks; ++s) {
      const int owner = rank + s < blocks ? rank + s : rank + s - blocks;
      const int begin = owner * params.rows_each, end = min(begin + params.rows_each, rows);
      const int from = rank < owner ? rank : rank - 1;
#pragma unroll 1
      for (int m = begin + row; m < end; m += step)
        ptx::put_in_block(inbox(from, m - begin, column), sum_of(m, column), &fixed.received,
                          owner);
    }
  }

  /// Squares become the scale of a row.
  __device__ void fold_norm() const {
    ptx::mbarrier_wait(&fixed.squared, 0);
    const int m = threadIdx.x;
    if (m < rows) x_scale[m] = params.unit * fixed.norm_of(params.gemm, m, blocks);
  }

  /// All blocks' sums, in order.
  __device__ float4 total_of(int m, int column) const {
    const float4 own = sum_of(m, column);
    if (blocks == 1) return own;
    float4 total{};
#pragma unroll 1
    for (int s = 0; s < blocks; ++s)
      add(total, s == rank ? own
                           : *inbox(s < rank ? s : s - 1, m - rank * params.rows_each, column));
    return total;
  }

  /// Scale and bias of kEach columns.
  struct Factors {
    float4 scale, bias;
  };
  __device__ Factors factors_of(int column) const {
    return {*reinterpret_cast<const float4*>(scale + column),
            *reinterpret_cast<const float4*>(bias + column)};
  }

  /// Products of the values of a row that are not finite, of which x's terms have zeros, with the
  /// tile's weight row `column`.
  __device__ __noinline__ float products_not_finite(int m, int column) const {
    const GemmParams& p = params.gemm;
    const int up = column - params.box_rows;
    const int n = params.paired && up >= 0 ? first + p.N / 2 + up : first + column;
    if (n >= p.N) return 0.0f;
    const T* x = static_cast<const T*>(p.x.whole) + (row0 + m) * p.x.stride_whole;
    const auto* weight = static_cast<const std::uint8_t*>(p.weight.data) + n * p.weight.stride_row;
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < p.K; ++k) {
      const float value = device::to_float(x[k]);
      if (isfinite(value)) continue;
      const float scale = block_scale_of(p, n, k);
      sum += value * device::dequantise(weight[k], DType::kFloat8E4M3, scale);
    }
    return sum;
  }

  /// Their sums, scaled, plus bias.
  __device__ float4 values_of(int m, int column, const Factors& by) const {
    float4 sum = total_of(m, column);
    float of_x = x_scale[m];
    if (params.second_term > 0 && of_x < 0.0f) {
      of_x = -of_x;
      add(sum, {products_not_finite(m, column), products_not_finite(m, column + 1),
                products_not_finite(m, column + 2), products_not_finite(m, column + 3)});
    }
    return {scaled({of_x, by.scale.x, by.bias.x}, sum.x),
            scaled({of_x, by.scale.y, by.bias.y}, sum.y),
            scaled({of_x, by.scale.z, by.bias.z}, sum.z),
            scaled({of_x, by.scale.w, by.bias.w}, sum.w)};
  }

  /// What a thread stores: kEach columns from `column` of the tile on, of rows `m`, `m` + `step`
  /// up to `end`.
  struct Part {
    int column, m, end, step;
  };
  __device__ Part part() const {
    const int per_row = params.box_rows / kEach, step = threads / per_row;
    const int column = threadIdx.x % per_row * kEach, row = threadIdx.x / per_row;
    const int begin = rank * params.rows_each, end = min(begin + params.rows_each, rows);
    const bool has_none = first + column >= params.gemm.out_cols() || row >= step;
    return {column, begin + row, has_none ? 0 : end, step};
  }

  __device__ Four* residual_place() const {
    return reinterpret_cast<Four*>(reinterpret_cast<char*>(sums) + params.residual_at) +
           threadIdx.x;
  }

  /// Asks for the residual, which comes while sums are exchanged. Read where it was added, each row
  /// was a trip to L2 or memory behind the one before. H200, us, by turns, that way and so, 128 rows
  /// of 4096 x 4096: int4 12.5 and 11.2, fp8 by fp8 10.3 and 9.0, bf16 15.3 and 14.0, fp8 by bf16
  /// 14.7 and 13.6; 256 rows of int4 18.7 and 15.5; wide tiles, 64 rows of 4096 x 28672, 38.4 and
  /// 32.2.
  __device__ void request_residual() const {
    if (params.residual_at == 0) return;
    const GemmParams& p = params.gemm;
    auto [column, m, end, step] = part();
    const T* from = static_cast<const T*>(p.residual) + (row0 + m) * p.stride_residual + first +
                    column;
    Four* to = residual_place();
#pragma unroll 1
    for (; m < end; m += step, from += step * p.stride_residual, to += threads)
      ptx::copy_async_8(to, from, true);
    ptx::commit_copies();
  }

  __device__ void store() const {
    const GemmParams& p = params.gemm;
    const int out_cols = p.out_cols();
    auto [column, m, end, step] = part();
    if (m >= end) return;
    const int n = first + column;
    const Factors by = factors_of(column);
    T* y = static_cast<T*>(p.y) + static_cast<std::int64_t>(row0 + m) * out_cols + n;
    if (params.plain) {
      const Four* residual = residual_place();
      ptx::wait_copies<0>();
#pragma unroll 2
      for (; m < end; m += step, y += static_cast<std::int64_t>(step) * out_cols) {
        const float4 values = values_of(m, column, by);
        device::Vec<float, kEach> sum{values.x, values.y, values.z, values.w};
        if (p.residual) {
          const auto more = device::floats(*residual);
#pragma unroll
          for (int i = 0; i < kEach; ++i) sum.data[i] = __fadd_rn(sum.data[i], more.data[i]);
          residual += threads;
        }
        device::store(y, device::rounded<T>(sum));
      }
      return;
    }
#pragma unroll 1
    for (; m < end; m += step, y += static_cast<std::int64_t>(step) * out_cols) {
      float4 values = values_of(m, column, by);
      if (p.activation != Activation::kNone)
#pragma unroll 1
        for (int i = 0; i < kEach; ++i)  // four turns bring each to its place
          values = {values.y, values.z, values.w, activate<T>(p.activation, values.x)};
      if (params.paired) {
        const int up = column + params.box_rows;
        const float4 more = values_of(m, up, factors_of(up));
        values = {__fmul_rn(values.x, more.x), __fmul_rn(values.y, more.y),
                  __fmul_rn(values.z, more.z), __fmul_rn(values.w, more.w)};
      }
      store_four(values, y, row0 + m, n, out_cols - n);
    }
  }

  /// Four neighbours of row m from column n on, or as many as there are, plus residual.
  __device__ void store_four(const float4& values, T* y, std::int64_t m, int n, int count) const {
    const GemmParams& p = params.gemm;
    const T* residual = static_cast<const T*>(p.residual) + m * p.stride_residual + n;
    float value[kEach] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (p.residual && i < count)
        value[i] = __fadd_rn(value[i], device::to_float(residual[i]));
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i < count) y[i] = device::from_float<T>(value[i]);
  }
};

}  // namespace ridgeline::gemm_cluster
