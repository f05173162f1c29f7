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

/// The same of 8 bytes.
__device__ __forceinline__ void put_in_block(float2* shared, const float2& value,
                                             std::uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counted, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
      " [there], {%1, %2}, [counted];\n"
      "}\n" ::"r"(shared_address(shared)),
      "f"(value.x), "f"(value.y), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// Copies `bytes`, a multiple of 16, by the copy engine to `to` of block `rank`; `barrier` there
/// receives them. Until it has, neither block may end. One thread issues it.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void copy_to_block(void* to, const void* from, int bytes,
                                              std::uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counted, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [there], [%1], %2, [counted];\n"
      "}\n" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// One half of a barrier of the cluster that orders no writes: of initialised barriers,
/// fence_mbarrier_init() does. The other waits for all that the thread has under way.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

}  // namespace ridgeline::ptx
