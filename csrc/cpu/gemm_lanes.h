#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/float8.h"
#include "cpu/half.h"

/// Eight floats at a time: GCC's and Clang's vector types, for the loops whose shape the compiler
/// does not find by itself.
namespace ridgeline::cpu {

constexpr int kLanes = 8;
typedef float FloatLanes __attribute__((vector_size(32)));
typedef std::uint32_t WordLanes __attribute__((vector_size(32)));
typedef std::int32_t IntLanes __attribute__((vector_size(32)));

inline FloatLanes load_lanes(const float* p) {
  FloatLanes lanes;
  std::memcpy(&lanes, p, sizeof lanes);
  return lanes;
}

inline void store_lanes(float* p, FloatLanes lanes) { std::memcpy(p, &lanes, sizeof lanes); }

/// The sum in a fixed order.
inline float sum_lanes(FloatLanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/// Codes i of words of Fp4Layout, those of the low half.
inline WordLanes fp4_codes(WordLanes words, int i) {
  switch (i) {
    case 0: return (words >> 6 & 7u) | (words >> 12 & 8u);
    case 1: return (words >> 12 & 7u) | (words >> 18 & 8u);
    case 2: return (words & 7u) | (words >> 6 & 8u);
    default: return (words >> 10 & 3u) | (words >> 2 & 4u) | (words >> 16 & 8u);
  }
}

/// The floats of 4-bit codes: a sign, two bits of exponent, one of mantissa.
inline FloatLanes e2m1_lanes(WordLanes codes) {
  const IntLanes magnitude = (IntLanes)(codes & 7u);
  const FloatLanes halves = __builtin_convertvector(magnitude, FloatLanes) * 0.5f;
  // Exponents from 1 on are those of float32 less its bias; those of 0 have no leading one.
  const WordLanes normal = ((WordLanes)magnitude << 22) + (126u << 23);
  const WordLanes is_small = (WordLanes)(magnitude < 2);
  const WordLanes words = (is_small & (WordLanes)halves) | (~is_small & normal);
  return (FloatLanes)(words | ((codes & 8u) << 28));
}

/// Each value rounded to T and back.
template <class T>
FloatLanes round_lanes(FloatLanes lanes) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    WordLanes words;
    std::memcpy(&words, &lanes, sizeof words);
    const WordLanes is_nan = (words & 0x7fffffffu) > 0x7f800000u;
    const WordLanes rounded = (words + 0x7fffu + ((words >> 16) & 1u)) & 0xffff0000u;
    words = is_nan ? (words | 0x400000u) : rounded;
    std::memcpy(&lanes, &words, sizeof lanes);
  } else if constexpr (!std::is_same_v<T, float>) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(static_cast<T>(lanes[i]));
  }
  return lanes;
}

}  // namespace ridgeline::cpu
