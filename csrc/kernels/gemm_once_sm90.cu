#include <algorithm>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_not_finite.cuh"
#include "kernels/gemm_once_weights.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_once;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM, each with up to kStrips consecutive strips of 16 weight rows. A warp has a
/// slice of their columns in registers: all of the weight is asked for at once, and nothing stands
/// between it and the tensor cores but x, of which a warp stages its slice. The first warps add up
/// what all have.
/// Roofline: the weight's bytes, once.
template <class T, WeightFormat kFormat, bool kFp8X, int kStrips>
__global__ void __launch_bounds__(kThreads)
    once_sm90_kernel(const __grid_constant__ OnceParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  constexpr int kFinishers = ceil_div(kStrips * kStripRows, 32);
  using Weights = std::conditional_t<kInt4, Int4Weights<T, kStrips>, Fp8Weights<kStrips>>;
  __shared__ Shared shared;
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const Place place{params.order.first_row(blockIdx.x), params.order.strips(blockIdx.x),
                    warp * kCols, lane};
  const bool here = place.column < p.K;  // the slice has columns
  const int output = threadIdx.x, n = place.row + output;
  const bool finishes = output < place.strips * kStripRows && n < p.N;
  Weights weights;
  weights.find(params, place);

  ptx::launch_dependents();
  if (warp == 0) prefetch_x(p, lane);
  if (params.prefetches && here) weights.prefetch(place);
  ptx::wait_for_dependencies();
  XOfLane<T> x;
  x.template load<kFp8X>(p, place.column + lane * 8);
  if (here) weights.load(p, place);
  x.norm.load(p, place.column + lane * 8);
  Operands operands;
  if (finishes) {
    load_of_column<T>(operands, p, n);
    load_of_row<T>(operands, p, 0, n);
  }

  float sums[kStrips][2] = {};
  if (kFp8X) x.template expand<std::conditional_t<kInt4, T, __half>>();
  if (!kFp8X) x.normalize(p, shared.squares[warp]);
  if constexpr (!kInt4) {
    const float unit = kFp8X ? 1.0f : to_halves<T>(x.pairs);
    if (here)
      weights.multiply(Halves(x.pairs, unit, shared.x[warp], lane), sums,
                       p.weight.scale_layout == ScaleLayout::kBlock);
  } else if (here) {
    const Digits digits = Digits::of<T>(x.pairs, shared.x[warp], lane);
    weights.multiply(digits, sums, p.weight.zeros != nullptr);
    if (!digits.finite)
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) {
        if (i / 2 >= place.strips) break;
        const int row = place.row + i * 8 + lane / 4;
        const auto* strip = static_cast<const uint4*>(p.weight.data) +
                            std::int64_t{row / kStripRows} * ceil_div(p.K, Int4Layout::kCols) * 32;
        sums[i / 2][i % 2] += gemm_strips::products_not_finite<T>(
            p, strip, static_cast<const T*>(p.weight.scales) + row,
            p.weight.zeros ? p.weight.zeros + row : nullptr, p.x.data, row, place.column, kCols,
            p.K);
      }
  }
  if (lane % 4 == 0)
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        shared.sums[warp][s * kStripRows + j * 8 + lane / 4] = sums[s][j];

  // Every warp's sums are there.
  if (warp >= kFinishers) return ptx::named_barrier_arrive(1, kThreads);
  ptx::named_barrier_sync(1, kThreads);
  if (!finishes) return;
  if (!kFp8X && p.x.norm_weight) {
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) squares += shared.squares[w];
    operands.x_scale = gemm_strips::norm_factor(p, squares);
  }
  float totals[4] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) totals[w % 4] += shared.sums[w][output];
  finish<T>(p, operands, (totals[0] + totals[1]) + (totals[2] + totals[3]), 0, n);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, WeightFormat kFormat, bool kFp8X, int kStrips>
void launch(const GemmParams& p, int blocks, Stream stream) {
  const int items = gemm_strips::strip_items(p);
  OnceParams params{.gemm = p, .order = gemm_strips::StripOrder::of(p, items, blocks)};
  if (kFormat == WeightFormat::kInt4) params.group = device::Divisor::of(p.weight.group);
  // Where the kernel ahead, if it is one such, leaves SMs or the bus idle. H200, us, without and
  // so: int4 4096 x 4096 4.3 and 4.8, 4096 x 2048 3.4 and 3.2, fp8 by bf16 3072 x 3072 4.8 and 4.6.
  params.prefetches = p.K <= gemm_config::kOnceMostCols * 3 / 4 || items <= blocks;
  check(ceil_div(items, blocks) <= kStrips && p.M == 1 && p.K <= gemm_config::kOnceMostCols &&
            !p.x.to_codes,
        "linear: the kernel of one row takes up to ", kStrips, " strips a block, got ",
        ceil_div(items, blocks));
  device::launch_chained<once_sm90_kernel<T, kFormat, kFp8X, kStrips>>(
      dim3(blocks), dim3(kThreads), 0, stream, params, "linear: once");
}

template <class T, bool kFp8X>
void launch_format(const GemmParams& p, Stream stream) {
  constexpr auto kInt4 = WeightFormat::kInt4;
  const int items = gemm_strips::strip_items(p);
  const int blocks = std::min(items, device::multiprocessors()), strips = ceil_div(items, blocks);
  if (p.weight.format != kInt4) return launch<T, WeightFormat::kFp8, kFp8X, 2>(p, blocks, stream);
  if (strips > 2) return launch<T, kInt4, kFp8X, 3>(p, blocks, stream);
  launch<T, kInt4, kFp8X, 2>(p, blocks, stream);
}

template <class T>
void launch_x(const GemmParams& p, Stream stream) {
  if (p.x.dtype == DType::kFloat8E4M3) return launch_format<T, true>(p, stream);
  launch_format<T, false>(p, stream);
}

}  // namespace

void launch_once(const GemmParams& p, Stream stream) {
  if (p.dtype == DType::kFloat16) return launch_x<__half>(p, stream);
  launch_x<__nv_bfloat16>(p, stream);
}

}  // namespace ridgeline::gemm_detail
