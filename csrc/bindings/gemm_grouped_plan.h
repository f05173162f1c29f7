#pragma once
#include <string>

#include "bindings/gemm.h"
#include "kernels/gemm_grouped_config_text.h"

namespace ridgeline::bindings {

/// How CUDA would multiply the rows of experts, as text, without a GPU. `M`: rows of y, which
/// `gathered` ones of x make. `format` is "dense", "int4", "fp4", or "fp8", "fp8_blocks" with
/// scales of blocks, "fp8_fp8" and "fp8_fp8_blocks" for x of fp8; rows are taken to be aligned.
/// `group`, `zeros`: of int4. `sms`: of the GPU.
inline std::string grouped_plan(std::int64_t M, std::int64_t experts, std::int64_t N,
                                std::int64_t K, const std::string& dtype,
                                const std::string& format, const std::string& activation,
                                bool gathered, bool batch_invariant, bool hopper,
                                std::int64_t group, bool zeros, std::int64_t sms) {
  const bool dense = format == "dense", int4 = format == "int4", fp4 = format == "fp4";
  const bool codes = format == "fp8_fp8" || format == "fp8_fp8_blocks";
  const bool blocks = format == "fp8_blocks" || format == "fp8_fp8_blocks";
  check(dense || int4 || fp4 || codes || blocks || format == "fp8",
        "format: expected 'dense', 'int4', 'fp4', 'fp8', 'fp8_blocks', 'fp8_fp8' or ",
        "'fp8_fp8_blocks', got '", format, "'");
  const bool bfloat = dtype == "bfloat16";
  check(bfloat || (dtype == "float16" && !fp4), "dtype: expected ",
        fp4 ? "bfloat16" : "float16 or bfloat16", ", got ", dtype);
  check(M > 0, "M: expected 1 or more, got ", M);
  check(experts >= 0 && experts <= gemm_grouped::kMaxExperts, "experts: expected 0 to ",
        gemm_grouped::kMaxExperts, ", got ", experts);
  check(!int4 || (group > 0 && (group % 32 == 0 || group >= K)),
        "group: expected a multiple of 32, or K = ", K, ", got ", group);
  check(sms > 0, "sms: expected 1 or more, got ", sms);
  const DType half = bfloat ? DType::kBFloat16 : DType::kFloat16;
  const gemm_grouped::Shape shape{
      .M = checked_int32(M, "M"),
      .x_rows = M,
      .experts = checked_int32(experts, "experts"),
      .N = checked_int32(N, "N"),
      .K = checked_int32(K, "K"),
      .segments = 1,
      .dtype = half,
      .x_dtype = codes ? DType::kFloat8E4M3 : half,
      .format = dense  ? WeightFormat::kDense
                : int4 ? WeightFormat::kInt4
                : fp4  ? WeightFormat::kFp4
                       : WeightFormat::kFp8,
      .scale_layout = blocks ? ScaleLayout::kBlock : ScaleLayout::kRow,
      .x_group = codes && blocks ? kScaleBlock : 0,
      .group = fp4 ? 0 : checked_int32(group, "group"),
      .has_zeros = zeros && !fp4,
      .activation = activation_of(activation),
      .gathers = gathered,
      .batch_invariant = batch_invariant,
      .sm90a = hopper,
      .x_aligned = true,
      .weight_aligned = true,
      .sms = checked_int32(sms, "sms")};
  return gemm_grouped::to_text(gemm_grouped::choose(shape));
}

}  // namespace ridgeline::bindings
