#pragma once
#include "device/ptx/global_order.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_sm90_consumer.cuh"
#include "kernels/attention_sm90_launch.cuh"

namespace ridgeline::attention_sm90 {

/// Prefill on Hopper. Grid: at most one block an SM. A block takes tiles of queries of one head, or
/// packed ones of all heads before one segment of the keys, from the queue and walks the keys each
/// sees, the last first. Four warps bring tiles by the copy engine; two to four warpgroups of 64
/// queries each multiply, accumulating in fp32.
///
/// Roofline: 4 * head_dim flops a visible pair, on the tensor cores; with short sequences, and many
/// of them, reading and writing each row once comes near it.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  if constexpr (!Packed<Tile>) ptx::launch_dependents();
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
  const bool follows = Packed<Tile> && launch.attention.follows_few;
  if (follows) {
    ptx::fence_device();  // L1 may have lengths and tables of a step before
  } else {
    ptx::wait_for_dependencies();
  }
  if constexpr (Packed<Tile>) ptx::launch_dependents();  // which may read lengths at once

  if (warpgroup == 0) {
    ptx::release_registers<Tile::kProducerRegisters>();
    Producer<Tile>{launch, shared}.run();
    // Beside the last tiles' products.
    if (launch.attention.takes_few) clear_unowned_rows<typename Tile::T>(launch.attention);
    if (follows) ptx::wait_for_dependencies();  // what comes next needs both results
  } else {
    ptx::take_registers<Tile::kConsumerRegisters>();
    Consumer<Tile>{launch.attention, shared, warpgroup - 1}.run();
  }
#endif
}

}  // namespace ridgeline::attention_sm90
