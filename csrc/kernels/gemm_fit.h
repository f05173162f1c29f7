#pragma once
#include <cstdint>

#include "kernels/gemm.h"
#include "kernels/gemm_shape.h"

/// What a product's operands allow, by their addresses, strides and formats: the choice of its
/// kernel reads it from a Shape.
namespace ridgeline::gemm_fit {

constexpr std::int64_t kVectorBytes = 16;

inline bool is_aligned(const void* address, std::int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0 &&
         stride_bytes % kVectorBytes == 0;
}

/// Whether each 128 columns have one scale, and e4m3 holds the integers less their zero point.
inline bool int4_takes_fp8(const GemmParams& p) {
  const bool whole = p.weight.group % kScaleBlock == 0 || p.weight.group >= p.K;
  return p.weight.format == WeightFormat::kInt4 && p.x.dtype == DType::kFloat8E4M3 && whole &&
         !p.weight.zeros && !p.x.scale_per_group;
}

inline bool rows_aligned(const void* data, std::int64_t rows, std::int64_t stride_bytes) {
  return is_aligned(data, rows > 1 ? stride_bytes : 0);
}

inline bool weight_aligned(const GemmParams& p) {
  const bool dense = p.weight.format == WeightFormat::kDense;
  const auto element = static_cast<std::int64_t>(dense ? size_of(p.dtype) : 1);
  if (p.weight.format == WeightFormat::kInt4) return true;
  // No kernel prepares codes of int8.
  if (p.weight.format == WeightFormat::kInt8 && !rows_aligned(p.x.data, p.M, p.x.stride_row))
    return false;
  return is_aligned(p.weight.data, p.weight.stride_row * element) &&
         p.K * element % kVectorBytes == 0;
}

/// Whether vectors of scales, of y and, where bits may depend on M, of the residual are aligned.
inline bool has_whole_vectors(const GemmParams& p) {
  const bool int4 = p.weight.format == WeightFormat::kInt4;
  const std::int64_t columns = !int4 ? 1 : p.weight.zeros ? 16 : 8;
  const bool scales = !int4 || (is_aligned(p.weight.scales, 0) && is_aligned(p.weight.zeros, 0));
  const auto at = reinterpret_cast<std::uintptr_t>(p.residual);
  const bool dense = p.weight.format == WeightFormat::kDense;  // the copy engine brings all of it
  const int each = dense ? 8 : 4;
  const bool apart = !dense || p.stride_residual > 0;
  const bool rows = p.M <= 1 || (p.stride_residual % each == 0 && apart);
  const bool residual = !at || p.batch_invariant || (at % (2 * each) == 0 && rows);
  return p.N % columns == 0 && p.out_cols() % 8 == 0 && scales && residual && is_aligned(p.y, 0);
}

/// The copy engine's maps have no stride 0, which expanded tensors have.
inline bool strides_are_mappable(const GemmParams& p) {
  const bool weight = p.weight.format == WeightFormat::kInt4 || p.N <= 1 || p.weight.stride_row > 0;
  return weight && (p.M <= 1 || p.x.stride_row > 0);
}

inline bool has_wide_groups(const GemmParams& p) {
  return p.x.scale_per_group && p.x.scale_group == kWideGroup;
}

/// Whether each 128 weight rows of a tile have one scale: the up rows begin a block of scales.
inline bool parts_have_scales(const GemmParams& p) {
  return p.weight.scale_layout != ScaleLayout::kBlock || !is_gated(p.activation) ||
         p.N / 2 % kScaleBlock == 0;
}

/// Whether the kernel for many rows has x's groups of 256 columns, if they are that wide: of few
/// products, and of more than one group.
inline bool takes_groups(const GemmParams& p) {
  const bool scaled = p.weight.scales_products() && !p.bias && p.dtype == DType::kBFloat16;
  const bool plain = p.activation == Activation::kNone && !p.residual;
  return !has_wide_groups(p) || (scaled && plain && p.K > kWideGroup);
}

/// Whether y is what tiles of gates make, if x is e4m3.
inline bool gates_alone(const GemmParams& p) {
  return p.weight.format == WeightFormat::kFp8 && p.weight.scales_products() && !p.bias &&
         p.activation == Activation::kSiluMul && p.dtype == DType::kBFloat16 && !p.residual &&
         !p.x.scale_per_group;
}

/// Whether rows do not overlap, as cuBLASLt's layouts demand; those of an expanded tensor do.
inline bool rows_are_apart(std::int64_t rows, std::int64_t stride, std::int64_t cols) {
  return rows <= 1 || stride >= cols;
}

/// Whether cuBLASLt gives y itself. It has GELU in fast kernels for aligned vectors alone: H200,
/// bf16, 1300 x 5008 x 1520 (M x N x K) us, of 1521 columns, relu and GELU 215 and 696; with a bias
/// that is not aligned 228 and 699.
inline bool library_finishes(const GemmParams& p) {
  const bool aligned = has_whole_vectors(p) && weight_aligned(p) && is_aligned(p.bias, 0) &&
                       rows_aligned(p.x.data, p.M, p.x.stride_row * size_of(p.x.dtype));
  return gemm_config::library_knows(p.activation, p.residual != nullptr, p.dtype) &&
         (p.activation != Activation::kGeluTanh || aligned);
}

/// Whether x has a norm that kernels can fold.
inline bool has_norm_to_fold(const GemmParams& p) {
  return p.x.norm_weight && p.dtype == DType::kBFloat16 && p.x.dtype == p.dtype &&
         p.x.norm_dtype == p.dtype && is_aligned(p.x.norm_weight, 0);
}

/// Whether the kernel of `path` cannot take x as it is.
inline bool must_prepare(const GemmParams& p, gemm_config::Path path, bool folds_norm) {
  using gemm_config::Path;
  if (p.weight.format == WeightFormat::kInt8) return false;
  const bool once = path == Path::kOnce;
  const bool few = once || path == Path::kStrips || path == Path::kCluster;
  const bool by_groups = p.x.scale_per_group;
  const bool takes_fp8 = p.weight.format == WeightFormat::kFp8
                             ? path == Path::kFp8 || (few && !by_groups)
                             : ((once || path == Path::kDigits) && !by_groups) ||
                                   ((path == Path::kCluster || path == Path::kExpandToFp8) &&
                                    int4_takes_fp8(p));
  const bool as_is = p.x.dtype == p.dtype || (p.x.dtype == DType::kFloat8E4M3 && takes_fp8);
  if ((p.x.norm_weight && !folds_norm) || p.x.perm || !as_is) return true;
  if (path == Path::kSimple) return false;
  if (path == Path::kLibrary) return !rows_are_apart(p.M, p.x.stride_row, p.K);
  const bool maps = path == Path::kCluster || path == Path::kGrouped;
  if (maps && !strides_are_mappable(p)) return true;
  const auto element = static_cast<std::int64_t>(size_of(p.x.dtype));
  const std::int64_t stride = p.M > 1 ? p.x.stride_row : 0;
  return !is_aligned(p.x.data, stride * element) || p.K * element % kVectorBytes != 0;
}

/// Why the kernel that takes any alignment multiplies, and no faster one.
inline const char* reason_for_simple(const GemmParams& p) {
  if (!weight_aligned(p)) return "rows of the weight do not start at multiples of 16 bytes";
  if (p.batch_invariant) return "float32 products that do not depend on M are not the library's";
  return "cuBLASLt, which multiplies float32, cannot be opened or does not take these strides";
}

}  // namespace ridgeline::gemm_fit
