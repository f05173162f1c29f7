#pragma once
#include "device/dequant.cuh"
#include "device/digits.cuh"
#include "device/divisor.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// How x becomes digits in shared memory, in the digits kernel, and where they lie.
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
  device::Divisor by_group;   // chunks of a group
  std::int32_t zeros_at;      // in a stage
  std::int32_t stage_bytes;
  std::int32_t operands_at;   // in shared memory: KeptOperands
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

/// 512 columns of row m of x, finite ones, 16 a lane, as digits in the order of the columns of an
/// int4 block: [block of 64 columns][row][digit][lane % 4][word].
template <class T, int kSpan>
__device__ __forceinline__ void store_digits(const std::uint32_t (&pairs)[8],
                                             std::uint32_t largest, int chunk, int rows, int m,
                                             bool stores, char* x, Span* spans) {
  const int lane = threadIdx.x % 32;
  const auto unit = device::PowerUnit<14>::of(device::group_max(largest, 4 * kSpan), T{});
  char* to = x + (chunk * kChunkBlocks + lane / 4) * block_bytes(rows) + m * kRowBytes +
             lane % 4 * 4;
  int low = 0, high = 0;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float2 near = device::floats_of(device::as_pair<T>(pairs[t]));
    const float2 far = device::floats_of(device::as_pair<T>(pairs[t + 4]));
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
    spans[(chunk * (kChunkBlocks / kSpan) + lane / (4 * kSpan)) * rows + m] = {
        static_cast<float>(sum), unit.unit};
}

/// kRows rows of x from m on, of kChunks chunks, kWarps apart, as digits. False if some were not
/// finite: those count as zero. No branch stands between rows, so that their chains of shuffles
/// overlap.
template <class T, int kSpan, int kRows, int kChunks, class Requested>
__device__ __forceinline__ bool stage_rows(const DigitsParams& params, int chunk, int m, char* x,
                                           Span* spans, Squares& squares, Requested x_requested) {
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
  x_requested();
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
    for (int i = 0; i < kRows; ++i)
      store_digits<T, kSpan>(pairs[c][i], largest[c][i], of, rows, m + i, stores, x, spans);
  }
  return finite;
}

/// A warp's chunks of x: false if it has values that are not finite. Calls x_requested() when the
/// first have been asked for.
template <class T, int kSpan, class Requested>
__device__ __forceinline__ bool stage_x(const DigitsParams& params, int warp, char* x, Span* spans,
                                        Squares& squares, Requested x_requested) {
  bool finite = true;
  int m = 0;
  for (; m + 4 <= params.gemm.M; m += 4)
    for (int chunk = warp; chunk < params.chunks; chunk += kWarps)
      finite &= stage_rows<T, kSpan, 4, 1>(params, chunk, m, x, spans, squares, x_requested);
  for (; m < params.gemm.M; ++m) {
    int chunk = warp;
    if (params.chunks > kWarps)
      for (; chunk < params.chunks; chunk += 4 * kWarps)
        finite &= stage_rows<T, kSpan, 1, 4>(params, chunk, m, x, spans, squares, x_requested);
    else if (chunk < params.chunks)
      finite &= stage_rows<T, kSpan, 1, 1>(params, chunk, m, x, spans, squares, x_requested);
  }
  return finite;
}

}  // namespace ridgeline::gemm_digits
