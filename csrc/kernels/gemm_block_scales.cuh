#pragma once
#include "common/math.h"
#include "kernels/gemm.h"

/// Scales of weights that belong to blocks of kScaleBlock rows by as many columns of K.
namespace ridgeline::gemm_detail {

/// Which scale is that of the first columns of weight row n, or of the last row past it.
__device__ __forceinline__ int first_block_scale(const GemmParams& p, int n) {
  return min(n, p.N - 1) / kScaleBlock * ceil_div(p.K, kScaleBlock);
}

/// That of column k of weight row n; 1 where products are scaled.
__device__ __forceinline__ float block_scale_of(const GemmParams& p, int n, int k) {
  if (p.weight.scales_products()) return 1.0f;
  return static_cast<const float*>(p.weight.scales)[first_block_scale(p, n) + k / kScaleBlock];
}

}  // namespace ridgeline::gemm_detail
