#pragma once
#include <bit>
#include <cstdint>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/types.h"

namespace ridgeline::cpu {

/// bfloat16 storage. Conversion from float rounds to nearest even and keeps NaN.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<std::uint16_t>(is_nan ? (word >> 16) | 0x40u : rounded);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};

/// IEEE binary16 storage; the compiler's own type does the conversions.
struct Half {
  _Float16 value;

  Half() = default;
  explicit Half(float x) : value(static_cast<_Float16>(x)) {}
  explicit operator float() const { return static_cast<float>(value); }
};

static_assert(sizeof(BFloat16) == 2 && sizeof(Half) == 2);

/// Calls fn(Type<T>{}) with the CPU storage type of a floating `dtype`.
template <class Fn>
void dispatch_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(Type<float>{});
    case DType::kFloat16: return fn(Type<Half>{});
    case DType::kBFloat16: return fn(Type<BFloat16>{});
    default: check(false, "dtype must be float32, float16 or bfloat16, got ", name_of(dtype));
  }
}

}  // namespace ridgeline::cpu
