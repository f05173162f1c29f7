#include <algorithm>
#include <limits>
#include <numeric>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tensor_map.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_sm90.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kStepBytes = 32;  // 16 columns of an operand, the depth of one wgmma
constexpr int kFirstTurn = 2;   // named barriers: the turns of two warpgroups, ...
constexpr int kOutStored = 4;   // ... the end of a warpgroup's store, ...
constexpr int kValuesCleared = 7;  // ... and of the clearing of unused values

// ---- Consumer -----------------------------------------------------------------------------------

/// What one warpgroup keeps in registers: 64 rows of sums, one tile of scores, and the weights of
/// the tile before as the operand of the second product.
template <class Tile>
struct Consumer {
  using T = typename Tile::T;

  const AttentionParams& p;
  Shared<Tile>& shared;
  Work work;
  device::OnlineSoftmax softmax;
  float sums[Tile::kSize / 8][4];
  float scores[Tile::kKeys / 8][4];
  std::uint32_t weights[Tile::kKeys / 16][4];

  __device__ static int warpgroup() { return static_cast<int>(threadIdx.x) / kWarpgroup - 1; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }
  /// The first of this thread's two rows of the tile; the other is 8 further.
  __device__ static int row() {
    return warpgroup() * kWarpgroupRows + thread() / device::kWarpSize * 16 + lane() / 4;
  }

  /// Two warpgroups take turns: while one feeds the tensor cores, the other takes its softmax.
  __device__ __forceinline__ static void await_turn() {
    if constexpr (Tile::kConsumers == 2)
      ptx::named_barrier_sync(kFirstTurn + warpgroup(), 2 * kWarpgroup);
  }
  __device__ __forceinline__ static void pass_turn() {
    if constexpr (Tile::kConsumers == 2)
      ptx::named_barrier_arrive(kFirstTurn + (warpgroup() ^ 1), 2 * kWarpgroup);
  }

  __device__ __forceinline__ static void release(std::uint64_t* barrier) {
    if (thread() == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    const std::uint64_t q =
        ptx::swizzled_operand(shared.q[0][warpgroup() * kWarpgroupRows], 16, 8 * kRowBytes);
    const std::uint64_t k = ptx::swizzled_operand(shared.k[stage], 16, 8 * kRowBytes);
    constexpr int kSteps = kRowBytes / kStepBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i) {
      const int part = i / kSteps, within = i % kSteps * kStepBytes;
      ptx::WgmmaShared<Tile::kKeys, T>::mma(scores,
                                            q + (part * Tile::kQueries * kRowBytes + within) / 16,
                                            k + (part * Tile::kKeys * kRowBytes + within) / 16,
                                            i != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(int stage) {
    const std::uint64_t v =
        ptx::swizzled_operand(shared.v[stage], Tile::kKeys * kRowBytes, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i)
      ptx::WgmmaRegisters<Tile::kSize, T>::mma(sums, weights[i], v + i * 16 * kRowBytes / 16);
    ptx::wgmma_commit();
  }

  /// Hides what this thread's rows do not see of a tile at an edge.
  __device__ __forceinline__ void mask(int tile) {
    const config::Sequence& s = work.sequence;
    const int first = work.first_query + warpgroup() * kWarpgroupRows;
    const int begin = tile * Tile::kKeys, end = begin + Tile::kKeys;
    const int last = min(first + kWarpgroupRows, s.q_len) - 1;
    if (begin >= config::visible_keys(p, s, last).begin &&
        end <= config::lesser(config::visible_keys(p, s, first).end, s.k_len))
      return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const config::KeyRange sees = config::visible_keys(p, s, work.first_query + row() + 8 * r);
      const int limit = config::lesser(sees.end, s.k_len);
#pragma unroll
      for (int i = 0; i < Tile::kKeys / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int n = begin + 8 * i + lane() % 4 * 2 + c;
          if (n < sees.begin || n >= limit) scores[i][2 * r + c] = device::kMinusInfinity;
        }
    }
  }

  /// Products become weights relative to the largest score so far.
  __device__ __forceinline__ void take_softmax(int tile, float (&keep)[2]) {
    float unit = p.scale * device::kLog2E;
    if (p.softcap > 0.0f) {
      unit = device::kLog2E;
#pragma unroll
      for (auto& piece : scores)
#pragma unroll
        for (float& score : piece) score = device::capped(score * p.scale, p.softcap);
    }
    mask(tile);
    softmax.step(scores, keep, unit);
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&piece)[4] = scores[2 * i + j / 2];
        weights[i][j] = attention_tile::pack<T>(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
      }
  }

  /// Values of slots outside the sequence may be NaN, and 0 * NaN must not reach the sums: they
  /// become zero. All consumers meet here, so none may be holding the turn.
  __device__ __forceinline__ void clear_unused_values(int tile, const Ring& ring) {
    const config::Sequence& s = work.sequence;
    const int begin = tile * Tile::kKeys;
    if (begin + Tile::kKeys <= s.k_len && begin >= s.k_start) return;
    ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.parity);
    constexpr int kChunks = Tile::kSize / 8;
    for (int i = threadIdx.x - kWarpgroup; i < Tile::kKeys * kChunks; i += Tile::kConsumerThreads) {
      const int n = i / kChunks, chunk = i % kChunks;
      if (begin + n >= s.k_start && begin + n < s.k_len) continue;
      auto* piece = &shared.v[ring.stage][chunk / 8][n][chunk % 8 * 8];
      *reinterpret_cast<uint4*>(piece) = uint4{};
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kValuesCleared, Tile::kConsumerThreads);  // all zeros are written
  }

  /// All tiles of the work, the last first. The scores of a tile are on the tensor cores together
  /// with the values of the tile before.
  __device__ __forceinline__ void walk_tiles(Ring& ring) {
    float keep[2];
    int tile = work.last_tile - 1;
    ptx::mbarrier_wait(&shared.k_full[ring.stage], ring.parity);
    await_turn();
    issue_scores(ring.stage);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    release(&shared.k_free[ring.stage]);
    take_softmax(tile, keep);
    round_weights();
    for (--tile; tile >= work.first_tile; --tile) {
      const Ring before = ring;
      ring.next();
      clear_unused_values(tile + 1, before);
      ptx::mbarrier_wait(&shared.k_full[ring.stage], ring.parity);
      await_turn();
      issue_scores(ring.stage);
      ptx::mbarrier_wait(&shared.v_full[before.stage], before.parity);
      issue_values(before.stage);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::hold_registers(scores);
      release(&shared.k_free[ring.stage]);
      take_softmax(tile, keep);
      ptx::wgmma_wait<0>();
      ptx::hold_registers(sums);
      release(&shared.v_free[before.stage]);
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2];
      round_weights();
    }
    if (Tile::kOwnOut) release(&shared.q_free);
    clear_unused_values(work.first_tile, ring);
    ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.parity);
    issue_values(ring.stage);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    release(&shared.v_free[ring.stage]);
    ring.next();
  }

  /// The warp's 16 rows through shared memory, 16-byte pieces swizzled by row, to whole lines.
  __device__ __forceinline__ void store() {
    const attention_tile::Work rows{.sequence = work.sequence, .batch = work.batch,
                                    .kv_head = work.head, .group = 1};
    softmax.join_quad();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int in_tile = row() + 8 * r, query = work.first_query + in_tile;
      const device::RowEnd end = device::end_of_row(softmax.largest[r], softmax.sum[r],
                                                    attention_tile::sink_of(p, work.head));
      if (lane() % 4 == 0 && query < work.sequence.q_len)
        attention_tile::store_lse(p, rows, query, end.lse);
#pragma unroll
      for (int i = 0; i < Tile::kSize / 8; ++i) {
        T* to = shared.out(i / 8, in_tile, ((i % 8) ^ (in_tile % 8)) * 8 + lane() % 4 * 2);
        *reinterpret_cast<std::uint32_t*>(to) = attention_tile::pack<T>(
            sums[i][2 * r] * end.factor, sums[i][2 * r + 1] * end.factor);
      }
    }
    __syncwarp();  // the warp's rows are in shared memory
    const int pieces = p.head_dim / 8, first_row = row() - lane() / 4;
    for (int i = lane(); i < 16 * pieces; i += device::kWarpSize) {
      const int in_tile = first_row + i / pieces, j = i % pieces;
      const int query = work.first_query + in_tile;
      if (query >= work.sequence.q_len) continue;
      const T* from = shared.out(j / 8, in_tile, ((j % 8) ^ (in_tile % 8)) * 8);
      T* to = static_cast<T*>(p.out) + attention_tile::out_offset(p, rows, query) + j * 8;
      device::store(to, device::load(from));
    }
    __syncwarp();  // the rows are read before the next work writes them
  }

  __device__ __forceinline__ void run(Ring& ring, int& q_parity) {
    softmax = {};
#pragma unroll
    for (auto& piece : sums)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
    ptx::mbarrier_wait(&shared.q_full, q_parity);
    q_parity ^= 1;
    const bool sees = work.last_tile > work.first_tile;
    if (sees) walk_tiles(ring);
    store();
    if (Tile::kOwnOut && sees) return;
    if constexpr (!Tile::kOwnOut) {
      ptx::fence_async_shared();
      ptx::named_barrier_sync(kOutStored + warpgroup(), kWarpgroup);  // q is read and written by all
    }
    release(&shared.q_free);
  }
};


// ---- Kernel -------------------------------------------------------------------------------------

/// Prefill on Hopper. Grid: as many blocks as SMs (or one a work). A block owns one tile of queries
/// of one head at a time and walks the keys it sees, the last first. One warp brings tiles by the
/// copy engine; two or three warpgroups of 64 queries each multiply, accumulating in fp32.
///
/// Roofline: 4 * head_dim flops a visible pair: the tensor cores bound it from about 1000 keys on;
/// below, filling and emptying the pipeline of a tile costs as much as its products.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.q_full, 1);
    ptx::mbarrier_init(&shared.q_free, Tile::kConsumers);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.k_full[i], 1);
      ptx::mbarrier_init(&shared.v_full[i], 1);
      ptx::mbarrier_init(&shared.k_free[i], Tile::kConsumers);
      ptx::mbarrier_init(&shared.v_free[i], Tile::kConsumers);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&launch.q);
    ptx::prefetch_tensor_map(&launch.k);
    ptx::prefetch_tensor_map(&launch.v);
  }
  __syncthreads();  // the barriers are made
  ptx::wait_for_dependencies();

  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<Tile::kProducerRegisters>();
    if (threadIdx.x < device::kWarpSize) produce<Tile>(launch, shared);
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    Ring ring;
    int q_parity = 0;
    Consumer<Tile> consumer{launch.attention, shared};
    if (Consumer<Tile>::warpgroup() == 1) Consumer<Tile>::pass_turn();  // warpgroup 0 begins
    for_each_work<Tile>(launch, [&](const Work& work) {
      consumer.work = work;
      consumer.run(ring, q_parity);
    });
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

device::TensorView queries_of(const AttentionParams& p) {
  const bool packed = p.cu_q != nullptr;
  return {.dtype = p.dtype,
          .data = p.q,
          .sizes = {p.head_dim, packed ? p.total_q : p.max_q, p.heads, packed ? 1 : p.batch},
          .strides = {p.stride_q_row, p.stride_q_head, p.stride_q_batch}};
}

device::TensorView cache_of(const AttentionParams& p, const void* data, std::int64_t stride_row,
                            std::int64_t stride_head, std::int64_t stride_batch) {
  const bool paged = p.block_tables != nullptr, packed = p.cu_k != nullptr;
  return {.dtype = p.dtype,
          .data = data,
          .sizes = {p.head_dim, paged ? p.block_size : packed ? p.total_k : p.max_k, p.kv_heads,
                    paged ? p.num_blocks : packed ? 1 : p.batch},
          .strides = {stride_row, stride_head, stride_batch}};
}

device::TensorView keys_of(const AttentionParams& p) {
  return cache_of(p, p.k, p.stride_k_row, p.stride_k_head, p.stride_k_batch);
}

device::TensorView values_of(const AttentionParams& p) {
  return cache_of(p, p.v, p.stride_v_row, p.stride_v_head, p.stride_v_batch);
}

constexpr std::int64_t kCacheBytes = 32 << 20;  // of the L2 cache, for keys and values side by side
constexpr int kShortTiles = 8;  // up to so many tiles of keys the start of a block is what costs

template <class Tile>
void launch_tiles(const AttentionParams& p, Stream stream) {
  Launch launch{.attention = p};
  launch.box_rows = p.block_tables ? std::gcd(p.block_size, Tile::kKeys) : Tile::kKeys;
  launch.boxes = Tile::kKeys / launch.box_rows * Tile::kParts;
  launch.q = device::swizzled_map(queries_of(p), Tile::kQueries);
  launch.k = device::swizzled_map(keys_of(p), launch.box_rows);
  launch.v = device::swizzled_map(values_of(p), launch.box_rows);
  launch.tiles = ceil_div(p.max_q, Tile::kQueries);
  const std::int64_t bytes = std::int64_t{4} * p.max_k * p.head_dim;  // keys and values of a head
  const std::int64_t pairs = std::int64_t{p.heads} * p.batch, group = p.heads / p.kv_heads;
  launch.together = static_cast<int>(std::clamp(kCacheBytes / bytes * group, group, pairs));
  launch.works = checked_int32(pairs * launch.tiles, "attention: tiles of queries");
  // Blocks that stay fetch their next queries early, which pays where works are short or equal;
  // causal works differ, and the hardware hands out short-lived blocks more evenly. H200, TFLOP/s
  // staying / short-lived: head size 128, 512 keys 438 / 385; causal, 16k keys 508 / 588.
  const bool stays = !p.causal || p.max_k <= kShortTiles * Tile::kKeys;
  const int blocks = stays ? std::min(launch.works, device::multiprocessors()) : launch.works;
  device::launch_chained<prefill_sm90_kernel<Tile>>(dim3(blocks), dim3(Tile::kThreads),
                                                    sizeof(Shared<Tile>), stream, launch,
                                                    "attention");
}

}  // namespace

namespace attention_launch {

bool covers_sm90(const AttentionParams& p) {
  return device::runs_sm90a() && p.k_scale == nullptr && p.dtype == p.kv_dtype && p.scale > 0.0f &&
         p.scale < std::numeric_limits<float>::infinity() && device::is_mappable(queries_of(p)) &&
         device::is_mappable(keys_of(p)) && device::is_mappable(values_of(p));
}

void prefill_sm90(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.head_dim <= 64) {
      launch_tiles<Tile<T, 64, 3, 128, true>>(p, stream);
    } else if (p.head_dim <= 128) {
      launch_tiles<Tile<T, 128, 2, 128, true>>(p, stream);
    } else {
      launch_tiles<Tile<T, 256, 2, 80, false>>(p, stream);
    }
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
