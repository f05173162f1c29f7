#pragma once
#include <cstdint>

/// Clusters whose size the launch decides. Before compute 9.0 a block is a cluster of its own.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
namespace ridgeline::ptx {

/// How many blocks the cluster has.
__device__ __forceinline__ int cluster_blocks() {
  std::uint32_t blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return static_cast<int>(blocks);
}

/// This block's place among them.
__device__ __forceinline__ int cluster_rank() {
  std::uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

/// The same object in the shared memory of block `rank`, to be read, written or added to there.
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  std::uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return shared;
#endif
}

/// One half of a barrier of the cluster: what this thread wrote is visible to those that wait.
/// A block may end after it.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

/// The other half: every thread of the cluster has arrived or ended.
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

}  // namespace ridgeline::ptx
