#pragma once
#include <cstdint>

#include "device/ptx/address.cuh"

/// Blocks of a cluster, which read each other's shared memory.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
namespace ridgeline::ptx {

/// All threads of the cluster meet; what they wrote to shared memory is visible to each other.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The address of `pointer`'s counterpart in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t address_in_block(const void* pointer, int rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

__device__ __forceinline__ float load_in_cluster(std::uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

/// Writes 16 bytes, aligned so, to the same object of block `rank` and counts them at the barrier
/// there, both when they are there: whoever waits at that barrier reads them.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
__device__ __forceinline__ void put_in_block(float4* shared, const float4& value,
                                             std::uint64_t* barrier, int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(address_in_block(shared, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(address_in_block(barrier, rank))
      : "memory");
}

}  // namespace ridgeline::ptx
