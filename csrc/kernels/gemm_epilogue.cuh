#pragma once
#include <type_traits>

#include "common/dispatch.h"
#include "common/math.h"
#include "device/activation.cuh"
#include "device/vec.cuh"
#include "kernels/gemm.h"

/// From a product's sum to y: scales, bias, activation, residual, in float32, one rounding.
namespace ridgeline::gemm_detail {

/// What products of E are added up in.
template <class E>
using SumOf = std::conditional_t<std::is_same_v<E, std::int8_t>, int, float>;

template <class T>
__device__ __forceinline__ float activate(Activation activation, float x) {
  constexpr bool kFast = sizeof(T) == 2;
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGelu:
    case Activation::kGeluMul:
      return device::gelu<kFast>(x);
    case Activation::kGeluTanh:
      return device::gelu_tanh<kFast>(x);
    case Activation::kSilu:
    case Activation::kSiluMul:
      return device::silu<kFast>(x);
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
  }
  return x;
}

/// Calls fn(activation) with a constant, that of the gates where they are gated: a choice a piece,
/// not one an element.
template <class Fn>
__device__ __forceinline__ void with_activation(Activation activation, Fn&& fn) {
  using enum Activation;
  switch (activation) {
    case kNone: return fn(Int<static_cast<int>(kNone)>{});
    case kGelu: case kGeluMul: return fn(Int<static_cast<int>(kGelu)>{});
    case kGeluTanh: return fn(Int<static_cast<int>(kGeluTanh)>{});
    case kSilu: case kSiluMul: return fn(Int<static_cast<int>(kSilu)>{});
    case kRelu: return fn(Int<static_cast<int>(kRelu)>{});
  }
}

/// The same of values of a thread.
template <class T, int kPieces, int kEach>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kPieces][kEach]) {
  with_activation(activation, [&](auto constant) {
    constexpr auto kActivation = static_cast<Activation>(constant());
#pragma unroll
    for (auto& piece : values)
#pragma unroll
      for (float& value : piece) value = activate<T>(kActivation, value);
  });
}

/// What turns the sum of row m and weight row n into their output: loaded ahead of the sum where
/// nothing else hides the latency. What is not there changes no bit: a sum less zero is itself.
struct Operands {
  float x_scale = 1.0f, weight_scale = 1.0f, bias = -0.0f, residual = -0.0f;
};

/// The scale of weight row n.
__device__ __forceinline__ float weight_scale_of(const GemmParams& p, std::int64_t n) {
  if (!p.weight.scales_products()) return 1.0f;
  const float* scales = static_cast<const float*>(p.weight.scales);
  return scales[p.weight.scale_layout == ScaleLayout::kRow ? n : 0];
}

/// Those of weight row n.
template <class T>
__device__ __forceinline__ void load_of_column(Operands& operands, const GemmParams& p,
                                               std::int64_t n) {
  operands.weight_scale = weight_scale_of(p, n);
  if (p.bias) operands.bias = device::to_float(static_cast<const T*>(p.bias)[n]);
}

/// Those of row m, and of the output's column: which an up row has none of, its gate makes it.
constexpr std::int64_t kNoColumn = -1;

template <class T>
__device__ __forceinline__ void load_of_row(Operands& operands, const GemmParams& p, std::int64_t m,
                                            std::int64_t column) {
  if (p.x.scale) operands.x_scale = p.x.scale[p.x.scale_per_row ? m : 0];
  if (p.residual && column != kNoColumn)
    operands.residual =
        device::to_float(static_cast<const T*>(p.residual)[m * p.stride_residual + column]);
}

template <class T>
__device__ __forceinline__ Operands operands_of(const GemmParams& p, std::int64_t m, std::int64_t n,
                                                std::int64_t column) {
  Operands operands;
  load_of_column<T>(operands, p, n);
  load_of_row<T>(operands, p, m, column);
  return operands;
}

/// rmsnorm folded into a product: what its sums of a row are multiplied by.
__device__ __forceinline__ float norm_factor(const GemmParams& p, float squares) {
  return rsqrtf(squares / p.K + p.x.norm_eps);
}

/// The sum, scaled, plus bias. Products and sums are rounded one by one, so that every kernel gives
/// the same bits: the compiler may not fuse them differently.
__device__ __forceinline__ float scaled(const Operands& operands, float sum) {
  return __fadd_rn(__fmul_rn(__fmul_rn(sum, operands.x_scale), operands.weight_scale),
                   operands.bias);
}

template <class T>
__device__ __forceinline__ void store_output(const GemmParams& p, const Operands& operands,
                                             float value, std::int64_t m, std::int64_t column) {
  static_cast<T*>(p.y)[m * p.out_cols() + column] =
      device::from_float<T>(__fadd_rn(value, operands.residual));
}

/// y of row m and weight row n from its sum; not gated.
template <class T>
__device__ __forceinline__ void finish(const GemmParams& p, const Operands& operands, float sum,
                                       std::int64_t m, std::int64_t n) {
  store_output<T>(p, operands, activate<T>(p.activation, scaled(operands, sum)), m, n);
}

template <class T>
__device__ __forceinline__ void finish(const GemmParams& p, float sum, std::int64_t m,
                                       std::int64_t n) {
  finish<T>(p, operands_of<T>(p, m, n, n), sum, m, n);
}

/// y of row m and column n from the sums of its gate (weight row n) and up (n + N / 2) rows.
template <class T>
__device__ __forceinline__ void finish_gated(const GemmParams& p, const Operands& of_gate,
                                             const Operands& of_up, float gate, float up,
                                             std::int64_t m, std::int64_t n) {
  const float value = activate<T>(p.activation, scaled(of_gate, gate));
  store_output<T>(p, of_gate, __fmul_rn(value, scaled(of_up, up)), m, n);
}

template <class T>
__device__ __forceinline__ void finish_gated(const GemmParams& p, float gate, float up,
                                             std::int64_t m, std::int64_t n) {
  finish_gated<T>(p, operands_of<T>(p, m, n, n),
                  operands_of<T>(p, m, n + p.N / 2, kNoColumn), gate, up, m, n);
}

}  // namespace ridgeline::gemm_detail
