#pragma once
#include "kernels/gemm.h"

namespace ridgeline {

/// Products of consecutive rows with the weight of each row's expert: rows offsets[e] to
/// offsets[e + 1] of y meet expert e. Rows from offsets[experts] on belong to none and are zero.
///
/// Roofline: the weights of the experts that have rows, S K and S N elements; 2 S N K flops. Few
/// rows an expert are bound by bandwidth, many by the tensor cores.
struct GroupedGemmParams {
  // M = S rows of y; weight, scales, zero points and bias those of expert 0, biases lie N apart; no
  // norm or perm; where batch_invariant a residual, else none; scales of x are those of its own
  // rows; those of y, where it has them, of 128 columns.
  GemmParams gemm = {};
  std::int32_t experts = 0;
  std::int64_t stride_expert = 0;         // bytes between the experts' weights
  std::int64_t stride_scales = 0;         // elements between their scales, and zero points; e4m3
                                          // x has scales of groups where these are of blocks
  const std::int32_t* offsets = nullptr;  // [experts + 1], not falling, from 0; or null, where
                                          // batch_invariant: of one expert, which has all rows
  const std::int32_t* rows = nullptr;     // [S]: the row of x that row s is made of; or null: s
  std::int64_t x_rows = 0;
  std::int32_t segments = 1;              // of K, of a single dense weight: each is summed by
                                          // itself, then their sums, in order
};

/// Bytes that grouped_gemm() needs on the current device: for rows of x in the order of y, or of
/// e4m3 expanded where no kernel multiplies them as they are.
std::size_t grouped_gemm_workspace_bytes(const GroupedGemmParams& params);

/// Whether grouped_gemm() takes `y_scale` on the current device: else quantize() makes the codes.
bool grouped_gemm_makes_codes(const GroupedGemmParams& params);

/// Enqueues up to four kernels: what x, its order and the order of tiles take, and the product. x,
/// weight and their rows aligned to 16 bytes, half precision.
void grouped_gemm(const GroupedGemmParams& params, Stream stream);

namespace cpu {
void grouped_gemm(const GroupedGemmParams& params);
}  // namespace cpu

}  // namespace ridgeline
