#include <cstdint>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/row.cuh"
#include "device/row_reduce.cuh"
#include "device/row_weight.cuh"
#include "kernels/norm.h"

namespace ridgeline {
namespace {

using Activation = LayerNormParams::Activation;

// ---- Constants ----------------------------------------------------------------------------------

// Beside a mean of up to 4 deviations E[x^2] - mean^2 is within 2^-18 of itself.
constexpr float kLargestMean = 16.0f;  // mean^2 / variance

// ---- Phases -------------------------------------------------------------------------------------

/// Mean and variance of the row. For 16 bits from one pass and one reduction, unless the mean is
/// so large that it would cancel (H200, bf16 8192 x 4096 with GELU: 38.4 us with two passes, 36.5).
template <bool kFast, class Row>
__device__ float2 moments(Row& row, float share_of_one, device::RowScratch (&scratch)[2]) {
  const float2 sums = device::reduce_row<device::Sum, device::Sum>(
      row, scratch[0], [](int, int, const auto& piece) {
        float2 sums{};
        for (const float v : device::floats(piece).data)
          sums = make_float2(sums.x + v, fmaf(v, v, sums.y));
        return sums;
      });
  const float mean = sums.x * share_of_one;
  const float variance = sums.y * share_of_one - mean * mean;
  if (kFast && mean * mean <= kLargestMean * variance) return {mean, variance};
  const float squares =
      device::sum_row(row, scratch[1], [mean](float v) { return (v - mean) * (v - mean); });
  return {mean, squares * share_of_one};
}

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
  row.visit_padded([&](int i, int column, const auto& piece, bool inside) {
    const auto w = weight.at(i, column), b = bias.at(i, column);
    auto values = device::floats(piece);
#pragma unroll
    for (float& value : values.data) value = normalised<sizeof(T) == 2>(value, mean, scale);
#pragma unroll
    for (int j = 0; j < Row::kWidth; ++j)
      values.data[j] = activate(values.data[j] * w.data[j] + b.data[j]);
    device::store_inside(y + column, device::rounded<T>(values), inside);
  });
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row, or a cluster, or a block for up to four narrow rows: blocks of one warp
/// leave half of an SM's warps unused (H200, bf16 8192 x 1024 12.3 us, four rows a block 10.6; 8192
/// x 768 11.2 and 8.9, with GELU 13.6 and 12.2; but 8192 x 1024 with GELU 12.6 full, 13.0 so).
/// Block: a whole number of warps for each row; a thread owns the pieces that Row deals it. Shared
/// memory: four floats a segment. Beside few rows weight and bias are on their way together with
/// the row; else they are read where they are used, since kept beside the row they take registers
/// of other blocks (H200, bf16 8192 x 4096 with GELU: 40.8 us, kept 42.8).
///
/// Bytes: the row in and out, weight and bias from L2. With GELU about 20 instructions an element,
/// of the 33 that fit in its share of the time at the bandwidth of an H200: still bandwidth.
template <class T, class Row, bool kFloatWeights, bool kHasActivation>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    layernorm_kernel(const __grid_constant__ LayerNormParams params) {
  __shared__ device::RowScratch scratch[2];
  constexpr bool kFast = sizeof(T) == 2;
  constexpr bool kFew = Row::kPieces == 2;

  device::start_dependents();
  device::open_scratch<Row>(scratch[0], scratch[1]);
  const std::int64_t index = device::row_index<Row>();
  const float share_of_one = 1.0f / static_cast<float>(params.cols);
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;
  Row row(x, params.cols);
  device::RowWeight<T, Row, kFloatWeights, kFew> weight(row, params.weight);
  device::RowWeight<T, Row, kFloatWeights, kFew> bias(row, params.bias);
  if (params.weights_ready) weight.load(), bias.load();
  device::prefetch_early<Row>(x, params.cols);
  device::wait_then_start_dependents();

  row.load(x);
  if (!params.weights_ready) weight.load(), bias.load();
  device::prefetch_ahead<Row, T>(params.x, params.stride_x_row, index, params.rows, params.cols);
  const auto [mean, variance] = moments<kFast>(row, share_of_one, scratch);
  const float scale = rsqrtf(variance + params.eps);

  T* y = static_cast<T*>(params.y) + index * params.cols;
  const auto store = [&](auto activate) {
    store_row(y, row, weight, bias, mean, scale, activate);
  };
  if constexpr (!kHasActivation) {
    store([](float v) { return v; });
  } else if (params.activation == Activation::kGelu) {
    store([](float v) { return device::gelu<kFast>(v); });
  } else {
    store([](float v) { return device::gelu_tanh<kFast>(v); });
  }
}

// ---- Launch -------------------------------------------------------------------------------------

constexpr auto kAnyKernel =
    layernorm_kernel<float, device::HeldRow<float, 2, false, true>, true, true>;

}  // namespace

void layernorm(const LayerNormParams& params, Stream stream) {
  if (params.rows == 0 || params.cols == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .rows = params.rows,
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.weight, params.bias, params.y},
                                     {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes}),
      .full = params.bias != nullptr,
      .stacked = params.activation == Activation::kNone,
      .most_blocks = device::has_clusters<kAnyKernel>() ? 4 : 1};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_bool(params.weight_dtype == DType::kFloat32, [&](auto is_float) {
      constexpr bool kFloatWeights = is_float() || sizeof(T) == sizeof(float);
      // Beside float32 weights few rows are as many are, to spare compile time.
      device::dispatch_row<T, false, !kFloatWeights, !kFloatWeights, true, true>(
          layout, [&](auto row_type, int threads, int blocks = 1) {
            using Row = typename decltype(row_type)::type;
            const int together = device::rows_together<Row>(rows, threads);
            dispatch_bool(params.activation != Activation::kNone, [&](auto has_activation) {
              device::launch_chained<layernorm_kernel<T, Row, kFloatWeights, has_activation()>>(
                  dim3(rows / together * blocks), dim3(threads, together), 0, stream, params,
                  "layernorm", blocks);
            });
          });
    });
  });
}

}  // namespace ridgeline
