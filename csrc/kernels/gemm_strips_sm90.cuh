#pragma once
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/mma.cuh"
#include "kernels/gemm_strips_stage.cuh"

/// What a warp of the strips kernel does besides: how the weight comes, and how 16 of its rows meet
/// up to eight rows of x.
namespace ridgeline::gemm_strips {

// ---- Phases -------------------------------------------------------------------------------------

/// 16 weight rows by 8 rows of x. Even and odd steps have sums of their own: a product need not
/// wait for the one before.
template <class E>
struct Sums {
  SumOf<E> of[2][4] = {};

  __device__ float get(int i) const { return static_cast<float>(of[0][i] + of[1][i]); }
};

/// 64 columns of bf16, fp16 or pairs of int8, from byte `at` of a row of x.
template <class E>
__device__ void multiply_dense(const char* weight, const char* x, int at, Sums<E>& sums, int lane) {
  const char* row = weight + lane % 16 * kRowBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step)
      ptx::ldmatrix(a[step], row + (((half * 2 + step) * 2 + lane / 16) ^ lane % 8) * 16);
    std::uint32_t b[4];
    ptx::ldmatrix(b, x + at + half * 64);
#pragma unroll
    for (int step = 0; step < 2; ++step)
      ptx::mma_m16n8k16<E>(sums.of[step], a[step], b[2 * step], b[2 * step + 1]);
  }
}

/// A chunk of fp8, whose boxes of 128 columns have sums of their own and go on side by side. Step s
/// multiplies, in thread t of a quad, columns 16 s + 4 t + {0, 1, 2, 3}.
template <class E>
__device__ __forceinline__ void multiply_fp8(const char* weight, const char* x, int at,
                                             Sums<E> (&sums)[kBoxes], int lane) {
  const char* row = weight + lane % 16 * kRowBytes;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    std::uint32_t raw[kBoxes][4];
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::ldmatrix(raw[box], row + box * kBoxBytes + ((pair * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        std::uint32_t low[2], high[2];
        device::convert_e4m3<E>(raw[box][2 * step], low);
        device::convert_e4m3<E>(raw[box][2 * step + 1], high);
        const std::uint32_t a[4] = {low[0], high[0], low[1], high[1]};
        const uint2 b =
            *reinterpret_cast<const uint2*>(x + at + (box * 8 + pair * 2 + step) * 32);
        ptx::mma_m16n8k16<E>(sums[box].of[step], a, b.x, b.y);
      }
  }
}

template <WeightFormat kFormat>
struct Requests {
  const StripsParams& params;
  std::uint64_t policy;
  ChunkWalk walk;

  __device__ Requests(const StripsParams& params, int warp)
      : params(params), policy(ptx::evict_first()), walk(params.order, params.chunks, warp) {}

  /// Asks for the next chunk. All lanes of the warp call it.
  __device__ void next(char* to, std::uint64_t* full) {
    if (walk.strips == 0) return;
    if (ptx::elect_one()) {
      ptx::mbarrier_expect(full, kChunkBytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        ptx::copy_matrix(to + box * kBoxBytes, &params.weight, full,
                         (walk.chunk * kBoxes + box) * kBoxCols<kFormat>, walk.row, policy);
    }
    walk.next();
  }

  /// Asks L2 for the next chunks.
  __device__ void prefetch(int chunks) const {
    ChunkWalk ahead = walk;
#pragma unroll 1
    for (int i = 0; i < chunks && ahead.strips > 0; ++i, ahead.next()) {
      if (!ptx::elect_one()) continue;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        ptx::prefetch_matrix(&params.weight, (ahead.chunk * kBoxes + box) * kBoxCols<kFormat>,
                             ahead.row, policy);
    }
  }
};

}  // namespace ridgeline::gemm_strips
