#pragma once
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// From the sums of a block's strips to y, by the warps that add them up.
namespace ridgeline::gemm_strips {

/// What finishes a block's outputs besides scales, in shared memory: rows of bias, of the up rows'
/// too, and of the residual. All of it is loaded at the start: behind the requests of full rings a
/// load takes longer than a strip. H200, one row of int4, 4096 x 28672, plain 16.3 us: with a bias
/// or a residual loaded for each strip 19.3, a strip ahead 18.3, so 16.2; eight rows 25.2 and 21.5.
template <class T>
struct KeptOperands {
  const GemmParams& p;
  int biases, columns;  // rows of bias; columns of the block
  T* rows;

  static int bytes(const GemmParams& p, const StripOrder& order) {
    const int rows = (p.bias ? order.paired : 0) + (p.residual ? static_cast<int>(p.M) : 0);
    return rows * (order.each + (order.rest > 0 ? 1 : 0)) * kStripRows * sizeof(T);
  }

  __device__ KeptOperands(const GemmParams& p, const StripOrder& order, int strips, char* memory)
      : p(p), biases(p.bias ? order.paired : 0), columns(strips / order.paired * kStripRows),
        rows(reinterpret_cast<T*>(memory)) {}

  /// What the thread needs that finishes outputs of row m in columns at, at + 16, … of the block,
  /// whose first is column `first` of the product. Row 0's threads bring the bias, for all rows.
  __device__ void bring(const StripOrder& order, int first, int m, int at) const {
    if (m >= p.M) return;
    if (p.residual)
      copy(biases + m, static_cast<const T*>(p.residual) + m * p.stride_residual, first, at);
    if (m > 0) return;
    for (int i = 0; i < biases; ++i)
      copy(i, static_cast<const T*>(p.bias) + i * order.up_rows, first, at);
  }

  /// All `threads` threads that bring meet: behind it the bias is kept for all rows. Lanes of a warp
  /// bring other rows, so they meet first: the barrier counts warps.
  __device__ void meet(int barrier, int threads) const {
    __syncwarp();
    if (biases > 0) ptx::named_barrier_sync(barrier, threads);
  }

  __device__ float bias(bool up, int column) const {
    return biases == 0 ? -0.0f : device::to_float(rows[(up ? columns : 0) + column]);
  }
  __device__ float residual(int m, int column) const {
    return p.residual ? device::to_float(rows[(biases + m) * columns + column]) : -0.0f;
  }

 private:
  __device__ void copy(int row, const T* from, int first, int at) const {
    constexpr int kTogether = 8;
#pragma unroll 1
    for (int begin = at; begin < columns; begin += kTogether * kStripRows) {
      T values[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int column = begin + j * kStripRows, n = first + column;
        if (column < columns && n < p.out_cols()) values[j] = from[n];
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (const int column = begin + j * kStripRows; column < columns)
          rows[row * columns + column] = values[j];
    }
  }
};

/// What the warps do that add up: the outputs of the block's strips, in order. `kept`: memory of
/// KeptOperands. `code_scale`: of a row of x that became codes.
template <class T>
__device__ void finish_strips(const GemmParams& p, const StripOrder& order, StripSums& barriers,
                              const float* sums, char* kept, const Squares& squares,
                              const float* code_scale) {
  constexpr int kOutputs = 2;  // of a strip, that a thread has at most
  const bool paired = order.paired == 2;
  const int each = sums_each(p), strips = order.strips(blockIdx.x);
  const int begin = threadIdx.x - kThreads, step = blockDim.x - kThreads;
  const int first = order.first_row(blockIdx.x), at = begin % kStripRows;
  const KeptOperands<T> operands(p, order, strips, kept);
  float x_scales[kOutputs], scale = 1.0f, up_scale = 1.0f;
#pragma unroll
  for (int j = 0; j < kOutputs; ++j) {
    const int m = (begin + j * step) / kStripRows;
    x_scales[j] = p.x.scale && m < p.M ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
  }
  const auto load_scales = [&](int column) {
    if (column >= operands.columns || first + column >= p.out_cols()) return;
    scale = weight_scale_of(p, first + column);
    if (paired) up_scale = weight_scale_of(p, first + column + order.up_rows);
  };
  load_scales(at);
#pragma unroll
  for (int j = 0; j < kOutputs; ++j)
    operands.bring(order, first, (begin + j * step) / kStripRows, at);
  operands.meet(2, step);
  for (int strip = 0, column = at; strip < strips;
       strip += order.paired, column += kStripRows) {
    const int last = strip + order.paired - 1, n = first + column;
    Operands own{.weight_scale = scale}, up{.weight_scale = up_scale};
    load_scales(column + kStripRows);  // a strip ahead
    if (paired) barriers.wait_done(strip);
    barriers.wait_done(last);
#pragma unroll
    for (int j = 0; j < kOutputs; ++j) {
      const int i = begin + j * step, m = i / kStripRows;
      if (i >= each || n >= p.out_cols()) break;
      // These came with x, which the sums wait for.
      if (strip == 0 && p.x.to_codes) x_scales[j] = *code_scale;
      else if (strip == 0 && p.x.norm_weight) x_scales[j] = norm_factor(p, squares.sum(m));
      own.x_scale = up.x_scale = x_scales[j];
      own.bias = operands.bias(false, column);
      own.residual = operands.residual(m, column);
      const float sum = total_of(sums, each, strip, i);
      if (paired) {
        up.bias = operands.bias(true, column);
        finish_gated<T>(p, own, up, sum, total_of(sums, each, last, i), m, n);
      } else {
        finish<T>(p, own, sum, m, n);
      }
    }
    if (paired) barriers.arrive_free(strip);
    barriers.arrive_free(last);  // this lane has read the sums
  }
}

}  // namespace ridgeline::gemm_strips
