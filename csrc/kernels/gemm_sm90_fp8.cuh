#pragma once
#include <cuda.h>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/row_tiles.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of the kernel for operands of 8 bits works on, and the warps that bring it.
namespace ridgeline::gemm_fp8 {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRows = kConsumers * kWarpgroupRows;  // of x, a tile
constexpr int kStepBytes = 32;                      // 32 columns, the depth of one wgmma
constexpr int kSteps = kRowBytes / kStepBytes;
constexpr int kResidualBoxes = 2;  // of 64 columns of a tile's rows, in a stage

/// Which columns of K or of y have scales beside those of rows.
enum class Groups : std::uint8_t {
  kNone,
  kBlocks,  // 128 of K: of x, of the weight's blocks, or of both
  kOfX,     // 256 of K: of x
  kOfY,     // 256 of y, which is e4m3: those of two tiles side by side
};

/// Of kCols weight rows: 256, 224 of gates and their ups, or 128 where tiles are few. E:
/// std::uint8_t, which stands for e4m3, of which 128 or 112 rows are multiplied at a time and added
/// to float32 sums every kAddEvery stages, times their columns' scales. Or std::int8_t: exact sums,
/// all of them on the tensor cores.
/// kSplit: the blocks of a cluster share a tile's columns of K.
template <class T_, class E_, int kCols_, Groups kGroups_, bool kSplit_>
struct Tile {
  using T = T_;
  static constexpr bool kInt8 = std::is_same_v<E_, std::int8_t>;
  static constexpr int kCols = kCols_;
  static constexpr bool kOfGates = kCols == gemm_config::kGateCols;
  static constexpr int kPartCols = kInt8 ? kCols : kOfGates ? kCols / 2 : kScaleBlock;
  static constexpr int kParts = kCols / kPartCols;
  static constexpr int kStages = kCols > 128 ? 4 : 6;
  static constexpr int kChunks = kCols / kChunk;  // of a warpgroup's sums
  static constexpr Groups kGroups = kGroups_;
  static constexpr bool kBlocks = kGroups == Groups::kBlocks;
  static constexpr bool kMakesCodes = kGroups == Groups::kOfY;
  static constexpr int kAddEvery = kBlocks ? 1 : 2;
  static constexpr bool kSplit = kSplit_;
  static constexpr bool kHasKnown = !kInt8 && kCols > 128;  // kernels for a way to y each, ...
  static constexpr bool kOverlaps = kHasKnown && !kBlocks;  // ... beside the next tile's products
};

/// Whether a tile's columns have half of their scale and bias, for gelu_of_half().
template <class Tile, class Way>
constexpr bool kTakesHalf = std::is_same_v<typename Tile::T, __nv_bfloat16> &&
                            std::is_same_v<Way, KnownWay<Activation::kGelu>>;

struct Launch {
  GemmParams gemm;
  device::RowTiles x;
  CUtensorMap weight, y, residual;
  Tiles tiles;
  int segments;  // of K
  int steps;     // of 128 columns of K, in all
  bool copies_residual;  // or there is none, or it cannot be mapped
};

// ---- Shared memory ------------------------------------------------------------------------------

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
  float row_scales[kRows];
  alignas(8) std::uint64_t full[Tile::kStages], free[Tile::kStages];
  std::uint64_t columns_full, columns_free;

  /// A box of the residual, in the place of a stage's x or of its weight.
  __device__ __forceinline__ std::uint8_t* residual(int stage, int box) {
    static_assert(sizeof(x[0]) == kRows * kRowBytes && sizeof(weight[0]) >= sizeof(x[0]));
    return box == 0 ? x[stage][0] : weight[stage][0][0];
  }

  /// In the place of the stages, once nobody reads them.
  __device__ __forceinline__ Split<Tile::kChunks>& split() {
    static_assert(sizeof(x) + sizeof(weight) >= sizeof(Split<Tile::kChunks>));
    return reinterpret_cast<Split<Tile::kChunks>&>(x);
  }
};

// ---- Producer -----------------------------------------------------------------------------------

/// First weight row of a half of tile `n`: halves follow each other, or are gate and up.
template <class Tile>
__device__ __forceinline__ int weight_row(const GemmParams& p, int n, int half) {
  constexpr int kHalf = Tile::kCols / 2;
  return is_gated(p.activation) ? n * kHalf + half * (p.N / 2) : n * Tile::kCols + half * kHalf;
}

template <class Tile, class Fn>
__device__ __forceinline__ void for_each_work(const Launch& launch, Fn&& fn) {
  gemm_sm90::for_each_work<Tile::kSplit>(
      launch.tiles, launch.segments, launch.steps, [&](Work work) {
        if (!Tile::kMakesCodes) return fn(work);
        work.place.n *= 2;
        for (int i = 0; i < 2; ++i, ++work.place.n) fn(work);
      });
}

template <class Tile>
__device__ __forceinline__ int residual_boxes(const GemmParams& p) {
  return Tile::kCols / kOutColumns / (is_gated(p.activation) ? 2 : 1);
}
template <class Tile>
__device__ __forceinline__ int residual_stages(const GemmParams& p) {
  return ceil_div(residual_boxes<Tile>(p), kResidualBoxes);
}

/// The residual of a tile, as stages behind its last: it is there when the products are. It leaves
/// L2 ahead of operands: H200, 4096 rows of 4096 x 28672, by turns, us, hot and cool, 787 and 711,
/// so 781 and 700.
template <class Tile>
__device__ __forceinline__ void bring_residual(const Launch& launch, Shared<Tile>& shared,
                                               Ring<Tile::kStages>& ring, const Place& place) {
  const int boxes = residual_boxes<Tile>(launch.gemm);
  for (int box = 0; box < boxes; box += kResidualBoxes, ring.next()) {
    const int count = min(kResidualBoxes, boxes - box);
    ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
    ptx::mbarrier_expect(&shared.full[ring.stage], count * kRows * kRowBytes);
    for (int i = 0; i < count; ++i)
      ptx::copy_matrix(shared.residual(ring.stage, i), &launch.residual, &shared.full[ring.stage],
                       (place.n * boxes + box + i) * kOutColumns, place.m * kRows,
                       ptx::evict_first());
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const GemmParams& p = launch.gemm;
  const auto request_weight = [&](const Work& work, int k, int s) {
    constexpr int kWeightBytes = sizeof(shared.weight[0]);
    ptx::mbarrier_expect(&shared.full[s],
                         kWeightBytes + launch.x.rows_of(work.place.m) * kRowBytes);
    for (int half = 0; half < 2; ++half) {
      const int column = (work.first_step + k) * kRowBytes;
      const int row = weight_row<Tile>(p, work.place.n, half);
      if constexpr (Tile::kMakesCodes) {
        ptx::copy_tensor_5d(shared.weight[s][half], &launch.weight, &shared.full[s], column, 0, 0,
                            0, row / 64);
      } else {
        ptx::copy_matrix(shared.weight[s][half], &launch.weight, &shared.full[s], column, row);
      }
    }
  };
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  bool waits = true;
  for_each_work<Tile>(launch, [&](const Work& work) {
    const int ahead = waits && p.weights_ready ? min(Tile::kStages, work.steps) : 0;
    for (int k = 0; k < ahead; ++k) request_weight(work, k, k);
    if (waits) ptx::wait_for_dependencies();
    waits = false;
    for (int k = 0; k < work.steps; ++k, ring.next()) {
      const int s = ring.stage;
      ptx::mbarrier_wait(&shared.free[s], ring.parity);
      if (k >= ahead) request_weight(work, k, s);
      ptx::copy_matrix(shared.x[s], launch.x.map_of(work.place.m), &shared.full[s],
                       (work.first_step + k) * kRowBytes, work.place.m * kRows);
    }
    if (launch.copies_residual) bring_residual<Tile>(launch, shared, ring, work.place);
  });
}

/// Scale and bias of each tile's columns and scales of its rows, by one warp, while the tile is
/// multiplied.
template <class Tile, class Way>
__device__ __forceinline__ void bring_columns(const Launch& launch, Shared<Tile>& shared) {
  using T = typename Tile::T;
  constexpr int kHalf = Tile::kCols / 2;
  const GemmParams& p = launch.gemm;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  int parity = 1;
  for_each_work<Tile>(launch, [&](const Work& work) {
    ptx::mbarrier_wait(&shared.columns_free, parity);
    parity ^= 1;
    for (int c = lane; c < Tile::kCols; c += device::kWarpSize) {
      const int in_half = Tile::kMakesCodes ? device::dealt_row(c % kHalf) : c % kHalf;
      const int n = weight_row<Tile>(p, work.place.n, c / kHalf) + in_half;
      constexpr float kPart = kTakesHalf<Tile, Way> ? 0.5f : 1.0f;
      const Column whole = Column::load<T>(p, n);
      shared.columns[c] = {kPart * whole.scale, kPart * whole.bias};
    }
    const bool scales_rows = p.x.scale && !p.x.scale_per_group;
    for (int r = lane; r < kRows; r += device::kWarpSize) {
      const int m = work.place.m * kRows + r;
      shared.row_scales[r] = scales_rows && m < p.M ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
    }
    ptx::mbarrier_arrive(&shared.columns_full);  // every lane, for what it wrote
  });
}

}  // namespace ridgeline::gemm_fp8
