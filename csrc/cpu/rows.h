#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/half.h"

/// Rows as float32: ops on 16-bit types convert a row, compute in float32 and convert back, so that
/// the loops between are written once and vectorise.
namespace ridgeline::cpu {

/// Columns of a row that an elementwise op works on at a time: buffers stay in the first cache.
constexpr std::int32_t kChunk = 1024;

template <class T>
void to_floats(const T* x, std::int64_t count, float* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = static_cast<float>(x[i]);
}

template <class T>
void from_floats(const float* x, std::int64_t count, T* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = static_cast<T>(x[i]);
}

/// The rounding of BFloat16's constructor on words: through the struct the compiler does not
/// vectorise it.
template <>
inline void from_floats<BFloat16>(const float* x, std::int64_t count, BFloat16* y) {
  auto* bits = reinterpret_cast<std::uint16_t*>(y);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word = std::bit_cast<std::uint32_t>(x[i]);
    const std::uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (word >> 16) | 0x40u;
    const std::uint32_t magnitude = word & 0x7fffffffu;
    bits[i] = static_cast<std::uint16_t>(magnitude > 0x7f800000u ? quiet : rounded);
  }
}

#if defined(__F16C__)
/// GCC 12 converts _Float16 one by one; the instruction converts eight.
template <>
inline void to_floats<Half>(const Half* x, std::int64_t count, float* y) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(
        y + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < count; ++i) y[i] = static_cast<float>(x[i]);
}

template <>
inline void from_floats<Half>(const float* x, std::int64_t count, Half* y) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) y[i] = static_cast<Half>(x[i]);
}
#endif

/// The row itself if it is float32, else its values in `buffer` (at least `count` floats).
template <class T>
const float* as_floats(const T* row, std::int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    to_floats(row, count, buffer);
    return buffer;
  }
}

/// Where to compute the floats of an output row: in place if it is float32, else in `buffer`;
/// finish_row() then converts.
template <class T>
float* begin_row(T* row, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    return buffer;
  }
}

template <class T>
void finish_row(const float* values, std::int64_t count, T* row) {
  if constexpr (!std::is_same_v<T, float>) from_floats(values, count, row);
}

/// The sum of fn(i) over [0, count): float32 in lanes over pieces, double across pieces, so that
/// the error does not grow with the row.
template <class Fn>
float sum_over(std::int64_t count, Fn fn) {
  constexpr std::int64_t kPiece = 128;
  double total = 0.0;
  for (std::int64_t begin = 0; begin < count; begin += kPiece) {
    const std::int64_t end = std::min(count, begin + kPiece);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = begin; i < end; ++i) sum += fn(i);
    total += sum;
  }
  return static_cast<float>(total);
}

/// The largest fn(i), or NaN if one is NaN; -inf for an empty range. Lanes are written out: the
/// compiler does not vectorise a maximum whose NaN matters.
template <class Fn>
float max_over(std::int64_t count, Fn fn) {
  constexpr int kLanes = 32;
  float best[kLanes];
  std::int32_t nans[kLanes] = {};
  std::fill_n(best, kLanes, -std::numeric_limits<float>::infinity());
  const auto take = [&](int lane, float value) {
    best[lane] = best[lane] > value ? best[lane] : value;
    nans[lane] |= value != value ? 1 : 0;
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) take(lane, fn(i + lane));
  }
  for (int lane = 0; i < count; ++i, ++lane) take(lane, fn(i));
  if (std::any_of(nans, nans + kLanes, [](std::int32_t seen) { return seen != 0; }))
    return std::numeric_limits<float>::quiet_NaN();
  return *std::max_element(best, best + kLanes);
}

}  // namespace ridgeline::cpu
