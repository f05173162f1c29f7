#pragma once
#include "device/ptx/cluster.cuh"
#include "kernels/gemm_cluster_sm90.cuh"

/// From the sums of a cluster's blocks to y.
namespace ridgeline::gemm_cluster {

/// A sum over the blocks of the cluster, in order, of kColumns columns 32 apart: every part is
/// asked for before the first is there.
template <int kColumns>
__device__ __forceinline__ void total_of(const float* sum, float (&totals)[kColumns]) {
  const int segments = gridDim.x;
  if (segments == 1) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) totals[i] = sum[i * 32];
    return;
  }
  float parts[gemm_config::kMaxSegments][kColumns];
#pragma unroll
  for (int s = 0; s < gemm_config::kMaxSegments; ++s)
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      parts[s][i] =
          s < segments ? ptx::load_in_cluster(ptx::address_in_block(sum + i * 32, s)) : 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    totals[i] = 0.0f;
#pragma unroll
    for (int s = 0; s < gemm_config::kMaxSegments; ++s) totals[i] += parts[s][i];
  }
}

/// y of this block's share of the tile's rows of x: a warp takes whole rows, a lane columns 32
/// apart, of which the second half are the up rows of the first where outputs are gated.
template <class T>
struct Finish {
  static constexpr int kColumns = kTileRows / 32;
  const ClusterParams& params;
  int first;  // column of the tile
  int lane = threadIdx.x % 32;
  Operands operands[kColumns] = {};

  __device__ bool is_up(int i) const { return params.paired && i >= kColumns / 2; }
  __device__ int column(int i) const {
    return first + lane + (is_up(i) ? i - kColumns / 2 : i) * 32;
  }

  /// What does not depend on the rows, ahead of the sums.
  __device__ void load() {
    const GemmParams& p = params.gemm;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (column(i) < p.out_cols())
        load_of_column<T>(operands[i], p, column(i) + (is_up(i) ? p.N / 2 : 0));
  }

  __device__ void run(const float (*sums)[kPitch]) {
    const GemmParams& p = params.gemm;
    const int rows = static_cast<int>(p.M), segment = blockIdx.x, segments = gridDim.x;
    const int end = rows * (segment + 1) / segments;
    for (int m = rows * segment / segments + threadIdx.x / 32; m < end;
         m += kThreads / 32) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column(i) < p.out_cols())
          load_of_row<T>(operands[i], p, m, is_up(i) ? kNoColumn : column(i));
      float totals[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4)
        total_of(&sums[m][lane + i * 32], reinterpret_cast<float(&)[4]>(totals[i]));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (column(i) >= p.out_cols()) continue;
        if (!params.paired) {
          finish<T>(p, operands[i], totals[i], m, column(i));
        } else if (i < kColumns / 2) {
          finish_gated<T>(p, operands[i], operands[i + kColumns / 2], totals[i],
                          totals[i + kColumns / 2], m, column(i));
        }
      }
    }
  }
};

}  // namespace ridgeline::gemm_cluster
