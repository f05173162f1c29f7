#pragma once
#include <type_traits>

#include "device/activation_short.cuh"
#include "kernels/gemm_epilogue.cuh"

/// Activations at the end of Hopper's kernels for few rows, whose code comes from memory: GELU to
/// bfloat16 by Hopper's tanh is half the code, and half the time.
namespace ridgeline::gemm_detail {

/// The activation of each value.
template <class T, Activation kActivation, int kMany>
__device__ __forceinline__ void activate_piece(float (&values)[kMany]) {
#pragma unroll
  for (float& value : values) {
    if constexpr (kActivation == Activation::kGelu && std::is_same_v<T, __nv_bfloat16>) {
      value = device::gelu_of_half(0.5f * value);
    } else {
      value = activate<T>(kActivation, value);
    }
  }
}

/// Of each value of all pieces.
template <class T, int kPieces, int kMany>
__device__ __forceinline__ void activate_all(Activation activation,
                                             float (&values)[kPieces][kMany]) {
  with_activation(activation, [&](auto constant) {
#pragma unroll
    for (auto& piece : values) activate_piece<T, static_cast<Activation>(constant())>(piece);
  });
}

}  // namespace ridgeline::gemm_detail
