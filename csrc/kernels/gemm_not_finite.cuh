#pragma once
#include "device/dequant.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// What digits of x leave out.
namespace ridgeline::gemm_strips {

/// The products of a row of x's values that are not finite with weight row n, in `width` columns
/// from `first` on, and so on `step` columns further. Addresses: of the weight's strip, of the
/// scales and the zero points of row n, of the row of x.
template <class T>
__device__ __noinline__ float products_not_finite(const GemmParams& p, const void* strip,
                                                  const T* scales, const std::uint8_t* zeros,
                                                  const void* x_row, int n, int first, int width,
                                                  int step) {
  float sum = 0.0f;
  for (int begin = first; begin < p.K; begin += step)
    for (int k = begin; k < min(begin + width, p.K); ++k) {
      float x = p.x.dtype == DType::kFloat8E4M3
                    ? device::dequantise(static_cast<const std::uint8_t*>(x_row)[k],
                                         DType::kFloat8E4M3, 1.0f)
                    : device::to_float(static_cast<const T*>(x_row)[k]);
      if (p.x.norm_weight)
        x = device::to_float(device::from_float<T>(
            x * device::to_float(static_cast<const T*>(p.x.norm_weight)[k])));
      if (isfinite(x)) continue;
      const std::int64_t at = static_cast<std::int64_t>(k / p.weight.group) * p.N;
      const int zero = zeros ? zeros[at] : Int4Layout::kSymmetricZero;
      const int q = device::int4_of_block(
          static_cast<const std::uint32_t*>(strip) + k / Int4Layout::kCols * Int4Layout::kWords,
          n % kStripRows, k % Int4Layout::kCols);
      sum += x * (static_cast<float>(q - zero) * device::to_float(scales[at]));
    }
  return sum;
}

}  // namespace ridgeline::gemm_strips
