#include "kernels/gemm.h"

#include "common/launch_trace.h"
#include "device/properties.cuh"
#include "kernels/gemm_config_text.h"
#include "kernels/gemm_fit.h"
#include "kernels/gemm_grouped.h"
#include "kernels/gemm_launch.cuh"
#include "kernels/norm.h"

/// The way of one product: prepare x if the kernel cannot take it as it is, multiply, finish what
/// the product's kernel left.
namespace ridgeline {
namespace {

using namespace gemm_fit;
using gemm_config::Config;
using gemm_config::Path;
using gemm_config::Shape;

constexpr std::size_t kAlignment = 256;

/// What gemm() will do and where in the workspace, in bytes, each part lies.
struct Plan {
  Config config;
  bool prepares = false;  // a kernel ahead makes x what the product's takes
  bool finishes = false;  // cuBLASLt, which multiplies, gives y itself
  std::int64_t prepared_cols = 0;
  std::size_t prepared = 0, terms = 0, units = 0, partials = 0, product = 0, library = 0, total = 0;
};

/// int8 as the kernels for few rows take it: two in the place of a column of 16 bits.
GemmParams in_pairs(GemmParams p) {
  p.K /= 2;
  p.x.stride_row /= 2;
  p.weight.stride_row /= 2;
  return p;
}

bool library_takes(const GemmParams& p) {
  return p.K > 0 && rows_are_apart(p.N, p.weight.stride_row, p.K) &&
         (!p.residual || rows_are_apart(p.M, p.stride_residual, p.out_cols())) &&
         gemm_detail::library_available();
}

Plan plan_of(const GemmParams& p) {
  const Shape shape{.M = p.M,
                    .N = p.N,
                    .K = p.K,
                    .dtype = p.dtype,
                    .format = p.weight.format,
                    .activation = p.activation,
                    .group = p.weight.group,
                    .sm90a = device::runs_sm90a() && p.weight.stride_row > 0,
                    .has_residual = p.residual != nullptr,
                    .hopper = device::runs_sm90a() && strides_are_mappable(p),
                    .weight_aligned = weight_aligned(p),
                    .whole_vectors = has_whole_vectors(p),
                    .byte_x = p.weight.format == WeightFormat::kInt8 ||
                              int4_takes_fp8(p) ||
                              (p.x.dtype == DType::kFloat8E4M3 && !p.x.perm &&
                               p.weight.format == WeightFormat::kFp8 && parts_have_scales(p) &&
                               takes_groups(p) &&
                               rows_aligned(p.x.data, p.M, p.x.stride_row)),
                    .codes_x = p.x.dtype == DType::kFloat8E4M3 &&
                               !must_prepare(p, Path::kCluster, false),
                    .bfloat_x = p.dtype == DType::kBFloat16 && p.x.dtype == p.dtype,
                    .scales_products = p.weight.scales_products(),
                    .library = library_takes(p),
                    .library_finishes = library_finishes(p),
                    .batch_invariant = p.batch_invariant,
                    .chained = p.weights_ready,
                    .normalizes = has_norm_to_fold(p),
                    .makes_codes = p.x.to_codes,
                    .wide_groups = has_wide_groups(p),
                    .gates_alone = gates_alone(p),
                    .sms = device::multiprocessors()};
  Plan plan{.config = gemm_config::choose(shape)};
  plan.prepares = must_prepare(p, plan.config.path, plan.config.folds_norm);
  plan.prepared_cols = round_up(p.K, gemm_config::kBlockCols);
  const bool calls = plan.config.path == Path::kLibrary;
  const auto take = [&](std::size_t bytes) {
    const std::size_t offset = plan.total;
    plan.total += round_up(bytes, kAlignment);
    return offset;
  };
  plan.prepared = take(plan.prepares ? p.M * plan.prepared_cols * size_of(p.dtype) : 0);
  const bool splits = plan.config.splits_x;
  plan.terms = take(splits ? gemm_detail::kTermsOfX * round_up<std::int64_t>(p.M, 8) * p.K : 0);
  plan.units = take(splits ? p.M * sizeof(float) : 0);
  // The simple kernel stands in where cuBLASLt has no algorithm; gated, it needs partials too.
  plan.partials =
      take(calls && is_gated(p.activation) ? p.M * p.N * sizeof(float)
                                           : gemm_config::partial_bytes(shape, plan.config));
  plan.finishes = calls && shape.library_finishes;
  plan.product = take(calls && !plan.finishes ? p.M * p.N * size_of(p.dtype) : 0);
  plan.library = take(calls ? gemm_detail::kLibraryWorkspace : 0);
  return plan;
}

/// Rows of x as the product's kernel wants them, `stride` apart. `at_start`: that kernel starts with
/// this one, and asks for weights meanwhile.
void prepare(const GemmParams& p, void* prepared, std::int64_t stride, bool at_start,
             Stream stream) {
  const bool normalizes_alone = p.x.norm_weight && p.x.dtype == p.dtype && !p.x.perm &&
                                !p.x.scale_per_group && stride == p.K;
  if (!normalizes_alone) return gemm_detail::launch_prepare(p, prepared, stride, stream);
  rmsnorm({.dtype = p.dtype,
           .weight_dtype = p.x.norm_dtype,
           .y_dtype = p.dtype,
           .rows = p.M,
           .cols = p.K,
           .eps = p.x.norm_eps,
           .offset = 0.0f,
           .x = p.x.data,
           .stride_x_row = p.x.stride_row,
           .residual = nullptr,
           .stride_residual_row = 0,
           .weight = p.x.norm_weight,
           .y = prepared,
           .y_scale = nullptr,
           .by_group = false,
           .weights_ready = p.weights_ready,
           .next_at_start = at_start},
          stream);
}

/// False if cuBLASLt has no algorithm.
bool multiply_by_library(const GemmParams& p, const Plan& plan, char* workspace, Stream stream) {
  void* product = plan.finishes ? p.y : workspace + plan.product;
  if (!gemm_detail::launch_library(p, plan.finishes, product, workspace + plan.library, stream))
    return false;
  if (plan.finishes) return true;
  GemmParams rest = p;
  rest.bias = nullptr;  // in the product already
  gemm_detail::launch_finish(rest, product, 0, stream);
  return true;
}

void multiply_simply(const GemmParams& p, const Plan& plan, char* workspace, Stream stream) {
  auto* partials = reinterpret_cast<float*>(workspace + plan.partials);
  const bool gated = is_gated(p.activation);
  gemm_detail::launch_simple(p, gated ? partials : nullptr, stream);
  if (gated) gemm_detail::launch_finish(p, partials, 1, stream);
}

/// Whether pairs of tiles, which have a block each, take no more than quantising would beside
/// tiles: 1024 rows of 4096 x 28672, H200, us, 228 and 195, where that takes 12.
bool pairs_fill_waves(const GemmParams& p) {
  constexpr double kTileStep = 0.66, kBytesAMicrosecond = 4e6;
  const std::int64_t pairs = ceil_div<std::int64_t>(p.M, 128) * (p.out_cols() / kWideGroup);
  const std::int64_t sms = device::multiprocessors();
  const std::int64_t more = 2 * ceil_div(pairs, sms) - ceil_div(2 * pairs, sms);
  return static_cast<double>(more) * kTileStep * ceil_div(p.K, 128) <=
         3.0 * static_cast<double>(p.M) * p.out_cols() / kBytesAMicrosecond;
}

}  // namespace

std::size_t gemm_workspace_bytes(const GemmParams& params) {
  return plan_of(params).total;
}

bool gemm_makes_codes(const GemmParams& params) {
  GemmParams p = params;
  p.x.to_codes = true;
  const Plan plan = plan_of(p);
  return p.weight.format == WeightFormat::kFp8 && p.M == 1 && p.K <= gemm_config::kCodesCols &&
         plan.config.path == Path::kStrips && !plan.prepares;
}

bool gemm_adds(const GemmParams& p) {
  if (p.M == 0 || p.N == 0 || p.activation != Activation::kNone || p.residual) return false;
  const Plan plan = plan_of(p);
  return p.weight.format == WeightFormat::kFp8 && plan.config.path == Path::kFp8 &&
         plan.config.segments == 1 && !plan.prepares;
}

bool gemm_makes_groups(const GemmParams& p) {
  if (p.M == 0 || p.N == 0 || !gates_alone(p) || p.out_cols() % kWideGroup != 0) return false;
  const Plan plan = plan_of(p);
  return plan.config.path == Path::kFp8 && plan.config.tile_cols > 128 && !plan.prepares &&
         pairs_fill_waves(p);
}

void gemm_finish(const GemmParams& params, const void* product, Stream stream) {
  if (params.M > 0 && params.N > 0) gemm_detail::launch_finish(params, product, 0, stream);
}

void gemm(const GemmParams& params, Stream stream) {
  if (params.M == 0 || params.N == 0) return;
  const Plan plan = plan_of(params);
  launch_trace::note_choice([&] { return gemm_config::to_text(plan.config); });
  if (plan.config.path == Path::kSimple)
    launch_trace::note_slower([&] { return reason_for_simple(params); });
  auto* workspace = static_cast<char*>(params.workspace);
  GemmParams p = params;
  if (plan.prepares && plan.config.path == Path::kExpandToFp8) {
    gemm_detail::launch_gather(p, workspace + plan.prepared, plan.prepared_cols, stream);
    p.x.data = workspace + plan.prepared;
    p.x.stride_row = plan.prepared_cols;
  } else if (plan.prepares) {
    const bool at_start = plan.config.path == Path::kCluster;
    prepare(p, workspace + plan.prepared, plan.prepared_cols, at_start, stream);
    p.x = {.dtype = p.dtype,
           .data = workspace + plan.prepared,
           .stride_row = plan.prepared_cols,
           .scale = p.x.scale_per_group ? nullptr : p.x.scale,  // else in the values already
           .scale_per_row = p.x.scale_per_row,
           .made_ahead = at_start};
  }
  if (plan.config.splits_x) {
    auto* units = reinterpret_cast<float*>(workspace + plan.units);
    gemm_detail::launch_split_x(p, workspace + plan.terms, units, stream);
    p.x = {.dtype = DType::kFloat8E4M3,
           .data = workspace + plan.terms,
           .stride_row = p.K,
           .scale = units,
           .scale_per_row = true,
           .whole = p.x.data,
           .stride_whole = p.x.stride_row};
  }
  const bool by_bytes = plan.config.path == Path::kFp8 || plan.config.path == Path::kSimple;
  if (p.weight.format == WeightFormat::kInt8 && !by_bytes) p = in_pairs(p);
  auto* partials = reinterpret_cast<float*>(workspace + plan.partials);
  switch (plan.config.path) {
    case Path::kStrips:
      return gemm_detail::launch_strips(p, stream);
    case Path::kDigits:
      return gemm_detail::launch_digits(p, stream);
    case Path::kOnce:
      return p.M == 1 ? gemm_detail::launch_once(p, stream)
                      : gemm_detail::launch_once_rows(p, stream);
    case Path::kHeld:
      return gemm_detail::launch_held(p, stream);
    case Path::kCluster:
      gemm_detail::launch_cluster(p, plan.config, stream);
      if (plan.config.rest.cols == 0) return;
      p.weights_ready = true;  // the kernel ahead has waited for all that was written
      return gemm_detail::launch_cluster(p, gemm_config::config_of_rest(plan.config.rest), stream);
    case Path::kStream:
      gemm_detail::launch_stream(p, plan.config, partials, stream);
      break;
    case Path::kTile:
      gemm_detail::launch_tile(p, plan.config, partials, stream);
      break;
    case Path::kExpand:
    case Path::kExpandToFp8:
      gemm_detail::launch_expand(p, plan.config, partials, stream);
      if (plan.config.rest.cols == 0) return;
      return gemm_detail::launch_cluster(p, gemm_config::config_of_rest(plan.config.rest), stream);
    case Path::kFp8:
      return gemm_detail::launch_fp8(p, plan.config, stream);
    case Path::kSimple:
      return multiply_simply(p, plan, workspace, stream);
    case Path::kGrouped:
      return grouped_gemm(
          {.gemm = p, .experts = 1, .x_rows = p.M, .segments = plan.config.segments}, stream);
    case Path::kTurns:
      return gemm_detail::launch_turns(p, stream);
    case Path::kLibrary:
      if (!multiply_by_library(p, plan, workspace, stream))
        multiply_simply(p, plan, workspace, stream);
      return;
  }
  if (!plan.config.fused)
    gemm_detail::launch_finish(p, partials, plan.config.split ? plan.config.segments : 1, stream);
}

}  // namespace ridgeline
