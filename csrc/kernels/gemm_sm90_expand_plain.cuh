#pragma once
#include "device/ptx/async_copy.cuh"
#include "kernels/gemm_sm90_expand_parts.cuh"

/// The way of the expanding kernel's sums, which lie with weight rows as rows, to y: scaled, with
/// bias, and no more.
namespace ridgeline::gemm_expand {

/// Scale and bias of this thread's weight rows, and where those of e4m3 rows of x will be.
template <class Tile>
struct RowFactors {
  float scale[Tile::kBands][2], bias[Tile::kBands][2];
  const float* x_scales;

  __device__ __forceinline__ void load(const Launch& launch, int tile, const Consumer& me) {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = weight_row<Tile>(launch, tile, half_of<Tile>(me.warpgroup, band)) +
                      first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad + 8 * r;
        const Column of = Column::load<typename Tile::T>(launch.gemm, n);
        scale[band][r] = of.scale * Tile::kUnit;
        bias[band][r] = of.bias;
      }
  }
};

/// Whether that is all.
template <class Tile>
__host__ __device__ __forceinline__ bool is_scaled_alone(const GemmParams& p) {
  return is_plain(p) && (Tile::kFp8X || !p.x.scale);
}

/// Asks for the scales of a tile's rows of x, for this warpgroup, ahead of its products; in two
/// places by turns, for a warp may still read those of the tile before. H200, us, 512 rows of
/// 4096 x 6144: read by the epilogue 45.1, so 38.4, and 39.0 without scales.
template <class Tile>
__device__ __forceinline__ void request_x_scales(const Launch& launch, Shared<Tile>& shared,
                                                 RowFactors<Tile>& factors, const Work& work,
                                                 int turn, const Consumer& me) {
  const GemmParams& p = launch.gemm;
  float* to = shared.x_scales[turn][me.warpgroup];
  factors.x_scales = to;
  if (!p.x.scale) return;
#pragma unroll
  for (int row = me.thread; row < Tile::kRows; row += kWarpgroup) {
    const std::int64_t m = std::int64_t{work.place.m} * Tile::kRows + row;
    ptx::copy_async_4(to + row, p.x.scale + (p.x.scale_per_row ? min(m, p.M - 1) : 0), true);
  }
  ptx::commit_copies();
}

/// Of the two rows of the tile from `row` on, of which a thread has sums.
template <class Tile>
__device__ __forceinline__ float2 scales_of_x(const GemmParams& p, const RowFactors<Tile>& factors,
                                              int row) {
  if (!Tile::kFp8X || !p.x.scale) return {1.0f, 1.0f};
  return *reinterpret_cast<const float2*>(factors.x_scales + row);
}

/// A band's 64 columns of y through a warpgroup's boxes, some rows of x at a time, transposed on
/// the way.
template <class Tile>
__device__ __forceinline__ void store_plain(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const RowFactors<Tile>& factors, const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kRows = Tile::kPlainRows, kPieces = kRows / 8;
  const int matrix = me.lane / 8, chunk = me.warp * 2 + matrix % 2;
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
    for (int box = 0; box < Tile::kRows / kRows; ++box) {
      auto& out = shared.wide[me.warpgroup][box % 2];
      // A tile may have an odd number of boxes: its last store was perhaps from the first.
      if (me.thread == 0)
        band == 0 && box == 0 ? ptx::wait_stores_read<0>() : ptx::wait_stores_read<1>();
      me.meet();  // the box's last store has been read
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        std::uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // weight rows half j % 2 of piece i + j / 2
          const float(&of)[4] = sums[band][box * kPieces + i + j / 2];
          const float scale = factors.scale[band][j % 2], bias = factors.bias[band][j % 2];
          const float2 of_x = scales_of_x<Tile>(
              launch.gemm, factors, box * kRows + (i + j / 2) * 8 + me.in_quad * 2);
          const auto scaled = [&](float sum, float x_scale) {
            return __fadd_rn(__fmul_rn(__fmul_rn(sum, x_scale), scale), bias);
          };
          packed[j] = pack<T>(scaled(of[j % 2 * 2], of_x.x), scaled(of[j % 2 * 2 + 1], of_x.y));
        }
        const int m = (i + matrix / 2) * 8 + me.lane % 8;
        ptx::stmatrix_transposed(&out[m][(chunk ^ (m % 8)) * 8], packed);
      }
      ptx::fence_async_shared();
      me.meet();  // the box is whole
      if (me.thread == 0) {
        const int column = weight_row<Tile>(launch, place.n, half_of<Tile>(me.warpgroup, band)) +
                           first_in_half<Tile>(me.warpgroup);
        ptx::store_matrix(&launch.y, out, column, place.m * Tile::kRows + box * kRows);
        ptx::commit_stores();
      }
    }
}

}  // namespace ridgeline::gemm_expand
