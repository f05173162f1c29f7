#pragma once
#include "kernels/gemm_sm90_expand_parts.cuh"

/// The way to y of the expanding kernel's sums where several blocks share a tile: each finishes
/// some rows of x, by way of chunks in shared memory.
namespace ridgeline::gemm_expand {

/// kCount rows of x, the `index`-th so many, of a band, transposed, to the chunk's rows from `to`.
template <class Tile, int kCount>
__device__ __forceinline__ void put_rows(Chunk& chunk, const Sums<Tile>& sums, int band, int index,
                                         int to, const Consumer& me) {
#pragma unroll
  for (int b = 0; b < Tile::kBands; ++b)
#pragma unroll
    for (int c = 0; c < ceil_div(Tile::kRows, kCount); ++c) {
      if (b != band || c != index) continue;
#pragma unroll
      for (int i = 0; i < min(kCount, Tile::kRows - c * kCount) / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *chunk.at(to + i * 8 + me.in_quad * 2 + j % 2, me.warp * 16 + me.quad + j / 2 * 8) =
              sums[b][c * kCount / 8 + i][j] * Tile::kUnit;
    }
}

/// Chunk `c` of a warpgroup's sums: which part of y it is, which rows of which band.
template <class Tile>
struct ChunkOf {
  Part part;
  int band, index;
  bool paired, both;

  __device__ __forceinline__ ChunkOf(const Launch& launch, const Work& work, int c,
                                     const Consumer& me)
      // One band, paired: gates and up rows are in different warpgroups, which finish half the rows
      // each; two bands: a warpgroup puts both into its chunk, the up rows below.
      : paired(is_gated(launch.gemm.activation)), both(paired && Tile::kBands == 1) {
    constexpr int kPerBand = ceil_div(Tile::kRows, kChunk);
    const int rows = paired && !both ? kChunk / 2 : kChunk;
    band = paired ? 0 : c / kPerBand;
    index = paired ? c : c % kPerBand;
    const int half = paired ? 0 : half_of<Tile>(me.warpgroup, band);
    part = {.row = std::int64_t{work.place.m} * Tile::kRows + index * rows,
            .column = weight_row<Tile>(launch, work.place.n, half) +
                      first_in_half<Tile>(me.warpgroup),
            .begin = both ? me.warpgroup * (kChunk / 2) : 0,
            .end = both ? (me.warpgroup + 1) * (kChunk / 2) : rows,
            .columns = kChunk,
            .up_rows = both ? kChunk : kChunk / 2,
            .up_columns = 0};
  }

  __device__ __forceinline__ void put(Chunk& own, const Sums<Tile>& sums,
                                      const Consumer& me) const {
    if (paired && !both) {
      put_rows<Tile, kChunk / 2>(own, sums, 0, index, 0, me);
      put_rows<Tile, kChunk / 2>(own, sums, Tile::kBands - 1, index, kChunk / 2, me);
    } else {
      put_rows<Tile, kChunk>(own, sums, band, index, 0, me);
    }
  }
};

/// Scale and bias of the tile's columns for store_share, one a thread.
template <class Tile>
__device__ __forceinline__ void bring_columns(const Launch& launch, Shared<Tile>& shared,
                                              const Work& work, const Consumer& me) {
  for (int c = me.warpgroup * kWarpgroup + me.thread; c < 2 * Tile::kBoxCols;
       c += kConsumers * kWarpgroup)
    shared.columns[c] = Column::load<typename Tile::T>(
        launch.gemm, weight_row<Tile>(launch, work.place.n, c / Tile::kBoxCols) +
                         c % Tile::kBoxCols);
}

/// The rows of x that this block of a tile's segments finishes: those whose sums exchange() made
/// whole. Their residual is in the stages from `ring` on.
template <class Tile>
__device__ __forceinline__ void store_share(const Launch& launch, Shared<Tile>& shared,
                                            Ring<Tile::kStages> ring, const Sums<Tile>& sums,
                                            int thread) {
  using T = typename Tile::T;
  const Work work = segment_of(launch.tiles, launch.segments, launch.steps,
                               ptx::opaque(static_cast<int>(blockIdx.x)));
  const int rows = Tile::kRows / launch.segments, first = work.segment * rows;
  const Consumer me(ptx::opaque(thread));
  if (!is_gated(launch.gemm.activation)) ring.skip(me.warpgroup);
  const auto& residual = shared.x[ring.stage];
  if (launch.copies_residual) ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
#pragma unroll 1
  for (int c = first / kChunk; c * kChunk < first + rows; ++c) {
    ChunkOf<Tile> of(launch, work, c, me);
    me.meet_all();  // the columns are there, the chunk before is read
    of.put(shared.chunks[me.warpgroup], sums, me);
    me.meet_all();  // the chunk is whole
    of.part.begin = max(first - c * kChunk, 0);
    of.part.end = min(first + rows - c * kChunk, kChunk);
    if (of.both) {
      const int half = (of.part.end - of.part.begin) / 2;
      of.part.begin += me.warpgroup * half;
      of.part.end = of.part.begin + half;
    }
    const Column* columns_at = shared.columns + (of.both ? 0 : me.warpgroup) * Tile::kBoxCols +
                               me.thread * kEach % kChunk;
    Columns columns;
    columns.take(columns_at, of.paired ? columns_at + Tile::kBoxCols : columns_at);
    Chunk& chunk = shared.chunks[of.both ? 0 : me.warpgroup];
    finish_chunk<T>(
        launch.gemm,
        [&](int row, int column) { return device::load_vec<kEach>(chunk.at(row, column)); },
        [&](int row, int column) {
          if (!launch.copies_residual) return residual_at<T>(launch.gemm, of.part, row, column);
          const int m = c * kChunk + row - first;
          return device::load_vec<kEach>(reinterpret_cast<const T*>(
              &residual[m][(column / 8 ^ m % 8) * 16 + column % 8 * 2]));
        },
        of.part, columns, me.thread);
  }
}

}  // namespace ridgeline::gemm_expand
