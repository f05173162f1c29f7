#pragma once
#include "device/ptx/ldmatrix.cuh"
#include "kernels/gemm_sm90_fp8.cuh"

/// The way of the fp8 by fp8 kernel's sums, which lie with rows of x as rows, to y.
namespace ridgeline::gemm_fp8 {

template <class Tile>
using Sums = float[Tile::kParts][Tile::kPartCols / 8][4];

/// Calls fn(way) with a tile's way to y: those that models take, of large tiles, are known, each a
/// kernel. Fewer for float16, for a bias beside scales of blocks, and of small tiles, whose kernel
/// for any has code for two.
template <class Tile, class Fn>
void with_way(const GemmParams& p, Fn&& fn) {
  using enum Activation;
  constexpr bool kFull = std::is_same_v<typename Tile::T, __nv_bfloat16>;
  const bool adds = p.activation == kNone && is_mappable(residual_of(p));
  const bool only_gelu = p.activation == kGelu && !p.residual;
  if constexpr (Tile::kHasKnown) {
    constexpr Terms kFewer = Tile::kBlocks ? Terms::kNone : Terms::kScales;
    const bool scaled = p.x.scale_per_group && p.weight.scale_layout == ScaleLayout::kBlock;
    const bool fewer = kFull && !p.bias && scaled == Tile::kBlocks;
    const bool gates = p.activation == kSiluMul && !p.residual;
    if constexpr (kFull) {
      if (fewer && is_plain(p)) return fn(KnownWay<kNone, false, kFewer>{});
      if (fewer && gates) return fn(KnownWay<kSiluMul, false, kFewer>{});
      if (fewer && adds) return fn(KnownWay<kNone, true, kFewer>{});
    }
    if (is_plain(p)) return fn(KnownWay<kNone>{});
    if constexpr (!Tile::kBlocks) {
      if (gates) return fn(KnownWay<kSiluMul>{});
      if (adds) return fn(KnownWay<kNone, true>{});
    }
    if constexpr (kFull || !Tile::kBlocks)
      if (only_gelu) return fn(KnownWay<kGelu>{});
  } else if constexpr (kFull && !Tile::kInt8 && !Tile::kBlocks) {
    if (adds) return fn(KnownWay<kNone, true>{});
    if (only_gelu) return fn(KnownWay<kGelu>{});
  }
  fn(AnyWay{});
}

/// Columns of y that are finished at once, half a box: more take registers that there are not.
constexpr int kAtOnce = 32, kHalves = kOutColumns / kAtOnce;

/// What a thread has of them: of its two rows, two columns of each eight.
using Values = float[kAtOnce / 8][4];

/// The `index`-th so many columns of the sums, with their terms. Which is not known ahead: the way
/// of some is code, not that of all. kFuses: the bias is added by the last product's instruction.
template <class Tile, Terms kTerms, bool kFuses = false, int kPieces>
__device__ __forceinline__ void take(float (&values)[kPieces][4], const Shared<Tile>& shared,
                                     const Sums<Tile>& sums, int index,
                                     const float (&row_scale)[2], const Consumer& me) {
  constexpr int kPerPart = Tile::kPartCols / 8;
#pragma unroll
  for (int from = 0; from < Tile::kCols / 8 / kPieces; ++from) {
    if (from != index) continue;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int piece = from * kPieces + i;
        values[i][j] = sums[piece / kPerPart][piece % kPerPart][j];
      }
  }
  if (kTerms == Terms::kNone) return;
  const Column* columns = shared.columns + index * kPieces * 8 + me.in_quad * 2;
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Column& of = columns[i * 8 + j % 2];
      const float of_row = __fmul_rn(values[i][j], row_scale[j / 2]);
      values[i][j] = kFuses ? __fmaf_rn(of_row, of.scale, of.bias) : __fmul_rn(of_row, of.scale);
      if (kTerms == Terms::kScalesAndBias && !kFuses)
        values[i][j] = __fadd_rn(values[i][j], of.bias);
    }
}

/// Gives back a stage of the residual.
template <class Tile>
__device__ __forceinline__ void release_residual(Shared<Tile>& shared, int stage,
                                                 const Consumer& me) {
  me.meet();  // the warpgroup has read the stage
  if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
}

template <class T>
__device__ __forceinline__ void add_pair(Values& values, int i, int r,
                                         const device::Vec<T, 2>& pair) {
  const auto of = device::floats(pair);
#pragma unroll
  for (int j = 0; j < 2; ++j) values[i][2 * r + j] = __fadd_rn(values[i][2 * r + j], of.data[j]);
}

constexpr int kInStage = kResidualBoxes * kHalves;  // times kAtOnce columns

/// What a thread needs of the residual of kAtOnce columns, sixteen each.
using Pairs = std::uint32_t[kAtOnce / 16][4];

template <class Tile>
__device__ __forceinline__ void load_residual(Pairs& pairs, Shared<Tile>& shared, int stage,
                                              int index, const Consumer& me) {
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
  const int chunk = index % kHalves * (kAtOnce / 8) + matrix / 2;
  const std::uint8_t* from =
      shared.residual(stage, index % kInStage / kHalves) +
      (me.warpgroup * kWarpgroupRows + me.warp * 16 + row) * kRowBytes;
#pragma unroll
  for (int i = 0; i < kAtOnce / 16; ++i)
    ptx::ldmatrix(pairs[i], from + ((chunk + 2 * i) ^ (row % 8)) * 16);
}

/// All of a tile's, whose stages are free then.
template <class Tile>
__device__ __forceinline__ void take_residual(Pairs (&pairs)[Tile::kCols / kAtOnce],
                                              Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                              const Consumer& me) {
  constexpr int kCount = Tile::kCols / kAtOnce;
#pragma unroll
  for (int first = 0; first < kCount; first += kInStage, ring.next()) {
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
#pragma unroll
    for (int i = first; i < first + kInStage; ++i)
      load_residual<Tile>(pairs[i], shared, ring.stage, i, me);
    release_residual<Tile>(shared, ring.stage, me);
  }
}

template <class T>
__device__ __forceinline__ void add(Values& values, const Pairs& pairs) {
#pragma unroll
  for (int i = 0; i < kAtOnce / 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      add_pair(values, i, r,
               *reinterpret_cast<const device::Vec<T, 2>*>(&pairs[i / 2][i % 2 * 2 + r]));
}

/// Adds the residual: of the stages behind the tile's last, or of memory that the copy engine
/// cannot map.
template <class Tile>
__device__ __forceinline__ void add_residual(Values& values, const Launch& launch,
                                             Shared<Tile>& shared, Ring<Tile::kStages> ring,
                                             const Place& place, int index, int count,
                                             const Consumer& me) {
  using T = typename Tile::T;
  const GemmParams& p = launch.gemm;
  if (launch.copies_residual) {
    ring.skip(index / kInStage);
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    Pairs pairs;
    load_residual<Tile>(pairs, shared, ring.stage, index, me);
    add<T>(values, pairs);
    if (index % kInStage == kInStage - 1 || index == count - 1)
      release_residual<Tile>(shared, ring.stage, me);
    return;
  }
  const int n = (place.n * count + index) * kAtOnce + me.in_quad * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t m = std::int64_t{place.m} * kRows + me.warpgroup * kWarpgroupRows +
                           me.warp * 16 + me.quad + 8 * r;
    const T* from = static_cast<const T*>(p.residual) + m * p.stride_residual + n;
#pragma unroll
    for (int i = 0; i < kAtOnce / 8; ++i)
      if (m < p.M && n + i * 8 < p.out_cols())
        add_pair(values, i, r, device::load_vec<2>(from + i * 8));
  }
}

/// Each warp's 16 rows through its own boxes of 64 columns of y: of a tile's kMost times kAtOnce
/// columns those from kFirst to kLast, less where they are gated. A thread has the up sums of its
/// gates, half a tile on. A known way has no branches, beside which products cannot be made; its
/// residual is in registers.
template <class Tile, class Way, int kFirst, int kLast>
__device__ __forceinline__ void store_boxes(const Launch& launch, Shared<Tile>& shared,
                                            const Ring<Tile::kStages>& ring, const Place& place,
                                            const Sums<Tile>& sums, const Pairs* residual,
                                            const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kMost = Tile::kCols / kAtOnce;
  const GemmParams& p = launch.gemm;
  const float* scales = &shared.row_scales[me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad];
  const float row_scale[2] = {scales[0], scales[8]};
  const Activation activation = Way::activation(p);
  const bool gated = is_gated(activation);
  const int count = gated ? kMost / 2 : kMost;
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
#pragma unroll (Way::kKnown ? kMost : 1)
  for (int index = kFirst; index < kLast; ++index) {
    if (index == count) break;
    Values values;
    take<Tile, Way::kTerms, kTakesHalf<Tile, Way>>(values, shared, sums, index, row_scale, me);
    if constexpr (kTakesHalf<Tile, Way>) {
      replace(values, device::gelu_of_half);
    } else {
      gemm_detail::activate<T>(activation, values);
    }
    if (gated) {
      Values ups;
      take<Tile, Way::kTerms>(ups, shared, sums, count + index, row_scale, me);
#pragma unroll
      for (int i = 0; i < kAtOnce / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) values[i][j] = __fmul_rn(values[i][j], ups[i][j]);
    }
    if constexpr (Way::kKnown) {
      if (Way::has_residual(p)) add<T>(values, residual[index]);
    } else {
      if (Way::has_residual(p))
        add_residual<Tile>(values, launch, shared, ring, place, index, count, me);
    }
    const int box = index / kHalves, half = index % kHalves;
    auto& out = shared.out[me.warpgroup * 4 + me.warp][box % 2];
    if (half == 0) {
      // A tile may have one box, or an odd number: its last store was perhaps from the first.
      box == 0 ? ptx::wait_stores_read<0>() : ptx::wait_stores_read<1>();
      __syncwarp();  // the box's last store has been read
    }
#pragma unroll
    for (int i = 0; i < kAtOnce / 8; i += 2) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&of)[4] = values[i + j / 2];
        packed[j] = pack<T>(of[j % 2 * 2], of[j % 2 * 2 + 1]);
      }
      const int chunk = half * (kAtOnce / 8) + i + matrix / 2;
      ptx::stmatrix(&out[row][(chunk ^ (row % 8)) * 8], packed);
    }
    if (half != kHalves - 1) continue;
    ptx::fence_async_shared();
    __syncwarp();  // the box is whole
    const int column = place.n * (count * kAtOnce) + box * kOutColumns;
    const int first_row = place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16;
    const bool adds = Way::kPlain && p.adds_to_y;
    ptx::store_matrix_if(me.lane == 0 && !adds, &launch.y, out, column, first_row);
    if constexpr (Way::kPlain)
      ptx::add_matrix_if(me.lane == 0 && adds, &launch.y, out, column, first_row);
    ptx::commit_stores();
  }
}

/// Chunk `index` of the sums: 64 columns, or 32 gates and their up columns.
template <class Tile>
__device__ __forceinline__ void put_chunk(Chunk& chunk, const Sums<Tile>& sums, int index,
                                          bool gated, const Consumer& me) {
  constexpr int kPieces = kChunk / 8, kPerPart = Tile::kPartCols / 8;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    // Of the tile's pieces of eight columns; the second half of a gated tile is up.
    const int plain = index * kPieces + i;
    constexpr int kUp = Tile::kCols / 16;
    const int paired = index * kPieces / 2 + i % (kPieces / 2) + i / (kPieces / 2) * kUp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 pair;
      pair.x = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r]
                     : sums[plain / kPerPart][plain % kPerPart][2 * r];
      pair.y = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r + 1]
                     : sums[plain / kPerPart][plain % kPerPart][2 * r + 1];
      *reinterpret_cast<float2*>(
          chunk.at(me.warp * 16 + me.quad + 8 * r, i * 8 + me.in_quad * 2)) = pair;
    }
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
  me.meet_all();  // nobody reads the stages any more
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c)
    put_chunk<Tile>(split.chunks[c][me.warpgroup], sums, c, gated, me);
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
    finish_chunk<typename Tile::T>(
        p,
        [&](int row, int column) {
          return split.chunks[c][me.warpgroup].total(row, column, launch.segments);
        },
        [&](int row, int column) {
          return residual_at<typename Tile::T>(p, part, row, column);
        },
        part, of_thread, me.thread);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // nobody reads this block's sums any more
}

}  // namespace ridgeline::gemm_fp8
