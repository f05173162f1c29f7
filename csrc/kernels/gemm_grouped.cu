#include "kernels/gemm_grouped.h"

#include <algorithm>

#include "common/launch_trace.h"
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_fragments.cuh"
#include "kernels/gemm_grouped_config_text.h"
#include "kernels/gemm_grouped_fit.h"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline {
namespace {

using namespace gemm_detail;
using gemm_grouped::Choice;
using gemm_grouped::kMaxExperts;
using gemm_grouped::of_expanded_x;
using gemm_grouped::of_expert;
using gemm_grouped::row_of_x;
using gemm_grouped::Shape;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarpsAlongM = 2;
constexpr int kStripsOfWarp = 2;      // a gate strip and its up strip are in one warp
// That hide each other's barriers: many rows 165 TFLOP/s with one block an SM, 238 with two (H200,
// 8192 tokens, 8 experts of 4096 x 28672, top 2), for all that 128 x 128 tiles spill 16 addresses.
constexpr int kBlocksPerSm = 2;

/// A block's shape: kTiles16 * 32 rows of x by kWarps strips of 16 weight rows.
template <WeightFormat kFormat_, int kTiles16, int kWarps>
struct Tile {
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr int kRows = kTiles16 * 16 * kWarpsAlongM, kThreads = kWarps * 32;
  static constexpr int kCols = kWarps * kStripRows;
  static constexpr int kPitch = kCols + 8;  // of the sums: eight rows in different banks
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStripBytes = Layout<kFormat>::kWeightBytes;
  static constexpr int kScalesOfStrip =
      kFormat == WeightFormat::kDense ? 0 : kScaleBytes<kFormat>;
  static constexpr int kStageBytes = kXBytes + kWarps * (kStripBytes + kScalesOfStrip);
  static constexpr int kStages = std::min(8, 104 * 1024 * kWarps / 8 / kStageBytes);
  static_assert(kWarps / kWarpsAlongM * kStripsOfWarp == kWarps, "each warp copies one strip");
  static_assert(kStages >= 3, "two stages in flight, one in use");
  static_assert(kStages * kStageBytes >= kRows * kPitch * 4, "the sums take the stages' place");
};

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  struct Stage {
    char x[Tile::kXBytes];
    char weight[Tile::kThreads / 32][Tile::kStripBytes];
    char scales[Tile::kThreads / 32][Tile::kScalesOfStrip];
  };
  union {
    Stage stages[Tile::kStages];
    float tile[Tile::kRows][Tile::kPitch];  // the sums, once the stages are done with
  };
  std::int32_t tiles[kMaxExperts + 1];  // row tiles of each expert
  std::int32_t expert, tile_in_expert;
};

// ---- Phases -------------------------------------------------------------------------------------

/// Rows [offset(e), offset(e + 1)) of y belong to e; the last one stands for no expert.
__device__ __forceinline__ std::int32_t offset(const GroupedGemmParams& p, std::int32_t e) {
  return e > p.experts ? static_cast<std::int32_t>(p.gemm.M) : p.offsets[e];
}

/// Whose row tile blockIdx.x is. Each thread adds the tiles of all experts before its own: reads
/// that do not wait for each other, where a walk from expert to expert waits at every step.
template <class Tile>
__device__ void find_tile(Shared<Tile>& shared, const GroupedGemmParams& p) {
  const int groups = p.experts + 1;
  if (threadIdx.x == 0) shared.expert = -1;
  for (int e = threadIdx.x; e < groups; e += Tile::kThreads)
    shared.tiles[e] = ceil_div(offset(p, e + 1) - offset(p, e), Tile::kRows);
  __syncthreads();  // every expert's tiles are counted
  const int wanted = blockIdx.x;
  for (int e = threadIdx.x; e < groups; e += Tile::kThreads) {
    int first = 0;
#pragma unroll 8
    for (int j = 0; j < e; ++j) first += shared.tiles[j];
    if (first <= wanted && wanted < first + shared.tiles[e]) {
      shared.expert = e;
      shared.tile_in_expert = wanted - first;
    }
  }
  __syncthreads();  // the tile is known to all
}

/// What a thread copies of every stage of x or of a dense weight: 16 bytes of each of kCount rows,
/// kStep rows apart, 128 bytes further a stage. Places are worked out once, and count 16 bytes so
/// that they fit 32 bits.
template <WeightFormat kFormat, int kCount, int kStep>
struct Copier {
  const char* base;
  int row0, chunk;
  int limit;  // rows from here on are zeros
  std::uint32_t places[kCount];

  __device__ Copier(const void* from, int thread, int rows)
      : base(static_cast<const char*>(from)),
        row0(thread / kChunks),
        chunk(thread % kChunks),
        limit(rows) {}

  /// row_of(i): the row in memory, of `stride` elements, of the i-th row of this thread.
  template <class RowOf>
  __device__ void find(std::int64_t stride, RowOf row_of) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      places[i] = static_cast<std::uint32_t>(row_of(row0 + i * kStep) * (stride / 8)) + chunk;
  }

  __device__ void copy(char* stage, int block, int columns) const {
    const bool column_inside = block * kBlockCols + chunk * 8 < columns;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * kStep;
      const bool valid = row < limit && column_inside;
      const std::int64_t place = valid ? places[i] + block * kChunks : 0;
      const int at = Layout<kFormat>::chunk_at(row, chunk);
      ptx::copy_async_16(stage + row * kRowBytes + at * 16, base + place * 16, valid);
    }
  }
};

/// One warp's sums: kTiles16 x 16 rows by two strips of two n8 tiles, over one block of 64 columns.
template <class T, class Tile, int kTiles16>
__device__ void multiply_block(const typename Shared<Tile>::Stage& stage, const GemmParams& p,
                               float (&sums)[kTiles16][kStripsOfWarp][2][4], int warp_m, int warp_n,
                               Lane lane) {
  constexpr WeightFormat kFormat = Tile::kFormat;
  const bool has_zeros = p.weight.zeros != nullptr;
  const bool block_scaled = p.weight.scale_layout == ScaleLayout::kBlock;
  StripFragment<T, kFormat> weight[kStripsOfWarp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int s = 0; s < kStripsOfWarp; ++s)
      weight[s].load(stage.weight[warp_n * kStripsOfWarp + s], half, lane);
    std::uint32_t b[2][kStripsOfWarp][2][2];
#pragma unroll
    for (int i = 0; i < kStripsOfWarp * 4; ++i) {
      const int j = i % 2, tile = i / 2 % 2, s = i / 4;
      weight[s].step(b[j][s][tile], tile, half, j, stage.scales[warp_n * kStripsOfWarp + s],
                     has_zeros, block_scaled, lane);
    }
#pragma unroll
    for (int m = 0; m < kTiles16; ++m) {
      XFragment<kFormat, true> x;
      x.load(stage.x + (warp_m * kTiles16 + m) * 16 * kRowBytes, half, lane);
#pragma unroll
      for (int i = 0; i < kStripsOfWarp * 4; ++i) {
        const int j = i / 4, tile = i % 2, s = i / 2 % 2;
        ptx::mma_m16n8k16<T>(sums[m][s][tile], x.a[j], b[j][s][tile][0], b[j][s][tile][1]);
      }
    }
  }
}

template <int kTiles16, int kPitch>
__device__ void keep_sums(float (*tile)[kPitch], const float (&sums)[kTiles16][kStripsOfWarp][2][4],
                          int warp_m, int warp_n, Lane lane) {
#pragma unroll
  for (int m = 0; m < kTiles16; ++m)
#pragma unroll
    for (int i = 0; i < kStripsOfWarp * 2; ++i) {
      const int row = (warp_m * kTiles16 + m) * 16 + lane.quad;
      const int column = (warp_n * kStripsOfWarp * 2 + i) * 8 + 2 * lane.in_quad;
      const float(&of)[4] = sums[m][i / 2][i % 2];
      *reinterpret_cast<float2*>(&tile[row][column]) = float2{of[0], of[1]};
      *reinterpret_cast<float2*>(&tile[row + 8][column]) = float2{of[2], of[3]};
    }
}

/// The tile to y, or zeros where there is none: a thread keeps its column and walks down the rows.
template <class T, class Tile>
__device__ void store_tile(const GroupedGemmParams& params, const GemmParams& p,
                           const float (*tile)[Tile::kPitch], std::int64_t row0, int rows,
                           bool paired) {
  const int columns = paired ? Tile::kCols / 2 : Tile::kCols;
  const int c = threadIdx.x % columns;
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.y) * columns + c;
  if (n >= p.out_cols()) return;
  const int gate = c / kStripRows * 2 * kStripRows + c % kStripRows;
  for (int r = threadIdx.x / columns; r < rows; r += Tile::kThreads / columns) {
    const std::int64_t m = row0 + r;
    const float* scales = params.gemm.x.scale;
    const float scale =
        scales ? scales[params.gemm.x.scale_per_row ? row_of_x(params, m) : 0] : 1.0f;
    if (tile == nullptr) {
      static_cast<T*>(p.y)[m * p.out_cols() + n] = device::from_float<T>(0.0f);
    } else if (paired) {
      finish_gated<T>(p, __fmul_rn(tile[r][gate], scale),
                      __fmul_rn(tile[r][gate + kStripRows], scale), m, n);
    } else {
      finish<T>(p, __fmul_rn(tile[r][c], scale), m, n);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (row tiles, as many as any routing can need; tiles of weight rows). A block owns a Tile of
/// one expert, 2 warps along its rows, a warp 32 weight rows; 64 columns a stage, copied in the
/// background; sums in float32. A block without a tile ends.
/// Roofline: the bytes of the weights of the experts that have rows; 2 S N K flops (mma.sync).
template <class T, WeightFormat kFormat, int kTiles16, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm * 8 / kWarps)
    grouped_kernel(const __grid_constant__ GroupedGemmParams params) {
  using Tile = Tile<kFormat, kTiles16, kWarps>;
  extern __shared__ __align__(128) char raw[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(raw);
  const Lane lane;
  const int warp = threadIdx.x / 32, warp_m = warp % kWarpsAlongM, warp_n = warp / kWarpsAlongM;
  const bool paired = is_gated(params.gemm.activation);

  ptx::launch_dependents();
  ptx::wait_for_dependencies();  // which weights are read is what the kernels ahead decide
  find_tile<Tile>(shared, params);
  const int expert = shared.expert;
  if (expert < 0) return;
  const std::int64_t row0 =
      offset(params, expert) + shared.tile_in_expert * std::int64_t{Tile::kRows};
  const int rows =
      static_cast<int>(min(std::int64_t{Tile::kRows}, offset(params, expert + 1) - row0));
  if (expert == params.experts)
    return store_tile<T, Tile>(params, params.gemm, nullptr, row0, rows, paired);
  const GemmParams p = of_expert<T>(params, expert);

  constexpr int kRowStep = Tile::kThreads / kChunks;
  Copier<kFormat, Tile::kRows / kRowStep, kRowStep> of_x(p.x.data, threadIdx.x, rows);
  of_x.find(p.x.stride_row,
            [&](int r) { return r < rows ? row_of_x(params, row0 + r) : std::int64_t{0}; });
  const std::int64_t n0 =
      strip_row(p, static_cast<std::int64_t>(blockIdx.y) * kWarps + warp, paired);
  const auto strip_rows = static_cast<int>(max(std::int64_t{0}, min(p.N - n0, std::int64_t{16})));
  Copier<kFormat, 4, 4> of_weight(p.weight.data, lane.index, strip_rows);
  if constexpr (kFormat == WeightFormat::kDense)
    of_weight.find(p.weight.stride_row, [&](int r) { return n0 + r; });

  const int count = ceil_div(p.K, kBlockCols);
  const auto copy = [&](int i) {
    if (i < count) {
      auto& stage = shared.stages[i % Tile::kStages];
      if constexpr (kFormat == WeightFormat::kDense) {
        of_weight.copy(stage.weight[warp], i, p.K);
      } else {
        copy_strip<T, kFormat>(stage.weight[warp], p, n0, i, lane.index);
        copy_scales<T, kFormat>(stage.scales[warp], p, n0, i, lane.index);
      }
      of_x.copy(stage.x, i, p.K);
    }
    ptx::commit_copies();
  };
  for (int i = 0; i < Tile::kStages - 1; ++i) copy(i);
  float sums[kTiles16][kStripsOfWarp][2][4] = {};
  for (int i = 0; i < count; ++i) {
    ptx::wait_copies<Tile::kStages - 2>();
    __syncthreads();  // stage i of every warp is in; every warp is done with the stage filled next
    copy(i + Tile::kStages - 1);
    multiply_block<T, Tile>(shared.stages[i % Tile::kStages], p, sums, warp_m, warp_n, lane);
  }
  ptx::wait_copies<0>();
  __syncthreads();  // every warp is done with the stages, where the sums go
  keep_sums<kTiles16, Tile::kPitch>(shared.tile, sums, warp_m, warp_n, lane);
  __syncthreads();  // the tile is whole
  store_tile<T, Tile>(params, p, shared.tile, row0, rows, paired);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, WeightFormat kFormat, int kTiles16, int kWarps>
void launch(const GroupedGemmParams& params, Stream stream) {
  using Tile = Tile<kFormat, kTiles16, kWarps>;
  const GemmParams& p = params.gemm;
  // Of g groups with rows, each has a tile for its first row; the other rows fill tiles of kRows.
  const std::int64_t groups = std::min<std::int64_t>(p.M, params.experts + 1);
  const std::int64_t row_tiles = groups + (p.M - groups) / Tile::kRows;
  const std::int64_t tiles_n = ceil_div(ceil_div(p.N, kStripRows), kWarps);
  check(tiles_n <= 65535, "grouped_linear: weight rows must be at most ", 65535 * Tile::kCols,
        ", got ", p.N);
  const dim3 grid(checked_int32(row_tiles, "grouped_linear: row tiles"),
                  static_cast<unsigned>(tiles_n));
  device::launch_chained<grouped_kernel<T, kFormat, kTiles16, kWarps>>(
      grid, dim3(Tile::kThreads), sizeof(Shared<Tile>), stream, params, "grouped_linear");
}

template <class T>
void launch_rows(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  if (choice.tile_rows == 32) return launch<T, WeightFormat::kDense, 1, 4>(params, stream);
  if (choice.tile_rows == 64) return launch<T, WeightFormat::kDense, 2, 8>(params, stream);
  launch<T, WeightFormat::kDense, 4, 8>(params, stream);
}

template <class T>
void launch_format(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  switch (params.gemm.weight.format) {
    case WeightFormat::kDense: return launch_rows<T>(params, choice, stream);
    case WeightFormat::kInt4: return launch<T, WeightFormat::kInt4, 2, 8>(params, stream);
    case WeightFormat::kFp8: return launch<T, WeightFormat::kFp8, 2, 8>(params, stream);
    case WeightFormat::kFp4:  // its op takes bfloat16 alone
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return launch<T, WeightFormat::kFp4, 2, 8>(params, stream);
      break;
    case WeightFormat::kInt8: break;  // no op has experts of it
  }
}

Shape shape_of(const GroupedGemmParams& params) {
  return gemm_grouped::shape_of(params, device::runs_sm90a(), device::multiprocessors());
}

}  // namespace

std::size_t grouped_gemm_workspace_bytes(const GroupedGemmParams& params) {
  const Shape shape = shape_of(params);
  return gemm_grouped::workspace_bytes(shape, gemm_grouped::choose(shape));
}

bool grouped_gemm_makes_codes(const GroupedGemmParams& params) {
  return is_gated(params.gemm.activation) && gemm_grouped::choose(shape_of(params)).scales_groups;
}

void grouped_gemm(const GroupedGemmParams& params, Stream stream) {
  check(params.experts <= kMaxExperts, "weight: expected at most ", kMaxExperts, " experts, got ",
        params.experts);
  const Choice choice = gemm_grouped::choose(shape_of(params));
  launch_trace::note_choice([&] { return gemm_grouped::to_text(choice); });
  GroupedGemmParams taken = params;
  if (choice.expands_x) {
    GemmParams x = params.gemm;
    x.M = params.x_rows;
    launch_prepare(x, x.workspace, x.K, stream);
    taken = of_expanded_x(params);
  }
  if (choice.path != gemm_grouped::Path::kTile)
    return gemm_grouped::launch_sm90(taken, choice, stream);
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_format<typename decltype(type)::type>(taken, choice, stream);
  });
}

}  // namespace ridgeline
