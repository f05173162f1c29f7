#pragma once
#include <cuda.h>

#include "device/dequant.cuh"
#include "device/divisor.cuh"
#include "device/row_tiles.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of the kernel for weights of 4 or 8 bits works on.
namespace ridgeline::gemm_expand {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kSteps = 4;       // of a stage: so often one wgmma is deep
constexpr int kStepBytes = 32;  // 16 columns of x, or 32 of e4m3
constexpr int kOutRows = 32;    // of y in a box, but 64 of what is plain, ...
constexpr int kBoxes = 4;       // ... of which a warpgroup has so many

/// How many blocks multiply a tile: one; one, but for tails that others may take, or even shares of
/// all; or several, a segment of K each. A kernel each: in one, beside the ends of whole tiles, what
/// brings a share's residual to shared memory made the loop of fp8 by bf16 8% slower.
enum class Cut { kNone, kTails, kSegments };

/// kRows_ rows of x by kBands bands of 64 weight rows a warpgroup: 256 by 128 expand each weight
/// half as often, 160 to 224 by 128 leave fewer rows empty, 128 by 256 suit fewer rows, 128 by 128
/// make tiles where those are few. kBlocks: fp8 weights with scales of 128 x 128. kFp8X: x is e4m3,
/// and int4 becomes that.
template <class T_, WeightFormat kFormat_, bool kBlocks_, int kRows_, int kBands_, Cut kCut_,
          bool kFp8X_ = false>
struct Tile {
  using T = T_;
  static constexpr bool kFp8X = kFp8X_;
  static constexpr int kDepth = kFp8X ? 128 : 64;  // columns of K a stage
  static constexpr bool kInt4 = kFormat_ == WeightFormat::kInt4;
  static constexpr bool kBlocks = kBlocks_;
  static constexpr float kUnit = !kInt4  ? 1.0f  // of sums
                                 : kFp8X ? device::kInt4AsE4m3Unit
                                         : device::kInt4Unit<T>;
  static constexpr bool kWhole = kCut_ != Cut::kSegments, kTails = kCut_ == Cut::kTails;
  static constexpr int kBands = kBands_;
  /// Plain tiles have a kernel of their own: there are too few registers beside the loop over any
  /// epilogue. H200, int4, 4096 rows of 4096 x 28672, us: 1367 in one kernel and 1287.
  static constexpr bool kPlainApart = kBands == 2 && std::is_same_v<T, __nv_bfloat16>;
  /// Tiles of one band that leave registers for it know the ways of GELU, gated SiLU and a
  /// residual: those of fp8 beside any other, those of int4 in kernels of their own. In one with
  /// the others plain tiles of 160 to 224 rows by 28672 and 18944 columns took 3 to 5% longer (H200,
  /// lab, by turns), of fp8 not.
  static constexpr bool kKnows =
      kWhole && kBands == 1 && kRows_ != 256 && std::is_same_v<T, __nv_bfloat16>;
  static constexpr bool kKnowsApart = kKnows && kInt4, kKnowsBeside = kKnows && !kInt4;
  static constexpr int kRows = kRows_;                      // of x: wgmma's columns
  static constexpr int kBoxCols = kBands * kWarpgroupRows;  // weight rows of half a tile
  static constexpr int kBoxBytes = kBoxCols * kDepth / (kInt4 ? 2 : 1);
  static constexpr int kStages = kRows == 256   ? (kInt4 && !kFp8X ? 5 : 4)
                                 : kRows == 224 ? 5
                                 : kRows == 192 ? (kFp8X ? 5 : 6)
                                 : kRows == 160 ? (kInt4 ? 7 : 6)
                                 : kFp8X        ? 7
                                 : kBands == 2  ? (kInt4 ? 7 : 5)
                                                : 8;
  /// A stage's words and scales are read a step ahead of their expansion, where registers allow.
  /// H200, lab, by turns, us, so and before: tiles of 128 x 128, 256 rows of 4096 x 6144 25.0 and
  /// 25.3, of 8192 x 8192 49.8 and 50.8. Of 256 x 128 with a GELU 1561 and 1437, so not those.
  static constexpr bool kReadsAhead = kInt4 && !kFp8X && kRows != 256;
  /// Rows of x that a warpgroup stores at once of what is plain.
  static constexpr int kPlainRows = kRows % kChunk == 0 ? kChunk : kOutRows;
};

/// Sums on their way from block to block through L2, in slots, and signs that they are there: this
/// launch's ticket.
struct Parts {
  float4* sums;
  unsigned long long* signs;
  unsigned long long ticket;
};

struct Launch {
  GemmParams gemm;
  device::RowTiles x;
  CUtensorMap weight, scales, zeros, y, residual;
  bool copies_residual;  // or there is none, or it cannot be mapped
  Tiles tiles;
  int segments;  // of K
  int steps;     // stages, in all
  int tail;      // last stages of each tile, which one of `helpers` blocks multiplies ahead; or 0
  int helpers;
  bool even;     // or blocks multiply as many stages each
  Parts parts;
  int groups;    // scales a stage has of each row: 1 or 2; int4
  device::Divisor group;  // its columns; int4
};

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) std::uint8_t x[Tile::kStages][Tile::kRows][kRowBytes];
  alignas(1024) std::uint8_t weight[Tile::kStages][2][Tile::kBoxBytes];
  union {
    alignas(1024) T wide[kConsumers][2][kChunk][kOutColumns];
    alignas(1024) T out[kConsumers][kBoxes][kOutRows][kOutColumns];
    Chunk chunks[kConsumers];
  };
  struct Scales {
    alignas(128) T of[2][2][Tile::kBoxCols];  // of 32 columns of K, of a half of the tile
    alignas(128) std::uint8_t zeros[2][2][round_up(Tile::kBoxCols, 128)];
  };
  alignas(128) Scales scales[Tile::kInt4 ? Tile::kStages : 1];
  Column columns[2 * Tile::kBoxCols];
  float x_scales[Tile::kFp8X ? 2 : 1][kConsumers][Tile::kFp8X ? Tile::kRows : 1];  // by turns
  alignas(8) std::uint64_t full[Tile::kStages], free[Tile::kStages];
};

// ---- Work ---------------------------------------------------------------------------------------

/// The `i`-th part of this block's even share: whole tiles of all waves but the last two, then
/// consecutive stages of those. They may begin with a tile's tail, which is left in slot `block -
/// 1`, and end with a tile's head, to which comes slot `block`: nobody waits long, and only for
/// blocks that run. Behind the whole waves a tile's stages go round, from as many as its block has
/// multiplied: so all are in the same columns of K, or, with tails, in those of one other place,
/// and L2 holds what they share. H200, int4, 4096 rows of 14336 x 4096, us and bytes from memory,
/// tails first and K from its start: 748, 2.23 GB; so: 681, 0.39 GB; no tile shared: 691, 0.36 GB.
template <class Tile>
__device__ __forceinline__ bool find_even_work(const Launch& launch, int i, Work& work) {
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  const int waves = max(count / blocks - 1, 0), whole = waves * blocks;
  if (i < waves) {
    work = {place_of(launch.tiles, block + i * blocks), 0, 0, launch.steps};
    return true;
  }
  i -= waves;
  const int stages = (count - whole) * launch.steps;
  const auto share = gemm_config::stages_of(stages, blocks, block);
  const int tail = (launch.steps - share.begin % launch.steps) % launch.steps;
  if (tail > 0 && i-- == 0) {
    const int head_ends = gemm_config::stages_of(stages, blocks, block - 1).count;
    work = {place_of(launch.tiles, whole + share.begin / launch.steps), block - 1,
            head_ends % launch.steps, tail, true};
    return true;
  }
  const int done = tail + i * launch.steps;
  work = {place_of(launch.tiles, whole + (share.begin + done) / launch.steps), block, tail,
          min(launch.steps, share.count - done)};
  return done < share.count;
}

/// The `i`-th of what this block multiplies, if there are so many. A tile's tail is left in slot
/// `segment` for the block that has its first columns. That comes behind those that leave tails: it
/// waits for blocks that run.
template <class Tile>
__device__ __forceinline__ bool find_work(const Launch& launch, int i, Work& work) {
  if (Tile::kTails && launch.even) return find_even_work<Tile>(launch, i, work);
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  const int helpers = Tile::kTails ? launch.helpers : 0;
  const bool helps = block < helpers;
  const int index = helps ? block + i * helpers : block - helpers + i * (blocks - helpers);
  work = Tile::kWhole ? Work{.place = place_of(launch.tiles, index), .steps = launch.steps}
                      : segment_of(launch.tiles, launch.segments, launch.steps, index);
  if (Tile::kTails && helpers > 0) {
    work.segment = index;
    work.first_step = helps ? launch.steps - launch.tail : 0;
    work.steps = helps ? launch.tail : launch.steps - launch.tail;
    work.is_tail = helps;
  }
  return index < count * (Tile::kWhole ? 1 : launch.segments);
}

template <class Tile, class Fn>
__device__ __forceinline__ void for_each_work(const Launch& launch, Fn&& fn) {
  Work work;
  if constexpr (Tile::kWhole) {
    for (int i = 0; find_work<Tile>(launch, i, work); ++i) fn(work);
  } else if (find_work<Tile>(launch, 0, work)) {
    fn(work);  // a segment, and no more
  }
}

/// First weight row of a half of tile `n`: halves follow each other, or are gate and up.
template <class Tile>
__device__ __forceinline__ int weight_row(const Launch& launch, int n, int half) {
  return is_gated(launch.gemm.activation) ? n * Tile::kBoxCols + half * (launch.gemm.N / 2)
                                          : (2 * n + half) * Tile::kBoxCols;
}

/// Where a warpgroup's band lies: in which half, and its first row there. Two bands: one of each
/// half, so that a thread holds a gate and its up row.
template <class Tile>
__device__ __forceinline__ int half_of(int warpgroup, int band) {
  return Tile::kBands == 2 ? band : warpgroup;
}
template <class Tile>
__device__ __forceinline__ int first_in_half(int warpgroup) {
  return Tile::kBands == 2 ? warpgroup * kWarpgroupRows : 0;
}

/// The residual of a tile, or of a block's share of one, comes as stages behind its last, 64 columns
/// of its rows each in the place of x.
template <class Tile>
__device__ __forceinline__ int residual_stages(const GemmParams& p) {
  return is_gated(p.activation) ? Tile::kBands : 2 * Tile::kBands;
}

/// Whether they come behind this work.
__device__ __forceinline__ bool takes_residual(const Launch& launch, const Work& work) {
  return launch.copies_residual && !work.is_tail;
}

}  // namespace ridgeline::gemm_expand
