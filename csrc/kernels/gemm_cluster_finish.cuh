#pragma once
#include "device/dequant.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/cluster.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_cluster_sm90.cuh"
#include "kernels/gemm_epilogue_short.cuh"

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

/// kTerms: of x, two of which may lack values that are not finite.
template <class T, int kTerms = 1>
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

  /// Sums of kEach columns of a row, and, where kHalves are two, of those of the tile's other half.
  template <int kHalves>
  struct Sums {
    float4 of[kHalves];
    __device__ void add(const Sums& part) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) Finish::add(of[h], part.of[h]);
    }
  };

  /// Sums that begin at `from`, the other half's `further` behind.
  template <int kHalves>
  static __device__ Sums<kHalves> sums_at(const float* from, int further) {
    Sums<kHalves> sums;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      sums.of[h] = *reinterpret_cast<const float4*>(from + h * further);
    return sums;
  }

  /// Of the block's warpgroups.
  template <int kHalves>
  __device__ Sums<kHalves> sums_of(int m, int column) const {
    const float* from = sums + m * pitch() + column;
    auto sum = sums_at<kHalves>(from, params.box_rows);
#pragma unroll 1
    for (int turn = 1; turn < params.turns; ++turn)
      sum.add(sums_at<kHalves>(from += params.rows_held * pitch(), params.box_rows));
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
        ptx::put_in_block(inbox(from, m - begin, column), sums_of<1>(m, column).of[0],
                          &fixed.received, owner);
    }
  }

  /// Squares become the scale of a row.
  __device__ void fold_norm() const {
    ptx::mbarrier_wait(&fixed.squared, 0);
    const int m = threadIdx.x;
    if (m < rows) x_scale[m] = params.unit * fixed.norm_of(params.gemm, m, blocks);
  }

  /// All blocks' sums, in order.
  template <int kHalves>
  __device__ Sums<kHalves> totals_of(int m, int column) const {
    const auto own = sums_of<kHalves>(m, column);
    if (blocks == 1) return own;
    Sums<kHalves> total{};
#pragma unroll 1
    for (int s = 0; s < blocks; ++s) {
      const auto* got = reinterpret_cast<const float*>(
          inbox(s < rank ? s : s - 1, m - rank * params.rows_each, column));
      total.add(s == rank ? own : sums_at<kHalves>(got, params.box_rows));
    }
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

  /// kEach columns of a row.
  using Row = float[kEach];

  /// The sums from `column` of the tile on, scaled, plus bias, and those of its other half.
  template <int kHalves>
  __device__ __forceinline__ void bring_values(Row* values, int m, int column,
                                               const Factors* by) const {
    auto sums = totals_of<kHalves>(m, column);
    float of_x = x_scale[m];
    const bool lacks = kTerms > 1 && of_x < 0.0f;
    if (lacks) of_x = -of_x;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float4& sum = sums.of[h];
      if (lacks) {
        const int n = column + h * params.box_rows;
        add(sum, {products_not_finite(m, n), products_not_finite(m, n + 1),
                  products_not_finite(m, n + 2), products_not_finite(m, n + 3)});
      }
      values[h][0] = scaled({of_x, by[h].scale.x, by[h].bias.x}, sum.x);
      values[h][1] = scaled({of_x, by[h].scale.y, by[h].bias.y}, sum.y);
      values[h][2] = scaled({of_x, by[h].scale.z, by[h].bias.z}, sum.z);
      values[h][3] = scaled({of_x, by[h].scale.w, by[h].bias.w}, sum.w);
    }
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

  /// What is plain, and gates, have code of their own, as short as it can be: its lines come from
  /// memory. H200, us, 16 rows of int4 of 4096 x 28672, one loop for all, even with activations
  /// called, and so: 19.6 and 19.4.
  __device__ void store() const {
    const Part of = part();
    if (of.m >= of.end) return;
    if (params.residual_at > 0) ptx::wait_copies<0>();
    if (params.paired) return store_gated(of);
    params.plain && params.vectors ? store_plain(of) : store_any(of);
  }

  __device__ __forceinline__ T* place_of(const Part& of) const {
    return static_cast<T*>(params.gemm.y) +
           static_cast<std::int64_t>(row0 + of.m) * params.gemm.out_cols() + first + of.column;
  }

  __device__ __forceinline__ void store_vector(const Row& row, T* y, const Four* residual) const {
    device::Vec<float, kEach> out{row[0], row[1], row[2], row[3]};
    if (params.gemm.residual) {
      const auto more = device::floats(*residual);
#pragma unroll
      for (int i = 0; i < kEach; ++i) out.data[i] = __fadd_rn(out.data[i], more.data[i]);
    }
    device::store(y, device::rounded<T>(out));
  }

  __device__ __forceinline__ void store_plain(const Part& of) const {
    const std::int64_t further = static_cast<std::int64_t>(of.step) * params.gemm.out_cols();
    const Factors by = factors_of(of.column);
    const Four* residual = residual_place();
    T* y = place_of(of);
#pragma unroll 2
    for (int m = of.m; m < of.end; m += of.step, y += further, residual += threads) {
      Row row;
      bring_values<1>(&row, m, of.column, &by);
      store_vector(row, y, residual);
    }
  }

  /// kEach columns of row m of y, or as many as there are.
  __device__ __forceinline__ void store_row(const Row& row, T* y, int m, int n,
                                            const Four* residual) const {
    if (params.vectors) {
      store_vector(row, y, residual);
    } else {
      store_some(row, y, row0 + m, n, params.gemm.out_cols() - n);
    }
  }

  __device__ __forceinline__ void store_gated(const Part& of) const {
    const std::int64_t further = static_cast<std::int64_t>(of.step) * params.gemm.out_cols();
    const Factors by[] = {factors_of(of.column), factors_of(of.column + params.box_rows)};
    const Four* residual = residual_place();
    T* y = place_of(of);
#pragma unroll 1
    for (int m = of.m; m < of.end; m += of.step, y += further, residual += threads) {
      Row halves[2];
      bring_values<2>(halves, m, of.column, by);
      auto& [gates, ups] = halves;
      if (params.gemm.activation == Activation::kSiluMul) {
        activate_piece<T, Activation::kSilu>(gates);
      } else {
        activate_piece<T, Activation::kGelu>(gates);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) gates[i] = __fmul_rn(gates[i], ups[i]);
      store_row(gates, y, m, first + of.column, residual);
    }
  }

  __device__ __forceinline__ void store_any(const Part& of) const {
    const std::int64_t further = static_cast<std::int64_t>(of.step) * params.gemm.out_cols();
    const Factors by = factors_of(of.column);
    const Four* residual = residual_place();
    T* y = place_of(of);
    // Eight activations at once, of which none waits for another.
    constexpr int kRows = 2;
#pragma unroll 1
    for (int m = of.m; m < of.end;) {
      Row rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r)  // the last one again where there is none
        bring_values<1>(&rows[r], min(m + r * of.step, of.end - 1), of.column, &by);
      activate_all<T>(params.gemm.activation, rows);
#pragma unroll
      for (int r = 0; r < kRows && m < of.end; ++r) {
        store_row(rows[r], y, m, first + of.column, residual);
        m += of.step, y += further, residual += threads;
      }
    }
  }

  /// As many of row m from column n on as there are, plus residual.
  __device__ void store_some(const Row& row, T* y, std::int64_t m, int n, int count) const {
    const GemmParams& p = params.gemm;
    const T* residual = static_cast<const T*>(p.residual) + m * p.stride_residual + n;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i >= count) break;
      const float more = p.residual ? device::to_float(residual[i]) : -0.0f;
      y[i] = device::from_float<T>(__fadd_rn(row[i], more));
    }
  }
};

}  // namespace ridgeline::gemm_cluster
