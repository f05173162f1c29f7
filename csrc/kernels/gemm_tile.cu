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

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kWarpsAlongM = 2;
constexpr int kStrips = gemm_config::kTileCols / kStripRows;
constexpr int kStripsOfWarp = kStrips / (kWarps / kWarpsAlongM);
constexpr int kSharedBytes = 98 * 1024;             // a block's; fits every GPU from compute 8.0 on
constexpr int kPitch = gemm_config::kTileCols + 8;  // of the sums: eight rows in different banks
static_assert(kStrips == kWarps, "each warp copies one strip");
static_assert(kStripsOfWarp == 2, "a gate strip and its up strip are in one warp");

struct TileParams {
  GemmParams gemm;
  float* partials;        // where the epilogue is another kernel's; else null
  std::int32_t segments;  // of K, whose sums are added in order
  bool split;             // blockIdx.z is the segment; else the block adds them itself
  bool paired;            // gate and up strips by turns
};

// ---- Shared memory ------------------------------------------------------------------------------

template <WeightFormat kFormat, int kRows>
struct Stage {
  char x[kRows * kRowBytes];
  char weight[kStrips][Layout<kFormat>::kWeightBytes];
  char scales[kStrips][kScaleBytes<kFormat>];
};

template <WeightFormat kFormat, int kRows>
constexpr int kStages = std::min(6, kSharedBytes / static_cast<int>(sizeof(Stage<kFormat, kRows>)));

// ---- Phases -------------------------------------------------------------------------------------

/// One warp's sums: kTiles16 x 16 rows of x by two strips of two n8 tiles.
template <class Sum, int kTiles16>
struct Sums {
  Sum of[kTiles16][kStripsOfWarp][2][4];

  __device__ void clear() {
    visit([](Sum& sum) { sum = Sum{}; });
  }
  __device__ void add(const Sums& other) {
#pragma unroll
    for (int m = 0; m < kTiles16; ++m)
#pragma unroll
      for (int i = 0; i < kStripsOfWarp * 8; ++i)
        of[m][i / 8][i / 4 % 2][i % 4] += other.of[m][i / 8][i / 4 % 2][i % 4];
  }
  template <class Fn>
  __device__ void visit(Fn fn) {
#pragma unroll
    for (int m = 0; m < kTiles16; ++m)
#pragma unroll
      for (int i = 0; i < kStripsOfWarp * 8; ++i) fn(of[m][i / 8][i / 4 % 2][i % 4]);
  }
};

/// Multiplies one block of 64 columns.
template <class T, WeightFormat kFormat, class Sum, int kTiles16>
__device__ void multiply_block(const Stage<kFormat, kTiles16 * 32>& stage, const GemmParams& p,
                               Sums<Sum, kTiles16>& sums, int warp_m, int warp_n, Lane lane) {
  const bool has_zeros = p.weight.zeros != nullptr;
  const bool block_scaled = p.weight.scale_layout == ScaleLayout::kBlock;
  StripFragment<T, kFormat> weight[kStripsOfWarp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    XFragment<kFormat, true> x[kTiles16];
#pragma unroll
    for (int m = 0; m < kTiles16; ++m)
      x[m].load(stage.x + (warp_m * kTiles16 + m) * 16 * kRowBytes, half, lane);
#pragma unroll
    for (int s = 0; s < kStripsOfWarp; ++s) {
      const int strip = warp_n * kStripsOfWarp + s;
      weight[s].load(stage.weight[strip], half, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          std::uint32_t b[2];
          weight[s].step(b, tile, half, j, stage.scales[strip], has_zeros, block_scaled, lane);
#pragma unroll
          for (int m = 0; m < kTiles16; ++m)
            ptx::mma_m16n8k16<T>(sums.of[m][s][tile], x[m].a[j], b[0], b[1]);
        }
    }
  }
}

/// This warp's sums to their place in the tile.
template <class Sum, int kTiles16>
__device__ void keep_sums(float (*tile)[kPitch], const Sums<Sum, kTiles16>& sums, int warp_m,
                          int warp_n, Lane lane) {
#pragma unroll
  for (int m = 0; m < kTiles16; ++m)
#pragma unroll
    for (int i = 0; i < kStripsOfWarp * 2; ++i) {
      const int row = (warp_m * kTiles16 + m) * 16 + lane.quad;
      const int column = (warp_n * kStripsOfWarp * 2 + i) * 8 + 2 * lane.in_quad;
      const Sum(&of)[4] = sums.of[m][i / 2][i % 2];
      const auto put = [&](int down, Sum first, Sum second) {
        *reinterpret_cast<float2*>(&tile[row + down][column]) = {static_cast<float>(first),
                                                                 static_cast<float>(second)};
      };
      put(0, of[0], of[1]);
      put(8, of[2], of[3]);
    }
}

/// The tile to y or to the partials, neighbouring threads on neighbouring columns.
template <class T, int kRows>
__device__ void store_tile(const TileParams& params, const float (*tile)[kPitch],
                           std::int64_t row0) {
  const GemmParams& p = params.gemm;
  const int columns = params.paired ? gemm_config::kTileCols / 2 : gemm_config::kTileCols;
  const int rows = static_cast<int>(min(static_cast<std::int64_t>(kRows), p.M - row0));
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * columns;
  const std::int64_t bound = params.paired ? p.out_cols() : p.N;
  for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
    const int r = i / columns, c = i % columns;
    const std::int64_t m = row0 + r, n = first + c;
    if (n >= bound) continue;
    if (params.partials) {
      params.partials[(static_cast<std::int64_t>(blockIdx.z) * p.M + m) * p.N + n] = tile[r][c];
    } else if (params.paired) {
      const int gate = c / kStripRows * 2 * kStripRows + c % kStripRows;
      finish_gated<T>(p, tile[r][gate], tile[r][gate + kStripRows], m, n);
    } else {
      finish<T>(p, tile[r][c], m, n);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (row tiles, tiles of 128 weight rows, segments of K if split). A block of 2 x 4 warps owns
/// kTiles16 * 32 rows of x by 128 weight rows, a warp half of the rows by 32. 64 columns a stage,
/// copied in the background. Each segment is summed from zero and the segments added in order, as
/// in the few-row kernel: a row's bits do not depend on which kernel made it. Sums in float32, of
/// int8 in int32.
/// Roofline: 2 M N K flops on the tensor cores (mma.sync).
template <class T, WeightFormat kFormat, int kTiles16>
__global__ void __launch_bounds__(kThreads, 1)
    tile_kernel(const __grid_constant__ TileParams params) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kRows = kTiles16 * 32, kDepth = kStages<kFormat, kRows>;
  const GemmParams& p = params.gemm;
  auto* stages = reinterpret_cast<Stage<kFormat, kRows>*>(shared);
  const Lane lane;
  const int warp = threadIdx.x / 32, warp_m = warp % kWarpsAlongM, warp_n = warp / kWarpsAlongM;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRows;
  const std::int64_t n0 =
      strip_row(p, static_cast<std::int64_t>(blockIdx.y) * kStrips + warp, params.paired);

  const int blocks = ceil_div(p.K, kBlockCols), length = max(1, ceil_div(blocks, params.segments));
  const int begin = params.split ? min(static_cast<int>(blockIdx.z) * length, blocks) : 0;
  const int count = params.split ? min(length, blocks - begin) : blocks;
  const auto copy_weight = [&](int i) {
    Stage<kFormat, kRows>& stage = stages[i % kDepth];
    copy_strip<T, kFormat>(stage.weight[warp], p, n0, begin + i, lane.index);
    copy_scales<T, kFormat>(stage.scales[warp], p, n0, begin + i, lane.index);
  };
  const auto copy_rows = [&](int i) {
    copy_x<T, kFormat, kRows, kThreads>(stages[i % kDepth].x, p, row0, begin + i, threadIdx.x);
  };

  ptx::launch_dependents();
  if (!p.weights_ready) ptx::wait_for_dependencies();
  for (int i = 0; i < min(kDepth - 1, count); ++i) copy_weight(i);
  if (p.weights_ready) ptx::wait_for_dependencies();
  for (int i = 0; i < kDepth - 1; ++i) {
    if (i < count) copy_rows(i);
    ptx::commit_copies();  // the first group holds every weight requested above
  }

  using Sum = std::conditional_t<kFormat == WeightFormat::kInt8, int, float>;
  Sums<Sum, kTiles16> sums, total;
  sums.clear();
  total.clear();
  for (int i = 0; i < count; ++i) {
    ptx::wait_copies<kDepth - 2>();
    __syncthreads();  // stage i of every warp is in; every warp is done with the stage filled next
    if (i + kDepth - 1 < count) {
      copy_weight(i + kDepth - 1);
      copy_rows(i + kDepth - 1);
    }
    ptx::commit_copies();
    multiply_block<T, kFormat>(stages[i % kDepth], p, sums, warp_m, warp_n, lane);
    if ((i + 1) % length == 0) {  // the end of a segment
      total.add(sums);
      sums.clear();
    }
  }
  total.add(sums);

  ptx::wait_copies<0>();
  __syncthreads();  // every warp is done with the stages, where the sums go
  auto* tile = reinterpret_cast<float(*)[kPitch]>(shared);
  keep_sums(tile, total, warp_m, warp_n, lane);
  __syncthreads();  // the tile is whole
  store_tile<T, kRows>(params, tile, row0);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, WeightFormat kFormat, int kTiles16>
void launch(const TileParams& params, Stream stream) {
  constexpr int kRows = kTiles16 * 32;
  constexpr std::size_t kShared = sizeof(Stage<kFormat, kRows>) * kStages<kFormat, kRows>;
  static_assert(kStages<kFormat, kRows> >= 3, "two stages in flight, one in use");
  static_assert(kShared >= kRows * kPitch * sizeof(float), "the sums take the stages' place");
  constexpr auto kKernel = tile_kernel<T, kFormat, kTiles16>;
  allow_shared(kKernel, kShared);
  const GemmParams& p = params.gemm;
  const std::int64_t tiles_n = ceil_div(ceil_div(p.N, kStripRows), kStrips);
  check(tiles_n <= 65535, "linear: weight rows must be at most ", 65535 * gemm_config::kTileCols,
        ", got ", p.N);
  const dim3 grid(checked_int32(ceil_div<std::int64_t>(p.M, kRows), "linear: row tiles"),
                  static_cast<unsigned>(tiles_n), params.split ? params.segments : 1);
  device::launch_chained<kKernel>(grid, dim3(kThreads), kShared, stream, params, "linear: tiles");
}

template <class T, WeightFormat kFormat>
void launch_rows(const TileParams& params, int tile_rows, Stream stream) {
  if (tile_rows == 64) return launch<T, kFormat, 2>(params, stream);
  launch<T, kFormat, 4>(params, stream);
}

template <class T>
void launch_format(const TileParams& params, int tile_rows, Stream stream) {
  switch (params.gemm.weight.format) {
    case WeightFormat::kDense:
      return launch_rows<T, WeightFormat::kDense>(params, tile_rows, stream);
    case WeightFormat::kInt4:
      return launch_rows<T, WeightFormat::kInt4>(params, tile_rows, stream);
    case WeightFormat::kFp8:
      return launch_rows<T, WeightFormat::kFp8>(params, tile_rows, stream);
    case WeightFormat::kInt8:
      return launch_rows<T, WeightFormat::kInt8>(params, tile_rows, stream);
  }
}

}  // namespace

void launch_tile(const GemmParams& gemm, const gemm_config::Config& config, float* partials,
                 Stream stream) {
  const TileParams params{.gemm = gemm,
                          .partials = config.fused ? nullptr : partials,
                          .segments = config.segments,
                          .split = config.split,
                          .paired = config.fused && is_gated(gemm.activation)};
  if (gemm.dtype == DType::kFloat16) return launch_format<__half>(params, config.tile_rows, stream);
  launch_format<__nv_bfloat16>(params, config.tile_rows, stream);
}

}  // namespace ridgeline::gemm_detail
