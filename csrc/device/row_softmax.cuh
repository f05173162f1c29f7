#pragma once
#include "device/row.cuh"
#include "device/softmax.cuh"

namespace ridgeline::device {

/// Exponentials of a row relative to a base. kFast: in one multiply-add and one exponential, bases
/// in units of log2; a base's rounding is in all weights of the row alike. Else in natural units.
template <bool kFast>
struct Weigh {
  static constexpr float kUnit = kFast ? kLog2E : 1.0f;

  __device__ static float of(float x, float base) {
    return kFast ? ptx::exp2_approx(fmaf(x, kLog2E, -base)) : expf(x - base);
  }
  /// What a weight relative to `from` is multiplied with to be relative to `to`.
  __device__ static float moved(float from, float to) {
    return kFast ? ptx::exp2_approx(from - to) : expf(from - to);
  }
};

/// The largest value, in units of Weigh, and the sum of the weights relative to that.
struct RowWeights {
  float largest, sum;
};

/// Each warp files its part of the row in `filed`, in one pass: relative to the warp's own largest
/// value, which one instruction finds (H200, bf16 8192 x 4096, log-sum-exp: 18.4 us with two passes
/// of the block, 17.0 so). The bits depend on how the row is dealt out: few rows are as many are.
template <bool kFast, class Row>
__device__ void file_weights(Row& row, RowWeights* filed) {
  float largest = kMinusInfinity;
  row.visit_padded([&](int, int, const auto& piece, bool inside) {
    largest = MaxOrNaN::combine(largest, inside ? largest_of(piece) : kMinusInfinity);
  });
  largest = warp_max_or_nan(largest) * Weigh<kFast>::kUnit;
  const float base = exponent_base(largest);
  float total = 0.0f;
  row.visit_padded([&](int, int, const auto& piece, bool inside) {
    float sum = 0.0f;
    for (const float x : floats(piece).data) sum += Weigh<kFast>::of(x, base);
    total += inside ? sum : 0.0f;
  });
  total = warp_reduce<Sum>(total);
  if (threadIdx.x % kWarpSize == 0) filed[threadIdx.x / kWarpSize] = {largest, total};
  __syncthreads();  // every warp's part is filed
}

/// The row's, from what the block's warps have filed.
template <bool kFast>
__device__ RowWeights joined_weights(const RowWeights* filed) {
  const int lane = threadIdx.x % kWarpSize;
  const bool has_warp = lane < static_cast<int>(blockDim.x) / kWarpSize;
  const RowWeights own = has_warp ? filed[lane] : RowWeights{kMinusInfinity, 0.0f};
  const float largest = warp_max_or_nan(own.largest);
  return {largest, warp_reduce<Sum>(own.sum * Weigh<kFast>::moved(own.largest, largest))};
}

}  // namespace ridgeline::device
