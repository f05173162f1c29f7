#pragma once
#include "device/reduce.cuh"
#include "device/row.cuh"

/// Reductions over a row whose bits depend on the row alone, not on how many threads share it: the
/// elements of a piece in order, the 32 pieces of a segment in butterfly order, then the segments,
/// which every warp takes from shared memory in one order. So kernels for few and for many rows may
/// deal pieces out as each likes. A StreamedRow has a segment a warp, of as many pieces as it
/// meets.
namespace ridgeline::device {

constexpr int kMaxSegments = 128;  // 4096 pieces of a HeldRow

struct RowScratch {
  float first[kMaxSegments], second[kMaxSegments];
};

/// The segments that a row's warps own, kEach each, and their places in scratch.
template <class Row>
struct Segments {
  static constexpr int kEach = Row::kHeld ? Row::kPieces : 1;

  static constexpr int kRounds = ceil_div(Row::kMaxThreads * kEach, kWarpSize * kWarpSize);

  __device__ static int warps() { return static_cast<int>(blockDim.x) / kWarpSize; }
  __device__ static int count() { return warps() * kEach; }
  __device__ static int number(int each) {
    return each * warps() + static_cast<int>(threadIdx.x) / kWarpSize;
  }
  /// Segment number 32 * round + lane, or `other` beyond the last. The rounds are known in number,
  /// so that their loads are together (H200, bf16 layernorm 1 x 4096: 1.46 us in a loop, 1.29 so).
  __device__ static float of_lane(const float* segments, int round, float other) {
    const int segment = round * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
    return segment < count() ? segments[segment] : other;
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
  if (lane % kLanes == 0) scratch.first[Segs::number(lane / kLanes)] = value;
  __syncthreads();  // every warp's segments are in scratch
  return warp_reduce<Op>(lane_share<Op, Segs>(scratch.first));
}

/// Two reductions in one pass, at the price of one barrier: of_piece gives a float2.
template <class First, class Second, class Row, class Fn>
__device__ float2 reduce_row(Row& row, RowScratch& scratch, Fn of_piece) {
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
  if (lane % kLanes == 0) segments[Segs::number(lane / kLanes % kEach)] = value;
  __syncthreads();  // every warp's segments are in scratch
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
