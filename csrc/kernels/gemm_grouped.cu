#include "kernels/gemm_grouped.h"

#include <algorithm>

#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_fragments.cuh"

namespace ridgeline {
namespace {

using namespace gemm_detail;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kWarpsAlongM = 2;
constexpr int kStrips = gemm_config::kTileCols / kStripRows;
constexpr int kStripsOfWarp = kStrips / (kWarps / kWarpsAlongM);
constexpr int kPitch = gemm_config::kTileCols + 8;  // of the sums: eight rows in different banks
constexpr int kMaxExperts = 1023;                   // and the rows of no expert
constexpr int kSharedBytes = 104 * 1024;            // two blocks an SM on Hopper, one on others
static_assert(kStrips == kWarps, "each warp copies one strip");
static_assert(kStripsOfWarp == 2, "a gate strip and its up strip are in one warp");

// ---- Shared memory ------------------------------------------------------------------------------

template <int kRows>
struct Stage {
  char x[kRows * kRowBytes];
  char weight[kStrips][Layout<WeightFormat::kDense>::kWeightBytes];
};

template <int kRows>
constexpr int kStages = kSharedBytes / static_cast<int>(sizeof(Stage<kRows>));

template <int kRows>
struct Shared {
  union {
    Stage<kRows> stages[kStages<kRows>];
    float tile[kRows][kPitch];  // the sums, once the stages are done with
  };
  const char* source[kRows];         // each row of x; null: zeros
  std::int32_t tiles[kMaxExperts + 1];  // row tiles of each expert
  std::int32_t expert, tile_in_expert;
};

// ---- Phases -------------------------------------------------------------------------------------

/// Rows [offset(e), offset(e + 1)) of y belong to e; the last one stands for no expert.
__device__ __forceinline__ std::int32_t offset(const GroupedGemmParams& p, std::int32_t e) {
  return e > p.experts ? static_cast<std::int32_t>(p.gemm.M) : p.offsets[e];
}

/// Whose row tile blockIdx.x is. Each thread adds the tiles of all experts before its own: 128 reads
/// that do not wait for each other, where a walk from expert to expert waits at every step.
template <int kRows>
__device__ void find_tile(Shared<kRows>& shared, const GroupedGemmParams& p) {
  const int groups = p.experts + 1;
  if (threadIdx.x == 0) shared.expert = -1;
  for (int e = threadIdx.x; e < groups; e += kThreads)
    shared.tiles[e] = ceil_div(offset(p, e + 1) - offset(p, e), kRows);
  __syncthreads();  // every expert's tiles are counted
  const int wanted = blockIdx.x;
  for (int e = threadIdx.x; e < groups; e += kThreads) {
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

template <int kRows>
__device__ void copy_rows(char* to, const Shared<kRows>& shared, const GroupedGemmParams& p,
                          int block) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int column = block * kBlockCols + chunk * 8;
    const char* source = shared.source[row];
    const bool inside = source != nullptr && column < p.gemm.K;
    const void* from = inside ? source + column * 2 : p.gemm.x.data;
    const int at = Layout<WeightFormat::kDense>::chunk_at(row, chunk);
    ptx::copy_async_16(to + row * kRowBytes + at * 16, from, inside);
  }
}

/// One warp's sums: kTiles16 x 16 rows by two strips of two n8 tiles, over one block of 64 columns.
template <class T, int kTiles16>
__device__ void multiply_block(const Stage<kTiles16 * 32>& stage,
                               float (&sums)[kTiles16][kStripsOfWarp][2][4], int warp_m, int warp_n,
                               Lane lane) {
  constexpr auto kFormat = WeightFormat::kDense;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    XFragment<kFormat, true> x[kTiles16];
#pragma unroll
    for (int m = 0; m < kTiles16; ++m)
      x[m].load(stage.x + (warp_m * kTiles16 + m) * 16 * kRowBytes, half, lane);
#pragma unroll
    for (int s = 0; s < kStripsOfWarp; ++s) {
      StripFragment<T, kFormat> weight;
      weight.load(stage.weight[warp_n * kStripsOfWarp + s], half, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int m = 0; m < kTiles16; ++m)
            ptx::mma_m16n8k16<T>(sums[m][s][tile], x[m].a[j], weight.words[tile][2 * j],
                                 weight.words[tile][2 * j + 1]);
    }
  }
}

template <int kTiles16>
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

/// The tile to y, or zeros where there is none.
template <class T>
__device__ void store_tile(const GemmParams& p, const float (*tile)[kPitch], std::int64_t row0,
                           int rows, bool paired) {
  const int columns = paired ? gemm_config::kTileCols / 2 : gemm_config::kTileCols;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * columns;
  for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
    const int r = i / columns, c = i % columns;
    const std::int64_t m = row0 + r, n = first + c;
    if (n >= p.out_cols()) continue;
    if (tile == nullptr) {
      static_cast<T*>(p.y)[m * p.out_cols() + n] = device::from_float<T>(0.0f);
    } else if (paired) {
      const int gate = c / kStripRows * 2 * kStripRows + c % kStripRows;
      finish_gated<T>(p, tile[r][gate], tile[r][gate + kStripRows], m, n);
    } else {
      finish<T>(p, tile[r][c], m, n);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (row tiles, as many as any routing can need; tiles of 128 weight rows). A block of 2 x 4
/// warps owns kTiles16 * 32 rows of one expert by 128 weight rows, a warp half of the rows by 32;
/// 64 columns a stage, copied in the background; sums in float32. A block without a tile ends.
/// Roofline: the bytes of the weights of the experts that have rows; 2 S N K flops (mma.sync).
template <class T, int kTiles16>
__global__ void __launch_bounds__(kThreads, kTiles16 == 4 ? 1 : 2)
    grouped_kernel(const __grid_constant__ GroupedGemmParams params) {
  extern __shared__ __align__(128) char raw[];
  constexpr int kRows = kTiles16 * 32, kDepth = kStages<kRows>;
  auto& shared = *reinterpret_cast<Shared<kRows>*>(raw);
  const Lane lane;
  const int warp = threadIdx.x / 32, warp_m = warp % kWarpsAlongM, warp_n = warp / kWarpsAlongM;
  const bool paired = is_gated(params.gemm.activation);

  ptx::launch_dependents();
  ptx::wait_for_dependencies();  // which weights are read is what the kernels ahead decide
  find_tile<kRows>(shared, params);
  const int expert = shared.expert;
  if (expert < 0) return;
  const std::int64_t row0 = offset(params, expert) + shared.tile_in_expert * std::int64_t{kRows};
  const int rows =
      static_cast<int>(min(std::int64_t{kRows}, offset(params, expert + 1) - row0));
  GemmParams p = params.gemm;
  if (expert == params.experts) return store_tile<T>(p, nullptr, row0, rows, paired);
  p.weight.data = static_cast<const T*>(p.weight.data) + expert * params.stride_expert;
  if (p.bias) p.bias = static_cast<const T*>(p.bias) + expert * static_cast<std::int64_t>(p.N);
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    const char* source = nullptr;
    if (r < rows) {
      std::int64_t row = params.rows ? params.rows[row0 + r] : row0 + r;
      if (row < 0 || row >= params.x_rows) row = 0;  // reads what is there, as other ops do
      source = static_cast<const char*>(p.x.data) + row * p.x.stride_row * 2;
    }
    shared.source[r] = source;
  }
  __syncthreads();  // the rows' addresses are there

  const std::int64_t n0 =
      strip_row(p, static_cast<std::int64_t>(blockIdx.y) * kStrips + warp, paired);
  const int count = ceil_div(p.K, kBlockCols);
  const auto copy = [&](int i) {
    if (i < count) {
      Stage<kRows>& stage = shared.stages[i % kDepth];
      copy_strip<T, WeightFormat::kDense>(stage.weight[warp], p, n0, i, lane.index);
      copy_rows<kRows>(stage.x, shared, params, i);
    }
    ptx::commit_copies();
  };
  for (int i = 0; i < kDepth - 1; ++i) copy(i);
  float sums[kTiles16][kStripsOfWarp][2][4] = {};
  for (int i = 0; i < count; ++i) {
    ptx::wait_copies<kDepth - 2>();
    __syncthreads();  // stage i of every warp is in; every warp is done with the stage filled next
    copy(i + kDepth - 1);
    multiply_block<T, kTiles16>(shared.stages[i % kDepth], sums, warp_m, warp_n, lane);
  }
  ptx::wait_copies<0>();
  __syncthreads();  // every warp is done with the stages, where the sums go
  keep_sums<kTiles16>(shared.tile, sums, warp_m, warp_n, lane);
  __syncthreads();  // the tile is whole
  store_tile<T>(p, shared.tile, row0, rows, paired);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, int kTiles16>
void launch(const GroupedGemmParams& params, Stream stream) {
  constexpr std::int64_t kRows = kTiles16 * 32;
  static_assert(kStages<kRows> >= 3, "two stages in flight, one in use");
  const GemmParams& p = params.gemm;
  // Of g groups with rows, each has one tile for its first row, all others a tile for kRows of them.
  const std::int64_t groups = std::min<std::int64_t>(p.M, params.experts + 1);
  const std::int64_t row_tiles = groups + (p.M - groups) / kRows;
  const std::int64_t tiles_n = ceil_div(ceil_div(p.N, kStripRows), kStrips);
  check(tiles_n <= 65535, "grouped_linear: weight rows must be at most ",
        65535 * gemm_config::kTileCols, ", got ", p.N);
  const dim3 grid(checked_int32(row_tiles, "grouped_linear: row tiles"),
                  static_cast<unsigned>(tiles_n));
  device::launch_chained<grouped_kernel<T, kTiles16>>(grid, dim3(kThreads), sizeof(Shared<kRows>),
                                                      stream, params, "grouped_linear");
}

template <class T>
void launch_rows(const GroupedGemmParams& params, Stream stream) {
  const std::int64_t mean = params.gemm.M / std::max(params.experts, 1);
  if (mean <= 32) return launch<T, 1>(params, stream);
  if (mean <= 64) return launch<T, 2>(params, stream);
  launch<T, 4>(params, stream);
}

}  // namespace

void grouped_gemm(const GroupedGemmParams& params, Stream stream) {
  check(params.experts <= kMaxExperts, "weight: expected at most ", kMaxExperts, " experts, got ",
        params.experts);
  if (params.gemm.dtype == DType::kFloat16) return launch_rows<__half>(params, stream);
  launch_rows<__nv_bfloat16>(params, stream);
}

}  // namespace ridgeline
