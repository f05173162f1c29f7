#pragma once
#include <array>

#include "device/properties.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/tensor_map.cuh"
#include "kernels/gemm_grouped_walk.cuh"

/// What the warps do, beside those that multiply, of kernels that stream strips of experts: those
/// that ask for weights, and those that add up sums; and what launches of these kernels share.
namespace ridgeline::gemm_grouped {

// ---- Requests -----------------------------------------------------------------------------------

/// Every `apart`-th chunk of all the block's strips. A step is the same work whether strips have
/// few chunks or many.
struct ChunkSteps {
  const StripLaunch& launch;
  const RowTile* tile;
  int left;          // chunks of the block's from this one on
  int strip, chunk;  // of the tile, of the strip
  int apart, strips_apart, chunks_apart;

  __device__ ChunkSteps(const StripWalk& walk, int first, int apart)
      : launch(walk.launch),
        tile(walk.tiles),
        left(walk.strips * launch.chunks - first),
        strip(walk.item * launch.paired),
        chunk(0),
        apart(apart),
        strips_apart(launch.by_chunks.divide(apart)),
        chunks_apart(apart - strips_apart * launch.chunks) {
    const int strips = launch.by_chunks.divide(first);
    move(strips, first - strips * launch.chunks);
  }

  __device__ void next() {
    left -= apart;
    move(strips_apart, chunks_apart);
  }
  __device__ void move(int strips, int chunks) {
    strip += strips;
    chunk += chunks;
    if (chunk >= launch.chunks) {
      chunk -= launch.chunks;
      ++strip;
    }
    const int of_tile = launch.items * launch.paired;
    for (; strip >= of_tile; strip -= of_tile) ++tile;
  }
  __device__ int weight_row() const {
    const bool up = launch.paired == 2 && strip % 2 == 1;
    return (strip >> (launch.paired - 1)) * kStripRows + (up ? launch.grouped.gemm.N / 2 : 0);
  }
};

/// What a warp does that asks for weights: chunks into every kRequesters-th ring. request(at, ring,
/// stage, parity) waits until the stage is free, and asks for one.
template <class Request>
__device__ __forceinline__ void request_chunks(const StripWalk& walk, int requester, int stages,
                                               Request request) {
  ChunkSteps at(walk, requester, kRequesters);
  int stage = 0, parity = 1;
  while (at.left > 0) {
#pragma unroll 1
    for (int ring = requester; ring < kWarps && at.left > 0; ring += kRequesters, at.next())
      request(at, ring, stage, parity);
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// ---- Sums ---------------------------------------------------------------------------------------

struct SumBarriers {
  std::uint64_t done[kFinishers];  // the warps have left their sums of an item, ...
  std::uint64_t free[kFinishers];  // ... which are added up

  /// One thread calls it.
  __device__ void init(const StripLaunch& launch) {
#pragma unroll
    for (int i = 0; i < kFinishers; ++i) {
      const int warps = (launch.all_wait ? kWarps : min(launch.chunks, kWarps)) * launch.paired;
      ptx::mbarrier_init(&done[i], warps * device::kWarpSize);
      ptx::mbarrier_init(&free[i], device::kWarpSize);
    }
  }

  // A barrier has two phases to tell apart, and a warp that passed over one would take another for
  // it. Where all_wait, every warp calls both for every strip, with sums of it or none.
  __device__ void wait_free(int item) {
    ptx::mbarrier_wait(&free[item % kFinishers], item / kFinishers % 2 ^ 1);
  }
  __device__ void arrive_done(int item) { ptx::mbarrier_arrive(&done[item % kFinishers]); }
};

/// Sums in shared memory: [item % kFinishers][strip of the item][warp][row of x][weight row]. Those
/// of the block's strip `strip`.
__device__ __forceinline__ float* sums_of(float* sums, const StripLaunch& launch, int strip) {
  return sums + (strip & (kFinishers * launch.paired - 1)) * kWarps * kStripRows * launch.row_tile;
}

/// The warps' sums of a strip, the warp first that has its first columns: wherever the strip is in
/// its block, the order is one.
__device__ __forceinline__ float total_of_turns(const float* of_strip, int each, int chunks,
                                                int strip, int i) {
  const int first = strip * chunks % kWarps;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (w < chunks) total += of_strip[(first + w) % kWarps * each + i];
  return total;
}

/// What a warp does that adds up: the outputs of the block's items, every kFinishers-th of them.
template <class T>
__device__ void finish_items(StripWalk walk, SumBarriers& barriers, float* sums, int finisher) {
  const StripLaunch& launch = walk.launch;
  const GemmParams& p = launch.grouped.gemm;
  const int each = kStripRows * launch.row_tile, chunks = launch.chunks;
  const int paired = launch.paired, lane = threadIdx.x % 32;
  const auto skip = [&](int items) {
    for (int i = 0; i < items * paired; ++i) walk.next();
  };
  skip(finisher);
  int tile = -1;
  RowTile rows{};
  float x_scale = 1.0f;  // of the lane's row of the tile
  for (int item = finisher; walk.strips > 0; item += kFinishers, skip(kFinishers)) {
    if (walk.tile != tile) {
      rows = walk.rows();
      if (p.x.scale && !p.x.scale_per_group && lane < rows.count)
        x_scale =
            p.x.scale[p.x.scale_per_row ? row_of_x(launch.grouped, rows.first + lane) : 0];
    }
    tile = walk.tile;
    const int n = walk.weight_row() + lane % kStripRows, strip = item * paired;
    GemmParams of = of_expert<T>(launch.grouped, rows.expert);
    Operands own, up;
    load_of_column<T>(own, of, n);
    if (paired == 2) load_of_column<T>(up, of, n + p.N / 2);
    const float* of_own = sums_of(sums, launch, strip);
    const float* of_up = sums_of(sums, launch, strip + 1);
    ptx::mbarrier_wait(&barriers.done[finisher], item / kFinishers % 2);
    for (int first = 0; first < rows.count * kStripRows; first += device::kWarpSize) {
      const int i = first + lane, m = rows.first + i / kStripRows;
      own.x_scale = up.x_scale = device::from_lane(x_scale, i / kStripRows);
      if (i >= rows.count * kStripRows) continue;
      const float sum = total_of_turns(of_own, each, chunks, strip, i);
      if (paired == 2) {
        finish_gated<T>(p, own, up, sum, total_of_turns(of_up, each, chunks, strip + 1, i), m, n);
      } else {
        finish<T>(p, own, sum, m, n);
      }
    }
    ptx::mbarrier_arrive(&barriers.free[finisher]);
  }
}

// ---- Launch -------------------------------------------------------------------------------------

/// Not where a warp's chunks are so many items apart that its strips use the same barriers in each
/// of their phases. H200, lab, one token of 128 experts, int4, 2048 x 1536 9.2 us and 8.8, 768 x
/// 2048 7.7 and 7.1.
inline bool all_wait(int chunks, int paired) {
  return chunks < kWarps && (kWarps % chunks != 0 || kWarps / chunks > kFinishers * paired);
}

/// Boxes of [experts, rows, columns], elements of 1 or 2 bytes. `sizes` and `box`: from the columns
/// on. `strides`: bytes, of rows and of experts.
inline CUtensorMap experts_map(const void* data, int bytes, std::array<std::int64_t, 3> sizes,
                               std::array<std::int64_t, 2> strides, std::array<int, 2> box,
                               CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE) {
  const auto u64 = [](auto v) { return static_cast<cuuint64_t>(v); };
  const cuuint64_t of[] = {u64(sizes[0]), u64(sizes[1]), u64(sizes[2]), 1};
  const cuuint64_t apart[] = {u64(strides[0]), u64(strides[1]), u64(strides[1] * sizes[2])};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]), 1,
                              1};
  const cuuint32_t ones[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = device::tensor_map_encoder()(
      &map, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 4,
      const_cast<void*>(data), of, apart, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS,
        "grouped_linear: cuTensorMapEncodeTiled refused weights or scales, code ",
        static_cast<int>(result));
  return map;
}

/// A block an SM; a warp takes so many columns of a strip at a time.
inline StripLaunch strip_launch(const GroupedGemmParams& params, const Choice& choice,
                                int chunk_cols) {
  const GemmParams& p = params.gemm;
  const int paired = is_gated(p.activation) ? 2 : 1, items = p.N / kStripRows / paired;
  const int chunks = ceil_div(p.K, chunk_cols), blocks = device::multiprocessors();
  return {.grouped = params,
          .row_tile = choice.tile_rows,
          .items = items,
          .paired = paired,
          .chunks = chunks,
          .listed = static_cast<std::int32_t>(
              most_listed(p.M, params.experts, choice.tile_rows, blocks)),
          .all_wait = all_wait(chunks, paired),
          .by_blocks = device::Divisor::of(blocks),
          .by_items = device::Divisor::of(items),
          .by_chunks = device::Divisor::of(chunks)};
}

}  // namespace ridgeline::gemm_grouped
