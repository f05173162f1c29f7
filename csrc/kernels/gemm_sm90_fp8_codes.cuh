#pragma once
#include "device/ptx/store.cuh"
#include "kernels/gemm_codes.cuh"
#include "kernels/gemm_sm90_fp8_overlap.cuh"

/// Gated sums of the fp8 by fp8 kernel that leave as e4m3: 256 columns of a row have one scale, of
/// two tiles that a block multiplies one after the other.
namespace ridgeline::gemm_fp8 {

using gemm_detail::code, gemm_detail::CodeScale, gemm_detail::Magnitudes;

constexpr int kCodeColumns = 64;  // of y in a box of codes
constexpr int kGates = 4;         // times kAtOnce columns of the sums a tile has, ...
constexpr int kPairs = kAtOnce / 8;  // ... of each of which a thread has so many pairs in a row

/// What a thread has of a tile's columns of y, rounded as the model rounds them. The weight's rows
/// are dealt out so that those of two gates are 16 columns of y that follow each other.
using Rounded = std::uint32_t[kGates][2][kPairs];

/// Gates [kFirst, kLast) with their ups.
template <class Tile, int kFirst, int kLast>
__device__ __forceinline__ void gate(Rounded& rounded, Magnitudes<typename Tile::T>& magnitudes,
                                     const Shared<Tile>& shared, const Sums<Tile>& sums,
                                     const Consumer& me) {
  using T = typename Tile::T;
  const float* scales = &shared.row_scales[me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad];
  const float row_scale[2] = {scales[0], scales[8]};
#pragma unroll
  for (int index = kFirst; index < kLast; ++index) {
    Values values, ups;
    take<Tile, Terms::kScales>(values, shared, sums, index, row_scale, me);
    gemm_detail::activate<T>(Activation::kSiluMul, values);
    take<Tile, Terms::kScales>(ups, shared, sums, kGates + index, row_scale, me);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rounded[index][r][i] = pack<T>(__fmul_rn(values[i][2 * r], ups[i][2 * r]),
                                       __fmul_rn(values[i][2 * r + 1], ups[i][2 * r + 1]));
        magnitudes.add(r, rounded[index][r][i]);
      }
  }
}

/// A warp's 16 rows of a pair: the first tile's values, each thread's by itself, until the second's
/// are there; then the codes of both, as boxes.
union PairRows {
  uint4 held[kGates][2][device::kWarpSize];
  std::uint8_t codes[kWideGroup / kCodeColumns][16][kCodeColumns];
};

template <class Tile>
__device__ __forceinline__ PairRows& rows_of(Shared<Tile>& shared, const Consumer& me) {
  static_assert(sizeof(PairRows) == sizeof(shared.out[0]));
  return reinterpret_cast<PairRows&>(shared.out[me.warpgroup * 4 + me.warp]);
}

/// Keeps gates [kFirst, kLast) of the first tile.
template <int kFirst, int kLast>
__device__ __forceinline__ void hold(PairRows& rows, const Rounded& rounded, const Consumer& me) {
#pragma unroll
  for (int index = kFirst; index < kLast; ++index)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows.held[index][r][me.lane] = make_uint4(rounded[index][r][0], rounded[index][r][1],
                                                rounded[index][r][2], rounded[index][r][3]);
}

/// Scales and codes of a pair to y, without a branch.
template <class Tile>
__device__ __forceinline__ void store_pair(const Launch& launch, Shared<Tile>& shared,
                                           const Place& pair, const Rounded& second,
                                           typename Magnitudes<typename Tile::T>::Pair largest,
                                           const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kTileBoxes = kGates / 2;
  const GemmParams& p = launch.gemm;
  PairRows& rows = rows_of(shared, me);
  const int first_row = pair.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16;
  uint4 first_codes[kTileBoxes][2];
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float amax = device::to_float(r == 0 ? largest.x : largest.y);
    const CodeScale scale(device::warp_reduce<device::MaxOrNaN, 4>(amax));
    inverse[r] = scale.inverse;
    const int row = first_row + me.quad + 8 * r;
    ptx::store_if(me.in_quad == 0 && row < p.M,
                  p.y_scale + std::int64_t{row} * launch.tiles.along_n + pair.n, scale.scale);
#pragma unroll
    for (int box = 0; box < kTileBoxes; ++box) {
      const uint4 low = rows.held[box * 2][r][me.lane], high = rows.held[box * 2 + 1][r][me.lane];
      first_codes[box][r] =
          make_uint4(code<T>(low.x, low.y, inverse[r]), code<T>(low.z, low.w, inverse[r]),
                     code<T>(high.x, high.y, inverse[r]), code<T>(high.z, high.w, inverse[r]));
    }
  }
  __syncwarp();  // the first tile's values have been read
  const auto put = [&](int box, int r, const uint4& codes) {
    *reinterpret_cast<uint4*>(&rows.codes[box][me.quad + 8 * r][me.in_quad * 16]) = codes;
  };
#pragma unroll
  for (int box = 0; box < kTileBoxes; ++box)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      put(box, r, first_codes[box][r]);
      const auto& low = second[box * 2][r];
      const auto& high = second[box * 2 + 1][r];
      put(kTileBoxes + box, r,
          make_uint4(code<T>(low[0], low[1], inverse[r]), code<T>(low[2], low[3], inverse[r]),
                     code<T>(high[0], high[1], inverse[r]), code<T>(high[2], high[3], inverse[r])));
    }
  ptx::fence_async_shared();
  __syncwarp();  // the boxes are whole
#pragma unroll
  for (int box = 0; box < 2 * kTileBoxes; ++box)
    ptx::store_matrix_if(me.lane == 0, &launch.y, rows.codes[box],
                         pair.n * kWideGroup + box * kCodeColumns, first_row);
  ptx::commit_stores();
}

/// Pairs of tiles. Half of a tile's gates meet their ups beside the next tile's first products, as
/// do, of a pair's second, scales and codes.
template <class Tile>
__device__ __forceinline__ void consume_pairs(const Launch& launch, Shared<Tile>& shared,
                                              const Consumer& me) {
  using T = typename Tile::T;
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  const auto nothing = [](int) {};
  Ring<Tile::kStages> ring;
  Sums<Tile> sums;
  const auto multiply = [&](auto&& meanwhile) {
    multiply_stages<Tile, Tile::kAddEvery>(shared, ring, sums, me, meanwhile,
                                           [](float& sum, float product, int) { sum += product; });
  };
  const auto here = [] { return Consumer(ptx::opaque(static_cast<int>(threadIdx.x))); };
  clear<Tile>(sums);
  multiply(nothing);
  for (int i = static_cast<int>(blockIdx.x);;) {
    Rounded rounded;
    Magnitudes<T> magnitudes{device::zero_pair<T>(), device::zero_pair<T>()};
    const auto rest_of_tile = [&](int parity) {
      for (int k = Tile::kAddEvery; k < launch.steps; k += Tile::kAddEvery) multiply(nothing);
      ptx::mbarrier_wait(&shared.columns_full, parity);
      gate<Tile, 0, kGates / 2>(rounded, magnitudes, shared, sums, here());
    };
    const auto gate_rest = [&] {
      gate<Tile, kGates / 2, kGates>(rounded, magnitudes, shared, sums, here());
      clear<Tile>(sums);
    };
    rest_of_tile(0);
    ptx::wait_stores_read<0>();
    __syncwarp();  // the last pair's codes have been read
    hold<0, kGates / 2>(rows_of(shared, here()), rounded, here());
    typename Magnitudes<T>::Pair largest;
    multiply([&](int part) {
      if (part != 0) return;
      gate_rest();
      hold<kGates / 2, kGates>(rows_of(shared, here()), rounded, here());
      largest = magnitudes.joined();
      magnitudes = {device::zero_pair<T>(), device::zero_pair<T>()};
    });
    ptx::mbarrier_arrive(&shared.columns_free);  // every lane, for what it read
    const Place pair = place_of(launch.tiles, i);
    i += static_cast<int>(gridDim.x);
    rest_of_tile(1);
    const auto store = [&] {
      store_pair<Tile>(launch, shared, pair, rounded,
                       device::larger_or_nan(largest, magnitudes.joined()), here());
    };
    if (i >= count) return gate_rest(), store();
    multiply([&](int part) { part == 0 ? gate_rest() : store(); });
    ptx::mbarrier_arrive(&shared.columns_free);  // every lane, for what it read
  }
}

}  // namespace ridgeline::gemm_fp8
