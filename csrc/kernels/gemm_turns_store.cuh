#pragma once
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/row_tiles.cuh"
#include "kernels/gemm_sm90.cuh"

/// Tiles of the kernel of two warpgroups by turns, and the way of their sums to y.
namespace ridgeline::gemm_turns {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kSide = 128;      // rows of x, and of the weight, in a tile: 128 sums a thread
constexpr int kDepth = 64;      // columns of K in a stage: rows of 128 bytes
constexpr int kSteps = 4;       // of a stage's columns, the depth of one wgmma each
constexpr int kStepBytes = 32;  // of a row
constexpr int kStages = 6;      // 192 KB, beside 32 KB on their way to y
constexpr int kHalves = kSide / kWarpgroupRows;
constexpr int kEights = kSide / 8;  // of a tile's weight rows

/// kAdds: the residual.
template <class T_, Activation kActivation_, bool kAdds_ = false>
struct Tile {
  using T = T_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kAdds = kAdds_;
  static constexpr bool kGated = is_gated(kActivation);
  /// Sums and biases are halved on the way to each other, for gelu_of_half().
  static constexpr bool kHalves =
      kActivation == Activation::kGelu && std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kOutCols = kGated ? kSide / 2 : kSide;
};

struct Launch {
  GemmParams gemm;
  device::RowTiles x;
  CUtensorMap weight, y, residual;
  Tiles tiles;
  int steps;  // stages of a tile

  /// Whether the tile's second half has rows.
  __device__ __forceinline__ bool is_wide(const Place& place) const {
    return x.rows_of(place.m) > kWarpgroupRows;
  }
};

using Sums = float[kHalves][kEights][4];

// ---- Shared memory ------------------------------------------------------------------------------

template <class T>
struct Shared {
  alignas(1024) std::uint8_t x[kStages][kSide][kRowBytes];
  alignas(1024) std::uint8_t weight[kStages][kSide][kRowBytes];
  alignas(1024) T out[kConsumers * 4][2][16][kOutColumns];  // each warp's, two by turns
  alignas(8) std::uint64_t full[kStages], free[kStages];
  std::uint64_t added[kConsumers * 4][2];  // the residual is in a warp's box
};

// ---- Sums to y ----------------------------------------------------------------------------------

/// Two biases of the thread's columns in each eight of weight rows; gated, every second eight is
/// up rows. -0 where there are none, which changes no sum.
template <class Tile>
__device__ __forceinline__ void load_bias(const GemmParams& p, int n,
                                          float2 (&bias)[kEights], const Consumer& me) {
  using T = typename Tile::T;
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    const int eight = Tile::kGated ? i / 2 : i, column = n * Tile::kOutCols + eight * 8;
    const int at = column + me.in_quad * 2 + (Tile::kGated && i % 2 ? p.N / 2 : 0);
    const bool has = p.bias && column < p.out_cols();
    const T* of = static_cast<const T*>(p.bias) + at;
    constexpr float kPart = Tile::kHalves ? 0.5f : 1.0f;
    bias[i] = has ? float2{kPart * device::to_float(of[0]), kPart * device::to_float(of[1])}
                  : float2{-0.0f, -0.0f};
  }
}

template <class Tile>
__device__ __forceinline__ float with_bias(float sum, float bias) {
  return Tile::kHalves ? __fmaf_rn(0.5f, sum, bias) : __fadd_rn(sum, bias);
}

template <class Tile>
__device__ __forceinline__ float activate(float value) {
  if constexpr (Tile::kHalves) return device::gelu_of_half(value);
  return gemm_detail::activate<typename Tile::T>(Tile::kActivation, value);
}

template <class Tile>
constexpr int kBoxesAcross = Tile::kOutCols / kOutColumns;
struct BoxPlace {
  int column, row;
};

/// Of a warp's `box`-th 16 rows by 64 columns of y in a tile.
template <class Tile>
__device__ __forceinline__ BoxPlace box_place(const Place& place, int box, const Consumer& me) {
  constexpr int kAcross = kBoxesAcross<Tile>;
  return {place.n * Tile::kOutCols + box % kAcross * kOutColumns,
          place.m * kSide + box / kAcross * kWarpgroupRows + me.warp * 16};
}

/// Asks for the residual of a box, into that from which y is stored, by one lane: of a tile's first
/// two ahead of its products, so that they come meanwhile.
template <class Tile>
__device__ __forceinline__ void request_residual(const Launch& launch,
                                                 Shared<typename Tile::T>& shared,
                                                 const Place& place, int box, const Consumer& me) {
  const int warp = me.warpgroup * 4 + me.warp;
  auto& to = shared.out[warp][box % 2];
  const BoxPlace at = box_place<Tile>(place, box, me);
  ptx::mbarrier_expect(&shared.added[warp][box % 2], sizeof(to));
  ptx::copy_matrix(to, &launch.residual, &shared.added[warp][box % 2], at.column, at.row);
}

/// Each warp's 16 rows through its own boxes, 64 columns of y at a time.
template <class Tile>
__device__ __forceinline__ void store_tile(const Launch& launch, Shared<typename Tile::T>& shared,
                                           const Place& place, const Sums& sums,
                                           const float2 (&bias)[kEights], int& added,
                                           const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kAcross = kBoxesAcross<Tile>, kBoxes = kHalves * kAcross;
  constexpr int kPieces = kOutColumns / 8;
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
  const int warp = me.warpgroup * 4 + me.warp;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const int half = box / kAcross, part = box % kAcross;
    if (half > 0 && !launch.is_wide(place)) break;
    auto& out = shared.out[warp][box % 2];
    if constexpr (Tile::kAdds) {
      ptx::mbarrier_wait(&shared.added[warp][box % 2], added);
      added ^= box % 2;
    } else {
      if (me.lane == 0) ptx::wait_stores_read<1>();
      __syncwarp();  // the box's last store has been read
    }
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      std::uint32_t packed[4], more[4];
      T* at = &out[row][((i + matrix / 2) ^ (row % 8)) * 8];
      if constexpr (Tile::kAdds) ptx::ldmatrix(more, at);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto sum = [&](int eight, int r) {
          return float2{with_bias<Tile>(sums[half][eight][2 * r], bias[eight].x),
                        with_bias<Tile>(sums[half][eight][2 * r + 1], bias[eight].y)};
        };
        const int piece = part * kPieces + i + j;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2 value = sum(Tile::kGated ? 2 * piece : piece, r);
          value.x = activate<Tile>(value.x);
          value.y = activate<Tile>(value.y);
          if constexpr (Tile::kGated) {
            const float2 up = sum(2 * piece + 1, r);
            value = {__fmul_rn(value.x, up.x), __fmul_rn(value.y, up.y)};
          }
          if constexpr (Tile::kAdds) {
            using Pair = device::Vec<T, 2>;
            const auto of = device::floats(*reinterpret_cast<const Pair*>(&more[2 * j + r]));
            value = {__fadd_rn(value.x, of.data[0]), __fadd_rn(value.y, of.data[1])};
          }
          packed[2 * j + r] = pack<T>(value.x, value.y);
        }
      }
      ptx::stmatrix(at, packed);
    }
    ptx::fence_async_shared();
    __syncwarp();  // the box is whole
    if (me.lane == 0) {
      if (Tile::kAdds && box > 0 && box + 1 < kBoxes && launch.is_wide(place)) {
        ptx::wait_stores_read<0>();  // of the box before, which has the next one's place
        request_residual<Tile>(launch, shared, place, box + 1, me);
      }
      const BoxPlace to = box_place<Tile>(place, box, me);
      ptx::store_matrix(&launch.y, out, to.column, to.row);
      ptx::commit_stores();
    }
  }
}

}  // namespace ridgeline::gemm_turns
