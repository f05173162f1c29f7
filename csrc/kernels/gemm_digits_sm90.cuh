#pragma once
#include "device/matrix_map.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/mma_int8.cuh"
#include "kernels/gemm_digits_stage.cuh"
#include "kernels/gemm_not_finite.cuh"

/// What a warp of the digits kernel does besides: how the weight comes, and how 16 of its rows meet
/// up to eight rows of x.
namespace ridgeline::gemm_digits {

// ---- Phases -------------------------------------------------------------------------------------

/// Where a thread finds its part of x. Rows past the last repeat it; their sums are not kept.
template <int kTiles>
struct XOfLane {
  const char* digits[kTiles];
  const Span* spans[kTiles];

  __device__ XOfLane(const char* x, const Span* all, int rows, int lane) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      digits[tile] = x + min(tile * kTokens + lane / 8, rows - 1) * kRowBytes + lane / 4 % 2 * 64 +
                     lane % 4 * 16;
      spans[tile] = all + min(tile * kTokens + lane % 4, rows - 1);
    }
  }
};

/// A chunk of a strip. sums[tile]: rows lane / 4 and the eighth after it of the
/// weight, by row lane % 4 of the tile of x. Of one tile the products of four spans go on side by
/// side, and nothing branches between them: one after the other a chunk took 0.6 us, most of it
/// latency. Two tiles have as many products one after the other: eight rows of 4096 x 28672 23.4
/// us, so 23.9.
template <class T, int kSpan, int kTiles>
__device__ __forceinline__ void multiply_chunk(const DigitsParams& params, const char* stage,
                                               const XOfLane<kTiles>& x, int chunk,
                                               float (&sums)[kTiles][2], int lane) {
  constexpr int kSpans = kChunkBlocks / kSpan, kAbreast = kTiles > 1 ? 1 : 4;
  const int rows = static_cast<int>(params.gemm.M);
#pragma unroll
  for (int first = 0; first < kSpans; first += kAbreast) {
    float zero[kAbreast][2];
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) zero[i][0] = zero[i][1] = Int4Layout::kSymmetricZero;
    const auto group_of = [&](int i) {
      return (first + i) * kSpan * Int4Layout::kCols >> params.group_shift;
    };
    if (params.gemm.weight.zeros)
#pragma unroll
      for (int i = 0; i < kAbreast; ++i) {
        const auto* zeros = reinterpret_cast<const std::uint8_t*>(stage + params.zeros_at +
                                                                  group_of(i) * kZeroBytes);
        zero[i][0] = zeros[lane / 4], zero[i][1] = zeros[lane / 4 + 8];
      }
    int acc[kAbreast][kTiles][4];
#pragma unroll
    for (int block = 0; block < kSpan; ++block) {
      uint4 raw[kAbreast], b[kAbreast][kTiles];
#pragma unroll
      for (int i = 0; i < kAbreast; ++i) {
        const int at = (first + i) * kSpan + block;
        raw[i] = *reinterpret_cast<const uint4*>(stage + at * 512 + lane * 16);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          b[i][tile] = *reinterpret_cast<const uint4*>(
              x.digits[tile] + (chunk * kChunkBlocks + at) * block_bytes(rows));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kAbreast; ++i) {
          std::uint32_t a[4];
          device::split_int4(half == 0 ? raw[i].x : raw[i].z, a[0], a[1]);
          device::split_int4(half == 0 ? raw[i].y : raw[i].w, a[2], a[3]);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            int(&c)[4] = acc[i][tile];
            const uint4& of_x = b[i][tile];
            const bool begins = block == 0 && half == 0;
            ptx::mma_m16n8k32(c, a, half == 0 ? of_x.x : of_x.z, half == 0 ? of_x.y : of_x.w,
                              begins ? kMagic : c[0], begins ? kMagic : c[1],
                              begins ? kMagic : c[2], begins ? kMagic : c[3]);
          }
        }
    }
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      const T* scales =
          reinterpret_cast<const T*>(stage + kChunkBlocks * 512 + group_of(i) * kScaleBytes) +
          lane / 4;
      const float scale[2] = {device::to_float(scales[0]), device::to_float(scales[8])};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const Span of_x =
            x.spans[tile][(chunk * kSpans + first + i) * rows];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int(&c)[4] = acc[i][tile];
          const float low = __int_as_float(c[2 * j]) - __int_as_float(kMagic);
          const float high = __int_as_float(c[2 * j + 1]) - __int_as_float(kMagic);
          const float whole = fmaf(high, 256.0f, low);  // of row 8 on, 16 times the sum
          const float power = j == 0 ? 1.0f : 0.0625f;
          const float product = fmaf(-zero[i][j], of_x.sum, j == 0 ? whole : whole * power);
          sums[tile][j] = fmaf(scale[j] * of_x.unit, product, sums[tile][j]);
        }
      }
    }
  }
}

/// Where a chunk of the strip from weight row `row` on lies, its scales and its zero points.
struct ChunkSource {
  const char* weight;
  int bytes, group;

  __device__ ChunkSource(const DigitsParams& params, int row, int chunk) {
    const GemmParams& p = params.gemm;
    const int blocks = ceil_div(p.K, Int4Layout::kCols);
    weight = static_cast<const char*>(p.weight.data) +
             static_cast<std::int64_t>(static_cast<unsigned>(row) / kStripRows) * blocks * 512 +
             chunk * kChunkBytes;
    bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
    group = params.by_group.divide(chunk * (kChunkCols >> params.group_shift));
  }
};

struct Requests {
  const DigitsParams& params;
  std::uint64_t policy;
  ChunkWalk walk;

  __device__ Requests(const DigitsParams& params, int warp)
      : params(params), policy(ptx::evict_first()), walk(params.order, params.chunks, warp) {}

  /// Asks for the next chunk. All lanes of the warp call it.
  __device__ void next(char* to, std::uint64_t* full) {
    if (walk.strips == 0) return;
    const std::uint8_t* zeros = params.gemm.weight.zeros;
    const ChunkSource from(params, walk.row, walk.chunk);
    const int groups = kChunkCols >> params.group_shift;
    if (ptx::elect_one()) {
      ptx::mbarrier_expect(full, from.bytes + groups * (kScaleBytes + (zeros ? kZeroBytes : 0)));
      ptx::copy_bulk(to, from.weight, from.bytes, full, policy);
      ptx::copy_matrix(to + kChunkBytes, &params.scales, full, walk.row, from.group, policy);
      if (zeros)
        ptx::copy_matrix(to + params.zeros_at, &params.zeros, full, walk.row, from.group, policy);
    }
    walk.next();
  }

  /// Asks L2 for the next chunks.
  __device__ void prefetch(int chunks) const {
    ChunkWalk ahead = walk;
#pragma unroll 1
    for (int i = 0; i < chunks && ahead.strips > 0; ++i, ahead.next()) {
      const ChunkSource from(params, ahead.row, ahead.chunk);
      if (!ptx::elect_one()) continue;
      ptx::prefetch_bulk(from.weight, from.bytes, policy);
      ptx::prefetch_matrix(&params.scales, ahead.row, from.group, policy);
      if (params.gemm.weight.zeros)
        ptx::prefetch_matrix(&params.zeros, ahead.row, from.group, policy);
    }
  }
};

}  // namespace ridgeline::gemm_digits
