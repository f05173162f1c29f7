#pragma once
#include "device/ptx/elect.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_cluster_sm90.cuh"

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
  float squares[kOctets][2][4] = {};  // of even and of odd pairs

  /// A lane's chunks of its rows, lane / 4 and the eighth after it. Odd rows begin with the other
  /// half, so that the lanes of two rows, which go to shared memory together, meet in no bank.
  __device__ int chunk_of(int i) const { return lane % 4 + 4 * (i ^ lane / 4 % 2); }

  __device__ static uint4 product(const uint4& a, const uint4& b) {
    const auto of = [](std::uint32_t x, std::uint32_t y) {
      return device::as_bits(__hmul2(device::as_pair<T>(x), device::as_pair<T>(y)));
    };
    return {of(a.x, b.x), of(a.y, b.y), of(a.z, b.z), of(a.w, b.w)};
  }

  /// Adds up squares on the diagonals of products of x with itself. Both rows of a lane's operand
  /// are its own; of pairs that are the second's, sums 2 and 3 count.
  __device__ static void add_squares(const uint4& x, float (&sums)[2][4]) {
    ptx::mma_m16n8k8(sums[0], x.x, x.y, x.x);
    ptx::mma_m16n8k8(sums[1], x.x, x.y, x.y);
    ptx::mma_m16n8k8(sums[0], x.z, x.w, x.z);
    ptx::mma_m16n8k8(sums[1], x.z, x.w, x.w);
  }

  /// A stage's x, swizzled by rows of 128 bytes, of which there are `columns`.
  __device__ void weigh(char* stage, const char* weights, int columns) {
    const int row = lane / 4;
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box) {
      char* rows = stage + box * producer.params.x_box + row * kRowBytes;
      const auto at = [&](int i, int o) {
        return reinterpret_cast<uint4*>(rows + (chunk_of(i) ^ row) * 16 + o * 8 * kRowBytes);
      };
      uint4 by[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        by[i] = *reinterpret_cast<const uint4*>(weights + box * kRowBytes + chunk_of(i) * 16);
#pragma unroll
        for (int o = 0; o < kOctets; ++o) x[box][i][o] = *at(i, o);
      }
      if (columns < Layout::kCols)  // what lies behind the last weights
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
          if (box * 64 + chunk_of(i) * 8 >= columns) by[i] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int o = 0; o < kOctets; ++o) *at(i, o) = product(x[box][i][o], by[i]);
    }
  }

  /// Adds up the squares of what weigh() read.
  __device__ void square() {
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int o = 0; o < kOctets; ++o) add_squares(x[box][i][o], squares[o]);
  }

  /// A row's are in the lane of its quad that has the column of its number.
  __device__ void leave_squares() const {
    const int row = lane / 4;
    if (lane % 4 != row / 2) return;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const float(&sums)[2][4] = squares[o];
      producer.fixed.squares_of(turn)[o * 8 + row] =
          row % 2 == 0 ? sums[0][0] + sums[1][2] : sums[0][1] + sums[1][3];
    }
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
    ptx::named_barrier_arrive(1, kConsumerThreads + kNormWarps * 32);
  }
};

}  // namespace ridgeline::gemm_cluster
