#pragma once
#include "device/dequant.cuh"
#include "device/ptx/load.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/mma_int8.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/prefetch.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_once_x.cuh"

/// The weights of the kernel that holds them in registers, and how they meet x. Where a thread
/// finds them is made out ahead of the wait: code that runs once runs slowly.
namespace ridgeline::gemm_once {

/// The strips of a block, the columns of a warp.
struct Place {
  int row, strips;  // first weight row, strips of 16 rows
  int column;       // first of kCols, less than K
  int lane;
};

/// Int4: the words are the operand of 16 rows of mma.m16n8k32, as they are packed.
template <class T, int kStrips>
struct Int4Weights {
  uint4 words[kStrips][kBlocks];
  T scales[kStrips][kSpans][2];  // of rows lane / 4 and the eighth after it
  std::uint8_t zeros[kStrips][kSpans][2];

  const uint4* from;
  int pitch, last;      // blocks of a strip, and the last from the warp's first on
  int of_rows[kSpans];  // scales

  __device__ __forceinline__ void find(const OnceParams& params, const Place& place) {
    const GemmParams& p = params.gemm;
    const int first = place.column / Int4Layout::kCols;
    pitch = ceil_div(p.K, Int4Layout::kCols);
    last = pitch - first - 1;
    from = ptx::opaque(static_cast<const uint4*>(p.weight.data) +
                       (place.row / kStripRows * pitch + first) * std::int64_t{32} + place.lane);
#pragma unroll
    for (int span = 0; span < kSpans; ++span)
      of_rows[span] = ptx::opaque(
          params.group.divide(min(place.column + span * kSpanCols, p.K - 1)) * p.N + place.row +
          place.lane / 4);
  }

  /// Asks L2 for the words.
  __device__ __forceinline__ void prefetch(const Place& place) const {
    if (place.lane == 0)
      for (int s = 0; s < place.strips; ++s)
        ptx::prefetch_l2(from + s * pitch * 32, min(kBlocks, last + 1) * 512);
  }

  /// Asks for all, in the order of the products. Past K the last block again, which meets zeros.
  __device__ __forceinline__ void load(const GemmParams& p, const Place& place) {
#pragma unroll
    for (int turn = 0; turn < kBlocks; ++turn) {
      const int i = turn % kSpans * (kBlocks / kSpans) + turn / kSpans;
#pragma unroll
      for (int s = 0; s < kStrips; ++s)
        if (s < place.strips)
          words[s][i] = ptx::load_lines(from + (s * pitch + min(i, last)) * 32);
    }
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int span = 0; span < kSpans; ++span)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (s < place.strips)
            scales[s][span][j] =
                static_cast<const T*>(p.weight.scales)[of_rows[span] + s * kStripRows + j * 8];
    if (!p.weight.zeros) return;
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int span = 0; span < kSpans; ++span)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (s < place.strips)
            zeros[s][span][j] = p.weight.zeros[of_rows[span] + s * kStripRows + j * 8];
  }

  /// sums[strip]: rows lane / 4 and the eighth after it, in lanes of columns 0 and 1: the digits.
  __device__ __forceinline__ void multiply(const Digits& x, float (&sums)[kStrips][2],
                                           bool has_zeros) const {
    int acc[kStrips][kSpans][4];
#pragma unroll
    for (int block = 0; block < kBlocks / kSpans; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int s = 0; s < kStrips; ++s)
#pragma unroll
          for (int span = 0; span < kSpans; ++span) {  // chains side by side
            const int at = span * (kBlocks / kSpans) + block;
            const uint4 &raw = words[s][at], &of_x = x.words[at];
            std::uint32_t a[4];
            device::split_int4(half == 0 ? raw.x : raw.z, a[0], a[1]);
            device::split_int4(half == 0 ? raw.y : raw.w, a[2], a[3]);
            int(&c)[4] = acc[s][span];
            const bool begins = block == 0 && half == 0;
            ptx::mma_m16n8k32(c, a, half == 0 ? of_x.x : of_x.z, half == 0 ? of_x.y : of_x.w,
                              begins ? kMagic : c[0], begins ? kMagic : c[1],
                              begins ? kMagic : c[2], begins ? kMagic : c[3]);
          }
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int span = 0; span < kSpans; ++span)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int(&c)[4] = acc[s][span];
          const float low = __int_as_float(c[2 * j]) - __int_as_float(kMagic);
          const float high = __int_as_float(c[2 * j + 1]) - __int_as_float(kMagic);
          const float whole = fmaf(high, 256.0f, low);  // of row 8 on, 16 times the sum
          const float zero = has_zeros ? static_cast<float>(zeros[s][span][j])
                                       : static_cast<float>(Int4Layout::kSymmetricZero);
          const float product = fmaf(-zero, x.sum[span], j == 0 ? whole : whole * 0.0625f);
          sums[s][j] = fmaf(device::to_float(scales[s][span][j]) * x.unit[span], product,
                            sums[s][j]);
        }
  }
};

/// Fp8: a lane has 16 consecutive columns of a row at a time, four steps of mma.m16n8k16 by fp16.
template <int kStrips>
struct Fp8Weights {
  uint4 rows[kStrips][2][kBlocks];  // lane / 4 and the eighth after it
  float scales[kStrips][kSpans];    // of 128 x 128

  const std::uint8_t* from[kStrips][2];
  int last;  // columns to the lane's last 16

  /// Past the weight's last row that row again, whose sums are not kept.
  __device__ __forceinline__ void find(const OnceParams& params, const Place& place) {
    const GemmParams& p = params.gemm;
    const int column = place.column + place.lane % 4 * 16;
    last = p.K - 16 - column;
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        from[s][j] = ptx::opaque(
            static_cast<const std::uint8_t*>(p.weight.data) +
            min(place.row + s * kStripRows + j * 8 + place.lane / 4, p.N - 1) *
                p.weight.stride_row + column);
  }

  /// Asks L2 for the rows: 256 columns are two lines, and lanes of a quad go on in one of a row's.
  __device__ __forceinline__ void prefetch(const Place& place) const {
    if (place.lane % 4 < 2)
#pragma unroll
      for (int s = 0; s < kStrips; ++s)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (s < place.strips)
            ptx::prefetch_line(from[s][j] + min(place.lane % 4 * (128 - 16), last));
  }

  /// Asks for all, in the order of the products. Past K the last columns again, which meet zeros.
  __device__ __forceinline__ void load(const GemmParams& p, const Place& place) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int s = 0; s < kStrips; ++s)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (s < place.strips)
            rows[s][j][i] =
                ptx::load_lines(reinterpret_cast<const uint4*>(from[s][j] + min(i * 64, last)));
    if (p.weight.scale_layout != ScaleLayout::kBlock) return;
    const int blocks = ceil_div(p.K, kScaleBlock), first = place.column / kScaleBlock;
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int span = 0; span < kSpans; ++span)
        if (s < place.strips)
          scales[s][span] = static_cast<const float*>(
              p.weight.scales)[gemm_detail::first_block_scale(p, place.row + s * kStripRows) +
                               min(first + span, blocks - 1)];
  }

  /// sums[strip]: rows lane / 4 and the eighth after it.
  __device__ __forceinline__ void multiply(const Halves& x, float (&sums)[kStrips][2],
                                           bool by_blocks) const {
    float acc[kStrips][kSpans][2][4] = {};  // even and odd steps have sums of their own
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 b = x.read(i, half);
#pragma unroll
        for (int s = 0; s < kStrips; ++s)
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            std::uint32_t low[2], high[2];
            device::convert_e4m3<__half>(word_of(rows[s][0][i], half * 2 + step), low);
            device::convert_e4m3<__half>(word_of(rows[s][1][i], half * 2 + step), high);
            const std::uint32_t a[4] = {low[0], high[0], low[1], high[1]};
            ptx::mma_m16n8k16<__half>(acc[s][i / (kBlocks / kSpans)][step], a,
                                      step == 0 ? b.x : b.z, step == 0 ? b.y : b.w);
          }
      }
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int span = 0; span < kSpans; ++span)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          sums[s][j] += (by_blocks ? scales[s][span] * x.unit : x.unit) *
                        (acc[s][span][0][2 * j] + acc[s][span][1][2 * j]);
  }

  __device__ static std::uint32_t word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
};

}  // namespace ridgeline::gemm_once
