#pragma once
#include "device/divisor.cuh"
#include "device/ptx/mbarrier.cuh"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// What kernels share that stream strips of 16 weight rows of experts: which strips are a block's,
/// whose rows of x meet them, and where the sums go.
namespace ridgeline::gemm_grouped {

using namespace gemm_strips;

constexpr int kFinishers = 4;  // warps that add up sums, each those of an item by turns
constexpr int kHeld = 4;       // times 32 experts that a walk has in registers
constexpr int kStripThreads = kThreads + kFinishers * device::kWarpSize;

struct StripLaunch {
  GroupedGemmParams grouped;
  std::int32_t row_tile;  // rows of x that a strip meets at a time, and that shared memory holds
  std::int32_t items;     // of a row tile: strips, or of gated outputs pairs of them
  std::int32_t paired;    // strips an item is
  std::int32_t chunks;    // of a strip
  std::int32_t listed;    // row tiles that a block may come to
  std::int32_t all_wait;  // warps wait for the sums of strips that they have no columns of, too
  device::Divisor by_blocks, by_items;
};

/// Rows [first, first + count) of y, of one expert.
struct RowTile {
  std::int32_t expert, first, count;
};

// ---- Shared memory ------------------------------------------------------------------------------

struct SumBarriers {
  std::uint64_t done[kFinishers];  // the warps have left their sums of an item, ...
  std::uint64_t free[kFinishers];  // ... which are added up

  /// One thread calls it.
  __device__ void init(const StripLaunch& launch) {
#pragma unroll
    for (int i = 0; i < kFinishers; ++i) {
      ptx::mbarrier_init(&done[i], (launch.all_wait ? kWarps : min(launch.chunks, kWarps)) *
                                       launch.paired);
      ptx::mbarrier_init(&free[i], 1);
    }
  }

  // A barrier has two phases to tell apart, and a warp that passed over one would take another for
  // it. Where all_wait, every warp calls both for every strip, with sums of it or none.
  __device__ void wait_free(int item) {
    ptx::mbarrier_wait(&free[item % kFinishers], item / kFinishers % 2 ^ 1);
  }
  __device__ void arrive_done(int item, int lane) {
    if (lane == 0) ptx::mbarrier_arrive(&done[item % kFinishers]);
  }
};

/// Not where a warp's chunks are so many items apart that its strips use the same barriers in each
/// of their phases. H200, lab, one token of 128 experts, int4, 2048 x 1536 9.2 us and 8.8, 768 x
/// 2048 7.7 and 7.1.
inline bool all_wait(int chunks, int paired) {
  return chunks < kWarps && (kWarps % chunks != 0 || kWarps / chunks > kFinishers * paired);
}

inline int bytes_of_sums(const StripLaunch& launch) {
  return kFinishers * launch.paired * kWarps * kStripRows * launch.row_tile * 4;
}
inline int bytes_of_lists(const StripLaunch& launch) {
  return kStripThreads / device::kWarpSize * launch.listed * static_cast<int>(sizeof(RowTile));
}

/// How many row tiles a block may come to, of so many blocks.
inline int most_listed(const GroupedGemmParams& params, int row_tile, int blocks) {
  // Of g experts with rows, each has a tile for its first row; the others fill tiles of row_tile.
  const std::int64_t rows = params.gemm.M, groups = std::min<std::int64_t>(rows, params.experts);
  return static_cast<int>((groups + (rows - groups) / row_tile) / blocks) + 3;
}

// ---- Work ---------------------------------------------------------------------------------------

/// A block's strips, one after the other: all strips of a row tile, then those of the next. All
/// strips that have rows are dealt evenly to the blocks.
struct StripWalk {
  const StripLaunch& launch;
  const RowTile* tiles;  // of the block
  int strips;            // that are left
  int tile = 0, item;    // of `tiles`, of its items
  bool up = false;

  /// All lanes of a warp call it, with a list of its own: the way to the first weights is what few
  /// rows wait for, and a table of all experts in shared memory would be one more trip. Each lane
  /// has every 32nd expert, for reads that go together.
  __device__ StripWalk(const StripLaunch& launch, RowTile* list, int lane)
      : launch(launch), tiles(list) {
    const GroupedGemmParams& p = launch.grouped;
    // As a rule experts have a tile or none, and are few enough for registers: one trip to memory.
    std::int32_t held_first[kHeld], held_rows[kHeld], held_tiles = 0;
    bool several = p.experts > kHeld * device::kWarpSize;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      held_rows[i] = rows_of(i * device::kWarpSize + lane, held_first[i]);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      several |= held_rows[i] > launch.row_tile;
      held_tiles += device::count_lanes(held_rows[i] > 0);
    }
    several = device::any_lane(several);
    if (several) held_tiles = count_tiles(lane);
    const int all = held_tiles * launch.items;
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int share = launch.by_blocks.divide(all), rest = all - share * blocks;
    const int first = block * share + min(block, rest), count = share + (block < rest ? 1 : 0);
    const int first_tile = launch.by_items.divide(first);
    const int end_tile = launch.by_items.divide(first + count + launch.items - 1);
    if (several) {
      list_tiles(list, first_tile, end_tile, lane);
    } else {
      int at = -first_tile;  // of these 32 experts' first tile
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const bool any = held_rows[i] > 0;
        const int mine = at + device::count_lanes_before(any);
        if (any && mine >= 0 && mine < end_tile - first_tile)
          list[mine] = {i * device::kWarpSize + lane, held_first[i], held_rows[i]};
        at += device::count_lanes(any);
      }
    }
    __syncwarp();  // the list is whole
    strips = count * launch.paired;
    item = first - first_tile * launch.items;
  }

  __device__ std::int32_t rows_of(int expert, std::int32_t& first) const {
    first = offset_of(launch.grouped, expert);
    return offset_of(launch.grouped, expert + 1) - first;
  }
  __device__ int tiles_of(std::int32_t rows) const {
    return rows <= launch.row_tile ? (rows > 0 ? 1 : 0) : ceil_div(rows, launch.row_tile);
  }

  /// The tiles of all experts.
  __device__ int count_tiles(int lane) const {
    int mine = 0;
#pragma unroll 4
    for (int e = lane; e < launch.grouped.experts; e += device::kWarpSize) {
      std::int32_t first;
      mine += tiles_of(rows_of(e, first));
    }
    return device::warp_sum(mine);
  }

  /// Tiles [first_tile, end_tile) of all.
  __device__ void list_tiles(RowTile* list, int first_tile, int end_tile, int lane) const {
    int start = 0;  // the first tile of these 32 experts
    for (int e = lane; start < end_tile; e += device::kWarpSize) {
      std::int32_t row;
      const std::int32_t rows = rows_of(e, row);
      const int of_expert = tiles_of(rows);
      const bool alone = !device::any_lane(of_expert > 1);
      const int at = start - first_tile +
                     (alone ? device::count_lanes_before(of_expert > 0)
                            : device::warp_inclusive_sum(of_expert) - of_expert);
      const int dealt = of_expert > 1 ? ceil_div(rows, of_expert) : rows;  // evenly to its tiles
      for (int t = max(-at, 0); t < min(end_tile - first_tile - at, of_expert); ++t)
        list[at + t] = {e, row + t * dealt, min(dealt, rows - t * dealt)};
      start += alone ? device::count_lanes(of_expert > 0) : device::warp_sum(of_expert);
    }
  }

  __device__ RowTile rows() const { return tiles[tile]; }
  __device__ int weight_row() const {
    return item * kStripRows + (up ? launch.grouped.gemm.N / 2 : 0);
  }

  __device__ void next() {
    --strips;
    if (launch.paired == 2) {
      up = !up;
      if (up) return;
    }
    if (++item < launch.items) return;
    item = 0;
    ++tile;
  }

  /// Rows of y that can lie in shared memory together from this tile on, of tiles that are left:
  /// none where none are.
  __device__ int rows_together() const {
    if (strips == 0) return 0;
    const int first = tiles[tile].first;
    int end = first, left = strips + item * launch.paired + (up ? 1 : 0);
    for (int t = tile; left > 0; ++t, left -= launch.items * launch.paired) {
      const int after = tiles[t].first + tiles[t].count;
      if (after - first > launch.row_tile) break;
      end = after;
    }
    return end - first;
  }
};

/// The row of x that the lane's of the rows of y from the walk's tile on is made of; it is asked
/// for ahead of the weights, which take longer.
__device__ __forceinline__ int lane_row(const StripLaunch& launch, const StripWalk& walk,
                                        int lane) {
  if (walk.strips == 0) return 0;
  const auto last = static_cast<std::int32_t>(launch.grouped.gemm.M) - 1;
  return static_cast<int>(row_of_x(launch.grouped, min(walk.rows().first + lane, last)));
}

/// Chunks that one warp takes: kWarps apart over all strips of the block. `chunk` is of the walk's
/// strip, or of one after it.
struct WarpChunks {
  StripWalk walk;
  int chunk;

  __device__ WarpChunks(const StripWalk& walk, int warp) : walk(walk), chunk(warp) { find_strip(); }

  __device__ void next() {
    chunk += kWarps;
    find_strip();
  }
  __device__ void find_strip() {
    for (; chunk >= walk.launch.chunks && walk.strips > 0; walk.next())
      chunk -= walk.launch.chunks;
  }
};

/// Rows of y that belong to no expert.
template <class T>
__device__ __forceinline__ void clear_rows(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  const std::int64_t begin = std::int64_t{offset_of(params, params.experts)} * p.out_cols();
  for (std::int64_t i = begin + std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < p.M * p.out_cols(); i += std::int64_t{gridDim.x} * kThreads)
    static_cast<T*>(p.y)[i] = device::from_float<T>(0.0f);
}

// ---- Sums ---------------------------------------------------------------------------------------

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
      if (p.x.scale && lane < rows.count)
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
    __syncwarp();  // every lane has read the sums
    if (lane == 0) ptx::mbarrier_arrive(&barriers.free[finisher]);
  }
}

}  // namespace ridgeline::gemm_grouped
