#pragma once
#include "kernels/gemm_sm90_expand_parts.cuh"

/// The way of the expanding kernel's sums, which lie with weight rows as rows, to y.
namespace ridgeline::gemm_expand {

/// Scale and bias of this thread's weight rows.
template <class Tile>
struct RowFactors {
  float scale[Tile::kBands][2], bias[Tile::kBands][2];

  __device__ __forceinline__ void load(const Launch& launch, int tile, const Consumer& me) {
    using T = typename Tile::T;
    const GemmParams& p = launch.gemm;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = weight_row<Tile>(launch, tile, half_of<Tile>(me.warpgroup, band)) +
                      first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad + 8 * r;
        scale[band][r] = Tile::kUnit;
        bias[band][r] = 0.0f;
        if (n >= p.N) continue;
        if (!Tile::kInt4 && p.weight.scale_layout != ScaleLayout::kBlock)
          scale[band][r] = static_cast<const float*>(
              p.weight.scales)[p.weight.scale_layout == ScaleLayout::kRow ? n : 0];
        if (p.bias) bias[band][r] = device::to_float(static_cast<const T*>(p.bias)[n]);
      }
  }
};

/// Of the two rows of x beside each other, from `m` on, that a thread has sums of.
template <class Tile>
__device__ __forceinline__ float2 scales_of_x(const GemmParams& p, std::int64_t m) {
  if (!Tile::kFp8X || !p.x.scale) return {1.0f, 1.0f};
  if (!p.x.scale_per_row) return {*p.x.scale, *p.x.scale};
  return {p.x.scale[min(m, p.M - 1)], p.x.scale[min(m + 1, p.M - 1)]};
}

/// A band's 64 columns of y through a warpgroup's boxes, 64 rows of x at a time, transposed on the
/// way.
template <class Tile>
__device__ __forceinline__ void store_plain(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const RowFactors<Tile>& factors, const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kPieces = kChunk / 8;
  const int matrix = me.lane / 8, chunk = me.warp * 2 + matrix % 2;
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
    for (int box = 0; box < Tile::kRows / kChunk; ++box) {
      auto& out = shared.out[me.warpgroup][box % 2];
      if (me.thread == 0) ptx::wait_stores_read<1>();
      me.meet();  // the box's last store has been read
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        std::uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // weight rows half j % 2 of piece i + j / 2
          const float(&of)[4] = sums[band][box * kPieces + i + j / 2];
          const float scale = factors.scale[band][j % 2], bias = factors.bias[band][j % 2];
          const float2 of_x = scales_of_x<Tile>(
              launch.gemm, std::int64_t{place.m} * Tile::kRows + box * kChunk +
                               (i + j / 2) * 8 + me.in_quad * 2);
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
        ptx::store_matrix(&launch.y, out, column, place.m * Tile::kRows + box * kChunk);
        ptx::commit_stores();
      }
    }
}

/// kCount rows of x, the `index`-th so many, of a band, transposed, to the chunk's rows from `to`.
template <class Tile, int kCount>
__device__ __forceinline__ void put_rows(Chunk& chunk, const Sums<Tile>& sums, int band, int index,
                                         int to, const Consumer& me) {
#pragma unroll
  for (int b = 0; b < Tile::kBands; ++b)
#pragma unroll
    for (int c = 0; c < Tile::kRows / kCount; ++c) {
      if (b != band || c != index) continue;
#pragma unroll
      for (int i = 0; i < kCount / 8; ++i)
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
    constexpr int kPerBand = Tile::kRows / kChunk;
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

template <class Tile>
__device__ __forceinline__ void store_chunks(const Launch& launch, Shared<Tile>& shared,
                                             const Work& work, const Sums<Tile>& sums,
                                             int thread) {
  using T = typename Tile::T;
  const GemmParams& p = launch.gemm;
#pragma unroll 1
  for (int c = 0; c < Tile::kChunks; ++c) {
    const Consumer me(ptx::opaque(thread));  // no addresses of all rounds side by side in registers
    const ChunkOf<Tile> of(launch, work, c, me);
    const auto meet = [&] { of.both ? me.meet_all() : me.meet(); };
    Columns columns;
    columns.load<T>(p, of.part, me.thread);
    meet();  // the chunk before is read
    of.put(shared.chunks[me.warpgroup], sums, me);
    meet();  // the chunk is whole
    Chunk& chunk = shared.chunks[of.both ? 0 : me.warpgroup];
    finish_chunk<T, true>(
        p, [&](int row, int column) { return device::load_vec<kEach>(chunk.at(row, column)); },
        of.part, columns, me.thread);
  }
}

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
/// whole.
template <class Tile>
__device__ __forceinline__ void store_share(const Launch& launch, Shared<Tile>& shared,
                                            const Sums<Tile>& sums, int thread) {
  const Work work = segment_of(launch.tiles, launch.segments, launch.steps,
                               ptx::opaque(static_cast<int>(blockIdx.x)));
  const int rows = Tile::kRows / launch.segments, first = work.segment * rows;
  const Consumer me(ptx::opaque(thread));
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
    finish_chunk<typename Tile::T, true>(
        launch.gemm,
        [&](int row, int column) { return device::load_vec<kEach>(chunk.at(row, column)); },
        of.part, columns, me.thread);
  }
}

}  // namespace ridgeline::gemm_expand
