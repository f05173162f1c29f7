#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/shared_limit.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_split_merge.cuh"
#include "kernels/attention_tile.cuh"

namespace ridgeline {
namespace {

using namespace attention_split;
using namespace attention_tile;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * device::kWarpSize;
static_assert(kWarps * kGroup == config::kKeyTile, "each warp owns one group of a tile's keys");

/// Tiles in flight: two blocks of at most 112 KB an SM up to 128 columns.
template <int kDim>
constexpr int kStages = kDim == 64 ? 4 : kDim == 128 ? 3 : 2;

// ---- Shared memory ------------------------------------------------------------------------------

/// What one warp streams through: its keys and values of a tile.
template <class T, int kDim>
struct Stage {
  T k[kGroup * kPitch<kDim>];
  T v[kGroup * kPitch<kDim>];
};

/// The same as a quantised cache stores it.
template <int kDim>
struct RawStage {
  char k[kGroup * kDim];
  char v[kGroup * kDim];
};

template <class T, int kDim>
struct QuantisedStages {
  RawStage<kDim> raw[kWarps][kStages<kDim>];
  Stage<T, kDim> expanded[kWarps];
};

template <class T, int kDim>
struct Shared {
  T q[kWarpRows * kPitch<kDim>];
  union {
    Stage<T, kDim> stages[kWarps][kStages<kDim>];
    QuantisedStages<T, kDim> quantised;
    float sums[kWarps][kWarpRows][kDim];  // after the last tile
  };
  float scales[kWarps][2][kGroup];
  float largest[kWarps][kWarpRows];
  float total[kWarps][kWarpRows];
  config::KeyRange visible[kWarpRows];
};

// ---- Phases -------------------------------------------------------------------------------------

/// One warp's ring over its group of keys in each tile.
template <class T, int kDim>
struct Ring {
  Shared<T, kDim>& shared;
  bool expands;
  int warp, lane;
  float scale;  // lanes 0-15: of this lane's key in the tile to come; lanes 16-31: of its value

  __device__ __forceinline__ void request(const AttentionParams& p, const Work& work, int stage,
                                          int n0, config::KeyRange live) {
    auto& full = shared.stages[warp][stage];
    auto& raw = shared.quantised.raw[warp][stage];
    void* to_k = expands ? static_cast<void*>(raw.k) : full.k;
    void* to_v = expands ? static_cast<void*>(raw.v) : full.v;
    request_group<Part::kKeys, kDim, device::kWarpSize>(p, work, to_k, n0, live, lane);
    request_group<Part::kValues, kDim, device::kWarpSize>(p, work, to_v, n0, live, lane);
  }

  __device__ __forceinline__ void load_scales(const AttentionParams& p, const Work& work, int n0,
                                              config::KeyRange live) {
    if (!expands) return;
    const int n = n0 + lane % kGroup;
    if (lane < kGroup) {
      scale = load_scale<Part::kKeys>(p, work, n, live);
    } else {
      scale = load_scale<Part::kValues>(p, work, n, live);
    }
  }

  /// The stage as tiles of T; load_scales() has run for it.
  __device__ __forceinline__ Stage<T, kDim>& expand(const AttentionParams& p, int stage) {
    if (!expands) return shared.stages[warp][stage];
    auto& to = shared.quantised.expanded[warp];
    auto& raw = shared.quantised.raw[warp][stage];
    shared.scales[warp][lane / kGroup][lane % kGroup] = scale;
    __syncwarp();  // the scales are there
    dequantise_tile<T, kDim, kGroup, device::kWarpSize>(raw.k, shared.scales[warp][0], p.kv_dtype,
                                                        to.k, lane);
    dequantise_tile<T, kDim, kGroup, device::kWarpSize>(raw.v, shared.scales[warp][1], p.kv_dtype,
                                                        to.v, lane);
    __syncwarp();  // the expanded tiles are there
    return to;
  }
};

/// Leaves each warp's sums in shared memory, relative to the block's largest score, and returns
/// when all are there.
template <class T, int kDim>
__device__ __forceinline__ void share_sums(Shared<T, kDim>& shared, WarpRows<kDim>& rows) {
  const int lane = threadIdx.x % device::kWarpSize, warp = threadIdx.x / device::kWarpSize;
  rows.softmax.join_quad();
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (lane % 4 == 0) shared.largest[warp][lane / 4 + 8 * r] = rows.softmax.largest[r];
  __syncthreads();  // the largest scores are there, and no warp reads its ring any more
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float largest = shared.largest[0][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][row]);
    const float keep = exp2f(rows.softmax.largest[r] - device::exponent_base(largest));
    if (lane % 4 == 0) shared.total[warp][row] = rows.softmax.sum[r] * keep;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      *reinterpret_cast<float2*>(&shared.sums[warp][row][8 * i + lane % 4 * 2]) =
          make_float2(rows.sums[i][2 * r] * keep, rows.sums[i][2 * r + 1] * keep);
  }
  __syncthreads();  // sums and totals are there
}

/// One row of the block: the warps' parts added in their order.
template <class T, int kDim>
__device__ __forceinline__ float4 joined_sums(const Shared<T, kDim>& shared, int row, int column) {
  float4 sum = *reinterpret_cast<const float4*>(&shared.sums[0][row][column]);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float4 part = *reinterpret_cast<const float4*>(&shared.sums[w][row][column]);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}

/// The block's rows: the result if there is one split, a partial otherwise. An empty partial is its
/// lse alone.
template <class T, int kDim>
__device__ __forceinline__ void store_block(const SplitParams& params, const Work& work,
                                            const Shared<T, kDim>& shared, int split, int splits) {
  const AttentionParams& p = params.attention;
  const Partials partials(params);
  const int rows = min(kWarpRows, work.rows - work.first_row), chunks = p.head_dim / 4;
  for (int i = threadIdx.x; i < rows * chunks; i += kThreads) {
    const int r = i / chunks, column = i % chunks * 4, row = work.first_row + r;
    float largest = shared.largest[0][r], total = shared.total[0][r];
#pragma unroll
    for (int w = 1; w < kWarps; ++w)
      largest = fmaxf(largest, shared.largest[w][r]), total += shared.total[w][r];
    const float sink = splits == 1 ? sink_of(p, work.head(row)) : device::kMinusInfinity;
    const device::RowEnd end = device::end_of_row(largest, total, sink);
    const float4 sum = joined_sums(shared, r, column);
    if (splits == 1) {
      store_scaled(static_cast<T*>(p.out) + out_offset(p, work, row) + column, sum, end.factor);
      if (column == 0) store_lse(p, work, row, end.lse);
    } else {
      const std::int64_t index = Partials::index(params, work, row, split);
      if (end.factor != 0.0f)
        store_scaled(partials.out + index * p.head_dim + column, sum, end.factor);
      if (column == 0) partials.lse[index] = end.lse;
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (sequence, KV head, 16 rows, split), and as many blocks once more as a sequence has where
/// rows may belong to no sequence. A block owns 16 rows and the keys of one split; warp w owns keys
/// 16 w ... 16 w + 15 of each tile of 64 and its own ring of stages, so that the loop has no block
/// barrier. The warps' sums meet at the end.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    split_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(memory);
  const AttentionParams& p = params.attention;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int of_pair = params.max_splits * params.row_tiles, of_sequence = of_pair * p.kv_heads;
  Work work{.batch = static_cast<int>(blockIdx.x) / of_sequence, .group = p.heads / p.kv_heads};
  if (work.batch == p.batch) return clear_unowned_rows<T>(p, blockIdx.x % of_sequence, of_sequence);
  work.kv_head = static_cast<int>(blockIdx.x) % of_sequence / of_pair;
  const int split = blockIdx.x % params.max_splits;
  work.sequence = config::sequence_of(p, work.batch);
  work.first_row = static_cast<int>(blockIdx.x) % of_pair / params.max_splits * kWarpRows;
  work.rows = work.sequence.q_len * work.group;
  if (!config::is_split(p, work.sequence.q_len) || work.first_row >= work.rows) return;
  const int k_len = work.sequence.k_len;
  const bool expands = p.k_scale != nullptr;
  const int bytes = expands ? 1 : 2;
  const int splits = config::split_count(p.head_dim, bytes, k_len);
  if (split >= splits) return;

  const int last_row = min(work.first_row + kWarpRows, work.rows) - 1;
  const config::KeyRange first_sees =
      config::visible_keys(p, work.sequence, work.query(work.first_row));
  const config::KeyRange last_sees = config::visible_keys(p, work.sequence, work.query(last_row));
  const int split_keys = config::split_keys(p.head_dim, bytes, k_len);
  // The last split's end is the row's own: 64-bit products are not needed, its begin is below
  // k_len.
  const config::KeyRange live{
      max(first_sees.begin, split * split_keys),
      split == splits - 1 ? last_sees.end : min(last_sees.end, (split + 1) * split_keys)};

  Ring<T, kDim> ring{.shared = shared,
                     .expands = expands,
                     .warp = static_cast<int>(threadIdx.x) / device::kWarpSize,
                     .lane = static_cast<int>(threadIdx.x) % device::kWarpSize,
                     .scale = 0.0f};
  constexpr int kAhead = kStages<kDim> - 1;
  const int first = live.begin / config::kKeyTile * config::kKeyTile + ring.warp * kGroup;
  request_queries<T, kDim, kWarpRows, kThreads>(p, work, shared.q, threadIdx.x);
  ptx::commit_copies();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int n = first + i * config::kKeyTile;
    if (n < live.end) ring.request(p, work, i, n, live);
    ptx::commit_copies();
  }
  ring.load_scales(p, work, first, live);
  describe_rows<kWarpRows>(p, work, shared.visible);
  WarpRows<kDim> rows{shared.visible};
  ptx::wait_copies<kAhead>();
  __syncthreads();  // the queries and what they see are there for all

  int stage = 0, freed = kAhead;
  for (int n = first; n < live.end; n += config::kKeyTile) {
    ptx::wait_copies<kAhead - 1>();
    // The stage is there for the warp, and all its lanes are done with the one before.
    __syncwarp();
    const int ahead = n + kAhead * config::kKeyTile;
    if (ahead < live.end) ring.request(p, work, freed, ahead, live);
    ptx::commit_copies();
    Stage<T, kDim>& tile = ring.expand(p, stage);
    ring.load_scales(p, work, n + config::kKeyTile, live);

    float scores[kGroup / 8][4];
    score_tile<T, kDim, kGroup>(shared.q, tile.k, scores);
    rows.finish_scores(p, scores, n,
                       n >= last_sees.begin && n + kGroup <= min(first_sees.end, live.end));
    rows.template gather<T, kGroup>(scores, tile.v);
    freed = stage;
    stage = stage + 1 == kStages<kDim> ? 0 : stage + 1;
  }
  ptx::wait_copies<0>();
  share_sums<T, kDim>(shared, rows);
  store_block<T, kDim>(params, work, shared, split, splits);
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

namespace attention_launch {

void split(const AttentionParams& p, Stream stream) {
  SplitParams params{
      .attention = p,
      .max_splits = config::max_split_count(p.head_dim, p.k_scale ? 1 : 2, p.max_k),
      .max_rows = std::max(config::max_split_rows(p.max_q, p.heads / p.kv_heads), 1)};
  params.row_tiles = ceil_div(params.max_rows, kWarpRows);
  const std::int64_t of_sequence = std::int64_t{params.max_splits} * params.row_tiles * p.kv_heads;
  const std::int64_t blocks = of_sequence * (p.batch + (p.cu_q != nullptr ? 1 : 0));
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // A head between these is padded with zeros in shared memory alone: no more bytes are read. 96
    // and 192 as well took 43 s to compile for sm_80 and sm_90a, and 25 so.
    dispatch_at_least<64, 128, 256>(p.head_dim, "attention: head size", [&](auto dim) {
      device::check_shared(sizeof(Shared<T, dim>), "attention: this head size");
      device::launch_chained<split_kernel<T, dim>>(dim3(checked_int32(blocks, "attention: blocks")),
                                                   dim3(kThreads), sizeof(Shared<T, dim>), stream,
                                                   params, "attention");
    });
    if (params.max_splits == 1 || p.batch == 0) return;
    const std::int64_t rows = std::int64_t{p.batch} * p.kv_heads * params.max_rows;
    const int grid = checked_int32(ceil_div<std::int64_t>(rows, kCombineRows), "attention: rows");
    device::launch_chained<combine_kernel<T>>(dim3(grid), dim3(kCombineRows * device::kWarpSize), 0,
                                              stream, params, "attention: combine");
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
