#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>

#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_sm90_consumer.cuh"
#include "kernels/attention_views.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;
using attention_launch::keys_of;
using attention_launch::values_of;

// ---- Kernel -------------------------------------------------------------------------------------

/// Prefill on Hopper. Grid: at most one block an SM. A block takes tiles of queries of one head from
/// the queue and walks the keys each sees, the last first. Two warps bring tiles by the copy engine;
/// two or three warpgroups of 64 queries each multiply, accumulating in fp32.
///
/// Roofline: 4 * head_dim flops a visible pair, on the tensor cores; with short sequences, and many
/// of them, reading and writing each row once comes near it.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (auto& barrier : shared.q_full) ptx::mbarrier_init(&barrier, 2);
    for (int i = 0; i < Tile::kSlots; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.free[i], Tile::kConsumers);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&launch.q);
    ptx::prefetch_tensor_map(&launch.k);
    ptx::prefetch_tensor_map(&launch.v);
  }
  const int warpgroup = device::warp_index() / (kWarpgroup / device::kWarpSize);
  __syncthreads();  // the barriers are made
  ptx::wait_for_dependencies();

  if (warpgroup == 0) {
    ptx::release_registers<Tile::kProducerRegisters>();
    if (threadIdx.x < kProducers) Producer<Tile>{launch, shared}.run();
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    Consumer<Tile>{launch.attention, shared, warpgroup - 1}.run();
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

/// A number that no memory is likely to hold by chance, another one each time.
unsigned long long new_ticket() {
  static std::atomic<unsigned long long> count{static_cast<unsigned long long>(
      std::chrono::steady_clock::now().time_since_epoch().count())};
  unsigned long long x = (count += 0x9e3779b97f4a7c15ull);  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (x ^ (x >> 31)) | 1;  // never 0: so a closed queue is signed
}

constexpr std::int64_t kCacheBytes = 32 << 20;  // of the L2 cache, for keys and values side by side
constexpr int kShort = 4096;  // keys, up to which 128 queries a tile of head size 64 beat 192
constexpr int kSequences = device::kWarpSize;   // side by side at most: one a lane of Order

/// Whose works run side by side: as many as the L2 cache holds the keys and values of. Equal works
/// have no tail to fear, and then two works an SM are enough: more would first ask memory for all keys
/// at once and later for none. H200, full, 1024 keys, head size 128: 504 TFLOP/s with as many as fit,
/// 524 with two.
template <class Tile>
void set_order(const AttentionParams& p, Launch& launch) {
  const std::int64_t keys = p.cu_k ? ceil_div<std::int64_t>(p.total_k, p.batch) : p.max_k;
  const std::int64_t bytes = 4 * std::max<std::int64_t>(keys, 1) * p.head_dim;  // of one KV head
  const std::int64_t group = p.heads / p.kv_heads;
  std::int64_t pairs = std::max<std::int64_t>(kCacheBytes / bytes, 1);
  if (!p.causal) {
    const std::int64_t works = group * ceil_div(p.max_q, Tile::kQueries);
    pairs = std::min(pairs, ceil_div<std::int64_t>(2 * device::multiprocessors(), works));
  }
  const std::int64_t batches = p.cu_q ? kSequences : ceil_div<std::int64_t>(pairs, p.kv_heads);
  launch.batches_together =
      static_cast<int>(std::min<std::int64_t>({batches, p.batch, kSequences}));
  launch.heads_together = static_cast<int>(
      group * std::clamp<std::int64_t>(pairs / launch.batches_together, 1, p.kv_heads));
}

template <class Tile>
void launch_tiles(const AttentionParams& p, Stream stream) {
  Launch launch{.attention = p};
  launch.box_rows = p.block_tables ? std::gcd(p.block_size, Tile::kKeys) : Tile::kKeys;
  launch.boxes = Tile::kKeys / launch.box_rows * Tile::kParts;
  launch.q = device::swizzled_map(queries_of(p), Tile::kQueries);
  launch.k = device::swizzled_map(keys_of(p), launch.box_rows);
  launch.v = device::swizzled_map(values_of(p), launch.box_rows);
  set_order<Tile>(p, launch);
  void* queue = static_cast<char*>(p.workspace) + config::queue_offset(p);
  launch.queue = static_cast<Queue*>(queue);
  launch.ticket = new_ticket();
  const std::int64_t works = std::int64_t{p.heads} * p.batch * ceil_div(p.max_q, Tile::kQueries);
  checked_int32(works, "attention: tiles of queries");  // and so their numbers
  const auto blocks = std::min<std::int64_t>(works, device::multiprocessors());
  device::launch_chained<prefill_sm90_kernel<Tile>>(dim3(static_cast<unsigned>(blocks)),
                                                    dim3(Tile::kThreads), sizeof(Shared<Tile>),
                                                    stream, launch, "attention");
}

}  // namespace

namespace attention_launch {

const char* prefill_obstacle(const AttentionParams& p) { return obstacle_sm90(p, queries_of(p)); }

void prefill_sm90(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // One tile for every length where a row's bits must not depend on the rest.
    if (p.head_dim <= 64 && p.max_k <= kShort && !p.batch_invariant) {
      launch_tiles<Tile<T, 64, 2, 128, 2, 8>>(p, stream);
    } else if (p.head_dim <= 64) {
      launch_tiles<Tile<T, 64, 3, 112, 2, 8>>(p, stream);
    } else if (p.head_dim <= 128) {
      launch_tiles<Tile<T, 128, 2, 128, 2, 5>>(p, stream);
    } else {
      launch_tiles<Tile<T, 256, 2, 64, 1, 5>>(p, stream);
    }
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
