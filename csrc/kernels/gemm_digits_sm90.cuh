#pragma once
#include "device/dequant.cuh"
#include "device/digits.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/mma_int8.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// What a warp of the digits kernel does: where things lie in shared memory, how they come there,
/// and how 16 weight rows meet up to eight rows of x.
namespace ridgeline::gemm_digits {

using namespace gemm_strips;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kStages = 2;  // of a warp's ring
constexpr int kChunkCols = gemm_config::kDigitsCols, kChunkBlocks = kChunkCols / Int4Layout::kCols;
constexpr int kChunkBytes = kChunkBlocks * 512;
constexpr int kTokens = 4;                   // rows of x in a tile, two columns of mma each
constexpr int kScaleBytes = kStripRows * 2;  // of a group: 16 scales, ...
constexpr int kZeroBytes = kStripRows;       // ... and as many zero points
constexpr int kRowBytes = 128;               // of 64 columns of a row of x: two digits each
constexpr int kMagic = 0x4b400000;           // 1.5 * 2^23: an integer added to its bits is added

struct DigitsParams {
  CUtensorMap scales, zeros;
  GemmParams gemm;
  StripOrder order;
  std::int32_t chunks;        // of a strip
  std::int32_t group_shift;   // log2 of the columns that share a scale in a chunk
  std::int32_t zeros_at;      // in a stage
  std::int32_t stage_bytes;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them the sums, the spans of x, and x.
struct Barriers {
  std::uint64_t full[kWarps][kStages];  // a chunk and its scales are in
  StripSums sums;
  Squares squares;
};

/// Of 64 or 128 columns of a row of x.
struct Span {
  float sum;   // of its integers
  float unit;  // of them
};

// ---- Phases -------------------------------------------------------------------------------------

__device__ __forceinline__ bool has_byte_x(const GemmParams& p) {
  return p.x.dtype == DType::kFloat8E4M3;
}

/// 16 columns of a row of x, zero from K on: eight pairs, or e4m3 in the first four words.
__device__ __forceinline__ void load_x(const GemmParams& p, int m, int column,
                                       std::uint32_t (&words)[8]) {
  const bool bytes = has_byte_x(p);
  const char* from = static_cast<const char*>(p.x.data) +
                     (m * p.x.stride_row + column) * (bytes ? 1 : 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 raw{};
    if (column + i * 8 < p.K && !(bytes && i == 1))
      raw = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    words[4 * i] = raw.x, words[4 * i + 1] = raw.y;
    words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
  }
}

/// The pairs of 16 e4m3 values, which take the first four words.
template <class T>
__device__ __forceinline__ void expand_x(std::uint32_t (&words)[8]) {
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    std::uint32_t pairs[2];
    device::convert_e4m3<T>(words[i], pairs);
    words[2 * i] = pairs[0], words[2 * i + 1] = pairs[1];
  }
}

/// Bytes of 64 columns of all rows of x. Blocks start in different banks: a store goes to eight.
__device__ __forceinline__ constexpr int block_bytes(int rows) { return rows * kRowBytes + 16; }

/// kRows rows of x from m on, 512 columns, 16 a lane, of kChunks chunks, kWarps apart, as digits in
/// the order of the columns of an int4 block: [block of 64 columns][row][digit][lane % 4][word].
/// False if some were not finite: those count as zero. No branch stands between rows, so that their
/// chains of shuffles overlap.
template <class T, int kSpan, int kRows, int kChunks>
__device__ __forceinline__ bool stage_rows(const DigitsParams& params, int chunk, int m, char* x,
                                           Span* spans, Squares& squares) {
  const GemmParams& p = params.gemm;
  const int rows = static_cast<int>(p.M), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t pairs[kChunks][kRows][8], largest[kChunks][kRows], most = 0;
  Normed<T, 8> norm[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (chunk + c * kWarps) * kChunkCols + lane * 16;
    norm[c].load(p, column);
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_x(p, m + i, column, pairs[c][i]);
  }
  if (has_byte_x(p))
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kRows; ++i) expand_x<T>(pairs[c][i]);
  if (p.x.norm_weight)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        norm[c].apply(p, pairs[c][i], squares, m + i, warp, lane);
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[c][i] = device::largest_magnitude(pairs[c][i]);
      most = max(most, largest[c][i]);
    }
  const bool finite = !device::any_lane(most >= device::kNotFinite<T>);
  if (!finite)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        device::drop_not_finite<T>(pairs[c][i]);
        largest[c][i] = device::largest_magnitude(pairs[c][i]);
      }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int of = chunk + c * kWarps;
    const bool stores = of < params.chunks;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto unit =
          device::PowerUnit<14>::of(device::group_max(largest[c][i], 4 * kSpan), T{});
      char* to = x + (of * kChunkBlocks + lane / 4) * block_bytes(rows) + (m + i) * kRowBytes +
                 lane % 4 * 4;
      int low = 0, high = 0;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float2 near = device::floats_of(device::as_pair<T>(pairs[c][i][t]));
        const float2 far = device::floats_of(device::as_pair<T>(pairs[c][i][t + 4]));
        const uint2 digits = device::digits_of(near.x, far.x, near.y, far.y, unit.inverse);
        low = __dp4a(static_cast<int>(digits.x), 0x01010101, low);
        high = __dp4a(static_cast<int>(digits.y), 0x01010101, high);
        if (stores) {
          *reinterpret_cast<std::uint32_t*>(to + t * 16) = digits.x;
          *reinterpret_cast<std::uint32_t*>(to + 64 + t * 16) = digits.y;
        }
      }
      const int sum = device::group_sum(high * 256 + low, 4 * kSpan);
      if (stores && lane % (4 * kSpan) == 0)
        spans[(of * (kChunkBlocks / kSpan) + lane / (4 * kSpan)) * rows + m + i] = {
            static_cast<float>(sum), unit.unit};
    }
  }
  return finite;
}

/// A warp's chunks of x: false if it has values that are not finite.
template <class T, int kSpan>
__device__ bool stage_x(const DigitsParams& params, int warp, char* x, Span* spans,
                        Squares& squares) {
  bool finite = true;
  int m = 0;
  for (; m + 4 <= params.gemm.M; m += 4)
    for (int chunk = warp; chunk < params.chunks; chunk += kWarps)
      finite &= stage_rows<T, kSpan, 4, 1>(params, chunk, m, x, spans, squares);
  for (; m < params.gemm.M; ++m) {
    int chunk = warp;
    if (params.chunks > kWarps)
      for (; chunk < params.chunks; chunk += 4 * kWarps)
        finite &= stage_rows<T, kSpan, 1, 4>(params, chunk, m, x, spans, squares);
    else if (chunk < params.chunks)
      finite &= stage_rows<T, kSpan, 1, 1>(params, chunk, m, x, spans, squares);
  }
  return finite;
}

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

/// 512 columns of a strip. sums[tile]: rows lane / 4 and the eighth after it of the weight, by row
/// lane % 4 of the tile of x.
template <class T, int kSpan, int kTiles>
__device__ __forceinline__ void multiply_chunk(const DigitsParams& params, const char* stage,
                                               const XOfLane<kTiles>& x, int chunk,
                                               float (&sums)[kTiles][2], int lane) {
  const int rows = static_cast<int>(params.gemm.M);
#pragma unroll
  for (int span = 0; span < kChunkBlocks / kSpan; ++span) {
    int acc[kTiles][4];
#pragma unroll
    for (int block = span * kSpan; block < (span + 1) * kSpan; ++block) {
      const uint4 raw = *reinterpret_cast<const uint4*>(stage + block * 512 + lane * 16);
      const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      std::uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        device::split_int4(words[i], a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 b = *reinterpret_cast<const uint4*>(
            x.digits[tile] + (chunk * kChunkBlocks + block) * block_bytes(rows));
        int(&c)[4] = acc[tile];
        if (block == span * kSpan) {
          ptx::mma_m16n8k32(c, a[0], b.x, b.y, kMagic, kMagic, kMagic, kMagic);
        } else {
          ptx::mma_m16n8k32(c, a[0], b.x, b.y, c[0], c[1], c[2], c[3]);
        }
        ptx::mma_m16n8k32(c, a[1], b.z, b.w, c[0], c[1], c[2], c[3]);
      }
    }
    const int group = span * kSpan * Int4Layout::kCols >> params.group_shift;
    const T* scales = reinterpret_cast<const T*>(stage + kChunkBytes + group * kScaleBytes) +
                      lane / 4;
    float zero[2] = {Int4Layout::kSymmetricZero, Int4Layout::kSymmetricZero};
    if (params.gemm.weight.zeros) {
      const auto* zeros = reinterpret_cast<const std::uint8_t*>(stage + params.zeros_at +
                                                                group * kZeroBytes) + lane / 4;
      zero[0] = zeros[0], zero[1] = zeros[8];
    }
    const float scale[2] = {device::to_float(scales[0]), device::to_float(scales[8])};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Span of_x = x.spans[tile][(chunk * (kChunkBlocks / kSpan) + span) * rows];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = __int_as_float(acc[tile][2 * i]) - __int_as_float(kMagic);
        const float high = __int_as_float(acc[tile][2 * i + 1]) - __int_as_float(kMagic);
        const float whole = fmaf(high, 256.0f, low);  // of row 8 on, 16 times the sum
        const float power = i == 0 ? 1.0f : 0.0625f;
        const float product = fmaf(-zero[i], of_x.sum, i == 0 ? whole : whole * power);
        sums[tile][i] = fmaf(scale[i] * of_x.unit, product, sums[tile][i]);
      }
    }
  }
}

/// The products of x's values that are not finite with weight row n, in the chunks that the warp
/// staged: what the digits leave out.
template <class T>
__device__ __noinline__ float products_not_finite(const DigitsParams& params, int n, int m,
                                                  int warp) {
  const GemmParams& p = params.gemm;
  const int blocks = ceil_div(p.K, Int4Layout::kCols), group = p.weight.group;
  const auto* strip = static_cast<const std::uint32_t*>(p.weight.data) +
                      static_cast<std::int64_t>(n / kStripRows) * blocks * Int4Layout::kWords;
  float sum = 0.0f;
  for (int chunk = warp; chunk < params.chunks; chunk += kWarps)
    for (int k = chunk * kChunkCols; k < min((chunk + 1) * kChunkCols, p.K); ++k) {
      const std::int64_t x_at = m * p.x.stride_row + k;
      float x = has_byte_x(p)
                    ? device::dequantise(static_cast<const std::uint8_t*>(p.x.data)[x_at],
                                         DType::kFloat8E4M3, 1.0f)
                    : device::to_float(static_cast<const T*>(p.x.data)[x_at]);
      if (p.x.norm_weight)
        x = device::to_float(device::from_float<T>(
            x * device::to_float(static_cast<const T*>(p.x.norm_weight)[k])));
      if (isfinite(x)) continue;
      const std::int64_t at = static_cast<std::int64_t>(k / group) * p.N + n;
      const int zero = p.weight.zeros ? p.weight.zeros[at] : Int4Layout::kSymmetricZero;
      const int q = device::int4_of_block(strip + k / Int4Layout::kCols * Int4Layout::kWords,
                                          n % kStripRows, k % Int4Layout::kCols);
      sum += x * (static_cast<float>(q - zero) *
                  device::to_float(static_cast<const T*>(p.weight.scales)[at]));
    }
  return sum;
}

/// Asks for a chunk of the strip from weight row `row` on, and its scales and zero points.
__device__ __forceinline__ void request_chunk(const DigitsParams& params, int row, int chunk,
                                              char* to, std::uint64_t* full,
                                              std::uint64_t policy) {
  const GemmParams& p = params.gemm;
  const int blocks = ceil_div(p.K, Int4Layout::kCols);
  const int bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
  const auto from = static_cast<std::int64_t>(row / kStripRows) * blocks * 512;
  const int groups = kChunkCols >> params.group_shift;
  ptx::mbarrier_expect(full, bytes + groups * (kScaleBytes + (p.weight.zeros ? kZeroBytes : 0)));
  ptx::copy_bulk(to, static_cast<const char*>(p.weight.data) + from + chunk * kChunkBytes, bytes,
                 full, policy);
  const int group = p.weight.group <= kChunkCols ? chunk * groups
                                                 : chunk * kChunkCols / p.weight.group;
  ptx::copy_matrix(to + kChunkBytes, &params.scales, full, row, group, policy);
  if (p.weight.zeros)
    ptx::copy_matrix(to + params.zeros_at, &params.zeros, full, row, group, policy);
}

struct Requests {
  const DigitsParams& params;
  std::uint64_t policy;
  ChunkWalk walk;

  __device__ Requests(const DigitsParams& params, int warp)
      : params(params), policy(ptx::evict_first()), walk(params.order, params.chunks, warp) {}

  __device__ void next(char* to, std::uint64_t* full) {
    if (walk.strips == 0) return;
    request_chunk(params, walk.row, walk.chunk, to, full, policy);
    walk.next();
  }
};

}  // namespace ridgeline::gemm_digits
