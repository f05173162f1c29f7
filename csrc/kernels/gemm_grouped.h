#pragma once
#include "kernels/gemm.h"

namespace ridgeline {

/// Products of consecutive rows with the weight of each row's expert: rows offsets[e] to
/// offsets[e + 1] of y meet expert e. Rows from offsets[experts] on belong to none and are zero.
///
/// Roofline: the weights of the experts that have rows, S K and S N elements; 2 S N K flops. Few
/// rows an expert are bound by bandwidth, many by the tensor cores.
struct GroupedGemmParams {
  GemmParams gemm = {};  // M = S rows of y; weight and bias those of expert 0, dense
  std::int32_t experts = 0;
  std::int64_t stride_expert = 0;  // elements between the experts' weights; biases lie N apart
  const std::int32_t* offsets = nullptr;  // [experts + 1], not falling, from 0
  const std::int32_t* rows = nullptr;     // [S]: the row of x that row s is made of; or null: s
  std::int64_t x_rows = 0;
};

/// Enqueues one kernel. x, weight and their rows aligned to 16 bytes, half precision.
void grouped_gemm(const GroupedGemmParams& params, Stream stream);

namespace cpu {
void grouped_gemm(const GroupedGemmParams& params);
}  // namespace cpu

}  // namespace ridgeline
