#pragma once
#include "common/math.h"
#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_grouped_config.h"

/// What the kernels that grouped_gemm() is made of share.
namespace ridgeline::gemm_grouped {

/// The row of x that row `s` of y is made of. One that is not there reads row 0, as other ops do.
__device__ __forceinline__ std::int64_t row_of_x(const GroupedGemmParams& p, std::int64_t s) {
  const std::int64_t row = p.rows ? p.rows[s] : s;
  return row < 0 || row >= p.x_rows ? 0 : row;
}

/// The product of one expert, whose rows of x are found and scaled elsewhere.
template <class T>
__device__ __forceinline__ GemmParams of_expert(const GroupedGemmParams& params, int expert) {
  GemmParams p = params.gemm;
  const std::int64_t scales = expert * params.stride_scales;
  p.weight.data = static_cast<const char*>(p.weight.data) + expert * params.stride_expert;
  p.weight.scales = has_nibbles(p.weight.format)
                        ? static_cast<const void*>(static_cast<const T*>(p.weight.scales) + scales)
                        : static_cast<const float*>(p.weight.scales) + scales;
  if (p.weight.zeros) p.weight.zeros += scales;
  if (p.bias) p.bias = static_cast<const T*>(p.bias) + std::int64_t{expert} * p.N;
  p.x.scale = nullptr;
  return p;
}

/// Where rows of expert e begin.
__device__ __forceinline__ std::int32_t offset_of(const GroupedGemmParams& p, int e) {
  e = min(e, p.experts);
  return p.offsets ? p.offsets[e] : e * static_cast<std::int32_t>(p.gemm.M);
}

/// The same from L2: a kernel that starts ahead of its wait may find an older one in L1.
__device__ __forceinline__ std::int32_t fresh_offset_of(const GroupedGemmParams& p, int e) {
  e = min(e, p.experts);
  return p.offsets ? __ldcg(p.offsets + e) : e * static_cast<std::int32_t>(p.gemm.M);
}

/// In shared memory, [experts + 1] each: where rows of each expert begin, and where its row tiles.
struct Tables {
  std::int32_t *offsets, *starts;

  /// Each lane of a warp counts the tiles of some experts.
  __device__ __forceinline__ void fill(const GroupedGemmParams& p, int row_tile, int lane) const {
    const int each = ceil_div(p.experts, device::kWarpSize), first = lane * each;
    std::int32_t begin = fresh_offset_of(p, first);
    int tiles = 0;
    for (int e = first; e < first + each; ++e) {
      const std::int32_t end = fresh_offset_of(p, e + 1);
      if (e < p.experts) offsets[e] = begin;
      tiles += ceil_div(end - begin, row_tile);
      begin = end;
    }
    int before = device::warp_inclusive_sum(tiles) - tiles;
    if (lane == device::kWarpSize - 1) {
      offsets[p.experts] = begin;
      starts[p.experts] = before + tiles;
    }
    __syncwarp();  // the offsets are there
    for (int e = first; e < min(first + each, p.experts); ++e) {
      starts[e] = before;
      before += ceil_div(offsets[e + 1] - offsets[e], row_tile);
    }
  }

  /// The last expert whose tiles begin at `tile` or before. A walk from expert to expert instead of
  /// halving: one token of 128 int4 experts of 2048 x 1536 15.4 us, so 13.9 (H200, lab).
  __device__ __forceinline__ int expert_of(int experts, int tile) const {
    int e = 0;
    for (int end = experts; e + 1 < end;) {
      const int middle = (e + end) / 2;
      (starts[middle] <= tile ? e : end) = middle;
    }
    return e;
  }
};

/// The same product of x in 16 bits, at the start of the workspace.
inline GroupedGemmParams of_expanded_x(const GroupedGemmParams& params) {
  GroupedGemmParams expanded = params;
  GemmParams& p = expanded.gemm;
  p.x.data = p.workspace;
  p.x.dtype = p.dtype;
  p.x.stride_row = p.K;
  if (p.x.scale_per_group) p.x.scale = nullptr;
  p.workspace = static_cast<char*>(p.workspace) + expanded_bytes(params.x_rows, p.K, p.dtype);
  return expanded;
}

/// The rows of x that rows of y are made of, one after the other.
void launch_gather(const GroupedGemmParams& params, void* to, Stream stream);

/// The same of bfloat16, times device::kInt4MaskedFactor: kColsOfSums columns, zeros behind the
/// last one, then the sum of either half, each as three terms and 13 zeros, and 32 columns that
/// nobody reads.
void launch_gather_with_sums(const GroupedGemmParams& params, void* to, Stream stream);

/// Rows of bfloat16 in the order of y as two terms of e4m3, each row in a unit of its own, a power
/// of two, which is NaN where a value is not finite.
void launch_split_rows(const GroupedGemmParams& params, void* terms, float* units, Stream stream);

/// Zeros.
void launch_clear(unsigned* to, std::int64_t count, Stream stream);

/// Requires: the choice is Path::kDigits.
void launch_digits(const GroupedGemmParams& params, const Choice& choice, Stream stream);

/// Requires: the choice is Path::kStrips.
void launch_expert_strips(const GroupedGemmParams& params, const Choice& choice, Stream stream);

/// Hopper's kernels. Requires: the choice is not Path::kTile, x is expanded.
void launch_sm90(const GroupedGemmParams& params, const Choice& choice, Stream stream);

}  // namespace ridgeline::gemm_grouped
