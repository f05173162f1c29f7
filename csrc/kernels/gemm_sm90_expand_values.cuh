#pragma once
#include "device/ptx/ldmatrix.cuh"
#include "kernels/gemm_sm90_expand_plain.cuh"

/// What the expanding kernel makes of its sums on a way to y on which there is more to do.
namespace ridgeline::gemm_expand {

/// Rows of x that are finished at once, and what a thread has of them and of 16 weight rows.
constexpr int kAtOnce = kOutRows;
using Values = float[kAtOnce / 8][4];

/// The `index`-th so many rows of the sums of a band, scaled, plus bias. Which is not known ahead:
/// the way of some is code, not that of all. `first` is the tile's first row of x. kHalves: half of
/// that, by one instruction.
template <class Tile, bool kHalves = false>
__device__ __forceinline__ void take(Values& values, const GemmParams& p, const Sums<Tile>& sums,
                                     const RowFactors<Tile>& factors, int band, int index,
                                     std::int64_t first, const Consumer& me) {
  constexpr int kPieces = kAtOnce / 8;
  float scale[2], bias[2];
#pragma unroll
  for (int b = 0; b < Tile::kBands; ++b) {
    if (b != band) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = factors.scale[b][r], bias[r] = factors.bias[b][r];
#pragma unroll
    for (int from = 0; from < Tile::kRows / kAtOnce; ++from) {
      if (from != index) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) values[i][j] = sums[b][from * kPieces + i][j];
    }
  }
  if (p.x.scale)
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = index * kAtOnce + i * 8 + me.in_quad * 2 + c;
        const std::int64_t at = p.x.scale_per_row ? min(first + row, p.M - 1) : 0;
        const float of_row = Tile::kFp8X ? factors.x_scales[row] : p.x.scale[at];
#pragma unroll
        for (int r = 0; r < 2; ++r) values[i][2 * r + c] = __fmul_rn(values[i][2 * r + c], of_row);
      }
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      values[i][j] =
          kHalves ? __fmaf_rn(values[i][j], 0.5f * scale[j / 2], 0.5f * bias[j / 2])
                  : __fadd_rn(__fmul_rn(values[i][j], scale[j / 2]), bias[j / 2]);
}

/// Where gates and up rows are in different warpgroups, which have sums of the same places: of two
/// that each has, the first warpgroup finishes `gates`, the second `ups`, and both get the other
/// factor of what they finish.
template <class Tile, int kCount>
__device__ __forceinline__ void trade(Values (&gates)[kCount], Values (&ups)[kCount],
                                      Shared<Tile>& shared, const Consumer& me) {
  constexpr int kPieces = kAtOnce / 8;
  const auto at = [&](int warpgroup, int i) {
    return reinterpret_cast<float4*>(shared.out[warpgroup][kBoxes - 2 * kCount]) + i * kWarpgroup +
           me.thread;
  };
  static_assert(sizeof(Values) * kWarpgroup == 2 * sizeof(shared.out[0][0]));
  const bool first = me.warpgroup == 0;
  me.meet_all();  // the values before have been taken, the boxes have been read
#pragma unroll
  for (int i = 0; i < kCount * kPieces; ++i) {
    const float(&gate)[4] = gates[i / kPieces][i % kPieces];
    const float(&up)[4] = ups[i / kPieces][i % kPieces];
    *at(1 - me.warpgroup, i) = {first ? up[0] : gate[0], first ? up[1] : gate[1],
                                first ? up[2] : gate[2], first ? up[3] : gate[3]};
  }
  me.meet_all();  // the values are there
#pragma unroll
  for (int i = 0; i < kCount * kPieces; ++i) {
    const float4 of = *at(me.warpgroup, i);
    const float values[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& gate = gates[i / kPieces][i % kPieces][j];
      float& up = ups[i / kPieces][i % kPieces][j];
      gate = first ? gate : values[j];
      up = first ? values[j] : up;
    }
  }
}

/// gates = act(gates) * ups. kShort: by silu_short().
template <class T, bool kShort = false>
__device__ __forceinline__ void gate(Activation activation, Values& gates, const Values& ups) {
  if constexpr (kShort) {
    replace(gates, device::silu_short);
  } else {
    gemm_detail::activate<T>(activation, gates);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) gates[i][j] = __fmul_rn(gates[i][j], ups[i][j]);
}

/// Adds the residual that a stage holds of the tile's rows from `row` on.
template <class Tile>
__device__ __forceinline__ void add_copied(Values& values, Shared<Tile>& shared, int stage, int row,
                                           const Consumer& me) {
  using Pair = device::Vec<typename Tile::T, 2>;
  const int matrix = me.lane / 8, chunk = me.warp * 2 + matrix % 2;
#pragma unroll
  for (int i = 0; i < kAtOnce / 8; i += 2) {
    const int m = row + (i + matrix / 2) * 8 + me.lane % 8;
    std::uint32_t pairs[4];
    ptx::ldmatrix_transposed(pairs, &shared.x[stage][m][(chunk ^ (m % 8)) * 16]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto of = device::floats(*reinterpret_cast<const Pair*>(&pairs[j]));
      float(&to)[4] = values[i + j / 2];
#pragma unroll
      for (int c = 0; c < 2; ++c) to[j % 2 * 2 + c] = __fadd_rn(to[j % 2 * 2 + c], of.data[c]);
    }
  }
}

/// The same from memory, which the copy engine cannot map, of rows of x from `first` on.
template <class T>
__device__ __forceinline__ void add_from_memory(Values& values, const GemmParams& p,
                                                std::int64_t first, int column,
                                                const Consumer& me) {
#pragma unroll
  for (int i = 0; i < kAtOnce / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t m = first + i * 8 + me.in_quad * 2 + j % 2;
      const int n = column + me.warp * 16 + me.quad + j / 2 * 8;
      if (m < p.M && n < p.out_cols())
        values[i][j] = __fadd_rn(
            values[i][j],
            device::to_float(static_cast<const T*>(p.residual)[m * p.stride_residual + n]));
    }
}

}  // namespace ridgeline::gemm_expand
