#pragma once
#include "device/ptx/cluster_share.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"

/// Reductions over a row whose bits depend on the row alone, not on how many threads share it: the
/// elements of a piece in order, the 32 pieces of a segment in butterfly order, then the segments,
/// which every warp takes from shared memory in one order. So kernels for few and for many rows may
/// deal pieces out as each likes, also to the blocks of a cluster, each of which is sent all
/// segments. A StreamedRow has a segment a warp, of as many pieces as it meets.
namespace ridgeline::device {

constexpr int kMaxSegments = 128;  // 4096 pieces of a HeldRow

struct RowScratch {
  float first[kMaxSegments], second[kMaxSegments];
  std::uint64_t arrived;  // counts the segments' bytes where a cluster shares the row
};

/// Whether a cluster shares the row.
template <class Row>
__device__ __forceinline__ bool is_shared() {
  return Row::kShared && ptx::cluster_blocks() > 1;
}

/// Lets the blocks of the cluster write into each other's scratch, which serves one reduction each.
template <class Row, class... Scratch>
__device__ void open_scratch(Scratch&... scratch) {
  if (!is_shared<Row>()) return;
  if (threadIdx.x == 0) (ptx::init_puts(&scratch.arrived), ...);
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block's barriers are made
}

/// The segments that a row's warps own, kEach each, and their places in scratch.
template <class Row>
struct Segments {
  static constexpr int kEach = Row::kHeld ? Row::kPieces : 1;
  static constexpr int kRounds =
      ceil_div(Row::kMaxThreads * kEach * (Row::kShared ? kMostShares : 1), kWarpSize * kWarpSize);

  __device__ static int warps() { return static_cast<int>(blockDim.x) / kWarpSize; }
  __device__ static int blocks() { return Row::kShared ? ptx::cluster_blocks() : 1; }
  __device__ static int count() { return blocks() * warps() * kEach; }
  __device__ static int number(int each) {
    const int rank = Row::kShared ? ptx::cluster_rank() : 0;
    return first() + (rank * kEach + each) * warps() +
           static_cast<int>(threadIdx.x) / kWarpSize;
  }
  /// The row's first, among those of the block's rows.
  __device__ static int first() {
    return Row::kStacked ? static_cast<int>(threadIdx.y) * count() : 0;
  }
  /// Files a segment's value, which the lanes of `copy` 0, 1, ... all have, and no other lane.
  __device__ static void file(float* segment, float value, int copy, RowScratch& scratch) {
    if (!is_shared<Row>()) {
      if (copy == 0) *segment = value;
    } else if (copy < blocks()) {
      ptx::put_in_block(segment, value, &scratch.arrived, copy);
    }
  }
  /// All segments of `reductions` are filed.
  __device__ static void meet(RowScratch& scratch, int reductions) {
    // Of the rows of a block some may need fewer reductions: their threads end, and a barrier
    // waits for those that have not.
    if (!is_shared<Row>()) return __syncthreads();
    if (threadIdx.x == 0)
      ptx::expect_puts(&scratch.arrived, reductions * count() * static_cast<int>(sizeof(float)));
    ptx::wait_for_puts(&scratch.arrived);
  }
  /// Segment number 32 * round + lane, or `other` beyond the last. The rounds are known in number,
  /// so that their loads are together (H200, bf16 layernorm 1 x 4096: 1.46 us in a loop, 1.29 so).
  __device__ static float of_lane(const float* segments, int round, float other) {
    const int segment = round * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
    return segment < count() ? segments[first() + segment] : other;
  }
};

/// This lane's share of the reduction over all segments.
template <class Op, class Segs>
__device__ float lane_share(const float* segments) {
  float share = Op::identity();
#pragma unroll
  for (int round = 0; round < Segs::kRounds; ++round)
    share = Op::combine(share, Segs::of_lane(segments, round, Op::identity()));
  return share;
}

struct Nothing {
  __device__ void operator()() const {}
};

/// The reduction of of_piece(i, column, piece) over the row's pieces, in every thread.
template <class Op, class Row, class Fn>
__device__ float reduce_row(Row& row, RowScratch& scratch, Fn of_piece) {
  using Segs = Segments<Row>;
  float values[Segs::kEach];
  for (float& value : values) value = Op::identity();
  row.visit_padded([&](int i, int column, const auto& piece, bool inside) {
    const float value = of_piece(i, column, piece);
    values[i] = Row::kHeld ? (inside ? value : Op::identity()) : Op::combine(values[i], value);
  });
  const float value = warp_reduce_each<Op>(values);
  constexpr int kLanes = kWarpSize / Segs::kEach;
  const int lane = threadIdx.x % kWarpSize;
  Segs::file(&scratch.first[Segs::number(lane / kLanes)], value, lane % kLanes, scratch);
  Segs::meet(scratch, 1);
  return warp_reduce<Op>(lane_share<Op, Segs>(scratch.first));
}

/// Two reductions in one pass, at the price of one barrier: of_piece gives a float2. What needs
/// neither result is done `meanwhile`.
template <class First, class Second, class Row, class Fn, class Meanwhile = Nothing>
__device__ float2 reduce_row(Row& row, RowScratch& scratch, Fn of_piece, Meanwhile meanwhile = {}) {
  using Segs = Segments<Row>;
  using Both = Halves<First, Second>;
  constexpr int kEach = Segs::kEach;
  float values[2 * kEach];
  for (int i = 0; i < kEach; ++i)
    values[i] = First::identity(), values[kEach + i] = Second::identity();
  row.visit_padded([&](int i, int column, const auto& piece, bool inside) {
    const float2 value = of_piece(i, column, piece);
    float &first = values[i], &second = values[kEach + i];
    first = Row::kHeld ? (inside ? value.x : First::identity()) : First::combine(first, value.x);
    second =
        Row::kHeld ? (inside ? value.y : Second::identity()) : Second::combine(second, value.y);
  });
  const float value = warp_reduce_each<Both>(values);
  constexpr int kLanes = kWarpSize / 2 / kEach;
  const int lane = threadIdx.x % kWarpSize;
  float* segments = Both::in_second() ? scratch.second : scratch.first;
  Segs::file(&segments[Segs::number(lane / kLanes % kEach)], value, lane % kLanes, scratch);
  meanwhile();
  Segs::meet(scratch, 2);
  float shares[2] = {lane_share<First, Segs>(scratch.first),
                     lane_share<Second, Segs>(scratch.second)};
  const float own = warp_reduce_each<Both>(shares);
  const float other = shuffle_xor(own, kWarpSize / 2);
  return Both::in_second() ? make_float2(other, own) : make_float2(own, other);
}

/// The sum of fn(x) over a row.
template <class Row, class Fn>
__device__ float sum_row(Row& row, RowScratch& scratch, Fn fn) {
  return reduce_row<Sum>(row, scratch, [&](int, int, const auto& piece) {
    float sum = 0.0f;
    for (const float value : floats(piece).data) sum += fn(value);
    return sum;
  });
}

}  // namespace ridgeline::device
