#pragma once
#include "device/ptx/cluster.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_cluster_producer.cuh"

/// rmsnorm folded into the cluster kernel: further warps meet x with the norm's weight, in shared
/// memory and ahead of the warpgroups that multiply, and add up its squares.
namespace ridgeline::gemm_cluster {

/// One of kNormWarps, which has every kNormWarps-th stage of the ring: the phases of a stage are
/// always the same warp's.
template <class T, class Layout>
struct Normalizer {
  static constexpr int kChunks = 2, kOctets = 2;  // of a box: a lane's eights of columns, of rows
  const Producer<Layout>& producer;
  int turn, lane;
  uint4 x[Layout::kXBoxes][kChunks][kOctets];
  float squares[kOctets][2][4] = {};  // of either half of an eight

  /// A lane's chunks of its rows, lane / 4 and the eighth after it. Odd rows begin with the other
  /// half, so that the lanes of two rows, which go to shared memory together, meet in no bank.
  __device__ int chunk_of(int i) const { return lane % 4 + 4 * (i ^ lane / 4 % 2); }

  __device__ static uint4 product(const uint4& a, const uint4& b) {
    const auto of = [](std::uint32_t x, std::uint32_t y) {
      return device::as_bits(__hmul2(device::as_pair<T>(x), device::as_pair<T>(y)));
    };
    return {of(a.x, b.x), of(a.y, b.y), of(a.z, b.z), of(a.w, b.w)};
  }

  /// Adds up squares on the diagonals of products of x with itself: octet `o` of both as 16 rows.
  __device__ static void add_squares(const uint4 (&x)[kOctets], int o, float (&sums)[2][4]) {
    const uint4 &a = x[0], &b = x[1], &by = x[o];
    ptx::mma_m16n8k16<T>(sums[0], {a.x, b.x, a.y, b.y}, by.x, by.y);
    ptx::mma_m16n8k16<T>(sums[1], {a.z, b.z, a.w, b.w}, by.z, by.w);
  }

  /// A stage's x, swizzled by rows of 128 bytes, of which there are `columns`, read whole before
  /// the first is written. H200, us, box by box and so, 4096 x 4096: fp8 6.44 and 6.29, int4 5.61
  /// and 5.43.
  __device__ void weigh(char* stage, const char* weights, int columns) {
    const int row = lane / 4;
    const auto at = [&](int box, int i, int o) {
      char* rows = stage + box * producer.params.x_box + row * kRowBytes;
      return reinterpret_cast<uint4*>(rows + (chunk_of(i) ^ row) * 16 + o * 8 * kRowBytes);
    };
    uint4 by[Layout::kXBoxes][kChunks];
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        by[box][i] = *reinterpret_cast<const uint4*>(weights + box * kRowBytes + chunk_of(i) * 16);
#pragma unroll
        for (int o = 0; o < kOctets; ++o) x[box][i][o] = *at(box, i, o);
      }
    if (columns < Layout::kCols)  // what lies behind the last weights
#pragma unroll
      for (int box = 0; box < Layout::kXBoxes; ++box)
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
          if (box * 64 + chunk_of(i) * 8 >= columns) by[box][i] = {};
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int o = 0; o < kOctets; ++o) *at(box, i, o) = product(x[box][i][o], by[box][i]);
  }

  /// Adds up the squares of what weigh() read.
  __device__ void square() {
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int o = 0; o < kOctets; ++o) add_squares(x[box][i], o, squares[o]);
  }

  /// Where a warp leaves its sums: the norm's weight of a stage of its own, which it has read.
  __device__ float* sums_of(int warp) const {
    return reinterpret_cast<float*>(producer.norm_at(warp));
  }

  /// A row's are in the lane of its quad that has the column of its number.
  __device__ void leave_squares() const {
    const int row = lane / 4;
    if (lane % 4 != row / 2) return;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const float(&sums)[2][4] = squares[o];
      sums_of(turn)[o * 8 + row] = row % 2 == 0 ? sums[0][o * 2] + sums[1][o * 2]
                                                : sums[0][o * 2 + 1] + sums[1][o * 2 + 1];
    }
  }

  /// Squares of the block's columns to the cluster, ahead of the sums. One warp calls it.
  __device__ void send_squares() const {
    constexpr int kPieces = gemm_config::kNormRows / 4;
    static_assert(gemm_config::kMaxSegments * kPieces <= 32);
    Fixed& fixed = producer.fixed;
    const int block = lane / kPieces, piece = lane % kPieces;
    float4 total{};
#pragma unroll
    for (int w = 0; w < kNormWarps; ++w) {
      const float4 part = reinterpret_cast<const float4*>(sums_of(w))[piece];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    float4* to = reinterpret_cast<float4*>(fixed.squares_of(blockIdx.x)) + piece;
    if (gridDim.x > 1) ptx::cluster_wait();  // the barriers of all blocks are made
    if (block == blockIdx.x) {
      *to = total;
    } else if (block < gridDim.x) {
      ptx::put_in_block(to, total, &fixed.squared, block);
    }
    __syncwarp();  // the block's own are there
    if (lane == 0) ptx::mbarrier_arrive(&fixed.squared);
  }

  /// Requests its stages of the first round, then the norm's weight a round ahead, which no other
  /// warp reads, and weighs x.
  __device__ void run() {
    const int count = producer.count, stages = producer.params.stages;
    ptx::wait_for_dependencies();
    if (ptx::elect_one())
      for (int i = turn; i < min(stages, count); i += kNormWarps) {
        const auto step = producer.step_at(i, i);
        producer.request_x(producer.x_at(i), step);
        producer.request_norm(step);
      }
    __syncwarp();
    RingPlace place{turn, 0};
#pragma unroll 1
    for (int i = turn; i < count;) {
      const auto step = producer.step_at(place.stage, i);
      ptx::mbarrier_wait(step.x_full, place.round % 2);
      weigh(producer.x_at(place.stage), step.norm, producer.params.gemm.K - step.k0);
      ptx::fence_async_shared();
      __syncwarp();  // every lane's part of x is weighed
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive(step.full);
        if (i + stages < count) producer.request_norm(producer.step_at(place.stage, i + stages));
      }
      square();
      place.stage += kNormWarps, i += kNormWarps;
      if (place.stage >= stages) {
        i += turn + stages - place.stage;
        place = {turn, place.round + 1};
      }
    }
    leave_squares();
    ptx::named_barrier_sync(4, kNormWarps * 32);  // all warps have left theirs
    if (turn == 0) send_squares();
  }
};

}  // namespace ridgeline::gemm_cluster
