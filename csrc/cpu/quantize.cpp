#include "kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/math.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "cpu/quant.h"
#include "cpu/rows.h"

namespace ridgeline::cpu {
namespace {

using Granularity = QuantizeParams::Granularity;

/// Rows and columns under one scale.
struct Extent {
  std::int64_t rows, cols;
};

/// Requires: a granularity below the tensor.
Extent extent_of(const QuantizeParams& params) {
  constexpr std::int64_t kExtent = QuantizeParams::kExtent;
  switch (params.granularity) {
    case Granularity::kTensor: return {params.rows, params.cols};
    case Granularity::kRow: return {1, params.cols};
    case Granularity::kGroup: return {1, kExtent};
    case Granularity::kWideGroup: return {1, QuantizeParams::kWideExtent};
    case Granularity::kBlock: return {kExtent, kExtent};
  }
  return {};
}

/// NaN if either is, as torch's maximum.
float maximum(float a, float b) { return a > b || std::isnan(a) ? a : b; }

template <class T>
float amax_of(const QuantizeParams& params, std::int64_t row, std::int64_t first,
              std::int64_t count, float* buffer) {
  const T* source = static_cast<const T*>(params.x) + row * params.stride_x_row + first;
  const float* x = as_floats(source, count, buffer);
  return max_over(count, [&](std::int64_t c) { return std::abs(x[c]); });
}

template <class T>
void encode_piece(const QuantizeParams& params, std::int64_t row, std::int64_t first,
                  std::int64_t count, float scale, float* buffer) {
  const T* source = static_cast<const T*>(params.x) + row * params.stride_x_row + first;
  auto* q = static_cast<std::uint8_t*>(params.q) + row * params.cols + first;
  encode(as_floats(source, count, buffer), count, scale, params.codes, q);
}

/// One scale for everything: the rows' own maxima first, in parallel.
template <class T>
void quantize_tensor(const QuantizeParams& params) {
  std::vector<float> amax(static_cast<std::size_t>(params.rows));
  const auto over_rows = [&](auto&& fn) {
    parallel_ranges(params.rows, params.cols, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> buffer(static_cast<std::size_t>(params.cols));
      for (std::int64_t row = begin; row < end; ++row) fn(row, buffer.data());
    });
  };
  over_rows([&](std::int64_t row, float* buffer) {
    amax[static_cast<std::size_t>(row)] = amax_of<T>(params, row, 0, params.cols, buffer);
  });
  float largest = 0.0f;
  for (const float value : amax) largest = maximum(largest, value);
  params.scale[0] = scale_of_amax(largest, DType::kFloat8E4M3);
  over_rows([&](std::int64_t row, float* buffer) {
    encode_piece<T>(params, row, 0, params.cols, params.scale[0], buffer);
  });
}

template <class T>
void quantize_extents(const QuantizeParams& params, Extent extent) {
  const std::int64_t down = ceil_div(params.rows, extent.rows);
  const std::int64_t across = ceil_div<std::int64_t>(params.cols, extent.cols);
  const std::int64_t cost = extent.rows * extent.cols;
  parallel_ranges(down * across, cost, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> buffer(static_cast<std::size_t>(extent.cols));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first_row = i / across * extent.rows, first = i % across * extent.cols;
      const std::int64_t last_row = std::min(params.rows, first_row + extent.rows);
      const std::int64_t count = std::min<std::int64_t>(params.cols - first, extent.cols);
      float amax = 0.0f;
      for (std::int64_t row = first_row; row < last_row; ++row)
        amax = maximum(amax, amax_of<T>(params, row, first, count, buffer.data()));
      params.scale[i] = scale_of_amax(amax, params.codes);
      for (std::int64_t row = first_row; row < last_row; ++row)
        encode_piece<T>(params, row, first, count, params.scale[i], buffer.data());
    }
  });
}

}  // namespace

void quantize(const QuantizeParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params.granularity == Granularity::kTensor) return quantize_tensor<T>(params);
    if (params.rows == 0) return;
    if (params.cols == 0) {  // a scale a row, and nothing to encode
      if (params.granularity == Granularity::kRow)
        std::fill_n(params.scale, params.rows, scale_of_amax(0.0f, params.codes));
      return;
    }
    quantize_extents<T>(params, extent_of(params));
  });
}

}  // namespace ridgeline::cpu
