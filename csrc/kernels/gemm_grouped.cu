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

constexpr int kWarpsAlongM = 2;
constexpr int kStripsOfWarp = 2;      // a gate strip and its up strip are in one warp
constexpr int kMaxExperts = 1023;     // and the rows of no expert
// That hide each other's barriers: many rows 165 TFLOP/s with one block an SM, 238 with two (H200,
// 8192 tokens, 8 experts of 4096 x 28672, top 2), for all that 128 x 128 tiles spill 16 addresses.
constexpr int kBlocksPerSm = 2;

/// A block's shape: kTiles16 * 32 rows of x by kWarps strips of 16 weight rows.
template <int kTiles16, int kWarps>
struct Tile {
  static constexpr int kRows = kTiles16 * 16 * kWarpsAlongM, kThreads = kWarps * 32;
  static constexpr int kCols = kWarps * kStripRows;
  static constexpr int kPitch = kCols + 8;  // of the sums: eight rows in different banks
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStripBytes = Layout<WeightFormat::kDense>::kWeightBytes;
  static constexpr int kStageBytes = kXBytes + kWarps * kStripBytes;
  static constexpr int kStages = 104 * 1024 * kWarps / 8 / kStageBytes;
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

/// What a thread copies of every stage: 16 bytes of each of kCount rows, kStep rows apart, 128
/// bytes further a stage. Places are worked out once, and count 16 bytes so that they fit 32 bits.
template <int kCount, int kStep>
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
      const int at = Layout<WeightFormat::kDense>::chunk_at(row, chunk);
      ptx::copy_async_16(stage + row * kRowBytes + at * 16, base + place * 16, valid);
    }
  }
};

/// One warp's sums: kTiles16 x 16 rows by two strips of two n8 tiles, over one block of 64 columns.
template <class T, int kTiles16>
__device__ void multiply_block(const char* x_rows, const char (*strips)[2048],
                               float (&sums)[kTiles16][kStripsOfWarp][2][4], Lane lane) {
  constexpr auto kFormat = WeightFormat::kDense;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    StripFragment<T, kFormat> weight[kStripsOfWarp];
#pragma unroll
    for (int s = 0; s < kStripsOfWarp; ++s) weight[s].load(strips[s], half, lane);
#pragma unroll
    for (int m = 0; m < kTiles16; ++m) {
      XFragment<kFormat, true> x;
      x.load(x_rows + m * 16 * kRowBytes, half, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int s = 0; s < kStripsOfWarp; ++s)
#pragma unroll
          for (int tile = 0; tile < 2; ++tile)
            ptx::mma_m16n8k16<T>(sums[m][s][tile], x.a[j], weight[s].words[tile][2 * j],
                                 weight[s].words[tile][2 * j + 1]);
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
__device__ void store_tile(const GemmParams& p, const float (*tile)[Tile::kPitch],
                           std::int64_t row0, int rows, bool paired) {
  const int columns = paired ? Tile::kCols / 2 : Tile::kCols;
  const int c = threadIdx.x % columns;
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.y) * columns + c;
  if (n >= p.out_cols()) return;
  const int gate = c / kStripRows * 2 * kStripRows + c % kStripRows;
  for (int r = threadIdx.x / columns; r < rows; r += Tile::kThreads / columns) {
    const std::int64_t m = row0 + r;
    if (tile == nullptr) {
      static_cast<T*>(p.y)[m * p.out_cols() + n] = device::from_float<T>(0.0f);
    } else if (paired) {
      finish_gated<T>(p, tile[r][gate], tile[r][gate + kStripRows], m, n);
    } else {
      finish<T>(p, tile[r][c], m, n);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (row tiles, as many as any routing can need; tiles of weight rows). A block owns a Tile of
/// one expert, 2 warps along its rows, a warp 32 weight rows; 64 columns a stage, copied in the
/// background; sums in float32. A block without a tile ends.
/// Roofline: the bytes of the weights of the experts that have rows; 2 S N K flops (mma.sync).
template <class T, int kTiles16, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm * 8 / kWarps)
    grouped_kernel(const __grid_constant__ GroupedGemmParams params) {
  using Tile = Tile<kTiles16, kWarps>;
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
  const GemmParams& p = params.gemm;
  if (expert == params.experts) return store_tile<T, Tile>(p, nullptr, row0, rows, paired);
  const T* weight = static_cast<const T*>(p.weight.data) + expert * params.stride_expert;

  constexpr int kRowStep = Tile::kThreads / kChunks;
  Copier<Tile::kRows / kRowStep, kRowStep> of_x(p.x.data, threadIdx.x, rows);
  of_x.find(p.x.stride_row, [&](int r) -> std::int64_t {
    if (r >= rows) return 0;
    const std::int64_t row = params.rows ? params.rows[row0 + r] : row0 + r;
    return row < 0 || row >= params.x_rows ? 0 : row;  // reads what is there, as other ops do
  });
  const std::int64_t n0 =
      strip_row(p, static_cast<std::int64_t>(blockIdx.y) * kWarps + warp, paired);
  const auto strip_rows = static_cast<int>(max(std::int64_t{0}, min(p.N - n0, std::int64_t{16})));
  Copier<4, 4> of_weight(weight, lane.index, strip_rows);
  of_weight.find(p.weight.stride_row, [&](int r) { return n0 + r; });

  const int count = ceil_div(p.K, kBlockCols);
  const auto copy = [&](int i) {
    if (i < count) {
      auto& stage = shared.stages[i % Tile::kStages];
      of_weight.copy(stage.weight[warp], i, p.K);
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
    const auto& stage = shared.stages[i % Tile::kStages];
    multiply_block<T, kTiles16>(stage.x + warp_m * kTiles16 * 16 * kRowBytes,
                                &stage.weight[warp_n * kStripsOfWarp], sums, lane);
  }
  ptx::wait_copies<0>();
  __syncthreads();  // every warp is done with the stages, where the sums go
  keep_sums<kTiles16, Tile::kPitch>(shared.tile, sums, warp_m, warp_n, lane);
  __syncthreads();  // the tile is whole
  GemmParams of_expert = p;
  if (p.bias) of_expert.bias = static_cast<const T*>(p.bias) + std::int64_t{shared.expert} * p.N;
  store_tile<T, Tile>(of_expert, shared.tile, row0, rows, paired);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, int kTiles16, int kWarps>
void launch(const GroupedGemmParams& params, Stream stream) {
  using Tile = Tile<kTiles16, kWarps>;
  const GemmParams& p = params.gemm;
  // Of g groups with rows, each has a tile for its first row; the other rows fill tiles of kRows.
  const std::int64_t groups = std::min<std::int64_t>(p.M, params.experts + 1);
  const std::int64_t row_tiles = groups + (p.M - groups) / Tile::kRows;
  const std::int64_t tiles_n = ceil_div(ceil_div(p.N, kStripRows), kWarps);
  check(tiles_n <= 65535, "grouped_linear: weight rows must be at most ", 65535 * Tile::kCols,
        ", got ", p.N);
  const dim3 grid(checked_int32(row_tiles, "grouped_linear: row tiles"),
                  static_cast<unsigned>(tiles_n));
  device::launch_chained<grouped_kernel<T, kTiles16, kWarps>>(
      grid, dim3(Tile::kThreads), sizeof(Shared<Tile>), stream, params, "grouped_linear");
}

/// Tiles of about as many rows as experts have; few rows take narrow blocks, which spread a weight
/// over more SMs: one token of top 8 in 128 experts of 2048 x 1536 took 30.2 us in blocks of 128
/// weight rows, 23.6 in blocks of 64 (H200).
template <class T>
void launch_rows(const GroupedGemmParams& params, Stream stream) {
  const std::int64_t mean = params.gemm.M / std::max(params.experts, 1);
  if (mean <= 32) return launch<T, 1, 4>(params, stream);
  if (mean <= 64) return launch<T, 2, 8>(params, stream);
  launch<T, 4, 8>(params, stream);
}

}  // namespace

void grouped_gemm(const GroupedGemmParams& params, Stream stream) {
  check(params.experts <= kMaxExperts, "weight: expected at most ", kMaxExperts, " experts, got ",
        params.experts);
  if (params.gemm.dtype == DType::kFloat16) return launch_rows<__half>(params, stream);
  launch_rows<__nv_bfloat16>(params, stream);
}

}  // namespace ridgeline
