#pragma once
#include <cuda.h>

#include "kernels/gemm_sm90.cuh"

/// What a block of the fp8 by fp8 kernel works on, and the warps that bring it.
namespace ridgeline::gemm_fp8 {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRows = kConsumers * kWarpgroupRows;  // of x, a tile
constexpr int kStepBytes = 32;                      // 32 columns, the depth of one wgmma
constexpr int kSteps = kRowBytes / kStepBytes;

/// kCols weight rows a tile. kPartCols of them are multiplied at a time and added to float32 sums
/// every kAddEvery stages.
template <class T_, int kCols_, int kPartCols_, int kStages_, int kAddEvery_>
struct Tile {
  using T = T_;
  static constexpr int kCols = kCols_;
  static constexpr int kPartCols = kPartCols_;
  static constexpr int kParts = kCols / kPartCols;
  static constexpr int kStages = kStages_;
  static constexpr int kAddEvery = kAddEvery_;
};

struct Launch {
  GemmParams gemm;
  CUtensorMap x, weight, y;
  Tiles tiles;
  int steps;  // of 128 columns of K
};

// ---- Shared memory ------------------------------------------------------------------------------

/// What the epilogue needs of a column.
struct Column {
  float scale, bias;
};

template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) std::uint8_t x[Tile::kStages][kRows][kRowBytes];
  alignas(1024) std::uint8_t weight[Tile::kStages][2][Tile::kCols / 2][kRowBytes];
  union {
    alignas(1024) T out[kConsumers * 4][2][16][kOutColumns];  // two boxes a warp
    Chunk chunks[kConsumers];
  };
  alignas(16) Column columns[Tile::kCols];
  alignas(8) std::uint64_t full[Tile::kStages], free[Tile::kStages];
  std::uint64_t columns_full, columns_free;
};

// ---- Producer -----------------------------------------------------------------------------------

/// First weight row of a half of tile `n`: halves follow each other, or are gate and up.
template <class Tile>
__device__ __forceinline__ int weight_row(const GemmParams& p, int n, int half) {
  constexpr int kHalf = Tile::kCols / 2;
  return is_gated(p.activation) ? n * kHalf + half * (p.N / 2) : n * Tile::kCols + half * kHalf;
}

/// Calls fn(place) for each tile of this block.
template <class Fn>
__device__ __forceinline__ void for_each_tile(const Launch& launch, Fn&& fn) {
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x))
    fn(place_of(launch.tiles, i));
}

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const GemmParams& p = launch.gemm;
  constexpr int kBytes = sizeof(shared.x[0]) + sizeof(shared.weight[0]);
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  for_each_tile(launch, [&](const Place& place) {
    for (int k = 0; k < launch.steps; ++k, ring.next()) {
      const int s = ring.stage, column = k * kRowBytes;
      ptx::mbarrier_wait(&shared.free[s], ring.parity);
      ptx::mbarrier_expect(&shared.full[s], kBytes);
      ptx::copy_matrix(shared.x[s], &launch.x, &shared.full[s], column, place.m * kRows);
      for (int half = 0; half < 2; ++half)
        ptx::copy_matrix(shared.weight[s][half], &launch.weight, &shared.full[s], column,
                         weight_row<Tile>(p, place.n, half));
    }
  });
}

/// Scale and bias of each tile's columns, by one warp, while the tile is multiplied.
template <class Tile>
__device__ __forceinline__ void bring_columns(const Launch& launch, Shared<Tile>& shared) {
  using T = typename Tile::T;
  constexpr int kHalf = Tile::kCols / 2;
  const GemmParams& p = launch.gemm;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const auto* scales = static_cast<const float*>(p.weight.scales);
  const bool per_row = p.weight.scale_layout == ScaleLayout::kRow;
  int parity = 1;
  for_each_tile(launch, [&](const Place& place) {
    ptx::mbarrier_wait(&shared.columns_free, parity);
    parity ^= 1;
    for (int c = lane; c < Tile::kCols; c += device::kWarpSize) {
      const int n = weight_row<Tile>(p, place.n, c / kHalf) + c % kHalf;
      Column column{0.0f, 0.0f};
      if (n < p.N) {
        column.scale = scales[per_row ? n : 0];
        if (p.bias) column.bias = device::to_float(static_cast<const T*>(p.bias)[n]);
      }
      shared.columns[c] = column;
    }
    __syncwarp();  // the columns are written
    if (lane == 0) ptx::mbarrier_arrive(&shared.columns_full);
  });
}

}  // namespace ridgeline::gemm_fp8
