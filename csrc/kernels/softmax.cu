#include <cstdint>

#include "device/launch.cuh"
#include "device/row.cuh"
#include "device/row_softmax.cuh"
#include "kernels/reduction.h"

namespace ridgeline {
namespace {

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: two floats a warp. Exponentials are taken twice rather than kept:
/// a row of fp32 beside the row would halve the rows in flight. Bytes: the row in and out:
/// bandwidth.
template <class T, class Row>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    softmax_kernel(const __grid_constant__ SoftmaxParams params) {
  __shared__ device::RowWeights filed[device::kMaxWarps];
  constexpr bool kFast = sizeof(T) == 2;
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  device::start_dependents();
  device::wait_then_start_dependents();
  Row row(x, params.cols);
  row.load(x);

  device::file_weights<kFast>(row, filed);
  const auto [largest, sum] = device::joined_weights<kFast>(filed);
  const float inverse = 1.0f / sum;

  T* y = static_cast<T*>(params.y) + index * params.cols;
  row.visit_padded([&](int, int column, const auto& piece, bool inside) {
    auto values = device::floats(piece);
#pragma unroll
    for (float& value : values.data)
      value = device::Weigh<kFast>::of(value, largest) * inverse;
    device::store_inside(y + column, device::rounded<T>(values), inside);
  });
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void softmax(const SoftmaxParams& params, Stream stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .rows = params.rows,
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.y}, {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes}),
      .full = true};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    device::dispatch_row<T, true, false, true>(layout, [&](auto row_type, int threads) {
      using Row = typename decltype(row_type)::type;
      device::launch_chained<softmax_kernel<T, Row>>(dim3(rows), dim3(threads), 0, stream, params,
                                                     "softmax");
    });
  });
}

}  // namespace ridgeline
