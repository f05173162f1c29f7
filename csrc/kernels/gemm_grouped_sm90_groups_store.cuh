#pragma once
#include "device/activation.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/store.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_codes.cuh"
#include "kernels/gemm_grouped_sm90_expand.cuh"
#include "kernels/gemm_grouped_sm90_work.cuh"

/// The way of sums that lie with rows of x as rows to y, in 16 bits or as e4m3.
namespace ridgeline::gemm_grouped {

/// The share of a tile that a warpgroup multiplies: 64 rows of x by both halves of the weight rows;
/// or, where the tile has no more rows, all of them by one half.
struct Share {
  bool whole;  // both halves
  int row, part;

  __device__ __forceinline__ Share(const Item& item, const Consumer& me)
      : whole(item.rows > kWarpgroupRows),
        row(whole ? me.warpgroup * kWarpgroupRows : 0),
        part(whole ? 0 : me.warpgroup) {}
};

/// Adds the bias of an item's weight rows.
template <class Tile>
__device__ __forceinline__ void add_bias(const GemmParams& p, const Item& item, Sums<Tile>& sums,
                                         const Consumer& me) {
  using T = typename Tile::T;
  constexpr bool kGated = Tile::kWay.gated;
  const T* bias = static_cast<const T*>(p.bias) + std::int64_t{item.expert} * p.N;
  const Share share(item, me);
#pragma unroll
  for (int part = 0; part < Tile::kParts; ++part)
#pragma unroll
    for (int i = 0; i < kScaleBlock / 8; ++i) {
      const int of_part = (item.column * Tile::kParts + share.part + part) * kScaleBlock;
      int n = (kGated ? of_part / 2 + i / 2 * 8 : of_part + i * 8) + me.in_quad * 2;
      n = min(n, p.out_cols() - 2) + (kGated && i % 2 == 1 ? p.N / 2 : 0);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sums[part][i][j] = __fadd_rn(sums[part][i][j], device::to_float(bias[n + j % 2]));
    }
}

/// A part of the sums to y: of a warp's 16 rows, by its own box of 64 columns: of gates times their
/// ups a part has one, else two. No two warps wait for each other. Of an item without rows nothing,
/// and of one by halves no second part.
template <class Tile>
__device__ __forceinline__ void store_part(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums, int part,
                                           const Consumer& me) {
  using T = typename Tile::T;
  constexpr bool kGated = Tile::kWay.gated;
  constexpr int kBoxes = kGated ? 1 : 2, kCount = 4;
  constexpr int kRowsEach = 16 / kCount;  // of a load of all lanes
  const GemmParams& p = launch.grouped.gemm;
  const Share share(item, me);
  T(*out)[kOutColumns] = &shared.out[me.warpgroup][me.warp * 16];
  const int first_row = share.row + me.warp * 16;
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
  const int of_lane = me.lane / 8, vector = me.lane % 8, out_cols = p.out_cols();
  const int rows = part == 0 || share.whole ? item.rows - first_row - of_lane : 0;
  const int first = (item.column * Tile::kParts + share.part + part) * kBoxes * kOutColumns;
  T* y = static_cast<T*>(p.y) + (std::int64_t{item.row0} + first_row + of_lane) * out_cols +
         first + vector * 8;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box, y += kOutColumns) {
    __syncwarp();  // the last box has been read
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int eight = i * 2 + j / 2, at = j % 2 * 2;
        if constexpr (kGated) {
          const float(&gate)[4] = sums[part][2 * eight];
          const float(&up)[4] = sums[part][2 * eight + 1];
          packed[j] = pack<T>(__fmul_rn(device::silu<true>(gate[at]), up[at]),
                              __fmul_rn(device::silu<true>(gate[at + 1]), up[at + 1]));
        } else {
          const float(&of)[4] = sums[part][box * 8 + eight];
          packed[j] = pack<T>(of[at], of[at + 1]);
        }
      }
      ptx::stmatrix(&out[row][((i * 2 + matrix / 2) ^ (row % 8)) * 8], packed);
    }
    __syncwarp();  // the box is whole
    const bool inside = first + box * kOutColumns + vector * 8 < out_cols;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int m = of_lane + i * kRowsEach;
      const uint4 of_row = *reinterpret_cast<const uint4*>(&out[m][(vector ^ (m % 8)) * 8]);
      if (inside && i * kRowsEach < rows)
        *reinterpret_cast<uint4*>(y + std::int64_t{i} * kRowsEach * out_cols) = of_row;
    }
  }
}

/// Gates times their ups to y as e4m3 with a scale for each 128 columns, which are a tile's. Where
/// the warpgroups have half of a row each they tell each other its largest value, `turn` by turn.
/// Without a branch.
template <class Tile>
__device__ __forceinline__ void store_codes(const Launch& launch, Shared<Tile>& shared,
                                            const Item& item, const Sums<Tile>& sums, int turn,
                                            const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kEights = kScaleBlock / 16;  // of outputs, of a part
  const GemmParams& p = launch.grouped.gemm;
  const Share share(item, me);
  std::uint32_t rounded[Tile::kParts][kEights][2];
  gemm_detail::Magnitudes<T> of_part[Tile::kParts];
#pragma unroll
  for (int part = 0; part < Tile::kParts; ++part) {
    of_part[part] = {device::zero_pair<T>(), device::zero_pair<T>()};
#pragma unroll
    for (int i = 0; i < kEights; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* gate = sums[part][2 * i] + 2 * r;
        const float* up = sums[part][2 * i + 1] + 2 * r;
        rounded[part][i][r] = pack<T>(__fmul_rn(device::silu<true>(gate[0]), up[0]),
                                      __fmul_rn(device::silu<true>(gate[1]), up[1]));
        of_part[part].add(r, rounded[part][i][r]);
      }
  }
  const int row = me.warp * 16 + me.quad;  // of the warpgroup's, the first
  auto& magnitudes = shared.magnitudes.of_row[turn];
  float largest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto first = of_part[0].of_row[r];
    const auto both = device::larger_or_nan(first, of_part[1].of_row[r]);
    const auto of = share.whole ? both : first;
    largest[r] = device::warp_reduce<device::MaxOrNaN, 4>(
        device::larger_or_nan(device::to_float(of.x), device::to_float(of.y)));
    if (me.in_quad == 0) magnitudes[me.warpgroup][row + 8 * r] = largest[r];
  }
  __syncwarp();  // this warp's magnitudes are there, and the last codes have been read
  ptx::named_barrier_sync_if(!share.whole, kHalvesBarrier, Tile::kMultipliers);
  const int first_row = share.row + row, groups = p.out_cols() / kScaleBlock;
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int other = share.whole ? me.warpgroup : 1 - me.warpgroup;
    const gemm_detail::CodeScale scale(
        device::larger_or_nan(largest[r], magnitudes[other][row + 8 * r]));
    inverse[r] = scale.inverse;
    const int of_item = first_row + 8 * r;
    ptx::store_if(me.in_quad == 0 && share.part == 0 && of_item < item.rows,
                  p.y_scale + (std::int64_t{item.row0} + of_item) * groups + item.column,
                  scale.scale);
  }
  // 16 rows of 128 bytes. A thread has two columns of eight and of the next eight in a word, which
  // are put in order behind shared memory.
  char* out = reinterpret_cast<char*>(shared.out[me.warpgroup][me.warp * 16]);
  const int matrix = me.lane / 8, to_row = matrix % 2 * 8 + me.lane % 8;
#pragma unroll
  for (int i = 0; i < kEights / 2; ++i) {
    std::uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int sixteen = i * 2 + j / 2, eight = sixteen % (kEights / 2) * 2, r = j % 2;
      const auto(&of)[kEights][2] = rounded[sixteen / (kEights / 2)];
      packed[j] = gemm_detail::code<T>(of[eight][r], of[eight + 1][r], inverse[r]);
    }
    ptx::stmatrix(out + to_row * kRowBytes + ((i * 2 + matrix / 2) ^ (to_row % 8)) * kVector,
                  packed);
  }
  __syncwarp();  // the codes are whole
  constexpr int kCount = 4, kRowsEach = 16 / kCount;  // of a load of all lanes
  const int of_lane = me.lane / 8, vector = me.lane % 8, out_cols = p.out_cols();
  const int first = share.row + me.warp * 16 + of_lane;
  const bool inside = share.whole || vector < kVectors / 2;
  auto* y = static_cast<std::uint8_t*>(p.y) + (std::int64_t{item.row0} + first) * out_cols +
            item.column * kScaleBlock + share.part * (kScaleBlock / 2) + vector * kVector;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int m = of_lane + i * kRowsEach;
    const uint4 of = *reinterpret_cast<const uint4*>(out + m * kRowBytes +
                                                     (vector ^ (m % 8)) * kVector);
    const uint4 codes = {__byte_perm(of.x, of.y, 0x5410), __byte_perm(of.z, of.w, 0x5410),
                         __byte_perm(of.x, of.y, 0x7632), __byte_perm(of.z, of.w, 0x7632)};
    if (inside && first + i * kRowsEach < item.rows)
      *reinterpret_cast<uint4*>(y + std::int64_t{i} * kRowsEach * out_cols) = codes;
  }
}

}  // namespace ridgeline::gemm_grouped
