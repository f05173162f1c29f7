#include <cstdint>

#include "common/quant_scale.h"
#include "device/encode.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/row.cuh"
#include "device/row_weight.cuh"
#include "kernels/norm.h"

namespace ridgeline {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kMaxWarps = 512 / device::kWarpSize;

// ---- Phases -------------------------------------------------------------------------------------

/// The normalised values of one piece in fp32.
template <class T, int kWidth>
__device__ device::Vec<float, kWidth> normalised(const device::Vec<T, kWidth>& piece,
                                                 const device::Vec<float, kWidth>& weight,
                                                 float scale, float offset) {
  device::Vec<float, kWidth> values = device::floats(piece);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values.data[j] *= scale * (weight.data[j] + offset);
  return values;
}

/// Writes the row as 8-bit codes, and its scale. `partial_maxima` holds one float a warp.
template <class Row, class Weight>
__device__ void store_codes(const RmsNormParams& params, Row& row, const Weight& weight,
                            float scale, float* partial_maxima) {
  const std::int64_t index = blockIdx.x;
  float amax = 0.0f;
  row.visit([&](int i, int column, const auto& piece) {
    const auto values = normalised(piece, weight.at(i, column), scale, params.offset);
    for (const float value : values.data) amax = device::MaxOrNaN::combine(amax, fabsf(value));
  });
  amax = device::block_reduce<device::MaxOrNaN>(amax, partial_maxima);
  const float y_scale = scale_of_amax(amax, params.y_dtype);
  const float inverse = 1.0f / y_scale;
  if (threadIdx.x == 0) params.y_scale[index] = y_scale;
  auto* codes = static_cast<std::uint8_t*>(params.y) + index * params.cols;
  row.visit([&](int i, int column, const auto& piece) {
    const auto values = normalised(piece, weight.at(i, column), scale * inverse, params.offset);
    device::store(codes + column, device::encode(values, params.y_dtype == DType::kFloat8E4M3));
  });
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: two floats a warp. The weight is read ahead of the wait only if the
/// caller says that it is at rest; the row always after it.
///
/// Bytes: the row in and out (in and out twice with a residual), the weight from L2. About six
/// instructions an element: bandwidth.
template <class T, class Row, bool kHasResidual>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    rmsnorm_kernel(const __grid_constant__ RmsNormParams params) {
  __shared__ float partial_sums[kMaxWarps], partial_maxima[kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  ptx::launch_dependents();
  Row row(x, params.cols);
  const bool float_weight = params.weight_dtype == DType::kFloat32;
  device::RowWeight<T, Row, true> weight(row, params.weight, float_weight);
  if (params.weights_ready) weight.load();
  ptx::wait_for_dependencies();

  row.load(x);
  if (!params.weights_ready) weight.load();
  if constexpr (kHasResidual)
    row.add_into(static_cast<T*>(params.residual) + index * params.stride_residual_row);
  const float squares = device::sum_share(row, [](float v) { return v * v; });
  const float sum = device::block_reduce<device::Sum>(squares, partial_sums);
  const float scale = rsqrtf(sum / static_cast<float>(params.cols) + params.eps);
  if (params.y_scale != nullptr) return store_codes(params, row, weight, scale, partial_maxima);

  T* y = static_cast<T*>(params.y) + index * params.cols;
  row.visit([&](int i, int column, const auto& piece) {
    const auto values = normalised(piece, weight.at(i, column), scale, params.offset);
    device::store(y + column, device::rounded<T>(values));
  });
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void rmsnorm(const RmsNormParams& params, Stream stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const std::int64_t residual_bytes = params.stride_residual_row * element;
  // y is as long as the row in bytes or, in codes, aligned whenever the row is.
  const bool vectors =
      device::all_aligned(16, {params.x, params.residual, params.weight, params.y},
                          {x_bytes, residual_bytes, params.cols * element});
  const device::RowLayout layout{.cols = params.cols,
                                 .vectors = vectors,
                                 .lines = device::all_aligned(128, {params.x}, {x_bytes})};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    device::dispatch_row<T, false>(layout, [&](auto row_type, int threads) {
      using Row = typename decltype(row_type)::type;
      dispatch_bool(params.residual != nullptr, [&](auto has_residual) {
        device::launch_chained<rmsnorm_kernel<T, Row, has_residual()>>(
            dim3(rows), dim3(threads), 0, stream, params, "rmsnorm");
      });
    });
  });
}

}  // namespace ridgeline
