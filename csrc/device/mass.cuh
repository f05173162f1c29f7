#pragma once
#include <cstdint>

#include "common/sampling.h"

/// mass_of on the device, in a third of the instructions: the same integers.
namespace ridgeline::device {

/// The smallest float that is at least mass / 2^40.
__device__ inline float share_of(std::uint64_t mass) {
  return __double2float_ru(static_cast<double>(mass) / (std::uint64_t{1} << kMassBits));
}

/// The mass of a token by its logit, what min_p drops being nothing.
struct Mass {
  float largest, scale;
  float lowest;  // relative to the largest; what lies lower has no mass
  float least;   // share of the largest mass that min_p asks for

  __device__ Mass(float largest, float temperature, float min_p)
      : largest(largest),
        scale(mass_scale(temperature)),
        lowest(-100.0f / scale),
        least(share_of(least_mass(min_p))) {}

  /// Of the largest mass, not yet rounded to 2^-40.
  __device__ float share(float x) const {
    const float below = fmaxf(x == largest ? 0.0f : x - largest, lowest);
    const float rounded = fmaf(below, scale, kRound), whole = rounded - kRound;
    const float p = exp2_of_fraction(fmaf(below, scale, -whole));
    const float power = __int_as_float(__float_as_int(p) + (__float_as_int(rounded) << 23));
    return power >= least ? power : 0.0f;
  }

  __device__ std::uint64_t operator()(float x) const;
};

/// Adds shares, each rounded down to 2^-40: at 2^12 that is a double's last bit, so one addition
/// does both. Holds less than 2^12.
struct MassSum {
  double sum = 4096.0;

  __device__ void add(float share) {
    // The same number (of zero: one that rounds to it), without the slow conversion.
    const int bits = __float_as_int(share);
    sum = __dadd_rz(sum, __hiloint2double((bits >> 3) + 0x38000000, bits << 29));
  }

  __device__ std::uint64_t total() const {
    return static_cast<std::uint64_t>(__double_as_longlong(sum)) & 0xfffffffffffffu;
  }
};

__device__ __forceinline__ std::uint64_t Mass::operator()(float x) const {
  MassSum one;
  one.add(share(x));
  return one.total();
}

}  // namespace ridgeline::device
