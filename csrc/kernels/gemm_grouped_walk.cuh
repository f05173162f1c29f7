#pragma once
#include "device/divisor.cuh"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// What kernels share that stream strips of 16 weight rows of experts: which strips are a block's,
/// and whose rows of x meet them.
namespace ridgeline::gemm_grouped {

using namespace gemm_strips;

constexpr int kHeld = 4;  // times 32 experts that a walk has in registers
constexpr int kStripWarps = kWarps + kFinishers + kRequesters;
constexpr int kStripThreads = kStripWarps * device::kWarpSize;
static_assert(kRings == kWarps, "each warp that multiplies has one");

struct StripLaunch {
  GroupedGemmParams grouped;
  std::int32_t row_tile;  // rows of x that a strip meets at a time, and that shared memory holds
  std::int32_t items;     // of a row tile: strips, or of gated outputs pairs of them
  std::int32_t paired;    // strips an item is
  std::int32_t chunks;    // of a strip
  std::int32_t listed;    // row tiles that a block may come to
  std::int32_t all_wait;  // warps wait for the sums of strips that they have no columns of, too
  device::Divisor by_blocks, by_items, by_chunks;
};

/// Rows [first, first + count) of y, of one expert.
struct RowTile {
  std::int32_t expert, first, count;
};
static_assert(sizeof(RowTile) == kRowTileBytes);

// ---- Work ---------------------------------------------------------------------------------------

/// What a warp tells the others of its block: how many strips it has, and which item of the list's
/// first tile is the first.
struct alignas(16) Share {
  std::int32_t strips, item;
};

/// A block's strips, one after the other: all strips of a row tile, then those of the next. All
/// strips that have rows are dealt evenly to the blocks.
struct StripWalk {
  const StripLaunch& launch;
  const RowTile* tiles;  // of the block
  int strips;            // that are left
  int tile = 0, item;    // of `tiles`, of its items
  bool up = false;

  __device__ StripWalk(const StripLaunch& launch, const RowTile* list, const Share& share)
      : launch(launch), tiles(list), strips(share.strips), item(share.item) {}

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
    if (several) [[unlikely]] held_tiles = count_tiles(lane);
    const int all = held_tiles * launch.items;
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int share = launch.by_blocks.divide(all), rest = all - share * blocks;
    const int first = block * share + min(block, rest), count = share + (block < rest ? 1 : 0);
    const int first_tile = launch.by_items.divide(first);
    const int end_tile = launch.by_items.divide(first + count + launch.items - 1);
    if (several) [[unlikely]] {
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
#pragma unroll 1
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

/// The rows of x that the lane's of the rows of y are made of. Those of the first 32 are asked for
/// with the experts' rows, on one trip to memory; nothing looks at them before the walk does.
struct LaneRows {
  const GroupedGemmParams& params;
  int early;

  __device__ LaneRows(const GroupedGemmParams& params, int lane)
      : params(params), early(of(min(lane, last()))) {}

  __device__ int last() const { return static_cast<int>(params.gemm.M) - 1; }
  __device__ int of(int row) const { return params.rows ? params.rows[row] : row; }

  __device__ int there(int row) const { return row < 0 || row >= params.x_rows ? 0 : row; }

  /// Of the lane's of the first rows of y.
  __device__ int first_rows() const { return there(early); }

  /// Of the lane's of the rows of y from the walk's tile on.
  __device__ int from(const StripWalk& walk, int lane) const {
    if (walk.strips == 0) return 0;
    const int at = min(walk.rows().first + lane, last());
    return there(last() < device::kWarpSize ? device::from_lane(early, at) : of(at));
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

}  // namespace ridgeline::gemm_grouped
