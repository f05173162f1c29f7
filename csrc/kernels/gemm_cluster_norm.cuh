#pragma once
#include "device/digits.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_cluster_sm90.cuh"

/// rmsnorm folded into the cluster kernel: further warps meet x with the norm's weight, in shared
/// memory and ahead of the warpgroups that multiply, and add up its squares.
namespace ridgeline::gemm_cluster {

/// One of kNormWarps, which take stages by turns and request x for them, and the norm's weight: a
/// load by a lane stands behind the requests of full rings.
template <class T, class Layout>
struct Normalizer {
  static constexpr int kChunks = 2, kOctets = 2;  // of a box: a lane's eights of columns, of rows
  const Producer<Layout>& producer;
  int turn, lane;
  float squares[kOctets] = {};

  /// A lane's chunks of its rows, lane / 4 and the eighth after it. Odd rows begin with the other
  /// half, so that the lanes of two rows, which go to shared memory together, meet in no bank.
  __device__ int chunk_of(int i) const { return lane % 4 + 4 * (i ^ lane / 4 % 2); }

  /// Of a stage's columns, behind the ring.
  __device__ char* weights_of(int stage) const {
    const ClusterParams& params = producer.params;
    return producer.ring + params.stages * params.stage_bytes + stage * Layout::kNormBytes;
  }

  /// A stage's x, swizzled by rows of 128 bytes, of which there are `columns`. With its squares by
  /// mma, beside the warpgroups' products, 16 rows of int4, 4096 x 28672, took 35.3 us for 26.8
  /// (H200; one warp for three).
  __device__ void weigh(char* stage, const char* weights, int columns) {
    const int row = lane / 4;
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box) {
      char* rows = stage + box * producer.params.x_box + row * kRowBytes;
      uint4 x[kChunks][kOctets], by[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int chunk = chunk_of(i), at = box * kRowBytes + chunk * 16;
        by[i] = at < columns * 2 ? *reinterpret_cast<const uint4*>(weights + at) : uint4{};
#pragma unroll
        for (int o = 0; o < kOctets; ++o)
          x[i][o] = *reinterpret_cast<const uint4*>(rows + (chunk ^ row) * 16 + o * 8 * kRowBytes);
      }
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          std::uint32_t pairs[] = {x[i][o].x, x[i][o].y, x[i][o].z, x[i][o].w};
          const std::uint32_t factors[] = {by[i].x, by[i].y, by[i].z, by[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 two = device::floats_of(device::as_pair<T>(pairs[j]));
            squares[o] = fmaf(two.x, two.x, fmaf(two.y, two.y, squares[o]));
            pairs[j] = device::as_bits(
                __hmul2(device::as_pair<T>(pairs[j]), device::as_pair<T>(factors[j])));
          }
          *reinterpret_cast<uint4*>(rows + (chunk_of(i) ^ row) * 16 + o * 8 * kRowBytes) = {
              pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
  }

  __device__ void leave_squares() const {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const float sum = device::group_sum(squares[o], 4);
      if (lane % 4 == 0) producer.fixed.squares_of(turn)[o * 8 + lane / 4] = sum;
    }
  }

  __device__ void request(const RingPlace& place, int i) const {
    const GemmParams& p = producer.params.gemm;
    Fixed& fixed = producer.fixed;
    if (place.round > 0) ptx::mbarrier_wait(&fixed.empty[place.stage], (place.round - 1) % 2);
    typename Producer<Layout>::Step step = producer.step_at(place, i);
    step.full = &fixed.raw[place.stage];
    producer.request_scales(step);
    producer.request_x(step);
    const int bytes = min(Layout::kCols, p.K - step.k0) * static_cast<int>(sizeof(T));
    ptx::mbarrier_expect(step.full, bytes);
    ptx::copy_bulk(weights_of(place.stage), static_cast<const T*>(p.x.norm_weight) + step.k0, bytes,
                   step.full);
  }

  /// What run_x() does, and x, when it is there, by its norm's weight.
  __device__ void run() {
    const ClusterParams& params = producer.params;
    Fixed& fixed = producer.fixed;
    const int count = producer.count;
    // Steps from where x is requested to where it is weighed: most of the ring, for trips to L2;
    // the rest lets it be weighed before the stages ahead of it are free.
    const int lead = max(params.stages / kNormWarps - 1, 1) * kNormWarps;
    RingPlace place, ahead;
    place.advance(turn, params.stages);
    ahead.advance(turn, params.stages);
    const auto request_step = [&](int i) {
      if (i >= count) return;
      request(ahead, i);
      ahead.advance(kNormWarps, params.stages);
    };
    ptx::wait_for_dependencies();
    if (lane == 0)
      for (int i = turn; i < lead; i += kNormWarps) request_step(i);
#pragma unroll 1
    for (int i = turn; i < count; i += kNormWarps, place.advance(kNormWarps, params.stages)) {
      const auto step = producer.step_at(place, i);
      __syncwarp();  // lane 0 has seen the stage's last phase end, or lanes would take that for this
      ptx::mbarrier_wait(&fixed.raw[place.stage], place.round % 2);
      weigh(step.stage, weights_of(place.stage), params.gemm.K - step.k0);
      if (i + kNormWarps >= count) leave_squares();
      ptx::fence_async_shared();
      __syncwarp();  // every lane's part of x is weighed, and its squares are there
      if (lane != 0) continue;
      ptx::mbarrier_arrive(step.full);
      request_step(i + lead);
    }
  }
};

}  // namespace ridgeline::gemm_cluster
