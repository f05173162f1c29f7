#pragma once
#include <cstdint>

#include "device/ptx/cluster_share.cuh"

/// What the blocks of a cluster do besides, from compute 9.0 on.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
namespace ridgeline::ptx {

/// put_in_block() of 16 bytes, aligned so.
__device__ __forceinline__ void put_in_block(float4* shared, const float4& value,
                                             std::uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %6;\n"
      "mapa.shared::cluster.u32 counted, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
      " [there], {%1, %2, %3, %4}, [counted];\n"
      "}\n" ::"r"(shared_address(shared)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// Loads this object from the shared memory of block `rank`. In the order in which they stand: many
/// are on their way together.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
__device__ __forceinline__ float4 load_from_block(const float4* shared, int rank) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(shared)), "r"(rank));
  return v;
}
__device__ __forceinline__ float load_from_block(const float* shared, int rank) {
  float v;
  asm volatile(
      "{\n"
      ".reg .u32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n"
      "}\n"
      : "=f"(v)
      : "r"(shared_address(shared)), "r"(rank));
  return v;
}

/// One half of a barrier of the cluster that orders no writes: of initialised barriers,
/// fence_mbarrier_init() does. The other waits for all that the thread has under way.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

}  // namespace ridgeline::ptx
