#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/shared_limit.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_tile.cuh"

namespace ridgeline {
namespace {

using namespace attention_tile;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kKeys = config::kKeyTile;

/// Eight warps of 16 rows share a tile of keys; of 256 columns four, so that a warp's sums fit its
/// registers and two blocks an SM.
template <int kDim>
constexpr int kWarps = kDim <= 128 ? 8 : 4;
template <int kDim>
constexpr int kRows = kWarps<kDim> * kWarpRows;
template <int kDim>
constexpr int kThreads = kWarps<kDim> * device::kWarpSize;

// ---- Shared memory ------------------------------------------------------------------------------

template <class T, int kDim>
struct Shared {
  T q[kRows<kDim> * kPitch<kDim>];  // at the end: the output
  T k[kKeys * kPitch<kDim>];
  T v[kKeys * kPitch<kDim>];
  config::KeyRange visible[kRows<kDim>];
};

/// Directly behind Shared where the cache is quantised.
template <int kDim>
struct SharedQuantised {
  char k[kKeys * kDim];
  char v[kKeys * kDim];
  float scale[kKeys];  // of the tile being expanded
};

// ---- Phases -------------------------------------------------------------------------------------

/// The two homes of a tile of K or of V, found from the shared memory's base where they are needed.
template <Part kPart, class T, int kDim>
__device__ __forceinline__ T* tile_of(Shared<T, kDim>& shared) {
  return kPart == Part::kKeys ? shared.k : shared.v;
}

template <Part kPart, class T, int kDim>
__device__ __forceinline__ char* raw_of(Shared<T, kDim>& shared) {
  auto& quantised = *reinterpret_cast<SharedQuantised<kDim>*>(&shared + 1);
  return kPart == Part::kKeys ? quantised.k : quantised.v;
}

template <Part kPart, class T, int kDim>
__device__ __forceinline__ void request_tile(const AttentionParams& p, const Work& work,
                                             Shared<T, kDim>& shared, int n0,
                                             config::KeyRange live) {
  const bool expands = p.k_scale != nullptr;
  char* const tile =
      expands ? raw_of<kPart>(shared) : reinterpret_cast<char*>(tile_of<kPart>(shared));
  const int row_bytes = expands ? kDim : kPitch<kDim> * static_cast<int>(sizeof(T));
#pragma unroll 1
  for (int n = 0; n < kKeys; n += kGroup)
    request_group<kPart, kDim, kThreads<kDim>>(p, work, tile + n * row_bytes, n0 + n, live,
                                               threadIdx.x);
}

/// Waits for a requested tile and expands it if it is quantised. All threads call it; kPending
/// groups of copies may still be under way.
template <Part kPart, int kPending, class T, int kDim>
__device__ __forceinline__ void acquire_tile(const AttentionParams& p, const Work& work,
                                             Shared<T, kDim>& shared, int n0,
                                             config::KeyRange live) {
  ptx::wait_copies<kPending>();
  if (p.k_scale == nullptr) {
    __syncthreads();  // the tile is there for all
    return;
  }
  auto& quantised = *reinterpret_cast<SharedQuantised<kDim>*>(&shared + 1);
  if (threadIdx.x < kKeys)
    quantised.scale[threadIdx.x] = load_scale<kPart>(p, work, n0 + threadIdx.x, live);
  __syncthreads();  // the stored rows and their scales are there for all
  dequantise_tile<T, kDim, kKeys, kThreads<kDim>>(raw_of<kPart>(shared), quantised.scale,
                                                  p.kv_dtype, tile_of<kPart>(shared), threadIdx.x);
  __syncthreads();  // the expanded tile is there for all
}

/// The warp's 16 rows through shared memory, so that each is written in 16-byte pieces.
template <class T, int kDim>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const Work& work,
                                           WarpRows<kDim>& rows, T* tile, int first_row) {
  const int lane = threadIdx.x % device::kWarpSize;
  rows.softmax.join_quad();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + lane / 4 + 8 * r;
    const float sink = sink_of(p, work.head(min(row, work.rows - 1)));
    const device::RowEnd end =
        device::end_of_row(rows.softmax.largest[r], rows.softmax.sum[r], sink);
    if (lane % 4 == 0 && row < work.rows) store_lse(p, work, row, end.lse);
    T* to = tile + (lane / 4 + 8 * r) * kPitch<kDim> + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      *reinterpret_cast<std::uint32_t*>(to + 8 * i) =
          pack<T>(rows.sums[i][2 * r] * end.factor, rows.sums[i][2 * r + 1] * end.factor);
  }
  __syncwarp();  // the warp's rows are in shared memory
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 2
  for (int i = lane; i < kWarpRows * kChunks; i += device::kWarpSize) {
    const int r = i / kChunks, column = i % kChunks * kChunk;
    if (first_row + r >= work.rows || column >= p.head_dim) continue;
    T* to = static_cast<T*>(p.out) + out_offset(p, work, first_row + r) + column;
    device::store(to, device::load(tile + r * kPitch<kDim> + column));
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

struct PrefillParams {
  AttentionParams attention;
  int tiles;  // of kRows rows, of the longest sequence
};

/// Grid: (sequence, KV head, tile of rows), the last rows first: they see the most keys when
/// causal. A block owns kRows rows and walks their visible keys in tiles of 64; a warp owns 16
/// rows. K of the next tile is on its way while the weights meet V, and V while K meets the
/// queries. Sums in fp32 registers.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads<kDim>, 2)
    prefill_kernel(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(memory);
  const AttentionParams& p = params.attention;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int pair = blockIdx.x / params.tiles;
  Work work{
      .batch = pair / p.kv_heads, .kv_head = pair % p.kv_heads, .group = p.heads / p.kv_heads};
  work.sequence = config::sequence_of(p, work.batch);
  work.first_row = (params.tiles - 1 - static_cast<int>(blockIdx.x) % params.tiles) * kRows<kDim>;
  work.rows = work.sequence.q_len * work.group;
  if (config::is_split(p, work.sequence.q_len) || work.first_row >= work.rows) return;

  const int last_row = min(work.first_row + kRows<kDim>, work.rows) - 1;
  const config::KeyRange first_sees =
      config::visible_keys(p, work.sequence, work.query(work.first_row));
  const config::KeyRange last_sees = config::visible_keys(p, work.sequence, work.query(last_row));
  const config::KeyRange live{first_sees.begin, last_sees.end};

  int n0 = live.begin / kKeys * kKeys;
  request_queries<T, kDim, kRows<kDim>, kThreads<kDim>>(p, work, shared.q, threadIdx.x);
  if (n0 < live.end) request_tile<Part::kKeys>(p, work, shared, n0, live);
  ptx::commit_copies();
  if (n0 < live.end) request_tile<Part::kValues>(p, work, shared, n0, live);
  ptx::commit_copies();

  const int warp_row = static_cast<int>(threadIdx.x) / device::kWarpSize * kWarpRows;
  describe_rows<kRows<kDim>>(p, work, shared.visible);
  WarpRows<kDim> rows{shared.visible + warp_row};
  T* const warp_tile = shared.q + warp_row * kPitch<kDim>;
  for (; n0 < live.end; n0 += kKeys) {
    const bool more = n0 + kKeys < live.end;
    acquire_tile<Part::kKeys, 1>(p, work, shared, n0, live);
    float scores[kKeys / 8][4];
    score_tile<T, kDim, kKeys>(warp_tile, shared.k, scores);
    __syncthreads();  // every warp is done with K: the next may land on it
    if (more) request_tile<Part::kKeys>(p, work, shared, n0 + kKeys, live);
    ptx::commit_copies();

    rows.finish_scores(p, scores, n0, n0 >= last_sees.begin && n0 + kKeys <= first_sees.end);
    acquire_tile<Part::kValues, 1>(p, work, shared, n0, live);
    rows.template gather<T, kKeys>(scores, shared.v);
    __syncthreads();  // every warp is done with V
    if (more) request_tile<Part::kValues>(p, work, shared, n0 + kKeys, live);
    ptx::commit_copies();
  }
  ptx::wait_copies<0>();
  __syncthreads();  // no copy is on its way to q, which now takes the output
  store_rows<T, kDim>(p, work, rows, warp_tile, work.first_row + warp_row);
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

namespace attention_launch {

void prefill(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // A head between these is padded with zeros in shared memory: 96 and 192 as well took half of
    // the compiler's time again, for GPUs before Hopper.
    dispatch_at_least<64, 128, 256>(p.head_dim, "attention: head size", [&](auto dim) {
      const std::int64_t rows = std::int64_t{p.max_q} * (p.heads / p.kv_heads);
      PrefillParams params{.attention = p,
                           .tiles = checked_int32(ceil_div<std::int64_t>(rows, kRows<dim>),
                                                  "attention: tiles of a sequence")};
      const std::int64_t blocks = std::int64_t{p.batch} * p.kv_heads * params.tiles;
      const std::size_t shared =
          sizeof(Shared<T, dim>) + (p.k_scale ? sizeof(SharedQuantised<dim>) : 0);
      device::check_shared(shared, "attention: this head size");
      device::launch_chained<prefill_kernel<T, dim>>(
          dim3(checked_int32(blocks, "attention: blocks")), dim3(kThreads<dim>), shared, stream,
          params, "attention");
    });
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
