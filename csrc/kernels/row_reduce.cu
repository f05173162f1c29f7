#include <cstdint>

#include "device/launch.cuh"
#include "device/row.cuh"
#include "device/row_reduce.cuh"
#include "device/row_softmax.cuh"
#include "kernels/reduction.h"

namespace ridgeline {
namespace {

using Op = RowReduceParams::Op;

// ---- Phases -------------------------------------------------------------------------------------

/// The largest of sign * x over a piece, or NaN.
template <class Piece>
__device__ float piece_max(const Piece& piece, float sign) {
  float best = device::MaxOrNaN::identity();
  for (const float value : device::floats(piece).data)
    best = device::MaxOrNaN::combine(best, sign * value);
  return best;
}

/// The same over the row.
template <class Row>
__device__ float row_max(Row& row, float* scratch, float sign) {
  float best = device::MaxOrNaN::identity();
  row.visit([&](int, int, const auto& piece) {
    best = device::MaxOrNaN::combine(best, piece_max(piece, sign));
  });
  return device::block_reduce<device::MaxOrNaN>(best, scratch);
}

/// The lowest column that holds the largest value, or the first NaN. A thread keeps the first piece
/// that holds its own largest; threads that own the row's look into that piece once more (H200,
/// bf16 8192 x 4096: 26.7 us where all looked through all).
template <class T, class Row>
__device__ int row_argmax(Row& row, const T* x, float* maxima, int* columns) {
  float own = device::MaxOrNaN::identity();
  int own_column = 0;
  row.visit([&](int, int column, const auto& piece) {
    const float value = piece_max(piece, 1.0f);
    const bool better = value > own || (value != value && own == own);
    own = better ? value : own;
    own_column = better ? column : own_column;
  });
  const float best = device::block_reduce<device::MaxOrNaN>(own, maxima);
  const auto is_best = [best](float v) { return v == best || (v != v && best != best); };
  int first = device::MinIndex::identity();
  if (is_best(own)) {
    const auto values = device::floats(device::load_vec<Row::kWidth>(x + own_column));
#pragma unroll
    for (int j = Row::kWidth - 1; j >= 0; --j)
      if (is_best(values.data[j])) first = own_column + j;
  }
  return device::block_reduce<device::MinIndex>(first, columns);
}

template <bool kFast>
__device__ float log_sum_exp(device::RowWeights weights) {
  if (isinf(weights.largest)) return weights.largest;
  return weights.largest * (1.0f / device::Weigh<kFast>::kUnit) + logf(weights.sum);
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: three words a warp. Bytes: the row in: bandwidth.
template <class T, class Row, bool kLogSumExp>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    row_reduce_kernel(const __grid_constant__ RowReduceParams params) {
  __shared__ device::RowScratch scratch;
  __shared__ device::RowWeights filed[device::kMaxWarps];
  __shared__ float maxima[device::kMaxWarps];
  __shared__ int columns[device::kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  device::start_dependents();
  device::wait_then_start_dependents();
  Row row(x, params.cols);
  row.load(x);

  const auto store = [&](float result) {
    if (threadIdx.x == 0) static_cast<T*>(params.y)[index] = device::from_float<T>(result);
  };
  if constexpr (kLogSumExp) {
    constexpr bool kFast = sizeof(T) == 2;
    device::file_weights<kFast>(row, filed);
    if (device::warp_index() == 0)  // the others make room
      store(log_sum_exp<kFast>(device::joined_weights<kFast>(filed)));
    return;
  }
  const auto itself = [](float v) { return v; };
  switch (params.op) {
    case Op::kSum: return store(device::sum_row(row, scratch, itself));
    case Op::kMean:
      return store(device::sum_row(row, scratch, itself) / static_cast<float>(params.cols));
    case Op::kMax: return store(row_max(row, maxima, 1.0f));
    case Op::kMin: return store(-row_max(row, maxima, -1.0f));
    case Op::kArgmax: {
      const int column = row_argmax(row, x, maxima, columns);
      if (threadIdx.x == 0) static_cast<std::int64_t*>(params.y)[index] = column;
      return;
    }
    case Op::kLogSumExp: return;
  }
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void row_reduce(const RowReduceParams& params, Stream stream) {
  if (params.rows == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .rows = params.rows,
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x}, {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes}),
      .full = true};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_bool(params.op == Op::kLogSumExp, [&](auto is_log_sum_exp) {
      // A row's log-sum-exp depends on how it is dealt out: few rows are dealt out as many are.
      device::dispatch_row<T, true, !is_log_sum_exp(), true>(layout, [&](auto row_type,
                                                                         int threads) {
        using Row = typename decltype(row_type)::type;
        device::launch_chained<row_reduce_kernel<T, Row, is_log_sum_exp()>>(
            dim3(rows), dim3(threads), 0, stream, params, "row_reduce");
      });
    });
  });
}

}  // namespace ridgeline
