#pragma once

namespace ridgeline {

/// log2 of the upper tail of the standard normal distribution, log2(1 - Phi(a)), for a >= 0.
///
/// GELU is x * Phi(x), and the tail is one power of two of a smooth function: eight multiply-adds
/// and one exponential, where erf takes about 25 instructions. The polynomial is the minimax fit on
/// [0, 7], weighted towards small a: Phi is within 1.2e-7 everywhere, the tail within 4e-6 of
/// itself up to a = 3. It falls without end, so larger a and infinity give a tail of zero.
constexpr float log2_upper_tail(float a) {
  float p = -8.68122173e-7f;
  p = p * a + 1.43900897e-5f;
  p = p * a - 6.01973786e-5f;
  p = p * a - 4.59398175e-4f;
  p = p * a + 7.50819405e-3f;
  p = p * a - 5.28194314e-2f;
  p = p * a - 4.59096517e-1f;
  p = p * a - 1.15111943f;
  return p * a - 9.99999706e-1f;
}

/// The same for results that are rounded to 16 bits: three multiply-adds less. GELU is within
/// 1.6e-5 of itself above zero and within 1.5e-4 down to -3, 4.2e-6 everywhere.
constexpr float log2_upper_tail_short(float a) {
  float p = -3.7584599e-4f;
  p = p * a + 6.44247509e-3f;
  p = p * a - 5.04542304e-2f;
  p = p * a - 4.61055333e-1f;
  p = p * a - 1.15058259f;
  return p * a - 1.00002196f;
}

}  // namespace ridgeline
