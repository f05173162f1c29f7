#pragma once
#include "device/dequant.cuh"
#include "device/digits.cuh"
#include "device/launch.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_config.h"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_prefetch.cuh"

/// What kernels that stream strips of 16 weight rows share: the order of a block's strips, and where
/// its warps leave their sums over some of the columns while they go on with the next strip.
namespace ridgeline::gemm_strips {

using gemm_config::kStripRows;
using namespace gemm_detail;

constexpr int kWarps = 8;  // that stage x and multiply, ...
constexpr int kThreads = kWarps * 32;
constexpr int kMostFinishers = 2;  // ... and, at most, that add up
constexpr int kSumBuffers = 2;     // strips whose sums are kept

/// The strips of a block; of gated outputs a gate strip and its up strip come by turns.
struct StripOrder {
  std::int32_t each, rest;  // items of a block; so many blocks have one more
  std::int32_t paired;      // strips an item is: 2 if gated, else 1
  std::int32_t up_rows;     // from a gate row to its up row

  static StripOrder of(const GemmParams& p, int items, int blocks) {
    return {items / blocks, items % blocks, is_gated(p.activation) ? 2 : 1, p.N / 2};
  }
  __device__ int first_row(int block) const {
    return (block * each + min(block, rest)) * kStripRows;
  }
  __device__ int strips(int block) const { return paired * (each + (block < rest ? 1 : 0)); }
  __device__ int next_row(int row, bool up) const {
    if (paired == 1) return row + kStripRows;
    return up ? row + kStripRows - up_rows : row + up_rows;
  }
};

/// What one warp requests, in order: chunks of columns, kWarps apart over all strips of the block,
/// so that no warp has more of them than others where a strip has a number that kWarps does not
/// divide.
struct ChunkWalk {
  const StripOrder& order;
  int chunks, warp, strips, chunk, row;
  bool up;

  __device__ ChunkWalk(const StripOrder& order, int chunks, int warp)
      : order(order), chunks(chunks), warp(warp),
        strips(order.strips(blockIdx.x)), chunk(warp),
        row(order.first_row(blockIdx.x)), up(false) {
    find_strip();
  }

  __device__ void next() {
    chunk += kWarps;
    find_strip();
  }

  __device__ void find_strip() {
    for (; chunk >= chunks && strips > 0; chunk -= chunks, --strips, up = !up)
      row = order.next_row(row, up);
  }
};

// ---- Shared memory of a block -------------------------------------------------------------------

/// Of one row a product with a norm in front takes less: the next one's block then fits beside it,
/// or it beside the one before, and requests its weights while that one waits for x; but two of the
/// next never fit where a block is, for in a layer such products and others come by turns. Up to so
/// many columns, so that the products between have room for their x. H200, lab, a token of 8B
/// products and attention, 200 keys, us, with an SM for each block and so: fp8 2193 and 2157, int4
/// 1474 and 1451, bf16 3569 and 3596, so not where weights keep the bus busy for so much longer.
constexpr int kColumnsOfPairs = 4096;

inline int share_of(const GemmParams& p) {
  const bool pairs = p.M == 1 && p.x.norm_weight != nullptr && p.weights_ready &&
                     p.K <= kColumnsOfPairs && p.weight.format != WeightFormat::kDense;
  return pairs ? gemm_config::kShareOfSm : gemm_config::kShareOfStrips;
}

/// Gives shared memory all that an SM can: left to itself, an SM on which the first block is one
/// that fits once keeps so little that no other joins it. The token above 2381 us, and 2190 so.
template <auto kKernel>
void prefer_shared_memory(const char* what) {
  device::cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared),
                     what);
}

/// Items of a product's strips.
inline int strip_items(const GemmParams& p) {
  return ceil_div(p.N, kStripRows) / (is_gated(p.activation) ? 2 : 1);
}

// ---- rmsnorm of x -------------------------------------------------------------------------------

/// rmsnorm folded into the product: x meets the norm's weight on its way to shared memory, leaves
/// the sums of its squares there, and their root divides the outputs.
constexpr int kMostRows = gemm_config::kStripsRows;

struct Squares {
  float of[kMostRows][kWarps];  // row of x, warp that staged

  /// Each warp clears its own.
  __device__ void clear(int warp, int lane) {
    if (lane < kMostRows && warp < kWarps) of[lane][warp] = 0.0f;
    __syncwarp();  // they are zero
  }
  __device__ float sum(int m) const {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += of[m][w];
    return total;
  }
};

/// What of x and of the norm's weight a lane stages at a time.
template <class T, int kPairs>
struct Normed {
  std::uint32_t weight[kPairs];

  __device__ void load(const GemmParams& p, int column) {
    if (!p.x.norm_weight) return;
    const auto* from = static_cast<const T*>(p.x.norm_weight) + column;
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      uint4 raw{};
      if (column + 2 * i < p.K) raw = __ldg(reinterpret_cast<const uint4*>(from + 2 * i));
      weight[i] = raw.x, weight[i + 1] = raw.y, weight[i + 2] = raw.z, weight[i + 3] = raw.w;
    }
  }

  /// x meets the norm's weight. The sum of the lane's squares.
  __device__ __forceinline__ float weigh(std::uint32_t (&pairs)[kPairs]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 two = device::floats_of(device::as_pair<T>(pairs[i]));
      sum = fmaf(two.x, two.x, fmaf(two.y, two.y, sum));
      pairs[i] = device::as_bits(__hmul2(device::as_pair<T>(pairs[i]),
                                         device::as_pair<T>(weight[i])));
    }
    return sum;
  }

  /// All lanes call it, for row m.
  __device__ __forceinline__ void apply(const GemmParams& p, std::uint32_t (&pairs)[kPairs],
                                        Squares& squares, int m, int warp, int lane) const {
    if (!p.x.norm_weight) return;
    const float sum = device::warp_reduce<device::Sum>(weigh(pairs));
    if (lane == 0) squares.of[m][warp] += sum;
  }
};

// ---- Ahead of the wait --------------------------------------------------------------------------

/// Asks L2 for the norm's weight, which no kernel of the stream writes. One thread calls it.
__device__ __forceinline__ void prefetch_norm(const GemmParams& p) {
  if (p.x.norm_weight && p.weights_ready) ptx::prefetch_l2(p.x.norm_weight, p.K * 2 / 16 * 16);
}

/// What a warp asks for first. Where a kernel ahead may still write the weight, it asks L2 for it,
/// where that kernel's stores go, too, and copies it behind the wait, once it has asked for x.
/// H200, one row, alone, us, without and so: int4 4096 x 4096 5.8 and 5.1, 4096 x 28672 19.1 and
/// 17.2; fp8 by bf16 7.4 and 7.0, 31.4 and 28.9.
template <class Requests>
struct FirstRequests {
  Requests& requests;
  int stages;
  char* ring;
  int stage_bytes;
  std::uint64_t* full;
  bool pending = false;

  /// All lanes of the warp call these.
  __device__ void begin(bool ready) {
    pending = true;
    if (ready) return finish();
    requests.prefetch(stages);
  }
  __device__ void finish() {
    if (!pending) return;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) requests.next(ring + i * stage_bytes, full + i);
    pending = false;
  }
};

// ---- Sums ---------------------------------------------------------------------------------------

/// Warps that add up the sums of a strip: 64 outputs each, or 32 of so few rows that they are all.
inline int finishers_of(const GemmParams& p) {
  return p.M <= 2 ? 1 : kMostFinishers;
}

/// Sums of a strip in shared memory: [strip % kSumBuffers][warp][row of x][weight row]. Warps of
/// their own add them up: where those that multiply took turns at it, each waited for the slowest
/// and was the slowest of the next strip. H200, one row of int4, 4096 x 28672: 19.2 us so, 18.0
/// with one more warp.
struct StripSums {
  std::uint64_t done[kSumBuffers];  // every thread that multiplies has left its sums
  std::uint64_t free[kSumBuffers];  // these sums are added up

  /// One thread calls it.
  __device__ void init() {
#pragma unroll
    for (int i = 0; i < kSumBuffers; ++i) {
      ptx::mbarrier_init(&done[i], kWarps * 32);
      ptx::mbarrier_init(&free[i], static_cast<int>(blockDim.x) - kThreads);
    }
  }

  __device__ void wait_done(int strip) {
    ptx::mbarrier_wait(&done[strip % kSumBuffers], strip / kSumBuffers % 2);
  }
  __device__ void wait_free(int strip) {
    ptx::mbarrier_wait(&free[strip % kSumBuffers], strip / kSumBuffers % 2 ^ 1);
  }
  __device__ void arrive_done(int strip) { ptx::mbarrier_arrive(&done[strip % kSumBuffers]); }
  __device__ void arrive_free(int strip) { ptx::mbarrier_arrive(&free[strip % kSumBuffers]); }
};

/// Sums of a warp, of one strip.
__device__ __forceinline__ int sums_each(const GemmParams& p) {
  return kStripRows * static_cast<int>(p.M);
}
inline int sums_bytes(const GemmParams& p) {
  return kSumBuffers * kWarps * kStripRows * static_cast<int>(p.M) * 4;
}

__device__ __forceinline__ float total_of(const float* sums, int each, int strip, int i) {
  const float* of_strip = sums + strip % kSumBuffers * kWarps * each + i;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += of_strip[w * each];
  return total;
}

}  // namespace ridgeline::gemm_strips
