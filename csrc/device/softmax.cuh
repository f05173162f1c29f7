#pragma once
#include <cuda_fp16.h>

#include "device/ptx/math.cuh"
#include "device/reduce.cuh"

/// Softmax taken piece by piece. Scores are in units of log2 (multiplied by log2 e), so that each
/// weight is one exp2. A row that has seen nothing has largest -inf and sum 0, and adding pieces
/// that are all -inf changes no bit of it.
namespace ridgeline::device {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kQuad = 4;  // lanes that share a row of the accumulator
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

/// What exponents are taken relative to: never -inf, so that -inf minus it is -inf and not NaN.
__device__ __forceinline__ float exponent_base(float largest) {
  return largest == kMinusInfinity ? 0.0f : largest;
}

/// softcap * tanh(score / softcap), to a few units of 1e-7 of the cap.
__device__ __forceinline__ float capped(float score, float softcap) {
  const float e = ptx::exp2_approx(2.0f * kLog2E * __fdividef(score, softcap));
  return softcap * (1.0f - __fdividef(2.0f, e + 1.0f));
}

/// Two rows of scores spread over a quad as the m16n8 accumulator has them: [..][0..1] belong to
/// the first row, [..][2..3] to the second.
struct OnlineSoftmax {
  float largest[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns alone

  /// Scores become weights relative to the largest so far. keep[] is what every earlier sum is to
  /// be multiplied with. Scores times `unit`, which is positive, are in units of log2.
  template <int kTiles>
  __device__ __forceinline__ void step(float (&scores)[kTiles][4], float (&keep)[2],
                                       float unit = 1.0f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float piece = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        piece = fmaxf(piece, fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      piece = warp_reduce<MaxOrNaN, kQuad>(fmaxf(largest[r], piece * unit));
      const float base = exponent_base(piece);
      keep[r] = ptx::exp2_approx(largest[r] - base);
      largest[r] = piece;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int c = 2 * r; c < 2 * r + 2; ++c) {
          scores[i][c] = ptx::exp2_approx(fmaf(scores[i][c], unit, -base));
          total += scores[i][c];
        }
      sum[r] = sum[r] * keep[r] + total;
    }
  }

  /// Joins the quad's sums.
  __device__ __forceinline__ void join_quad() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warp_reduce<Sum, kQuad>(sum[r]);
  }
};

/// Scores whose accumulator has keys as rows and queries as columns: [0] and [2] are this thread's
/// two keys of its first query, [1] and [3] of its second. A base is raised only by a score far
/// above it, which spares most steps the exchange between lanes and the scaling of the sums;
/// weights stay below 2^kSlack, as exact in fp16 and bf16 as those below 1. A base moves by its own
/// query's scores alone.
struct ColumnSoftmax {
  static constexpr float kSlack = 8.0f;
  float base[2] = {kMinusInfinity, kMinusInfinity};  // the same in all lanes of a column
  float sum[2] = {0.0f, 0.0f};  // of this thread's keys alone; of all at a leaf's end

  __device__ __forceinline__ bool is_exceeded(const float (&scores)[4]) const {
    return fmaxf(scores[0], scores[2]) > base[0] + kSlack ||
           fmaxf(scores[1], scores[3]) > base[1] + kSlack;
  }

  /// The base of query c after new scores, of which this is the largest.
  __device__ __forceinline__ float raised(int c, float largest) const {
    return largest > base[c] + kSlack ? largest : base[c];
  }

  /// weights[] of scores[] relative to `bases`, and their sums added to totals[].
  __device__ __forceinline__ static void weigh(const float (&scores)[4], const float (&bases)[2],
                                               float (&weights)[4], float (&totals)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = ptx::exp2_approx(scores[i] - exponent_base(bases[i % 2]));
      totals[i % 2] += weights[i];
    }
  }

  /// The bases become whole numbers: sums go from one to another by a power of two, which rounds
  /// nothing, so parts that are joined in one order have the same bits wherever they are scaled.
  /// keep[] is what every sum is to be multiplied with.
  __device__ __forceinline__ void round_bases(float (&keep)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float whole = ceilf(base[c]);
      keep[c] = ptx::exp2_approx(base[c] - exponent_base(whole));
      base[c] = whole;
      sum[c] *= keep[c];
    }
  }
};

/// The base of two parts of a row, and what the sums of each are multiplied with.
struct JoinedBase {
  float base;
  float keep[2];

  __device__ __forceinline__ JoinedBase(float first, float second)
      : base(ptx::max_nan(first, second)) {
    keep[0] = ptx::exp2_approx(first - exponent_base(base));
    keep[1] = ptx::exp2_approx(second - exponent_base(base));
  }
  __device__ __forceinline__ float join(float first, float second) const {
    return fmaf(second, keep[1], first * keep[0]);
  }
};

/// A part of two rows: the base and total of the one, of the other, and two columns of their sums
/// as accumulators have them. Joined with a part that saw nothing it keeps its bits.
struct PairPart {
  float4 ends = {kMinusInfinity, 0.0f, kMinusInfinity, 0.0f};
  float4 sums = {-0.0f, -0.0f, -0.0f, -0.0f};

  __device__ __forceinline__ void join(const PairPart& other) {
    const JoinedBase even(ends.x, other.ends.x), odd(ends.z, other.ends.z);
    ends = {even.base, even.join(ends.y, other.ends.y), odd.base,
            odd.join(ends.w, other.ends.w)};
    sums = {even.join(sums.x, other.sums.x), odd.join(sums.y, other.sums.y),
            even.join(sums.z, other.sums.z), odd.join(sums.w, other.sums.w)};
  }
};

/// By pairs, then pairs of pairs: the first becomes all of them.
template <int kParts>
__device__ __forceinline__ void join_parts(PairPart (&parts)[kParts]) {
#pragma unroll
  for (int apart = 1; apart < kParts; apart *= 2)
#pragma unroll
    for (int i = 0; i + apart < kParts; i += 2 * apart) parts[i].join(parts[i + apart]);
}

/// The same over kLanes neighbours, in each of them.
template <int kLanes>
__device__ __forceinline__ void join_lanes(PairPart& part) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    const auto other = [&](const float4& mine) {
      return make_float4(shuffle_xor(mine.x, offset), shuffle_xor(mine.y, offset),
                         shuffle_xor(mine.z, offset), shuffle_xor(mine.w, offset));
    };
    part.join({other(part.ends), other(part.sums)});
  }
}

/// The end of a row: out = factor * gathered values; lse in natural units.
struct RowEnd {
  float factor;
  float lse;
};

/// `sink` is a score (in log2 units) that joins the sum without a value; -inf: none.
__device__ __forceinline__ RowEnd end_of_row(float largest, float sum, float sink) {
  const float base = exponent_base(fmaxf(largest, sink));
  const float keep = exp2f(largest - base);
  const float total = sum * keep + exp2f(sink - base);
  if (total == 0.0f) return {0.0f, kMinusInfinity};
  return {keep / total, kLn2 * (base + log2f(total))};
}

/// The same without a branch, by approximate functions: where what follows the last key is waited
/// for.
__device__ __forceinline__ RowEnd quick_end_of_row(float largest, float sum, float sink) {
  const float base = exponent_base(fmaxf(largest, sink));
  const float keep = ptx::exp2_approx(largest - base);
  const float total = fmaf(sum, keep, ptx::exp2_approx(sink - base));
  if (total == 0.0f) return {0.0f, kMinusInfinity};
  return {__fdividef(keep, total), kLn2 * (base + __log2f(total))};
}

/// Rows as OnlineSoftmax has them, with exponents relative to a base that follows the largest score
/// only when that is more than kSlack above it: most steps leave the sums alone, and weights stay
/// below 2^kSlack, as exact in fp16 and bf16 as those below 1. A row's base moves by its own scores
/// alone.
struct LazySoftmax {
  static constexpr float kSlack = 8.0f;
  float base[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns alone

  /// The scores of one step become weights. keep[] is what every earlier sum is to be multiplied
  /// with, mostly 1. Scores times `unit` are in units of log2.
  template <int kTiles>
  __device__ __forceinline__ void weigh(float (&scores)[kTiles][4], float (&keep)[2], float unit) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = kMinusInfinity;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        largest = fmaxf(largest, fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      largest = warp_reduce<MaxOrNaN, kQuad>(largest * unit);
      const bool grows = largest > base[r] + kSlack;
      keep[r] = grows ? ptx::exp2_approx(base[r] - largest) : 1.0f;
      base[r] = grows ? largest : base[r];
    }
    const float from[2] = {exponent_base(base[0]), exponent_base(base[1])};
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        scores[i][c] = ptx::exp2_approx(fmaf(scores[i][c], unit, -from[c / 2]));
  }

  /// Adds the weights of a step.
  template <int kTiles>
  __device__ __forceinline__ void add(const float (&weights)[kTiles][4], const float (&keep)[2]) {
    float totals[4] = {sum[0] * keep[0], 0.0f, sum[1] * keep[1], 0.0f};
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) totals[c] += weights[i][c];
    sum[0] = totals[0] + totals[1];
    sum[1] = totals[2] + totals[3];
  }

  /// Joins the quad's sums.
  __device__ __forceinline__ void join_quad() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warp_reduce<Sum, kQuad>(sum[r]);
  }

  __device__ __forceinline__ RowEnd end(int r, float sink) const {
    return quick_end_of_row(base[r], sum[r], sink);
  }
};

/// kParts parts of a row a lane of a warp: their bases become the powers of two that bring their
/// sums to a common one. totals: joined by pairs, then pairs of pairs, as lanes lie.
template <int kParts>
__device__ __forceinline__ RowEnd weigh_parts(float (&bases)[kParts], const float (&totals)[kParts],
                                              float sink) {
  static_assert(kParts == 1 || kParts == 2);
  float largest = bases[0];
#pragma unroll
  for (int i = 1; i < kParts; ++i) largest = ptx::max_nan(largest, bases[i]);
  largest = warp_reduce<MaxOrNaN>(largest);
  const float base = exponent_base(largest);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    bases[i] = ptx::exp2_approx(bases[i] - base);
    total += warp_reduce<Sum>(totals[i] * bases[i]);
  }
  return quick_end_of_row(largest, total, sink);
}

/// The weight of a part with lse `part` (log2 units) beside the whole's base; 0 for an empty part.
__device__ __forceinline__ float part_weight(float part, float base) { return exp2f(part - base); }

}  // namespace ridgeline::device
