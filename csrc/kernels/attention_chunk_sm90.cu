#include "kernels/attention_rows_merge.cuh"
#include "kernels/attention_sm90_kernel.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Kernel -------------------------------------------------------------------------------------

constexpr int kMergeWarps = 4;
constexpr int kMergeThreads = kMergeWarps * device::kWarpSize;
constexpr int kMergeBlocks = 8;  // an SM

/// Joins segments, in their order. Grid: warps, which share out the rows of all sequences.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_chunks_kernel(const __grid_constant__ AttentionParams p) {
  using attention_rows::JoinedRow;
  ptx::launch_dependents();
  ptx::fence_device();  // L1 may have lengths of a step before
  Looked looked;
  looked.look(p, 0);
  ptx::wait_for_dependencies();  // all segments are done
  const Partials partials{p};
  const int warps = static_cast<int>(gridDim.x) * kMergeWarps;
  int row = static_cast<int>(blockIdx.x) * kMergeWarps + device::warp_index();  // of all cut ones
  const int column = JoinedRow::lane() * 4, here = min(column, p.head_dim - 4);
  for (int first = 0; first < p.batch; first += device::kWarpSize) {
    if (first > 0) looked.look(p, first);
    unsigned cut = __ballot_sync(0xffffffffu, looked.segments > 1);
    for (; cut != 0; cut &= cut - 1) {
      const int lane = __ffs(static_cast<int>(cut)) - 1, batch = first + lane;
      const int count = device::from_lane(looked.segments, lane);
      const int rows = device::from_lane(looked.sequence.q_len, lane) * p.heads;
      const std::int64_t begin = device::from_lane(static_cast<int>(looked.sequence.q_begin), lane);
      for (; row < rows; row += warps) {
        const int head = row % p.heads;
        const std::int64_t token = begin + row / p.heads;
        const std::int64_t index = partials.index(batch, token, head, 0);
        const float* const from[1] = {partials.sums(index) + here};
        float lse[JoinedRow::kPerLane];
        attention_rows::load_lse(partials.lse(index), partials.step(), count, lse);
        JoinedRow joined[1];
        float4 sums[1];
        attention_rows::add_splits(joined, from, partials.step() * p.head_dim, count,
                                   [&] { joined[0].weigh(lse); }, sums);
        const device::RowEnd end = device::end_of_row(joined[0].largest, joined[0].total,
                                                      attention_tile::sink_of(p, head));
        T* out = static_cast<T*>(p.out) + batch * p.stride_out_batch +
                 (token * p.heads + head) * p.head_dim;
        if (column < p.head_dim) attention_tile::store_scaled(out + column, sums[0], end.factor);
        if (column == 0)
          p.lse[batch * p.stride_lse_batch + head * p.stride_lse_head + token] = end.lse;
      }
      row -= rows;
    }
  }
}

// ---- Launch -------------------------------------------------------------------------------------

/// {columns, heads, tokens, sequences}.
device::TensorView tokens_of(const AttentionParams& p) {
  const bool packed = p.cu_q != nullptr;
  return {.dtype = p.dtype,
          .data = p.q,
          .sizes = {p.head_dim, p.heads, packed ? p.total_q : p.max_q, packed ? 1 : p.batch},
          .strides = {p.stride_q_head, p.stride_q_row, p.stride_q_batch}};
}

template <class Tile>
void launch_segments(const AttentionParams& p, Stream stream) {
  Launch launch = launch_of<Tile>(p);
  launch.group = p.heads / p.kv_heads;
  launch.tokens = config::kChunkRows / launch.group;
  launch.q = device::swizzled_map(tokens_of(p), launch.group, Tile::kColumns,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, launch.tokens);
  device::launch_chained<prefill_sm90_kernel<Tile>>(
      dim3(static_cast<unsigned>(device::multiprocessors())), dim3(Tile::kThreads),
      sizeof(Shared<Tile>), stream, launch, "attention");
}

}  // namespace

namespace attention_launch {

void chunks_sm90(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.head_dim <= 64) {
      launch_segments<PackedTile<T, 64, 8>>(p, stream);
    } else {
      launch_segments<PackedTile<T, 128, 5>>(p, stream);
    }
    const std::int64_t rows = config::all_queries(p) * p.heads;
    const auto merge = std::min<std::int64_t>(ceil_div<std::int64_t>(rows, kMergeWarps),
                                              kMergeBlocks * device::multiprocessors());
    device::launch_chained<merge_chunks_kernel<T>>(dim3(static_cast<unsigned>(merge)),
                                                   dim3(kMergeThreads), 0, stream, p,
                                                   "attention: combine");
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
