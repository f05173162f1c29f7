#pragma once
#include "kernels/gemm_grouped_sm90_store.cuh"

/// The way of the sums of some rows to y.
namespace ridgeline::gemm_grouped {

/// Sums of a tile to y, kPiece rows of x at a time: each warp's by itself, through a kilobyte of
/// its own, so that none waits for another.
template <class Tile, bool kGated>
__device__ __forceinline__ void store_warp(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums,
                                           const RowFactors<typename Tile::T>& factors,
                                           const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kChunks = kGated ? 1 : 2;  // of 16 bytes, of a row of y
  constexpr int kPieces = ceil_div(Tile::kRows, Tile::kPiece);
  constexpr int kEights = (kGated ? Tile::kPiece : std::min(Tile::kRows, Tile::kPiece)) / 8;
  constexpr int kStep = device::kWarpSize / kChunks;  // rows between those of a lane
  const GemmParams& p = launch.grouped.gemm;
  char* out = reinterpret_cast<char*>(shared.out[me.warpgroup]) +
              me.warp * (Tile::kPiece * 2 * kVector);
  const auto place = [&](int row, int chunk) {  // eight rows are in different banks
    return out + (kGated ? row * kVector : row * 32 + (chunk ^ row / 4 % 2) * kVector);
  };
  const int out_cols = p.out_cols(), matrix = me.lane / 8;
  const int first = ((item.column * Tile::kConsumers + me.warpgroup) * 4 + me.warp) * kChunks * 8;
  const int row = me.lane / kChunks, chunk = me.lane % kChunks;
  T* y = static_cast<T*>(p.y) + (std::int64_t{item.row0} + row) * out_cols + first + chunk * 8;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece * Tile::kPiece >= item.rows) break;
    const auto values = [&](int r, int i) {
      const float(&of)[4] = sums[piece][i];
      return float2{factors.template of<Tile>(r, of[2 * r]),
                    factors.template of<Tile>(r, of[2 * r + 1])};
    };
#pragma unroll
    for (int i = 0; i < kEights; i += 4 / kChunks) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kGated) {
          const float2 gate = values(0, i + j), up = values(1, i + j);
          packed[j] = pack<T>(__fmul_rn(device::silu<true>(gate.x), up.x),
                              __fmul_rn(device::silu<true>(gate.y), up.y));
        } else {
          const float2 pair = values(j % 2, i + j / 2);
          packed[j] = pack<T>(pair.x, pair.y);
        }
      }
      ptx::stmatrix_transposed(place((i + matrix / kChunks) * 8 + me.lane % 8, matrix % kChunks),
                               packed);
    }
    __syncwarp();  // the piece is whole
    uint4 vectors[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      vectors[i] = *reinterpret_cast<const uint4*>(place(row + i * kStep, chunk));
    __syncwarp();  // it is read
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int m = piece * Tile::kPiece + row + i * kStep;
      if (m < item.rows && first < out_cols)
        *reinterpret_cast<uint4*>(y + std::int64_t{m - row} * out_cols) = vectors[i];
    }
  }
}

template <class Tile>
__device__ __forceinline__ void store_some(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums,
                                           const RowFactors<typename Tile::T>& factors,
                                           const Consumer& me) {
  const bool gated =
      Tile::kInt4 ? Tile::kWay.gated : is_gated(launch.grouped.gemm.activation);
  if (gated) {
    store_warp<Tile, true>(launch, shared, item, sums, factors, me);
  } else {
    store_warp<Tile, false>(launch, shared, item, sums, factors, me);
  }
}

}  // namespace ridgeline::gemm_grouped
