#include <algorithm>

#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_fragments.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = gemm_config::kMaxSegments;
constexpr int kThreads = kWarps * 32;
constexpr int kRingBytes =
    12 * 1024 + 64;  // a warp's; 97 KB a block fits every GPU from compute 8.0 on

struct StreamParams {
  GemmParams gemm;
  float* partials;        // where the epilogue is another kernel's; else null
  std::int32_t segments;  // warps that share a strip; a power of two up to kWarps
  bool paired;            // gate and up strips by turns
};

// ---- Shared memory: a ring a warp, then, in the same place, the sums ----------------------------

template <WeightFormat kFormat, int kRows>
struct Stage {
  char x[kRows * kRowBytes];
  char weight[Layout<kFormat>::kWeightBytes];
  char scales[kScaleBytes<kFormat>];
};

template <WeightFormat kFormat, int kRows>
struct Ring {
  static constexpr int kStages = kRingBytes / static_cast<int>(sizeof(Stage<kFormat, kRows>));
  static_assert(kStages >= 3, "two stages in flight, one in use");
  Stage<kFormat, kRows> stages[kStages];
};

struct SumsOfWarp {
  float sums[gemm_config::kStreamRows][kStripRows];
};

// ---- Phases -------------------------------------------------------------------------------------

/// Multiplies one block of 64 columns: 16 rows of x by the warp's strip.
template <class T, WeightFormat kFormat, int kRows>
__device__ void multiply_block(const Stage<kFormat, kRows>& stage, const GemmParams& p,
                               float (&sums)[2][4], Lane lane) {
  const bool has_zeros = p.weight.zeros != nullptr;
  const bool block_scaled = p.weight.scale_layout == ScaleLayout::kBlock;
  StripFragment<T, kFormat> weight;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    XFragment<kFormat, (kRows > 8)> x;
    x.load(stage.x, half, lane);
    weight.load(stage.weight, half, lane);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        std::uint32_t b[2];
        weight.step(b, tile, half, j, stage.scales, has_zeros, block_scaled, lane);
        ptx::mma_m16n8k16<T>(sums[tile], x.a[j], b[0], b[1]);
      }
  }
}

/// The sums of the block's strips, its segments added in order, to y or to the partials.
template <class T>
__device__ void store_strips(const StreamParams& params, const SumsOfWarp* of_warps) {
  const GemmParams& p = params.gemm;
  const int strips = kWarps / params.segments;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * strips;
  const int step = params.paired && params.partials == nullptr ? 2 : 1;
  const auto sum_of = [&](int strip, int m, int c) {
    float sum = of_warps[strip * params.segments].sums[m][c];
    for (int s = 1; s < params.segments; ++s)
      sum += of_warps[strip * params.segments + s].sums[m][c];
    return sum;
  };
  const int rows = static_cast<int>(p.M);
  for (int i = threadIdx.x; i < strips / step * rows * kStripRows; i += kThreads) {
    const int c = i % kStripRows, m = i / kStripRows % rows, strip = i / (kStripRows * rows) * step;
    const std::int64_t n = strip_row(p, first + strip, params.paired) + c;
    if (n >= (step == 2 ? p.out_cols() : p.N)) continue;
    const float sum = sum_of(strip, m, c);
    if (params.partials) {
      params.partials[static_cast<std::int64_t>(m) * p.N + n] = sum;
    } else if (step == 2) {
      finish_gated<T>(p, sum, sum_of(strip + 1, m, c), m, n);
    } else {
      finish<T>(p, sum, m, n);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: kWarps / segments strips of 16 weight rows a block. A warp multiplies one strip by all
/// rows of x over one segment of K, 64 columns at a time, through a ring of its own in shared
/// memory: no barrier but the last two, where the segments are added. Sums in float32.
/// Roofline: the weight's bytes, once; x comes from L2, once a strip.
template <class T, WeightFormat kFormat, int kRows>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const __grid_constant__ StreamParams params) {
  extern __shared__ __align__(128) char shared[];
  using RingOf = Ring<kFormat, kRows>;
  constexpr int kStages = RingOf::kStages;
  const GemmParams& p = params.gemm;
  const Lane lane;
  const int warp = threadIdx.x / 32, segment = warp % params.segments;
  RingOf& ring = reinterpret_cast<RingOf*>(shared)[warp];
  const std::int64_t strip =
      static_cast<std::int64_t>(blockIdx.x) * (kWarps / params.segments) + warp / params.segments;
  const std::int64_t n0 = strip_row(p, strip, params.paired);

  const int blocks = ceil_div(p.K, kBlockCols), length = ceil_div(blocks, params.segments);
  const int begin = min(segment * length, blocks), count = min(length, blocks - begin);
  const auto copy_weight = [&](int i) {
    Stage<kFormat, kRows>& stage = ring.stages[i % kStages];
    copy_strip<T, kFormat>(stage.weight, p, n0, begin + i, lane.index);
    copy_scales<T, kFormat>(stage.scales, p, n0, begin + i, lane.index);
  };
  const auto copy_rows = [&](int i) {
    copy_x<T, kFormat, kRows, 32>(ring.stages[i % kStages].x, p, 0, begin + i, lane.index);
  };

  ptx::launch_dependents();
  if (!p.weights_ready) ptx::wait_for_dependencies();
  for (int i = 0; i < min(kStages - 1, count); ++i) copy_weight(i);
  if (p.weights_ready) ptx::wait_for_dependencies();
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < count) copy_rows(i);
    ptx::commit_copies();  // the first group holds every weight requested above
  }

  float sums[2][4] = {};
  for (int i = 0; i < count; ++i) {
    ptx::wait_copies<kStages - 2>();
    __syncwarp();  // stage i of every lane is in; every lane is done with the stage filled next
    if (i + kStages - 1 < count) {
      copy_weight(i + kStages - 1);
      copy_rows(i + kStages - 1);
    }
    ptx::commit_copies();
    multiply_block<T, kFormat, kRows>(ring.stages[i % kStages], p, sums, lane);
  }

  ptx::wait_copies<0>();
  __syncthreads();  // every warp is done with its ring, where the sums go
  SumsOfWarp* of_warps = reinterpret_cast<SumsOfWarp*>(shared);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of_warps[warp].sums[lane.quad + 8 * (i / 2)][tile * 8 + 2 * lane.in_quad + i % 2] =
          sums[tile][i];
  __syncthreads();  // the sums of every segment are in shared memory
  store_strips<T>(params, of_warps);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, WeightFormat kFormat, int kRows>
void launch(const StreamParams& params, Stream stream) {
  constexpr std::size_t kShared = sizeof(Ring<kFormat, kRows>) * kWarps;
  static_assert(kShared >= sizeof(SumsOfWarp) * kWarps);
  constexpr auto kKernel = stream_kernel<T, kFormat, kRows>;
  allow_shared(kKernel, kShared);
  const std::int64_t strips = ceil_div(params.gemm.N, kStripRows);
  const std::int64_t grid = ceil_div<std::int64_t>(strips, kWarps / params.segments);
  device::launch_chained<kKernel>(dim3(checked_int32(grid, "linear: blocks")), dim3(kThreads),
                                  kShared, stream, params, "linear: few rows");
}

template <class T, WeightFormat kFormat>
void launch_rows(const StreamParams& params, Stream stream) {
  if (params.gemm.M <= 8) return launch<T, kFormat, 8>(params, stream);
  launch<T, kFormat, 16>(params, stream);
}

template <class T>
void launch_format(const StreamParams& params, Stream stream) {
  switch (params.gemm.weight.format) {
    case WeightFormat::kDense:
      return launch_rows<T, WeightFormat::kDense>(params, stream);
    case WeightFormat::kInt4:
      return launch_rows<T, WeightFormat::kInt4>(params, stream);
    case WeightFormat::kFp8:
      return launch_rows<T, WeightFormat::kFp8>(params, stream);
    case WeightFormat::kInt8:
      return;  // has the tile kernel for all rows
  }
}

}  // namespace

void launch_stream(const GemmParams& gemm, const gemm_config::Config& config, float* partials,
                   Stream stream) {
  check(gemm.M <= gemm_config::kStreamRows, "linear: the few-row kernel takes at most ",
        gemm_config::kStreamRows, " rows, got ", gemm.M);
  const StreamParams params{.gemm = gemm,
                            .partials = config.fused ? nullptr : partials,
                            .segments = config.segments,
                            .paired = config.fused && is_gated(gemm.activation)};
  if (gemm.dtype == DType::kFloat16) return launch_format<__half>(params, stream);
  launch_format<__nv_bfloat16>(params, stream);
}

}  // namespace ridgeline::gemm_detail
