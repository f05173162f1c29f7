#pragma once
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_digits_sm90.cuh"
#include "kernels/gemm_grouped_launch.cuh"

/// What a warp of the digits kernel does where weights are experts': which strips are its block's,
/// whose rows of x meet them, and where the sums go.
namespace ridgeline::gemm_grouped {

using namespace gemm_digits;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kMostStages = 4;  // of a warp's ring
constexpr int kFinishers = 4;   // warps that add up sums, each those of an item by turns

struct GroupedDigitsParams {
  DigitsParams digits;  // its M: rows of x that shared memory has room for
  GroupedGemmParams grouped;
  std::int32_t items;   // of a row tile: strips, or of gated outputs pairs of them
  std::int32_t paired;  // strips an item is
  std::int32_t stages;  // of a warp's ring
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them the sums, the spans of x, x, and the tables.
struct GroupedBarriers {
  std::uint64_t full[kWarps][kMostStages];  // a chunk and its scales are in
  std::uint64_t done[kFinishers];           // the warps have left their sums of an item, ...
  std::uint64_t free[kFinishers];           // ... which are added up
};

// ---- Work ---------------------------------------------------------------------------------------

/// Rows of y that belong to one tile.
struct TileRows {
  int first, count;
};

/// A block's strips, one after the other: all strips of a row tile, then those of the next.
struct StripWalk {
  const GroupedDigitsParams& params;
  Tables tables;
  int strips, expert, tile, item;  // strips: those that are left
  bool up = false;

  __device__ StripWalk(const GroupedDigitsParams& params, const Tables& tables)
      : params(params), tables(tables) {
    const int experts = params.grouped.experts;
    const int all = tables.starts[experts] * params.items, blocks = static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x), each = all / blocks, rest = all % blocks;
    const int first = block * each + min(block, rest);
    strips = params.paired * (each + (block < rest ? 1 : 0));
    tile = first / params.items;
    item = first % params.items;
    expert = tables.expert_of(experts, tile);
  }

  __device__ int row() const {
    return item * kStripRows + (up ? params.grouped.gemm.N / 2 : 0);
  }

  __device__ void next() {
    --strips;
    if (params.paired == 2) {
      up = !up;
      if (up) return;
    }
    if (++item < params.items) return;
    item = 0;
    ++tile;
    while (expert + 1 < params.grouped.experts && tables.starts[expert + 1] <= tile) ++expert;
  }

  /// An expert's rows are dealt evenly to its tiles.
  __device__ TileRows rows() const {
    const int first = tables.offsets[expert], all = tables.offsets[expert + 1] - first;
    const int tiles = tables.starts[expert + 1] - tables.starts[expert];
    const int each = ceil_div(all, tiles), at = (tile - tables.starts[expert]) * each;
    return {first + at, min(each, all - at)};
  }

  __device__ const char* weight() const {
    const GroupedGemmParams& p = params.grouped;
    const std::int64_t blocks = ceil_div(p.gemm.K, Int4Layout::kCols);
    return static_cast<const char*>(p.gemm.weight.data) + expert * p.stride_expert +
           row() / kStripRows * blocks * Int4Layout::kWords * 4;
  }
};

/// What one warp requests, in order: chunks of columns, kWarps apart over all strips of the block.
struct GroupedRequests {
  StripWalk walk;
  std::uint64_t policy;
  int chunk;

  __device__ GroupedRequests(const StripWalk& from, int warp)
      : walk(from), policy(ptx::evict_first()), chunk(warp) {
    find_strip();
  }

  __device__ void find_strip() {
    for (; chunk >= walk.params.digits.chunks && walk.strips > 0; walk.next())
      chunk -= walk.params.digits.chunks;
  }

  __device__ void next(char* to, std::uint64_t* full) {
    if (walk.strips == 0) return;
    const DigitsParams& params = walk.params.digits;
    const GemmWeight& weight = params.gemm.weight;
    const int blocks = ceil_div(params.gemm.K, Int4Layout::kCols), row = walk.row();
    const int bytes = min(kChunkBytes, blocks * 512 - chunk * kChunkBytes);
    const int groups = kChunkCols >> params.group_shift;
    ptx::mbarrier_expect(full, bytes + groups * (kScaleBytes + (weight.zeros ? kZeroBytes : 0)));
    ptx::copy_bulk(to, walk.weight() + chunk * kChunkBytes, bytes, full, policy);
    const int group =
        weight.group <= kChunkCols ? chunk * groups : chunk * kChunkCols / weight.group;
    ptx::copy_tensor_4d(to + kChunkBytes, &params.scales, full, row, group, walk.expert, 0, policy);
    if (weight.zeros)
      ptx::copy_tensor_4d(to + params.zeros_at, &params.zeros, full, row, group, walk.expert, 0,
                          policy);
    chunk += kWarps;
    find_strip();
  }
};

// ---- x ------------------------------------------------------------------------------------------

/// kCount chunks of rows of x, kWarps apart, of all chunks of all rows; `row` is the row of x that
/// the lane's row of y is made of. False if some values were not finite: those count as zero.
template <class T, int kSpan, int kCount>
__device__ __forceinline__ bool stage_pieces(const DigitsParams& params, int first, int pieces,
                                             int row, char* x, Span* spans) {
  const int lane = threadIdx.x % 32;
  std::uint32_t pairs[kCount][8], largest[kCount], most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, pieces - 1);
    load_x(params.gemm, device::from_lane(row, piece / params.chunks),
              piece % params.chunks * kChunkCols + lane * 16, pairs[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest[i] = device::largest_magnitude(pairs[i]);
    most = max(most, largest[i]);
  }
  const bool finite = !device::any_lane(most >= device::kNotFinite<T>);
  if (!finite)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      device::drop_not_finite<T>(pairs[i]);
      largest[i] = device::largest_magnitude(pairs[i]);
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, pieces - 1);
    store_digits<T, kSpan>(pairs[i], largest[i], piece % params.chunks,
                           static_cast<int>(params.gemm.M), piece / params.chunks,
                           first + i * kWarps < pieces, x, spans);
  }
  return finite;
}

/// A warp's part of the rows of a tile. All rows' loads but those of many pieces go together.
template <class T, int kSpan>
__device__ __forceinline__ bool stage_tile(const GroupedDigitsParams& params, const TileRows& rows,
                                           int warp, char* x, Span* spans) {
  constexpr int kTogether = 4;
  const int lane = threadIdx.x % 32;
  const int row = static_cast<int>(
      row_of_x(params.grouped, rows.first + min(lane, rows.count - 1)));
  const int pieces = rows.count * params.digits.chunks;
  bool finite = true;
  if (pieces <= kWarps) {
    if (warp < pieces)
      finite = stage_pieces<T, kSpan, 1>(params.digits, warp, pieces, row, x, spans);
  } else {
    for (int piece = warp; piece < pieces; piece += kTogether * kWarps)
      finite &= stage_pieces<T, kSpan, kTogether>(params.digits, piece, pieces, row, x, spans);
  }
  return finite;
}

// ---- Sums ---------------------------------------------------------------------------------------

/// Sums in shared memory: [item % kFinishers][strip of the item][warp][row of x][weight row]. Those
/// of the block's strip `strip`.
__device__ __forceinline__ float* sums_of(float* sums, const GroupedDigitsParams& params,
                                          int strip) {
  return sums + (strip & (kFinishers * params.paired - 1)) * kWarps * sums_each(params.digits.gemm);
}

/// The warps' sums of a strip, the warp first that has its first columns: wherever the strip is in
/// its block, the order is one.
__device__ __forceinline__ float total_of_turns(const float* of_strip, int each, int first,
                                                int i) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += of_strip[(first + w) % kWarps * each + i];
  return total;
}

/// What a warp does that adds up: the outputs of the block's items, every kFinishers-th of them.
template <class T>
__device__ void finish_items(const GroupedDigitsParams& params, StripWalk walk,
                             GroupedBarriers& barriers, float* sums, int finisher) {
  const GemmParams& p = params.grouped.gemm;
  const int each = sums_each(params.digits.gemm), chunks = params.digits.chunks;
  const int paired = params.paired, lane = threadIdx.x % 32;
  const auto* bias = static_cast<const T*>(p.bias);
  const auto skip = [&](int items) {
    for (int i = 0; i < items * paired; ++i) walk.next();
  };
  skip(finisher);
  int tile = -1;
  TileRows rows{};
  for (int item = finisher; walk.strips > 0; item += kFinishers, skip(kFinishers)) {
    if (walk.tile != tile) rows = walk.rows();
    tile = walk.tile;
    const int n = walk.row() + lane % kStripRows, strip = item * paired;
    Operands own, up;
    if (bias) {
      own.bias = device::to_float(bias[std::int64_t{walk.expert} * p.N + n]);
      if (paired == 2)
        up.bias = device::to_float(bias[std::int64_t{walk.expert} * p.N + p.N / 2 + n]);
    }
    const float* of_own = sums_of(sums, params, strip);
    const float* of_up = sums_of(sums, params, strip + 1);
    const int first = strip * chunks % kWarps, first_up = (strip + 1) * chunks % kWarps;
    ptx::mbarrier_wait(&barriers.done[finisher], item / kFinishers % 2);
#pragma unroll 2
    for (int i = lane; i < rows.count * kStripRows; i += 32) {
      const int m = rows.first + i / kStripRows;
      const float sum = total_of_turns(of_own, each, first, i);
      if (paired == 2) {
        finish_gated<T>(p, own, up, sum, total_of_turns(of_up, each, first_up, i), m, n);
      } else {
        finish<T>(p, own, sum, m, n);
      }
    }
    __syncwarp();  // every lane has read the sums
    if (lane == 0) ptx::mbarrier_arrive(&barriers.free[finisher]);
  }
}

}  // namespace ridgeline::gemm_grouped
