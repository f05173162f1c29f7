#include <cstdint>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/row.cuh"
#include "device/row_weight.cuh"
#include "kernels/norm.h"

namespace ridgeline {
namespace {

using Activation = LayerNormParams::Activation;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kMaxWarps = 512 / device::kWarpSize;
constexpr int kFewRows = 132;  // up to a row an SM latency is what costs, not registers

// ---- Phases -------------------------------------------------------------------------------------

/// (x - mean) * scale. kFast: in one instruction, whose error beside a large mean is still far
/// below that of x itself in 16 bits.
template <bool kFast>
__device__ float normalised(float x, float mean, float scale) {
  return kFast ? fmaf(x, scale, -mean * scale) : (x - mean) * scale;
}

/// y = activate((x - mean) * scale * weight + bias).
template <class T, class Row, class Weight, class Fn>
__device__ void store_row(T* y, Row& row, const Weight& weight, const Weight& bias, float mean,
                          float scale, Fn activate) {
  row.visit([&](int i, int column, const auto& piece) {
    const auto w = weight.at(i, column), b = bias.at(i, column);
    auto values = device::floats(piece);
#pragma unroll
    for (float& value : values.data) value = normalised<sizeof(T) == 2>(value, mean, scale);
#pragma unroll
    for (int j = 0; j < Row::kWidth; ++j)
      values.data[j] = activate(values.data[j] * w.data[j] + b.data[j]);
    device::store(y + column, device::rounded<T>(values));
  });
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: two floats a warp. With kAhead weight and bias are on their way
/// together with the row; else they are read where they are used, since kept beside the row they
/// take the registers of other blocks (H200, bf16 8192 x 4096 with GELU: 40.8 us, kept 42.8).
///
/// Bytes: the row in and out, weight and bias from L2. With GELU about 25 instructions an element,
/// of the 33 that fit in its share of the time at the bandwidth of an H200: still bandwidth.
template <class T, class Row, bool kHasActivation, bool kAhead>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    layernorm_kernel(const __grid_constant__ LayerNormParams params) {
  __shared__ float partial_sums[kMaxWarps], partial_squares[kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;
  const auto cols = static_cast<float>(params.cols);

  ptx::launch_dependents();
  Row row(x, params.cols);
  const bool float_weights = params.weight_dtype == DType::kFloat32;
  device::RowWeight<T, Row, kAhead> weight(row, params.weight, float_weights);
  device::RowWeight<T, Row, kAhead> bias(row, params.bias, float_weights);
  ptx::wait_for_dependencies();

  row.load(x);
  weight.load();
  bias.load();
  const float sum = device::sum_share(row, [](float v) { return v; });
  const float mean = device::block_reduce<device::Sum>(sum, partial_sums) / cols;
  const float squares =
      device::sum_share(row, [mean](float v) { return (v - mean) * (v - mean); });
  const float variance = device::block_reduce<device::Sum>(squares, partial_squares) / cols;
  const float scale = rsqrtf(variance + params.eps);

  T* y = static_cast<T*>(params.y) + index * params.cols;
  constexpr bool kFast = sizeof(T) == 2;
  if constexpr (!kHasActivation) {
    store_row(y, row, weight, bias, mean, scale, [](float v) { return v; });
  } else if (params.activation == Activation::kGelu) {
    store_row(y, row, weight, bias, mean, scale, [](float v) { return device::gelu<kFast>(v); });
  } else {
    const auto tanh_form = [](float v) { return device::gelu_tanh<kFast>(v); };
    store_row(y, row, weight, bias, mean, scale, tanh_form);
  }
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void layernorm(const LayerNormParams& params, Stream stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.weight, params.bias, params.y},
                                     {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes})};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    device::dispatch_row<T, false>(layout, [&](auto row_type, int threads) {
      using Row = typename decltype(row_type)::type;
      dispatch_bool(params.activation != Activation::kNone, [&](auto has_activation) {
        constexpr bool kCanKeep = device::RowWeight<T, Row, true>::kKept;
        dispatch_bool(kCanKeep && params.rows <= kFewRows, [&](auto ahead) {
          constexpr bool kAhead = ahead() && kCanKeep;  // elsewhere both are one kernel
          device::launch_chained<layernorm_kernel<T, Row, has_activation(), kAhead>>(
              dim3(rows), dim3(threads), 0, stream, params, "layernorm");
        });
      });
    });
  });
}

}  // namespace ridgeline
