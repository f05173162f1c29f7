#pragma once
#include <string>

#include "bindings/gemm.h"
#include "kernels/gemm_config_text.h"

namespace ridgeline::bindings {

/// How CUDA would multiply, as text, without a GPU. `format` is "dense", "int4" (in groups of 128)
/// or "fp8", "fp8_blocks" with scales of blocks, or "int4_fp8" or "fp8_fp8" for x of fp8, or
/// "int8"; rows are taken to be aligned. `sms`: of the GPU.
inline std::string gemm_plan(std::int64_t M, std::int64_t N, std::int64_t K,
                             const std::string& dtype, const std::string& format,
                             const std::string& activation, bool library, bool batch_invariant,
                             bool hopper, bool weights_ready, bool norm, std::int64_t sms,
                             bool residual) {
  const bool int4 = format == "int4" || format == "int4_fp8";
  const bool fp8 = format.starts_with("fp8"), int8 = format == "int8";
  const bool known = format == "fp8" || format == "fp8_blocks" || format == "fp8_fp8";
  check(int4 || known || int8 || format == "dense", "format: expected 'dense', 'int4', ",
        "'int4_fp8', 'int8', 'fp8', 'fp8_blocks' or 'fp8_fp8', got '", format, "'");
  const DType type = named_dtype(dtype, "dtype");
  const Activation ends = activation_of(activation);
  check(M >= 0, "M: expected 0 or more, got ", M);
  check(sms > 0, "sms: expected 1 or more, got ", sms);
  const gemm_config::Shape shape{.M = M,
                                 .N = checked_int32(N, "N"),
                                 .K = checked_int32(K, "K"),
                                 .dtype = type,
                                 .format = int4   ? WeightFormat::kInt4
                                           : fp8  ? WeightFormat::kFp8
                                           : int8 ? WeightFormat::kInt8
                                                  : WeightFormat::kDense,
                                 .activation = ends,
                                 .group = kScaleBlock,
                                 .sm90a = hopper,
                                 .has_residual = residual,
                                 .hopper = hopper,
                                 .weight_aligned = true,
                                 .whole_vectors = true,
                                 .byte_x = int8 || format == "fp8_fp8" || format == "int4_fp8",
                                 .codes_x = format.ends_with("_fp8"),
                                 .bfloat_x = type == DType::kBFloat16 &&
                                             !format.ends_with("_fp8") && !int8,
                                 .scales_products = (fp8 && format != "fp8_blocks") || int8,
                                 .library = library,
                                 .library_finishes =
                                     gemm_config::library_knows(ends, residual, type),
                                 .batch_invariant = batch_invariant,
                                 .chained = weights_ready,
                                 .normalizes = norm,
                                 .gates_alone = format == "fp8_fp8" && activation == "silu_mul" &&
                                                type == DType::kBFloat16,
                                 .sms = checked_int32(sms, "sms")};
  return gemm_config::to_text(gemm_config::choose(shape));
}

}  // namespace ridgeline::bindings
