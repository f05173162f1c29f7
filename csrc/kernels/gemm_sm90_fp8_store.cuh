#pragma once
#include "kernels/gemm_sm90_fp8.cuh"

/// The way of the fp8 by fp8 kernel's sums, which lie with rows of x as rows, to y.
namespace ridgeline::gemm_fp8 {

template <class Tile>
using Sums = float[Tile::kParts][Tile::kPartCols / 8][4];

__device__ __forceinline__ void load_row_scales(const GemmParams& p, const Place& place,
                                                const Consumer& me, float (&row_scale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m =
        place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad + 8 * r;
    const bool scaled = p.x.scale && !p.x.scale_per_group && m < p.M;
    row_scale[r] = scaled ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
  }
}

/// A sum of the thread's row `r` in a piece of eight columns, scaled, plus bias.
template <class Tile>
__device__ __forceinline__ float scaled_sum(const Sums<Tile>& sums, int piece, int r, int column,
                                            float row_scale, const Column& of) {
  constexpr int kPerPart = Tile::kPartCols / 8;
  const float sum = sums[piece / kPerPart][piece % kPerPart][2 * r + column];
  return __fadd_rn(__fmul_rn(__fmul_rn(sum, row_scale), of.scale), of.bias);
}

/// Each warp's 16 rows through its own boxes, 64 columns of y at a time. kGated: a thread has the
/// up sums of its gates, half a tile on.
template <class Tile, bool kGated>
__device__ __forceinline__ void store_boxes(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const float (&row_scale)[2], const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kPieces = kOutColumns / 8, kOutCols = kGated ? Tile::kCols / 2 : Tile::kCols;
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
#pragma unroll
  for (int box = 0; box < kOutCols / kOutColumns; ++box) {
    auto& out = shared.out[me.warpgroup * 4 + me.warp][box % 2];
    if (me.lane == 0) ptx::wait_stores_read<1>();
    __syncwarp();  // the box's last store has been read
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int piece = box * kPieces + i + j;
        const Column* columns = &shared.columns[piece * 8 + me.in_quad * 2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float values[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            values[c] = scaled_sum<Tile>(sums, piece, r, c, row_scale[r], columns[c]);
            if constexpr (kGated)
              values[c] = __fmul_rn(
                  gemm_detail::activate<T>(Activation::kSiluMul, values[c]),
                  scaled_sum<Tile>(sums, piece + kOutCols / 8, r, c, row_scale[r],
                                   columns[kOutCols + c]));
          }
          packed[2 * j + r] = pack<T>(values[0], values[1]);
        }
      }
      ptx::stmatrix(&out[row][((i + matrix / 2) ^ (row % 8)) * 8], packed);
    }
    ptx::fence_async_shared();
    __syncwarp();  // the box is whole
    if (me.lane == 0) {
      ptx::store_matrix(&launch.y, out, place.n * kOutCols + box * kOutColumns,
                        place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16);
      ptx::commit_stores();
    }
  }
}

/// Chunk `index` of the sums, times the scales of their rows: 64 columns, or 32 gates and their up
/// columns.
template <class Tile>
__device__ __forceinline__ void put_chunk(Chunk& chunk, const Sums<Tile>& sums, int index,
                                          bool gated, const float (&row_scale)[2],
                                          const Consumer& me) {
  constexpr int kPieces = kChunk / 8, kPerPart = Tile::kPartCols / 8;
#pragma unroll
  for (int c = 0; c < Tile::kCols / kChunk; ++c) {
    if (c != index) continue;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // Of the tile's pieces of eight columns; the second half of a gated tile is up.
      const int plain = c * kPieces + i;
      constexpr int kUp = Tile::kCols / 16;
      const int paired = c * kPieces / 2 + i % (kPieces / 2) + i / (kPieces / 2) * kUp;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2 pair;
        pair.x = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r]
                       : sums[plain / kPerPart][plain % kPerPart][2 * r];
        pair.y = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r + 1]
                       : sums[plain / kPerPart][plain % kPerPart][2 * r + 1];
        pair.x = __fmul_rn(pair.x, row_scale[r]);
        pair.y = __fmul_rn(pair.y, row_scale[r]);
        *reinterpret_cast<float2*>(
            chunk.at(me.warp * 16 + me.quad + 8 * r, i * 8 + me.in_quad * 2)) = pair;
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void store_chunks(const Launch& launch, Shared<Tile>& shared,
                                             const Place& place, const Sums<Tile>& sums,
                                             const float (&row_scale)[2], const Consumer& me) {
  using T = typename Tile::T;
  const GemmParams& p = launch.gemm;
  const bool gated = is_gated(p.activation);
  const int columns = gated ? kChunk / 2 : kChunk;
  Chunk& chunk = shared.chunks[me.warpgroup];
#pragma unroll 1
  for (int c = 0; c < Tile::kChunks; ++c) {
    const Part part{.row = place.m * kRows + me.warpgroup * kWarpgroupRows,
                    .column = (place.n * Tile::kChunks + c) * columns,
                    .begin = 0,
                    .end = kWarpgroupRows,
                    .columns = columns,
                    .up_rows = 0,
                    .up_columns = kChunk / 2};
    Columns of_thread;
    of_thread.load<T>(p, part, me.thread);
    me.meet();  // the chunk before is read
    put_chunk<Tile>(chunk, sums, c, gated, row_scale, me);
    me.meet();  // the chunk is whole
    finish_chunk<T, false>(
        p, [&](int row, int column) { return device::load_vec<kEach>(chunk.at(row, column)); },
        part, of_thread, me.thread);
  }
}

/// The sums of all segments, of which each block of the cluster finishes some rows.
template <class Tile>
__device__ __forceinline__ void store_split(const Launch& launch, Shared<Tile>& shared,
                                            const Sums<Tile>& sums, const Consumer& me) {
  const GemmParams& p = launch.gemm;
  const Work work = segment_of(launch.tiles, launch.segments, launch.steps,
                               ptx::opaque(static_cast<int>(blockIdx.x)));
  const bool gated = is_gated(p.activation);
  const int columns = gated ? kChunk / 2 : kChunk;
  auto& split = shared.split();
  const float one[2] = {1.0f, 1.0f};
  me.meet_all();  // nobody reads the stages any more
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c)
    put_chunk<Tile>(split.chunks[c][me.warpgroup], sums, c, gated, one, me);
  ptx::cluster_arrive();
  ptx::cluster_wait();  // the sums of every segment are in shared memory
#pragma unroll 1
  for (int c = 0; c < Tile::kChunks; ++c) {
    Part part{.row = work.place.m * kRows + me.warpgroup * kWarpgroupRows,
              .column = (work.place.n * Tile::kChunks + c) * columns,
              .begin = 0,
              .end = kWarpgroupRows,
              .columns = columns,
              .up_rows = 0,
              .up_columns = kChunk / 2};
    take_share(part, work, launch.segments);
    Columns of_thread;
    const Column* first = shared.columns + c * columns + me.thread * kEach % columns;
    of_thread.take(first, gated ? first + Tile::kCols / 2 : first);
    finish_chunk<typename Tile::T, true>(
        p,
        [&](int row, int column) {
          return split.chunks[c][me.warpgroup].total(row, column, launch.segments);
        },
        part, of_thread, me.thread);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // nobody reads this block's sums any more
}

}  // namespace ridgeline::gemm_fp8
