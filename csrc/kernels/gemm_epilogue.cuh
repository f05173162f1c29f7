#pragma once
#include "device/activation.cuh"
#include "device/vec.cuh"
#include "kernels/gemm.h"

/// From a product's sum to y: scales, bias, activation, residual, in float32, one rounding.
namespace ridgeline::gemm_detail {

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

/// The sum of row m and weight row n, scaled, plus bias. Products and sums are rounded one by one,
/// so that every kernel gives the same bits: the compiler may not fuse them differently.
template <class T>
__device__ __forceinline__ float scaled(const GemmParams& p, float sum, std::int64_t m,
                                        std::int64_t n) {
  if (p.x.scale) sum = __fmul_rn(sum, p.x.scale[p.x.scale_per_row ? m : 0]);
  if (p.weight.format == WeightFormat::kFp8 && p.weight.scale_layout != ScaleLayout::kBlock) {
    const float* scales = static_cast<const float*>(p.weight.scales);
    sum = __fmul_rn(sum, scales[p.weight.scale_layout == ScaleLayout::kRow ? n : 0]);
  }
  if (p.bias) sum = __fadd_rn(sum, device::to_float(static_cast<const T*>(p.bias)[n]));
  return sum;
}

template <class T>
__device__ __forceinline__ void store_output(const GemmParams& p, float value, std::int64_t m,
                                             std::int64_t column) {
  if (p.residual) {
    const T* row = static_cast<const T*>(p.residual) + m * p.stride_residual;
    value = __fadd_rn(value, device::to_float(row[column]));
  }
  static_cast<T*>(p.y)[m * p.out_cols() + column] = device::from_float<T>(value);
}

/// y of row m and weight row n from its sum; not gated.
template <class T>
__device__ __forceinline__ void finish(const GemmParams& p, float sum, std::int64_t m,
                                       std::int64_t n) {
  store_output<T>(p, activate<T>(p.activation, scaled<T>(p, sum, m, n)), m, n);
}

/// y of row m and column n from the sums of its gate (weight row n) and up (n + N / 2) rows.
template <class T>
__device__ __forceinline__ void finish_gated(const GemmParams& p, float gate, float up,
                                             std::int64_t m, std::int64_t n) {
  const float value = activate<T>(p.activation, scaled<T>(p, gate, m, n));
  store_output<T>(p, __fmul_rn(value, scaled<T>(p, up, m, n + p.N / 2)), m, n);
}

}  // namespace ridgeline::gemm_detail
