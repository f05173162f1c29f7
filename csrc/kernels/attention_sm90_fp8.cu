#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_sm90_fp8_consumer.cuh"
#include "kernels/attention_sm90_fp8_scales.cuh"
#include "kernels/attention_sm90_launch.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Kernel -------------------------------------------------------------------------------------

/// Prefill on Hopper with queries, keys, values and weights in e4m3. Grid: at most one block an SM.
/// As prefill_sm90_kernel, with one warp that brings tiles, one that brings scales, and two that
/// turn each tile of values, since wgmma takes bytes with keys contiguous only. Scores in fp16,
/// sums in fp32, of products that the tensor cores keep to about 14 bits.
///
/// Roofline: 4 * head_dim flops a visible pair at twice the rate of bf16; as many cycles go to the
/// exponentials, and as many to shared memory, of which turning is a quarter.
__global__ void __launch_bounds__(Fp8Tile::kThreads, 1)
    prefill_fp8_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = Fp8Tile;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (auto& barrier : shared.q_full) ptx::mbarrier_init(&barrier, 2);
    for (int i = 0; i < Tile::kSlots; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.free[i], Tile::kConsumers);
    }
    for (int i = 0; i < Tile::kTurnedSlots; ++i) {
      ptx::mbarrier_init(&shared.turned_full[i], Tile::kTurnerThreads + device::kWarpSize);
      ptx::mbarrier_init(&shared.turned_free[i], Tile::kConsumerThreads);
    }
    for (auto& barrier : shared.turn) ptx::mbarrier_init(&barrier, kWarpgroup / device::kWarpSize);
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
    if (threadIdx.x < Tile::kProducerThreads) {
      Producer<Tile>{launch, shared}.run();
    } else if (threadIdx.x < kWarpgroup - Tile::kTurnerThreads) {
      Scaler{launch, shared}.run();
    } else {
      Turner{shared}.run();
    }
    if (launch.attention.takes_few) clear_unowned_rows<__nv_bfloat16>(launch.attention);
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    Fp8Consumer{launch.attention, shared, warpgroup - 1}.run();
  }
#endif
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

namespace attention_launch {

const char* prefill_fp8_obstacle(const AttentionParams& p) {
  if (p.head_dim > Fp8Tile::kSize) return "fp8 tiles end at head size 128";
  // A tile's largest scale of values moves the base of all its rows.
  if (p.batch_invariant) return "weights in fp8 depend on keys that come later";
  return obstacle_sm90(p, queries_of(p));
}

void prefill_fp8_sm90(const AttentionParams& p, Stream stream) {
  launch_works<prefill_fp8_kernel, Fp8Tile>(p, stream);
}

}  // namespace attention_launch
}  // namespace ridgeline
