#pragma once
#include "common/quant_scale.h"
#include "device/ptx/convert.cuh"
#include "device/ptx/math.cuh"
#include "device/vec.cuh"

/// How outputs of a product become e4m3 as quantize_fp8 makes it of the rounded ones, bit by bit,
/// in the product's kernel.
namespace ridgeline::gemm_detail {

/// The largest magnitudes of a thread's two rows, of its even columns and of its odd ones.
template <class T>
struct Magnitudes {
  using Pair = typename device::PairOf<T>::type;
  Pair of_row[2];

  __device__ __forceinline__ void add(int row, std::uint32_t rounded) {
    of_row[row] = device::larger_or_nan(of_row[row], __habs2(reinterpret_cast<Pair&>(rounded)));
  }

  /// Those of both rows in one register, to be kept beside sums and products.
  __device__ __forceinline__ Pair joined() const {
    return device::larger_or_nan(Pair{of_row[0].x, of_row[1].x}, Pair{of_row[0].y, of_row[1].y});
  }
};

/// scale_of_amax() of e4m3 and its inverse, without a branch, beside which products cannot be made:
/// the same bits.
struct CodeScale {
  float scale, inverse;

  __device__ __forceinline__ explicit CodeScale(float amax) {
    constexpr float kLargest = 448.0f, kInverse = 1.0f / kLargest, kSmallest = 1.17549435e-38f;
    const float infinity = __uint_as_float(0x7f800000u);
    const float near = amax * kInverse;
    const float quotient = fmaf(fmaf(-kLargest, near, amax), kInverse, near);
    scale = amax == infinity ? infinity : quotient < kSmallest ? kSmallest : quotient;
    scale = amax == 0.0f ? 1.0f : scale;
    const float about = ptx::reciprocal_approx(scale);
    const float exact = fmaf(about, fmaf(-scale, about, 1.0f), about);
    inverse = scale == infinity ? 0.0f : exact;
  }
};

/// Four codes of two pairs.
template <class T>
__device__ __forceinline__ std::uint32_t code(std::uint32_t first, std::uint32_t second,
                                              float inverse) {
  const std::uint32_t pairs[2] = {first, second};
  const auto of = device::floats(reinterpret_cast<const device::Vec<T, 4>&>(pairs));
  return ptx::pack_e4m3(of.data[0] * inverse, of.data[1] * inverse, of.data[2] * inverse,
                        of.data[3] * inverse);
}

}  // namespace ridgeline::gemm_detail
