#pragma once
#include <type_traits>

#include "common/math.h"
#include "device/activation_short.cuh"
#include "device/launch.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/matrix_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_config.h"
#include "kernels/gemm_epilogue.cuh"

/// What the Hopper kernels for many rows share: roles of the warps, the ring of stages, the order
/// of the tiles, the way of the sums to y.
namespace ridgeline::gemm_sm90 {

using gemm_config::kMaxSegments;

// ---- Roles and tiles ----------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply; one more brings the operands
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
constexpr int kWarpgroupRows = 64;  // of wgmma's first operand
constexpr int kRowBytes = 128;      // of an operand's row in a stage, with the 128-byte swizzle
constexpr int kOutColumns = 64;     // of y in a box of such rows

/// Which stage comes next, and the parity of its use.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  /// `count` stages on, up to kStages.
  __device__ __forceinline__ void skip(int count) {
    stage += count;
    parity ^= stage >= kStages;
    stage -= stage >= kStages ? kStages : 0;
  }
};

/// The tiles of the product. `together` row tiles, whose rows stay in L2, walk the weight side by
/// side.
struct Tiles {
  std::int32_t along_m, along_n, together;
};

constexpr int kTogether = 8;

struct Place {
  int m, n;
};

__device__ __forceinline__ Place place_of(const Tiles& tiles, int index) {
  const int per_group = tiles.together * tiles.along_n;
  const int first = index / per_group * tiles.together, rest = index % per_group;
  const int side_by_side = min(tiles.together, tiles.along_m - first);
  return {first + rest % side_by_side, rest / side_by_side};
}

/// A tile, or a segment of its columns of K: some stages of them.
struct Work {
  Place place;
  int segment, first_step, steps;
  bool is_tail = false;  // what is left for the block that has the tile's other stages
};

/// What block `index` does where several blocks share a tile.
__device__ __forceinline__ Work segment_of(const Tiles& tiles, int segments, int steps, int index) {
  const auto stages = gemm_config::stages_of(steps, segments, index % segments);
  return {place_of(tiles, index / segments), index % segments, stages.begin, stages.count};
}

/// Calls fn(work) for each tile of this block, or for its segment of one.
template <bool kSplit, class Fn>
__device__ __forceinline__ void for_each_work(const Tiles& tiles, int segments, int steps,
                                              Fn&& fn) {
  const int index = static_cast<int>(blockIdx.x);
  if constexpr (kSplit) {
    fn(segment_of(tiles, segments, steps, index));
  } else {
    const int count = tiles.along_m * tiles.along_n;
    for (int i = index; i < count; i += static_cast<int>(gridDim.x))
      fn(Work{.place = place_of(tiles, i), .steps = steps});
  }
}

/// The thread of a consumer: its warpgroup, its warp in it, its place in a fragment.
struct Consumer {
  int warpgroup, thread, warp, lane, quad, in_quad;

  __device__ __forceinline__ explicit Consumer(int index)
      : warpgroup(index / kWarpgroup - 1),
        thread(index % kWarpgroup),
        warp(thread / device::kWarpSize),
        lane(index % device::kWarpSize),
        quad(lane / 4),
        in_quad(lane % 4) {}

  /// This warpgroup's threads meet.
  __device__ __forceinline__ void meet() const {
    ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
  }

  /// All consumers' threads meet.
  __device__ __forceinline__ static void meet_all() {
    ptx::named_barrier_sync(1 + kConsumers, kConsumers * kWarpgroup);
  }
};

// ---- Epilogue -----------------------------------------------------------------------------------

/// Whether y is the sums with scales and bias.
__host__ __device__ __forceinline__ bool is_plain(const GemmParams& p) {
  return p.activation == Activation::kNone && p.residual == nullptr;
}

/// Two sums rounded to T, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float first, float second) {
  typename device::PairOf<T>::type pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = __floats2half2_rn(first, second);
  } else {
    pair = __floats2bfloat162_rn(first, second);
  }
  return *reinterpret_cast<std::uint32_t*>(&pair);
}

/// A warpgroup's sums where several blocks share a tile: 64 x 64, rows are those of x. Eight
/// columns move as one so that the eight rows of a fragment, by columns or transposed, lie in
/// different banks.
constexpr int kChunk = 64;
struct Chunk {
  float sums[kChunk * kChunk];

  __device__ __forceinline__ float* at(int row, int column) {
    return sums + row * kChunk + ((column / 8 ^ (row + row / 4) % 4) * 8 + column % 8);
  }

  /// Four columns of a row, in each of a cluster's blocks: added in the order of the segments.
  __device__ __forceinline__ device::Vec<float, 4> total(int row, int column, int blocks) {
    device::Vec<float, 4> parts[kMaxSegments];
#pragma unroll
    for (int block = 0; block < kMaxSegments; ++block)
      if (block < blocks) parts[block] = device::load_vec<4>(ptx::in_block(at(row, column), block));
#pragma unroll
    for (int block = 1; block < kMaxSegments; ++block)
      if (block < blocks)
#pragma unroll
        for (int i = 0; i < 4; ++i) parts[0].data[i] += parts[block].data[i];
    return parts[0];
  }
};

/// Which part of y a chunk's rows [begin, end) are; row 0 is y's `row`. Gated, the up sums lie
/// `up_rows` below and `up_columns` right of their gates.
struct Part {
  std::int64_t row;
  int column, begin, end, columns, up_rows, up_columns;
};

constexpr int kEach = 4;  // columns of a row that a thread finishes

/// What the epilogue needs of a column of the sums.
struct Column {
  float scale, bias;

  template <class T>
  __device__ __forceinline__ static Column load(const GemmParams& p, int n) {
    if (n >= p.N) return {0.0f, 0.0f};
    const auto* scales = static_cast<const float*>(p.weight.scales);
    const int at = p.weight.scale_layout == ScaleLayout::kRow ? n : 0;
    return {p.weight.scales_products() ? scales[at] : 1.0f,
            p.bias ? device::to_float(static_cast<const T*>(p.bias)[n]) : 0.0f};
  }
};

/// Scale and bias of a thread's columns: of the gates or of all, and of the up rows.
struct Columns {
  float scale[2][kEach], bias[2][kEach];

  /// From shared memory, those of the thread's first column on.
  __device__ __forceinline__ void take(const Column* gates, const Column* ups) {
#pragma unroll
    for (int up = 0; up < 2; ++up)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        scale[up][i] = (up ? ups : gates)[i].scale;
        bias[up][i] = (up ? ups : gates)[i].bias;
      }
  }
};

/// The chunk's part of y, neighbouring threads on neighbouring columns. Each product and sum is
/// rounded by itself, as `finish` does. sums_at(row, column) gives four sums, residual_at what is
/// added to them if there is a residual. Two rows of a thread hide each other's loads, and are code
/// that a block which runs it once waits for.
template <class T, class SumsAt, class ResidualAt>
__device__ __forceinline__ void finish_chunk(const GemmParams& p, SumsAt&& sums_at,
                                             ResidualAt&& residual_at, const Part& part,
                                             const Columns& columns, int thread) {
  const bool gated = is_gated(p.activation);
  const int per_row = part.columns / kEach, column = thread % per_row * kEach;
  const int out_cols = p.out_cols(), n = part.column + column;
  if (n >= out_cols) return;
#pragma unroll 2
  for (int row = part.begin + thread / per_row; row < part.end; row += kWarpgroup / per_row) {
    const std::int64_t m = part.row + row;
    if (m >= p.M) return;
    const bool scales_row = p.x.scale && !p.x.scale_per_group;
    const float x_scale = scales_row ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
    device::Vec<float, kEach> sums[2];
    sums[0] = sums_at(row, column);
    if (gated) sums[1] = sums_at(row + part.up_rows, column + part.up_columns);
    const auto value = [&](int up, int i) {
      const float sum = __fmul_rn(__fmul_rn(sums[up].data[i], x_scale), columns.scale[up][i]);
      return __fadd_rn(sum, columns.bias[up][i]);
    };
    device::Vec<float, kEach> values;
#pragma unroll
    for (int i = 0; i < kEach; ++i) values.data[i] = value(0, i);
    if (p.activation != Activation::kNone)
      gemm_detail::with_activation(p.activation, [&](auto constant) {
        constexpr auto kActivation = static_cast<Activation>(constant());
#pragma unroll
        for (float& v : values.data) v = gemm_detail::activate<T>(kActivation, v);
      });
    if (gated)
#pragma unroll
      for (int i = 0; i < kEach; ++i) values.data[i] = __fmul_rn(values.data[i], value(1, i));
    if (p.residual) {
      const auto residual = device::floats(residual_at(row, column));
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        values.data[i] = __fadd_rn(values.data[i], residual.data[i]);
    }
    device::store(static_cast<T*>(p.y) + m * out_cols + n, device::rounded<T>(values));
  }
}

/// Four columns of a row of the part's residual, from memory.
template <class T>
__device__ __forceinline__ device::Vec<T, kEach> residual_at(const GemmParams& p, const Part& part,
                                                             int row, int column) {
  return device::load_vec<kEach>(static_cast<const T*>(p.residual) +
                                 (part.row + row) * p.stride_residual + part.column + column);
}

/// What sums meet ahead of their activation: nothing, or a row's and a column's scale, or a bias,
/// too. What they do not meet is an instruction less for each.
enum class Terms : std::uint8_t { kNone, kScales, kScalesAndBias };

/// An epilogue that is known ahead: code of its own, in which sums go from registers to y.
template <Activation kActivation, bool kResidual = false, Terms kTerms_ = Terms::kScalesAndBias>
struct KnownWay {
  static constexpr bool kKnown = true, kPlain = kActivation == Activation::kNone && !kResidual;
  static constexpr Terms kTerms = kTerms_;
  static constexpr Activation activation(const GemmParams&) { return kActivation; }
  static constexpr bool has_residual(const GemmParams&) { return kResidual; }
};

/// Any, by a loop.
struct AnyWay {
  static constexpr bool kKnown = false, kPlain = false;
  static constexpr Terms kTerms = Terms::kScalesAndBias;
  __device__ __forceinline__ static Activation activation(const GemmParams& p) {
    return p.activation;
  }
  __device__ __forceinline__ static bool has_residual(const GemmParams& p) {
    return p.residual != nullptr;
  }
};

/// Replaces each value by fn of it.
template <int kPieces, class Fn>
__device__ __forceinline__ void replace(float (&values)[kPieces][4], Fn&& fn) {
#pragma unroll
  for (auto& piece : values)
#pragma unroll
    for (float& value : piece) value = fn(value);
}

/// The residual as the copy engine sees it, if it can.
inline device::MatrixView residual_of(const GemmParams& p) {
  return {p.residual, 2, p.M, p.out_cols(), p.stride_residual};
}

// ---- Segments of K ------------------------------------------------------------------------------

/// A tile's sums on their way to the other blocks of the cluster, in the memory of the stages.
template <int kChunks>
struct Split {
  Chunk chunks[kChunks][kConsumers];
};

/// Leaves of a chunk the rows that this block of the cluster finishes.
__device__ __forceinline__ void take_share(Part& part, const Work& work, int segments) {
  const int rows = part.end - part.begin, first = part.begin;
  part.begin = first + rows * work.segment / segments;
  part.end = first + rows * (work.segment + 1) / segments;
}

}  // namespace ridgeline::gemm_sm90
