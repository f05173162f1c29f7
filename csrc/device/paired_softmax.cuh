#pragma once
#include "device/softmax.cuh"

/// Softmax of scores in fp16, two in a register.
namespace ridgeline::device {

/// As LazySoftmax, with scores and weights in fp16, two columns of row r in [i][r], for weights
/// rounded to e4m3: a weight's logarithm is off by 2^-11 of its score. A base, in fp16, comes to
/// lie kBelow under the largest score; within its rounding of the slack if another row's does.
struct PairedSoftmax {
  static constexpr float kSlack = 8.0f, kBelow = 6.0f;
  static constexpr float kUnseen = -65504.0f;  // not -inf, which less itself is NaN
  // Less the base of a row, in both halves: what a weight's exponent begins from.
  __half2 from[2] = {__float2half2_rn(-kUnseen), __float2half2_rn(-kUnseen)};
  float sum[2] = {};  // of this thread's columns alone

  /// The scores of one step are seen; times `unit` they are in units of log2. Most steps raise no
  /// base of the warp's rows, and then lanes exchange nothing. False: keep[] is 1.
  template <int kTiles>
  __device__ __forceinline__ bool raise(const __half2 (&scores)[kTiles][2], float (&keep)[2],
                                        const __half2 (&unit)[2]) {
    __half2 rows[2] = {scores[0][0], scores[0][1]};
#pragma unroll
    for (int i = 1; i < kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[r] = __hmax2(rows[r], scores[i][r]);
    keep[0] = keep[1] = 1.0f;
    bool fits = true;  // NaN does not, nor what a row sees first
#pragma unroll
    for (int r = 0; r < 2; ++r)
      fits &= __hble2(__hfma2(rows[r], unit[r], from[r]), __float2half2_rn(kSlack));
    if (!any_lane(!fits)) return false;
    const __half2 both = warp_reduce<LargerOfPairs, kQuad>(
        __hmax2(__lows2half2(rows[0], rows[1]), __highs2half2(rows[0], rows[1])));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float score = r == 0 ? __low2float(both) : __high2float(both);
      const float largest = score * __low2float(unit[r]);
      const float base = -__low2float(from[r]);
      const bool grows = largest > base + kSlack;
      const __half2 raised = __float2half2_rn(kBelow - largest);
      keep[r] = grows ? ptx::exp2_approx(base + __low2float(raised)) : 1.0f;
      from[r] = grows ? raised : from[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] *= keep[r];
    return true;
  }

  /// Scores that were seen become weights: pieces kFirst to kLast, the last not included.
  template <int kFirst, int kLast, int kTiles>
  __device__ __forceinline__ void weigh(__half2 (&scores)[kTiles][2],
                                        const __half2 (&unit)[2]) const {
#pragma unroll
    for (int i = kFirst; i < kLast; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scores[i][r] = ptx::exp2_approx(__hfma2(scores[i][r], unit[r], from[r]));
  }

  /// By pairs, then pairs of pairs: at most 2^kSlack each, they do not exceed fp16. On the tensor
  /// cores they would wait for the products of other warps. Returns bits that depend on all of them
  /// and are never all ones.
  template <int kFirst, int kLast, int kTiles>
  __device__ __forceinline__ std::uint32_t add(const __half2 (&weights)[kTiles][2]) {
    std::uint32_t bits = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      __half2 parts[kLast - kFirst];
#pragma unroll
      for (int i = 0; i < kLast - kFirst; ++i) parts[i] = weights[kFirst + i][r];
#pragma unroll
      for (int apart = 1; apart < kLast - kFirst; apart *= 2)
#pragma unroll
        for (int i = 0; i + apart < kLast - kFirst; i += 2 * apart)
          parts[i] = __hadd2(parts[i], parts[i + apart]);
      const float2 both = __half22float2(parts[0]);
      sum[r] += both.x + both.y;
      bits |= reinterpret_cast<const std::uint32_t&>(parts[0]);
    }
    return bits;
  }

  /// Joins the sums of a quad of lanes, which have a row.
  __device__ __forceinline__ void join_quad() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = warp_reduce<Sum, kQuad>(sum[r]);
  }

  __device__ __forceinline__ RowEnd end(int r, float sink) const {
    return quick_end_of_row(-__low2float(from[r]), sum[r], sink);
  }
};

}  // namespace ridgeline::device
