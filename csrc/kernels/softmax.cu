#include <cstdint>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/row.cuh"
#include "kernels/reduction.h"

namespace ridgeline {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kMaxWarps = 512 / device::kWarpSize;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: two floats a warp. Exponentials are taken twice rather than kept:
/// a row of fp32 beside the row would halve the rows in flight. Bytes: the row in and out:
/// bandwidth.
template <class T, class Row>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    softmax_kernel(const __grid_constant__ SoftmaxParams params) {
  __shared__ float maxima[kMaxWarps], sums[kMaxWarps];
  constexpr bool kFast = sizeof(T) == 2;
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  Row row(x, params.cols);
  row.load(x);

  float best = device::MaxOrNaN::identity();
  row.visit([&](int, int, const auto& piece) {
    for (const float value : device::floats(piece).data)
      best = device::MaxOrNaN::combine(best, value);
  });
  best = device::block_reduce<device::MaxOrNaN>(best, maxima);

  const float sum =
      device::sum_share(row, [best](float v) { return device::exp<kFast>(v - best); });
  const float inverse = 1.0f / device::block_reduce<device::Sum>(sum, sums);

  T* y = static_cast<T*>(params.y) + index * params.cols;
  row.visit([&](int, int column, const auto& piece) {
    auto values = device::floats(piece);
#pragma unroll
    for (float& value : values.data) value = device::exp<kFast>(value - best) * inverse;
    device::store(y + column, device::rounded<T>(values));
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
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.y}, {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes})};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    device::dispatch_row<T, true>(layout, [&](auto row_type, int threads) {
      using Row = typename decltype(row_type)::type;
      device::launch_chained<softmax_kernel<T, Row>>(dim3(rows), dim3(threads), 0, stream, params,
                                                     "softmax");
    });
  });
}

}  // namespace ridgeline
