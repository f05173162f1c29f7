#pragma once
#include "common/math.h"
#include "device/ptx/prefetch.cuh"
#include "kernels/gemm.h"

namespace ridgeline::gemm_detail {

/// Asks L2 for lines of x and of the norm's weight, some a block: behind the wait every block asks
/// for all. One warp of each block calls it.
__device__ __forceinline__ void prefetch_x(const GemmParams& p, int lane) {
  constexpr int kLine = 128, kWarp = 32;
  const int blocks = gridDim.x * gridDim.y * gridDim.z;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const bool pairs = p.weight.format == WeightFormat::kInt8;  // two in the place of a column
  const auto element = static_cast<int>(pairs ? 2 : size_of(p.x.dtype));
  const int bytes = p.K * element, lines = ceil_div(bytes, kLine);
  const auto* x = static_cast<const char*>(p.x.data);
  const auto* norm = static_cast<const char*>(p.x.norm_weight);
  const int rows = static_cast<int>(p.M) + (norm ? 1 : 0);
  for (int i = block * kWarp + lane; i < lines * rows; i += blocks * kWarp) {
    const int row = i / lines;
    const auto* of_row = row == p.M ? norm : x + row * p.x.stride_row * element;
    ptx::prefetch_line(of_row + i % lines * kLine);
  }
}

}  // namespace ridgeline::gemm_detail
