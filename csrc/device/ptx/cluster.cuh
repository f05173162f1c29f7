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

}  // namespace ridgeline::ptx
