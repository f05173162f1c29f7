#pragma once
#include <algorithm>
#include <cmath>

#include "common/math.h"
#include "cpu/gemm_lanes.h"
#include "kernels/gemm.h"

/// Some columns of 16 weight rows as floats, whatever the weight's format.
namespace ridgeline::cpu {

constexpr int kTileRows = Int4Layout::kRows;  // weight rows expanded together
constexpr int kTileCols = 1024;               // columns expanded together: a 64 KB tile, in L2

/// Rows [row0, row0 + 16) x columns [col0, col0 + cols) of the weight; cols is a multiple of 64.
/// What lies outside the matrix is zero.
struct Tile {
  std::int64_t row0;
  int col0;
  int cols;
  float* data;  // [16, kTileCols]

  float* row(int r) const { return data + r * kTileCols; }
};

template <class Element, class Convert>
void expand_rows(const GemmParams& params, const Tile& tile, Convert convert) {
  const int cols = std::clamp(params.K - tile.col0, 0, tile.cols);
  for (int r = 0; r < kTileRows; ++r) {
    const bool inside = tile.row0 + r < params.N;
    float* out = tile.row(r);
    if (inside) {
      const auto* weight = static_cast<const Element*>(params.weight.data) +
                           (tile.row0 + r) * params.weight.stride_row + tile.col0;
#pragma omp simd
      for (int k = 0; k < cols; ++k) out[k] = convert(weight[k]);
    }
    std::fill(out + (inside ? cols : 0), out + tile.cols, 0.0f);
  }
}

/// The block scale of fp8 weights belongs to the weight; tensor and row scales to the product.
inline void scale_blocks(const GemmParams& params, const Tile& tile) {
  const auto* scales = static_cast<const float*>(params.weight.scales);
  const int blocks = ceil_div(params.K, kScaleBlock);
  for (int r = 0; r < kTileRows && tile.row0 + r < params.N; ++r) {
    const float* row_scales = scales + (tile.row0 + r) / kScaleBlock * blocks;
    float* out = tile.row(r);
    const int cols = std::min(tile.cols, params.K - tile.col0);
    for (int k = 0; k < cols; ++k) out[k] *= row_scales[(tile.col0 + k) / kScaleBlock];
  }
}

/// The scales and zero points of sixteen rows of four-bit weights.
struct PackedGroup {
  float scale[kTileRows];
  float zero[kTileRows];

  /// Of a block of Fp4Layout, for half of its columns.
  void load_exponents(const std::uint32_t* block, int half) {
    const auto* exponents = reinterpret_cast<const std::uint8_t*>(block) + Fp4Layout::kCodeBytes;
    for (int r = 0; r < kTileRows; ++r)
      scale[r] = std::ldexp(1.0f, exponents[half * kTileRows + r] - Fp4Layout::kBias);
  }

  template <class T>
  void load(const GemmParams& params, std::int64_t row0, int group) {
    const auto* scales = static_cast<const T*>(params.weight.scales);
    for (int r = 0; r < kTileRows; ++r) {
      const bool inside = row0 + r < params.N;
      const std::int64_t at = static_cast<std::int64_t>(group) * params.N + row0 + r;
      scale[r] = inside ? static_cast<float>(scales[at]) : 0.0f;
      zero[r] =
          inside && params.weight.zeros ? params.weight.zeros[at] : Int4Layout::kSymmetricZero;
    }
  }
};

/// Sixteen columns of rows r and r + 8 from the four words of the lanes that hold them. Each word
/// stands twice, for its nibbles i and i + 4, in the order of eight columns.
template <WeightFormat kFormat, class T>
void expand_fragment(const std::uint32_t* words, const PackedGroup& group, int r, float* out) {
  const std::uint32_t a = words[0], b = words[4], c = words[8], d = words[12];
  const WordLanes words_twice = {a, a, b, b, c, c, d, d};
  const WordLanes halves = {0, 16, 0, 16, 0, 16, 0, 16};
  WordLanes lanes = words_twice >> halves;
  if (kFormat == WeightFormat::kFp4) lanes |= words_twice << ((32u - halves) & 31u);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int row = r + 8 * (i % 2);
    FloatLanes values;
    if constexpr (kFormat == WeightFormat::kFp4) {
      values = e2m1_lanes(fp4_codes(lanes, i));
    } else {
      const WordLanes codes = (lanes >> (4 * i)) & 15u;
      // Signed, because that conversion to float is one instruction and the unsigned one is not.
      values = __builtin_convertvector((IntLanes)codes, FloatLanes) - group.zero[row];
    }
    values *= group.scale[row];
    store_lanes(out + 8 * (i % 2) * kTileCols + 8 * (i / 2), round_lanes<T>(values));
  }
}

template <WeightFormat kFormat, class T>
void expand_packed(const GemmParams& params, const Tile& tile) {
  const std::int64_t blocks = ceil_div(params.K, Int4Layout::kCols);
  constexpr int kWords = block_bytes_of(kFormat) / 4;
  const auto* packed =
      static_cast<const std::uint32_t*>(params.weight.data) +
      (tile.row0 / kTileRows * blocks + tile.col0 / Int4Layout::kCols) * kWords;
  PackedGroup group{};
  int loaded = -1;
  for (int col = 0; col < tile.cols; col += 16) {
    const std::uint32_t* block = packed + col / Int4Layout::kCols * kWords;
    if constexpr (kFormat == WeightFormat::kFp4) {
      group.load_exponents(block, col % Int4Layout::kCols / kFp4Group);
    } else {
      const int wanted = std::min(tile.col0 + col, params.K - 1) / params.weight.group;
      if (wanted != loaded) group.load<T>(params, tile.row0, wanted);
      loaded = wanted;
    }
    const std::uint32_t* fragment = block + col % Int4Layout::kCols / 16;
    for (int r = 0; r < kTileRows / 2; ++r)
      expand_fragment<kFormat, T>(fragment + r * 16, group, r, tile.row(r) + col);
  }
}

inline void expand_tile(const GemmParams& params, const Tile& tile) {
  switch (params.weight.format) {
    case WeightFormat::kFp8:
      expand_rows<std::uint8_t>(params, tile, e4m3_to_float);
      if (params.weight.scale_layout == ScaleLayout::kBlock) scale_blocks(params, tile);
      return;
    case WeightFormat::kInt8:
      return expand_rows<std::int8_t>(params, tile, [](std::int8_t code) { return float(code); });
    case WeightFormat::kDense:
      return dispatch_float(params.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        expand_rows<T>(params, tile, [](T value) { return static_cast<float>(value); });
      });
    case WeightFormat::kInt4:
      return dispatch_float(params.dtype, [&](auto type) {
        expand_packed<WeightFormat::kInt4, typename decltype(type)::type>(params, tile);
      });
    case WeightFormat::kFp4:
      return dispatch_float(params.dtype, [&](auto type) {
        expand_packed<WeightFormat::kFp4, typename decltype(type)::type>(params, tile);
      });
  }
}

}  // namespace ridgeline::cpu
