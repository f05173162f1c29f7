#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_sm90_consumer.cuh"
#include "kernels/attention_sm90_launch.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Kernel -------------------------------------------------------------------------------------

/// Prefill on Hopper. Grid: at most one block an SM. A block takes tiles of queries of one head
/// from the queue and walks the keys each sees, the last first. Two warps bring tiles by the copy
/// engine; two or three warpgroups of 64 queries each multiply, accumulating in fp32.
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
    if (threadIdx.x < kProducers) {
      Producer<Tile>{launch, shared}.run();
    } else if (launch.attention.takes_few) {
      clear_unowned_rows<typename Tile::T>(launch.attention);
    }
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    Consumer<Tile>{launch.attention, shared, warpgroup - 1}.run();
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

constexpr int kShort = 4096;  // keys, up to which 128 queries a tile of head size 64 beat 192

template <class Tile>
void launch_tiles(const AttentionParams& p, Stream stream) {
  launch_works<prefill_sm90_kernel<Tile>, Tile>(p, stream);
}

}  // namespace

namespace attention_launch {

const char* prefill_obstacle(const AttentionParams& p) { return obstacle_sm90(p, queries_of(p)); }

void prefill_sm90(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // One tile for every length where a row's bits must not depend on the rest.
    if (p.head_dim <= 64 && (p.max_k <= kShort || p.batch_invariant)) {
      launch_tiles<Tile<T, 64, 2, config::prefill_keys(64), 2, 8>>(p, stream);
    } else if (p.head_dim <= 64) {
      launch_tiles<Tile<T, 64, 3, 112, 2, 8>>(p, stream);
    } else if (p.head_dim <= 128) {
      launch_tiles<Tile<T, 128, 2, config::prefill_keys(128), 2, 5>>(p, stream);
    } else {
      launch_tiles<Tile<T, 256, 2, config::prefill_keys(256), 1, 5>>(p, stream);
    }
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
