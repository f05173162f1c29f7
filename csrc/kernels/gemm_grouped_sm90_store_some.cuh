#pragma once
#include "kernels/gemm_grouped_sm90_store.cuh"

/// The way of the sums of some rows to y.
namespace ridgeline::gemm_grouped {

/// Sums of a tile to y, each warp's by itself, through half a kilobyte of its own, so that none
/// waits for another: 32 rows of x by 8 gated columns at a time, or 16 by 16.
template <class Tile, bool kGated>
__device__ __forceinline__ void store_warp(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums,
                                           const float* x_scale,
                                           const RowFactors<typename Tile::T>& factors,
                                           const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kChunks = kGated ? 1 : 2;                     // of 16 bytes, of a row of y
  constexpr int kLines = device::kWarpSize / kChunks;         // rows of x at a time
  constexpr int kEights = ceil_div(Tile::kRows, kLines) * kLines / 8;
  const GemmParams& p = launch.grouped.gemm;
  char* out = reinterpret_cast<char*>(shared.out[me.warpgroup]) +
              me.warp * (device::kWarpSize * kVector);
  const auto place = [&](int row, int chunk) {  // eight rows are in different banks
    return out + (kGated ? row * kVector : row * 32 + (chunk ^ row / 4 % 2) * kVector);
  };
  const int out_cols = p.out_cols(), matrix = me.lane / 8;
  const int first = ((item.column * Tile::kConsumers + me.warpgroup) * 4 + me.warp) * kChunks * 8;
  const int row = me.lane / kChunks, chunk = me.lane % kChunks;
  T* y = static_cast<T*>(p.y) + (std::int64_t{item.row0} + row) * out_cols + first + chunk * 8;
  const auto values = [&](int r, int i) {
    constexpr int kInPiece = Tile::kPiece / 8;
    const float(&of)[4] = sums[i / kInPiece][i % kInPiece];
    float2 pair{of[2 * r], of[2 * r + 1]};
    if constexpr (Tile::kFp8X) {
      const float2 scales = *reinterpret_cast<const float2*>(&x_scale[i * 8 + me.in_quad * 2]);
      pair.x = __fmul_rn(pair.x, scales.x), pair.y = __fmul_rn(pair.y, scales.y);
    }
    return float2{factors.template of<Tile>(r, pair.x), factors.template of<Tile>(r, pair.y)};
  };
#pragma unroll
  for (int i = 0; i < kEights; i += kLines / 8) {
    if (i * 8 >= item.rows) break;
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
    ptx::stmatrix_transposed(place(matrix / kChunks * 8 + me.lane % 8, matrix % kChunks), packed);
    __syncwarp();  // all rows are there
    const uint4 vector = *reinterpret_cast<const uint4*>(place(row, chunk));
    __syncwarp();  // they are read
    if (i * 8 + row < item.rows && first < out_cols)
      *reinterpret_cast<uint4*>(y + std::int64_t{i} * 8 * out_cols) = vector;
  }
}

template <class Tile>
__device__ __forceinline__ void store_some(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums,
                                           const float* x_scale,
                                           const RowFactors<typename Tile::T>& factors,
                                           const Consumer& me) {
  const bool gated =
      Tile::kNibbles ? Tile::kWay.gated : is_gated(launch.grouped.gemm.activation);
  if (gated) {
    store_warp<Tile, true>(launch, shared, item, sums, x_scale, factors, me);
  } else {
    store_warp<Tile, false>(launch, shared, item, sums, x_scale, factors, me);
  }
}

}  // namespace ridgeline::gemm_grouped
