#pragma once
#include "device/launch.cuh"
#include "kernels/gemm_grouped.h"

/// What the kernels that grouped_gemm() is made of share.
namespace ridgeline::gemm_grouped {

constexpr int kMaxExperts = 1023;  // and the rows of no expert

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
  p.weight.scales = p.weight.format == WeightFormat::kInt4
                        ? static_cast<const void*>(static_cast<const T*>(p.weight.scales) + scales)
                        : static_cast<const float*>(p.weight.scales) + scales;
  if (p.weight.zeros) p.weight.zeros += scales;
  if (p.bias) p.bias = static_cast<const T*>(p.bias) + std::int64_t{expert} * p.N;
  p.x.scale = nullptr;
  return p;
}

/// Whether launch_sm90() multiplies these shapes here. No function of the rows: a row's bits do not
/// depend on their number.
bool runs_on_wgmma(const GroupedGemmParams& params);

/// Bytes of workspace that launch_sm90() takes.
std::size_t sm90_workspace_bytes(const GroupedGemmParams& params);

/// The rows of x that rows of y are made of, one after the other.
void launch_gather(const GroupedGemmParams& params, void* to, Stream stream);

/// Requires: runs_on_wgmma(params).
void launch_sm90(const GroupedGemmParams& params, Stream stream);

}  // namespace ridgeline::gemm_grouped
