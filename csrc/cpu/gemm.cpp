#include <algorithm>
#include <cmath>
#include <vector>

#include "common/math.h"
#include "cpu/activation.h"
#include "cpu/gemm_tile.h"
#include "cpu/parallel.h"
#include "kernels/gemm.h"

namespace ridgeline::cpu {
namespace {

constexpr int kColsOfX = 2;  // weight rows a product step takes: 4 x 2 sums of 8
constexpr int kRowsOfX = 4;  // lanes each, in 16 registers

std::int64_t padded_cols(const GemmParams& params) {
  return round_up<std::int64_t>(params.K, Int4Layout::kCols);
}

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kGelu:
    case Activation::kGeluMul: return gelu(x);
    case Activation::kGeluTanh: return gelu_tanh(x);
    case Activation::kSilu:
    case Activation::kSiluMul: return silu(x);
    case Activation::kRelu: return x > 0.0f || std::isnan(x) ? x : 0.0f;
  }
  return x;
}

// ---- The activations as float32 rows ------------------------------------------------------------

template <class T>
float norm_scale(const GemmParams& params, const T* x) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int k = 0; k < params.K; ++k) sum += static_cast<float>(x[k]) * static_cast<float>(x[k]);
  return 1.0f / std::sqrt(sum / params.K + params.x.norm_eps);
}

template <class T>
void expand_row_of_x(const GemmParams& params, std::int64_t row, float* out) {
  const T* x = static_cast<const T*>(params.x.data) + row * params.x.stride_row;
#pragma omp simd
  for (int k = 0; k < params.K; ++k) out[k] = static_cast<float>(x[k]);
  if (params.x.norm_weight == nullptr) return;
  const float scale = norm_scale(params, x);
  dispatch_float(params.x.norm_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const W* weight = static_cast<const W*>(params.x.norm_weight);
#pragma omp simd
    for (int k = 0; k < params.K; ++k) {
      const float value = out[k] * scale * static_cast<float>(weight[k]);
      out[k] = static_cast<float>(static_cast<T>(value));
    }
  });
}

void expand_row_of_fp8(const GemmParams& params, std::int64_t row, float* out) {
  const auto* x = static_cast<const std::uint8_t*>(params.x.data) + row * params.x.stride_row;
#pragma omp simd
  for (int k = 0; k < params.K; ++k) out[k] = e4m3_to_float(x[k]);
  if (!params.x.scale_per_group) return;
  const int group = params.x.scale_group;
  const float* scales = params.x.scale + row * ceil_div(params.K, group);
  for (int k = 0; k < params.K; ++k) out[k] *= scales[k / group];
}

void expand_x(const GemmParams& params, float* out) {
  const std::int64_t pitch = padded_cols(params);
  parallel_ranges(params.M, pitch, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> unpermuted(params.x.perm ? params.K : 0);
    for (std::int64_t row = begin; row < end; ++row) {
      float* target = out + row * pitch;
      float* expanded = params.x.perm ? unpermuted.data() : target;
      if (params.x.dtype == DType::kFloat8E4M3) {
        expand_row_of_fp8(params, row, expanded);
      } else if (params.x.dtype == DType::kInt8) {
        const auto* x = static_cast<const std::int8_t*>(params.x.data);
        std::copy_n(x + row * params.x.stride_row, params.K, expanded);
      } else {
        dispatch_float(params.x.dtype, [&](auto type) {
          expand_row_of_x<typename decltype(type)::type>(params, row, expanded);
        });
      }
      if (params.x.perm)
        for (int k = 0; k < params.K; ++k) target[k] = expanded[params.x.perm[k]];
      std::fill(target + params.K, target + pitch, 0.0f);
    }
  });
}

// ---- The product --------------------------------------------------------------------------------

/// sums[m][c] += x rows m . tile rows c, over the tile's columns. Each sum runs over its columns
/// in the same eight lanes whatever the number of rows.
template <int kRows>
void multiply(const float* x, std::int64_t pitch, const Tile& tile, float* sums) {
  for (int c = 0; c < kTileRows; c += kColsOfX) {
    FloatLanes lanes[kRows][kColsOfX] = {};
    for (int k = 0; k < tile.cols; k += kLanes) {
      FloatLanes weight[kColsOfX];
      for (int j = 0; j < kColsOfX; ++j) weight[j] = load_lanes(tile.row(c + j) + k);
      for (int m = 0; m < kRows; ++m) {
        const FloatLanes value = load_lanes(x + m * pitch + k);
        for (int j = 0; j < kColsOfX; ++j) lanes[m][j] += value * weight[j];
      }
    }
    for (int m = 0; m < kRows; ++m)
      for (int j = 0; j < kColsOfX; ++j) sums[m * kTileRows + c + j] += sum_lanes(lanes[m][j]);
  }
}

void multiply_rows(const float* x, std::int64_t pitch, std::int64_t rows, const Tile& tile,
                   float* sums) {
  std::int64_t m = 0;
  for (; m + kRowsOfX <= rows; m += kRowsOfX)
    multiply<kRowsOfX>(x + m * pitch, pitch, tile, sums + m * kTileRows);
  for (; m < rows; ++m) multiply<1>(x + m * pitch, pitch, tile, sums + m * kTileRows);
}

/// product[m, row0 + c] = sums[m][c] with the scales that belong to the product, and the bias.
void store_sums(const GemmParams& params, std::int64_t row0, const float* sums, float* product) {
  const auto* scales = static_cast<const float*>(params.weight.scales);
  const int rows = static_cast<int>(std::min<std::int64_t>(kTileRows, params.N - row0));
  for (int c = 0; c < rows; ++c) {
    const std::int64_t n = row0 + c;
    float column_scale = 1.0f, bias = 0.0f;
    if (params.weight.scales_products())
      column_scale = scales[params.weight.scale_layout == ScaleLayout::kRow ? n : 0];
    if (params.bias)
      dispatch_float(params.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        bias = static_cast<float>(static_cast<const T*>(params.bias)[n]);
      });
    for (std::int64_t m = 0; m < params.M; ++m) {
      const float row_scale = params.x.scale && !params.x.scale_per_group
                                  ? params.x.scale[params.x.scale_per_row ? m : 0]
                                  : 1.0f;
      product[m * params.N + n] = sums[m * kTileRows + c] * row_scale * column_scale + bias;
    }
  }
}

void multiply_all(const GemmParams& params, const float* x, float* product) {
  const std::int64_t pitch = padded_cols(params);
  const std::int64_t tiles = ceil_div<std::int64_t>(params.N, kTileRows);
  parallel_ranges(tiles, params.M * pitch * kTileRows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> expanded(kTileRows * kTileCols), sums(params.M * kTileRows);
    for (std::int64_t t = begin; t < end; ++t) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int col0 = 0; col0 < pitch; col0 += kTileCols) {
        const int cols = static_cast<int>(std::min<std::int64_t>(kTileCols, pitch - col0));
        const Tile tile{t * kTileRows, col0, cols, expanded.data()};
        expand_tile(params, tile);
        multiply_rows(x + col0, pitch, params.M, tile, sums.data());
      }
      store_sums(params, t * kTileRows, sums.data(), product);
    }
  });
}

template <class T, class Product>
void apply_epilogue(const GemmParams& params, const Product* product, std::int64_t m) {
  const int cols = params.out_cols();
  const T* residual = static_cast<const T*>(params.residual);
  T* y = static_cast<T*>(params.y) + m * cols;
  const Product* row = product + m * params.N;
  for (int c = 0; c < cols; ++c) {
    float value = activate(params.activation, static_cast<float>(row[c]));
    if (is_gated(params.activation)) value *= static_cast<float>(row[cols + c]);
    if (residual) value += static_cast<float>(residual[m * params.stride_residual + c]);
    y[c] = static_cast<T>(value);
  }
}

}  // namespace

std::size_t gemm_workspace_bytes(const GemmParams& params) {
  return static_cast<std::size_t>(params.M * (padded_cols(params) + params.N)) * sizeof(float);
}

void gemm(const GemmParams& params) {
  if (params.M == 0 || params.N == 0) return;
  auto* x = static_cast<float*>(params.workspace);
  float* product = x + params.M * padded_cols(params);
  expand_x(params, x);
  multiply_all(params, x, product);
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for_each(params.M, params.N,
                      [&](std::int64_t m) { apply_epilogue<T>(params, product, m); });
  });
}

void gemm_prepare(const GemmParams& params, void* prepared) {
  dispatch_float(params.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_ranges(params.M, params.K, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> expanded(params.K);
      for (std::int64_t row = begin; row < end; ++row) {
        expand_row_of_x<T>(params, row, expanded.data());
        T* out = static_cast<T*>(prepared) + row * params.K;
        for (int k = 0; k < params.K; ++k) out[k] = static_cast<T>(expanded[k]);
      }
    });
  });
}

void gemm_finish(const GemmParams& params, const void* product) {
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for_each(params.M, params.N, [&](std::int64_t m) {
      apply_epilogue<T>(params, static_cast<const T*>(product), m);
    });
  });
}

}  // namespace ridgeline::cpu
