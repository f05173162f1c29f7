#pragma once
#include "device/dequant.cuh"

/// Weights of Fp4Layout as bfloat16 operands of mma.
namespace ridgeline::device {

/// The power of two of an exponent of Fp4Layout, times 2^126.
__device__ __forceinline__ Pair<__nv_bfloat16> fp4_factor(std::uint8_t exponent) {
  return as_pair<__nv_bfloat16>((exponent + 126u) * 0x00800080u);
}

/// Pairs of codes of a word of Fp4Layout among the lowest exponents of bfloat16, where the bits of
/// a code are its value times 2^-126, subnormals too. Where the compiler knows the row, three of a
/// word's four pairs take a mask and a shift at most.
struct Fp4Turns {
  unsigned near, far, top;  // of columns 2 t; of 2 t + 8, and of one bit of their exponents

  /// Of row g or, `high`, g + 8.
  __device__ __forceinline__ explicit Fp4Turns(bool high)
      : near(high ? 6 : 0), far(high ? 4 : 26), top(high ? 28 : 26) {}

  /// Columns 2 t and 2 t + 1 or, is_far, those 8 further on.
  __device__ __forceinline__ std::uint32_t codes(std::uint32_t word, bool is_far) const {
    return is_far ? (turn(word, far) & 0x80c080c0u) | (turn(word, top) & 0x01000100u)
                  : turn(word, near) & 0x81c081c0u;
  }
  /// The same as weights, exactly. `factor`: fp4_factor().
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, bool is_far,
                                                  Pair<__nv_bfloat16> factor) const {
    return as_bits(__hmul2(as_pair<__nv_bfloat16>(codes(word, is_far)), factor));
  }

 private:
  __device__ __forceinline__ static std::uint32_t turn(std::uint32_t word, unsigned right) {
    return word >> right | word << (-right & 31u);
  }
};

/// x for products with codes, whose sums are scaled: times 2^64. Products are not subnormal then of
/// |x| from 2^-63 on, and x is finite below 2^64.
__device__ __forceinline__ std::uint32_t fp4_operand(std::uint32_t pair) {
  return as_bits(__hmul2(as_pair<__nv_bfloat16>(pair), as_pair<__nv_bfloat16>(0x5f805f80u)));
}
/// What makes products of such sums: the power of two of an exponent, times 2^(126 - 64).
__device__ __forceinline__ float fp4_sum_scale(std::uint8_t exponent) {
  return __uint_as_float((exponent + 62u) << 23);
}

/// Expands words of Fp4Layout, of two rows with an exponent each.
struct Fp4Rows {
  Pair<__nv_bfloat16> factor[2];

  __device__ __forceinline__ void set(int r, std::uint8_t exponent) {
    factor[r] = fp4_factor(exponent);
  }
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i, bool high) const {
    return Fp4Turns(high).expand(word, i / 2 == 1, factor[i % 2]);
  }
};

}  // namespace ridgeline::device
