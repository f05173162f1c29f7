#pragma once
#include <cstdint>
#include <type_traits>

#include "common/types.h"
#include "device/ptx/convert.cuh"
#include "device/ptx/logic.cuh"
#include "device/vec.cuh"

namespace ridgeline::device {

/// Eight e4m3 or int8 values times a scale, each rounded once to T.
template <class T>
__device__ __forceinline__ Vec<T> dequantise8(uint2 raw, DType dtype, float scale) {
  Vec<T> out;
  const std::uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    float values[4];
    if (dtype == DType::kFloat8E4M3) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float2 two = __half22float2(
            ptx::e4m3x2_to_half2(static_cast<std::uint16_t>(words[w] >> (16 * pair))));
        values[2 * pair] = two.x;
        values[2 * pair + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = static_cast<float>(static_cast<std::int8_t>(words[w] >> (8 * i)));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out.data[4 * w + i] = from_float<T>(values[i] * scale);
  }
  return out;
}

/// Four int8 values plus 128, in units of 2^-24, where the bits of an fp16 are an integer: what
/// expand_halves() takes less two subtractions. Pairs as of bytes 0 and 1, 2 and 3.
constexpr float kBiasedUnit = 16777216.0f;              // to undo
constexpr std::uint32_t kMinusInt8Bias = 0x80808080u;  // -128 in those units, twice
__device__ __forceinline__ void expand_biased(std::uint32_t word, std::uint32_t (&out)[2]) {
  word ^= 0x80808080u;
  out[0] = __byte_perm(word, 0, 0x4140);
  out[1] = __byte_perm(word, 0, 0x4342);
}

/// Four e4m3 or int8 values, exactly, as two pairs of fp16: bytes 0 and 1, 2 and 3; or, apart by
/// two, 0 and 2, 1 and 3.
template <DType kType, bool kApart>
__device__ __forceinline__ void expand_halves(std::uint32_t word, std::uint32_t (&out)[2]) {
  if constexpr (kType == DType::kFloat8E4M3) {
    if (kApart) word = __byte_perm(word, 0, 0x3120);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2 pair = ptx::e4m3x2_to_half2(static_cast<std::uint16_t>(word >> (16 * i)));
      out[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  } else {
    static_assert(kType == DType::kInt8);
    word ^= 0x80808080u;  // value + 128, which becomes the mantissa of 1024 + value + 128
    const __half2 bias = __float2half2_rn(1152.0f);
    constexpr std::uint32_t kOrder[2] = {kApart ? 0x4240 : 0x4140, kApart ? 0x4341 : 0x4342};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t bits = __byte_perm(word, 0x64646464u, kOrder[i]);
      const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&bits), bias);
      out[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
}

/// One such value as float.
__device__ __forceinline__ float dequantise(std::uint8_t raw, DType dtype, float scale) {
  if (dtype == DType::kInt8) return static_cast<float>(static_cast<std::int8_t>(raw)) * scale;
  return __low2float(ptx::e4m3x2_to_half2(raw)) * scale;
}

// ---- Weights, as operands of mma ----------------------------------------------------------------

/// Two 16-bit floats in a register, as arithmetic and as an operand of mma.
template <class T> using Pair = typename PairOf<T>::type;

template <class T>
__device__ __forceinline__ Pair<T> as_pair(std::uint32_t bits) {
  return *reinterpret_cast<Pair<T>*>(&bits);
}

template <class P>
__device__ __forceinline__ std::uint32_t as_bits(P pair) {
  return *reinterpret_cast<std::uint32_t*>(&pair);
}

/// The bits of a 16-bit float whose last mantissa bit is worth one: or-ing a small integer in adds
/// it. 1024 in float16, 128 in bfloat16.
template <class T> constexpr std::uint32_t kIntegerBase = 0;
template <> constexpr std::uint32_t kIntegerBase<__half> = 0x6400;
template <> constexpr std::uint32_t kIntegerBase<__nv_bfloat16> = 0x4300;

/// base + zero in both halves: what expand_int4 subtracts.
template <class T>
__device__ __forceinline__ Pair<T> int4_zero(std::uint32_t zero) {
  return as_pair<T>((kIntegerBase<T> | zero) * 0x10001u);
}

/// Nibbles i and i + 4 of `word` as q - zero, exactly.
template <class T>
__device__ __forceinline__ std::uint32_t expand_int4(std::uint32_t word, int i, Pair<T> zero) {
  const std::uint32_t biased =
      ptx::or_masked(word >> (4 * i), 0x000f000fu, kIntegerBase<T> * 0x10001u);
  return as_bits(__hsub2(as_pair<T>(biased), zero));
}

/// Nibbles i and i + 4 of `word` as (q - zero) * scale: exact difference, one rounding.
template <class T>
__device__ __forceinline__ std::uint32_t expand_int4(std::uint32_t word, int i, Pair<T> zero,
                                                     Pair<T> scale) {
  return as_bits(__hmul2(as_pair<T>(expand_int4<T>(word, i, zero)), scale));
}

/// Int4 as bfloat16 without shifts or a base: below 256 the bits of a bfloat16 are an integer in
/// units of 2^-133, subnormals and first normals alike, so a nibble masked where it lies in the low
/// byte of its half is a number. Weights come times 2^-32, which keeps factors in range: of scales
/// below 2^27, and weights above 2^-94. 9 instructions for 8 weights, where shifts, a base, its
/// difference and a product are 15; with zero points 13.
template <class T> constexpr bool kInt4InPlace = std::is_same_v<T, __nv_bfloat16>;
template <class T> constexpr float kInt4Unit = kInt4InPlace<T> ? 4294967296.0f : 1.0f;  // to undo

/// Two columns of eight in `word`, of row r or, `high`, r + 8, where they lie.
__device__ __forceinline__ Pair<__nv_bfloat16> int4_nibbles(std::uint32_t word, int columns,
                                                            bool high) {
  return as_pair<__nv_bfloat16>((word >> columns * 8) & (high ? 0x00f000f0u : 0x000f000fu));
}
/// Such a number in units of its row: those of row r + 8 are in the high half of a byte.
__device__ __forceinline__ Pair<__nv_bfloat16> int4_in_place(std::uint32_t value, bool high) {
  return as_pair<__nv_bfloat16>(value * (high ? 0x00100010u : 0x00010001u));
}
/// What makes weights of nibbles in those units: 2^(133 - 32), or a 16th of that.
__device__ __forceinline__ Pair<__nv_bfloat16> int4_in_place_factor(bool high) {
  return as_pair<__nv_bfloat16>(high ? 0x70007000u : 0x72007200u);
}

/// Expands the words of rows r and r + 8 of an int4 block, of a scale and zero point each, or none:
/// kZeros.
template <class T, bool kZeros>
struct Int4Rows {
  Pair<T> scale[2], zero[2];  // in place without zero points: -8 scales, which meet the product

  __device__ __forceinline__ void set(int r, T of, std::uint32_t zero_point) {
    set(r, of, zero_point, r == 1);
  }
  /// Of operands whose row r is not the block's: `high` says which of the words' rows it is.
  __device__ __forceinline__ void set(int r, T of, std::uint32_t zero_point, bool high) {
    scale[r] = Pair<T>{of, of};
    if constexpr (kInt4InPlace<T>) {
      zero[r] = kZeros ? int4_in_place(zero_point, high)
                       : __hmul2(scale[r], as_pair<T>(0xb100b100u));  // -8 / 2^32
      scale[r] = __hmul2(scale[r], int4_in_place_factor(high));
    } else {
      zero[r] = int4_zero<T>(zero_point);
    }
  }

  /// Nibbles i and i + 4 of `word` as weights: one rounding.
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i) const {
    return expand(word, i, i % 2 == 1);
  }
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i, bool high) const {
    if constexpr (kInt4InPlace<T>) {
      const auto nibbles = int4_nibbles(word, i / 2, high);
      return as_bits(kZeros ? __hmul2(__hsub2(nibbles, zero[i % 2]), scale[i % 2])
                            : __hfma2(nibbles, scale[i % 2], zero[i % 2]));
    } else {
      return expand_int4<T>(word, i / 2 * 2 + high, zero[i % 2], scale[i % 2]);
    }
  }
};

/// Int4Rows less their zero points alone, exactly.
template <class T>
struct Int4Differences {
  Pair<T> zero[2];

  __device__ __forceinline__ void set(int r, std::uint32_t zero_point) {
    if constexpr (kInt4InPlace<T>) {
      zero[r] = __hmul2(int4_in_place(zero_point, false), as_pair<T>(0xf200f200u));  // -2^101
    } else {
      zero[r] = int4_zero<T>(zero_point);
    }
  }
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i) const {
    return expand(word, i, i % 2 == 1);
  }
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i, bool high) const {
    if constexpr (kInt4InPlace<T>) {
      return as_bits(
          __hfma2(int4_nibbles(word, i / 2, high), int4_in_place_factor(high), zero[i % 2]));
    } else {
      return expand_int4<T>(word, i / 2 * 2 + high, zero[i % 2]);
    }
  }
};

/// Nibbles as they are masked, in units of 2^-133, or of a 16th of that: minus their zero point, 8,
/// meets the sums of x. 5 instructions for 8 weights, where differences are 9. x and its sums come
/// times kInt4MaskedFactor: products are not subnormal of |x| from 2^-57 on, and finite below 2^63.
struct Int4Masked {
  __device__ __forceinline__ std::uint32_t expand(std::uint32_t word, int i, bool high) const {
    return as_bits(int4_nibbles(word, i / 2, high));
  }
  __device__ __forceinline__ static std::uint32_t minus_zero(bool high) {
    return high ? 0x80808080u : 0x80088008u;
  }
};
constexpr float kInt4MaskedFactor = 18446744073709551616.0f;  // 2^64
constexpr float kInt4MaskedUnit = 590295810358705651712.0f;   // 2^(133 - 64): to undo both

/// The even nibbles of `word` as bytes and the odd ones as bytes times 16: in an int4 block four
/// columns of row g and the same of row g + 8.
__device__ __forceinline__ void split_int4(std::uint32_t word, std::uint32_t& even,
                                           std::uint32_t& odd) {
  even = word & 0x0f0f0f0fu;
  odd = word & 0xf0f0f0f0u;
}

constexpr float kInt4AsE4m3Unit = 512.0f;  // what int4_as_e4m3 leaves to multiply by

/// The nibbles of `word`, less 8, as e4m3 in units of 2^-9, exactly: for those its codes are the
/// integers themselves, subnormals and first normals alike, with a sign. Even and odd ones apart,
/// as split_int4 does: four columns of row g, and the same of row g + 8.
__device__ __forceinline__ void int4_as_e4m3(std::uint32_t word, std::uint32_t& even,
                                             std::uint32_t& odd) {
  constexpr std::uint32_t kNibbles = 0x0f0f0f0f, kZeros = 0x08080808, kSigns = 0x80808080;
  even = __vabsdiffu4(word & kNibbles, kZeros) | (~(word << 4) & kSigns);
  odd = __vabsdiffu4(word >> 4 & kNibbles, kZeros) | (~word & kSigns);
}

/// The nibble of row `r` and column `c` of an int4 block.
__device__ __forceinline__ int int4_of_block(const std::uint32_t* block, int r, int c) {
  const std::uint32_t word = block[(r % 8 * 4 + c % 8 / 2) * 4 + c / 16];
  return word >> (4 * (c % 16 / 8 * 2 + r / 8 + c % 2 * 4)) & 15;
}

/// Four e4m3 values as two pairs of T, exactly: exponent and mantissa move to their place in T, and
/// a power of two corrects the bias (subnormals too). NaN (0x7f, 0xff) is rare: a branch.
template <class T>
__device__ __forceinline__ void expand_e4m3(std::uint32_t word, std::uint32_t (&out)[2]) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr int kShift = kIsHalf ? 1 : 4;
  constexpr std::uint32_t kPower = kIsHalf ? 0x5c005c00u : 0x7b807b80u;  // 2^8, 2^120
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t high_bytes = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
    const std::uint32_t magnitude = high_bytes & 0x7f007f00u;
    const std::uint32_t bits = (high_bytes & 0x80008000u) | (magnitude >> kShift);
    out[i] = as_bits(__hmul2(as_pair<T>(bits), as_pair<T>(kPower)));
  }
  if (((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (((word >> (8 * i)) & 0x7fu) == 0x7fu) out[i / 2] |= 0x7fffu << (16 * (i % 2));
  }
}

/// Two e4m3 values as a pair of T by conversions, which compute 8.9 has in hardware.
template <class T>
__device__ __forceinline__ std::uint32_t convert_e4m3_pair(std::uint16_t raw) {
  const __half2 pair = ptx::e4m3x2_to_half2(raw);
  if constexpr (std::is_same_v<T, __half>) {
    return as_bits(pair);
  } else {
    return as_bits(__float22bfloat162_rn(__half22float2(pair)));
  }
}

/// Two e4m3 values times a float32 factor, each rounded once to T.
template <class T>
__device__ __forceinline__ std::uint32_t scale_e4m3_pair(std::uint16_t raw, float factor) {
  const float2 two = __half22float2(ptx::e4m3x2_to_half2(raw));
  if constexpr (std::is_same_v<T, __half>) {
    return as_bits(__floats2half2_rn(two.x * factor, two.y * factor));
  } else {
    return as_bits(__floats2bfloat162_rn(two.x * factor, two.y * factor));
  }
}

/// Four of them, exactly.
template <class T>
__device__ __forceinline__ void convert_e4m3(std::uint32_t word, std::uint32_t (&out)[2]) {
  out[0] = convert_e4m3_pair<T>(static_cast<std::uint16_t>(word));
  out[1] = convert_e4m3_pair<T>(static_cast<std::uint16_t>(word >> 16));
}

/// A pair times a float32 factor, rounded once.
template <class T>
__device__ __forceinline__ std::uint32_t scale_pair(std::uint32_t bits, float factor) {
  const Pair<T> pair = as_pair<T>(bits);
  Pair<T> out;
  out.x = static_cast<T>(static_cast<float>(pair.x) * factor);
  out.y = static_cast<T>(static_cast<float>(pair.y) * factor);
  return as_bits(out);
}

}  // namespace ridgeline::device
