#pragma once
#include "device/dequant.cuh"
#include "device/divisor.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// What the kernel that holds x in registers keeps in shared memory, and how weights and x come.
namespace ridgeline::gemm_held {

using namespace gemm_detail;
using gemm_config::kHeldRows, gemm_config::kStripRows;
using T = __nv_bfloat16;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = 16, kMultipliers = kWarps * 32;
constexpr int kFinishers = kHeldRows * kStripRows;  // threads that add up, one an output of a strip
constexpr int kThreads = kMultipliers + kFinishers;
constexpr int kCols = gemm_config::kOnceCols, kBlocks = kCols / Int4Layout::kCols;  // of a warp
constexpr int kSpanCols = 128, kSpans = kCols / kSpanCols;  // that share a scale
constexpr int kStages = gemm_config::kHeldStages, kBuffers = 2;
constexpr int kXPitch = 128 + 16;          // bytes: ldmatrix meets each bank once
constexpr int kSumPitch = kStripRows + 4;  // lanes of a quad: different banks
static_assert(kWarps * kCols == gemm_config::kOnceMostCols);

struct HeldParams {
  GemmParams gemm;
  gemm_strips::StripOrder order;  // of the strips of a block
  device::Divisor group;          // columns that share a scale
  std::int32_t slices;            // of kCols columns, that K has
  std::int32_t blocks;            // of 64 columns, a strip has
};

// ---- Shared memory ------------------------------------------------------------------------------

/// A warp's columns of a strip.
struct Stage {
  uint4 words[kBlocks][32];
  std::uint16_t scales[kSpans][kStripRows];
  std::uint8_t zeros[kSpans][kStripRows];
};
static_assert(sizeof(Stage) == gemm_config::kHeldStageBytes);

struct Shared {
  Stage rings[kWarps][kStages];
  union {
    char x[kHeldRows * kXPitch];  // 64 columns, on their way to the registers that want them
    float sums[kBuffers][kHeldRows][kSumPitch];
  } of[kWarps];
  float squares[kHeldRows][kWarps];  // of x, where it is normalized
  std::uint64_t done[kBuffers];      // every thread that multiplies has left its sums
  std::uint64_t free[kBuffers];      // these sums are added up
};
static_assert(sizeof(Shared) <= gemm_config::kHeldBytes);

// ---- Phases -------------------------------------------------------------------------------------

/// The weight row that strip `strip` of a block begins with.
__device__ __forceinline__ int row_of(const gemm_strips::StripOrder& order, int first, int strip) {
  if (order.paired == 1) return first + strip * kStripRows;
  return first + strip / 2 * kStripRows + strip % 2 * order.up_rows;
}

/// What a lane copies of a warp's stages. A strip's addresses come from those of the one before.
struct Ring {
  Stage* stages;
  const char *words, *scales;  // of the next strip; scales of two lanes zero points
  std::int64_t to_up, to_next;  // bytes of words from an even strip to the odd one after it, and on
  int scales_to_up, scales_to_next;
  int strips, there;  // of the block; blocks of the slice that there are
  bool asks;          // for scales
  int asked = 0;

  __device__ Ring(const HeldParams& params, Stage* stages, int row, int strips, int column,
                  int lane)
      : stages(stages), strips(strips) {
    const GemmParams& p = params.gemm;
    const int first = column / Int4Layout::kCols;
    there = min(kBlocks, params.blocks - first);
    const std::int64_t strip_bytes = std::int64_t{params.blocks} * 512;
    words = static_cast<const char*>(p.weight.data) + row / kStripRows * strip_bytes +
            first * std::int64_t{512} + lane * 16;
    const auto of_span = [&](int span) {
      return std::int64_t{params.group.divide(min(column + span * kSpanCols, p.K - 1))} * p.N + row;
    };
    asks = lane < (p.weight.zeros ? 6 : 4);
    scales = lane < 4 ? static_cast<const char*>(p.weight.scales) + of_span(lane / 2) * 2 +
                            lane % 2 * 16
                      : reinterpret_cast<const char*>(p.weight.zeros) + of_span(lane % 2);
    const int up = row_of(params.order, 0, 1), next = row_of(params.order, 0, 2) - up;
    const int bytes = lane < 4 ? 2 : 1;
    to_up = up / kStripRows * strip_bytes, to_next = next / kStripRows * strip_bytes;
    scales_to_up = up * bytes, scales_to_next = next * bytes;
  }

  /// The next strip's, if there is one; past K zeros, which meet zeros of x.
  __device__ __forceinline__ void request(int lane) {
    if (asked < strips) {
      Stage& stage = stages[asked % kStages];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        ptx::copy_async_16(&stage.words[i][lane], i < there ? words + i * 512 : words, i < there);
      if (asks)
        ptx::copy_async_16(reinterpret_cast<char*>(stage.scales) + lane * 16, scales, true);
      words += asked % 2 == 0 ? to_up : to_next;
      scales += asked % 2 == 0 ? scales_to_up : scales_to_next;
    }
    ++asked;
    ptx::commit_copies();
  }
};

/// A warp's columns of all rows of x, as operands: eight words for each 64 columns.
struct XOfWarp {
  std::uint32_t words[kBlocks][8];
  gemm_strips::Normed<T, 4> norm[kBlocks];

  /// A lane asks for 8 columns of row lane / 8 and of the fourth after it; zeros past M and K.
  __device__ __forceinline__ void load(const GemmParams& p, int column, int lane) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = lane / 8 + j * 4, at = column + i * 64 + lane % 8 * 8;
        uint4 raw{};
        if (m < p.M && at < p.K)
          raw = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) +
                                                      m * p.x.stride_row + at));
        words[i][j * 4] = raw.x, words[i][j * 4 + 1] = raw.y;
        words[i][j * 4 + 2] = raw.z, words[i][j * 4 + 3] = raw.w;
      }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) norm[i].load(p, column + i * 64 + lane % 8 * 8);
  }

  /// Meets the norm's weight, and leaves the sums of the slice's squares.
  __device__ __forceinline__ void normalize(Shared& shared, int warp, int lane) {
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs[k] = words[i][j * 4 + k];
        squares[j] += norm[i].weigh(pairs);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[i][j * 4 + k] = pairs[k];
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float sum = device::group_sum(squares[j], 8);
      if (lane % 8 == 0) shared.squares[lane / 8 + j * 4][warp] = sum;
    }
  }

  /// By way of shared memory, each to the lane whose operand it is.
  __device__ __forceinline__ void arrange(char* x, int lane) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        *reinterpret_cast<uint4*>(x + (lane / 8 + j * 4) * kXPitch + lane % 8 * 16) = {
            words[i][j * 4], words[i][j * 4 + 1], words[i][j * 4 + 2], words[i][j * 4 + 3]};
      __syncwarp();  // 64 columns are there
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t m[4];
        ptx::ldmatrix(m, x + lane % 8 * kXPitch + lane / 8 * 16 + j * 64);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[i][j * 4 + k] = m[k];
      }
      __syncwarp();  // and read
    }
  }
};

}  // namespace ridgeline::gemm_held
