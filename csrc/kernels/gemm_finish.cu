#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kThreads = 128;

// Rows a thread works on at once, where there are pieces enough to fill the machine without that.
constexpr int kManyRows = 4;
constexpr std::int64_t kFillingPieces = 132 * 2048;

struct FinishParams {
  GemmParams gemm;
  const void* partials;
  std::int32_t segments;
  std::int32_t pieces;        // of a row of y, ...
  std::int32_t column_tiles;  // ... blocks beside each other
  std::int32_t across;        // threads of a block beside each other; the others lie below
};

// ---- Phases -------------------------------------------------------------------------------------

/// The sums of row m from weight row n on; of a bare product as they are in memory, so that no load
/// waits for another's conversion (H200, GELU 8192 x 4096: 56.5 us converted here, 33.8 so).
template <class T, int kWidth, bool kBare>
__device__ auto sums_at(const FinishParams& params, std::int64_t m, std::int64_t n) {
  const GemmParams& p = params.gemm;
  const std::int64_t at = m * p.N + n;
  const auto product = [&] {
    return device::load_vec<kWidth>(static_cast<const T*>(params.partials) + at);
  };
  if constexpr (kBare) {
    return product();
  } else {
    if (params.segments == 0) return device::floats(product());
    const float* partials = static_cast<const float*>(params.partials) + at;
    device::Vec<float, kWidth> sums = device::load_vec<kWidth>(partials);
    for (int s = 1; s < params.segments; ++s)
      device::add(sums, device::load_vec<kWidth>(partials + s * p.M * p.N));
    return sums;
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// The epilogue on its own. Grid: tiles of `across` pieces by the rows below, one dimension. Block:
/// 128 threads; a thread owns kRows pieces of 16 bytes of y (or single elements), one below the
/// other. With segments, `partials` is float32 [segments, M, N], added in order; without, a product
/// [M, N] of T that has its bias. kBare: the latter, and no residual: nothing but an activation.
/// Roofline: these in, y out: bandwidth.
template <class T, int kWidth, int kRows, bool kBare>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ FinishParams params) {
  using Loaded = device::Vec<std::conditional_t<kBare, T, float>, kWidth>;
  const GemmParams& p = params.gemm;
  const int columns = p.out_cols();
  const int down = kThreads / params.across;
  const int piece = static_cast<int>(blockIdx.x) % params.column_tiles * params.across +
                    static_cast<int>(threadIdx.x) % params.across;
  const std::int64_t first_row =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.x) / params.column_tiles) *
          (down * kRows) +
      static_cast<int>(threadIdx.x) / params.across;
  const int n = piece * kWidth;
  const auto row = [&](int i) { return first_row + i * down; };
  const auto holds = [&](int i) { return piece < params.pieces && row(i) < p.M; };
  const bool gated = is_gated(p.activation);

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  Loaded sums[kRows], ups[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!holds(i)) continue;
    sums[i] = sums_at<T, kWidth, kBare>(params, row(i), n);
    if (gated) ups[i] = sums_at<T, kWidth, kBare>(params, row(i), n + columns);
  }
  with_activation(p.activation, [&](auto constant) {
    constexpr auto kActivation = static_cast<Activation>(constant());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!holds(i)) continue;
      device::Vec<float, kWidth> values = device::floats(sums[i]), residuals;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Operands operands = kBare ? Operands{} : operands_of<T>(p, row(i), n + j, n + j);
        const float sum = kBare ? values.data[j] : scaled(operands, values.data[j]);
        values.data[j] = activate<T>(kActivation, sum);
        residuals.data[j] = operands.residual;
      }
      if (gated) {
        const device::Vec<float, kWidth> factors = device::floats(ups[i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          float factor = factors.data[j];
          if constexpr (!kBare)
            factor = scaled(operands_of<T>(p, row(i), n + columns + j, kNoColumn), factor);
          values.data[j] = __fmul_rn(values.data[j], factor);
        }
      }
      if (!kBare)
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          values.data[j] = __fadd_rn(values.data[j], residuals.data[j]);
      device::store(static_cast<T*>(p.y) + row(i) * columns + n, device::rounded<T>(values));
    }
  });
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void launch_finish(const GemmParams& gemm, const void* partials, int segments, Stream stream) {
  const std::int64_t columns = gemm.out_cols();
  const auto element = static_cast<std::int64_t>(size_of(gemm.dtype));
  const bool vectors = device::all_aligned(16, {partials, gemm.y}, {columns * element});
  const bool bare = segments == 0 && gemm.residual == nullptr && gemm.x.scale == nullptr &&
                    gemm.bias == nullptr && gemm.weight.format == WeightFormat::kDense;
  device::dispatch_float(gemm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVector = device::Vec<T>::kSize;
    const auto run = [&](auto width, auto rows, auto is_bare) {
      FinishParams params{.gemm = gemm,
                          .partials = partials,
                          .segments = segments,
                          .pieces = static_cast<std::int32_t>(columns / width),
                          .column_tiles = 0,
                          .across = 1};
      while (params.across < kThreads && params.across < params.pieces) params.across *= 2;
      params.column_tiles = ceil_div(params.pieces, params.across);
      const std::int64_t blocks =
          ceil_div<std::int64_t>(gemm.M, kThreads / params.across * rows) * params.column_tiles;
      device::launch_chained<finish_kernel<T, width(), rows(), is_bare()>>(
          dim3(checked_int32(blocks, "linear: blocks")), dim3(kThreads), 0, stream, params,
          "linear: epilogue");
    };
    constexpr std::true_type kIsBare;
    constexpr std::false_type kHasOperands;
    if (!vectors) return run(Int<1>{}, Int<1>{}, kHasOperands);
    if constexpr (sizeof(T) == 2) {
      if (bare && gemm.M * (columns / kVector) > kFillingPieces)
        return run(Int<kVector>{}, Int<kManyRows>{}, kIsBare);
      if (bare) return run(Int<kVector>{}, Int<1>{}, kIsBare);
    }
    run(Int<kVector>{}, Int<1>{}, kHasOperands);
  });
}

}  // namespace ridgeline::gemm_detail
