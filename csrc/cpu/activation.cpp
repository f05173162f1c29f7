#include <algorithm>
#include <cmath>
#include <vector>

#include "common/math.h"
#include "cpu/activation.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "cpu/quant.h"
#include "cpu/rows.h"
#include "kernels/activation.h"

namespace ridgeline::cpu {
namespace {

using Function = ActivationParams::Function;

template <Function kFunction>
float activate(float value) {
  if constexpr (kFunction == Function::kGelu) return gelu(value);
  if constexpr (kFunction == Function::kGeluTanh) return gelu_tanh(value);
  return silu(value);
}

/// Calls fn(constant) with a function of one value as a compile-time constant.
template <class Fn>
void dispatch_function(Function function, Fn&& fn) {
  switch (function) {
    case Function::kGelu: return fn(std::integral_constant<Function, Function::kGelu>{});
    case Function::kGeluTanh: return fn(std::integral_constant<Function, Function::kGeluTanh>{});
    case Function::kSilu: return fn(std::integral_constant<Function, Function::kSilu>{});
    case Function::kSwigluClamped: return;  // of gate and up: dispatch_gated's
  }
}

/// Calls fn(product) with product(gate, up), the gated function of the call.
template <class Fn>
void dispatch_gated(const ActivationParams& params, Fn&& fn) {
  if (params.function == Function::kSwigluClamped)
    return fn([limit = params.limit, alpha = params.alpha](float gate, float up) {
      return swiglu_clamped(gate, up, limit, alpha);
    });
  dispatch_function(params.function, [&](auto function) {
    fn([&](float gate, float up) { return activate<function()>(gate) * up; });
  });
}

/// Calls fn(row, first column, columns) for pieces of at most kChunk columns, in parallel.
template <class Fn>
void for_each_chunk(const ActivationParams& params, Fn&& fn) {
  const std::int64_t chunks = ceil_div<std::int64_t>(params.cols, kChunk);
  parallel_for_each(params.rows * chunks, std::int64_t{kChunk} * 4, [&](std::int64_t i) {
    const std::int64_t first = i % chunks * kChunk;
    fn(i / chunks, first, std::min<std::int64_t>(kChunk, params.cols - first));
  });
}

}  // namespace

void bias_act(const ActivationParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    dispatch_function(params.function, [&](auto function) {
      using T = typename decltype(type)::type;
      for_each_chunk(params, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
        float x_buffer[kChunk], bias_buffer[kChunk];
        const T* x_row = static_cast<const T*>(params.x) + row * params.stride_x_row;
        T* y = static_cast<T*>(params.y) + row * params.cols + first;
        const float* x = as_floats(x_row + first, count, x_buffer);
        const T* bias_row = static_cast<const T*>(params.bias);
        const float* bias = as_floats(bias_row + first, count, bias_buffer);
        float* out = begin_row(y, x_buffer);
#pragma omp simd
        for (std::int64_t c = 0; c < count; ++c) out[c] = activate<function()>(x[c] + bias[c]);
        finish_row(out, count, y);
      });
    });
  });
}

void gated_act(const ActivationParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    dispatch_gated(params, [&](auto product) {
      using T = typename decltype(type)::type;
      for_each_chunk(params, [&](std::int64_t row, std::int64_t first, std::int64_t count) {
        float gate_buffer[kChunk], up_buffer[kChunk];
        const T* x_row = static_cast<const T*>(params.x) + row * params.stride_x_row;
        T* y = static_cast<T*>(params.y) + row * params.cols + first;
        const float* gate = as_floats(x_row + first, count, gate_buffer);
        const float* up = as_floats(x_row + params.cols + first, count, up_buffer);
        float* out = begin_row(y, gate_buffer);
#pragma omp simd
        for (std::int64_t c = 0; c < count; ++c) out[c] = product(gate[c], up[c]);
        finish_row(out, count, y);
      });
    });
  });
}

void gated_act_quant(const GatedQuantParams& params) {
  const std::int64_t extent = params.by_group ? kScaleGroup : params.cols;
  const std::int64_t extents = params.by_group ? ceil_div<std::int64_t>(params.cols, extent) : 1;
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_ranges(params.rows, params.cols * 4, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> gate_buffer(static_cast<std::size_t>(params.cols));
      std::vector<float> up_buffer(gate_buffer.size()), out(gate_buffer.size());
      for (std::int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(params.x) + row * params.stride_x_row;
        const float* gate = as_floats(x, params.cols, gate_buffer.data());
        const float* up = as_floats(x + params.cols, params.cols, up_buffer.data());
#pragma omp simd
        for (std::int32_t c = 0; c < params.cols; ++c)
          out[static_cast<std::size_t>(c)] = silu(gate[c]) * up[c];
        for (std::int64_t i = 0; i < extents; ++i) {
          const float* values = out.data() + i * extent;
          const std::int64_t count = std::min(extent, params.cols - i * extent);
          const auto size_of = [&](std::int64_t c) { return std::abs(values[c]); };
          const float amax = count == 0 ? 0.0f : max_over(count, size_of);
          const float scale = scale_of_amax(amax, params.y_dtype);
          params.y_scale[row * extents + i] = scale;
          encode(values, count, scale, params.y_dtype,
                 static_cast<std::uint8_t*>(params.y) + row * params.cols + i * extent);
        }
      }
    });
  });
}

}  // namespace ridgeline::cpu
