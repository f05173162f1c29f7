#pragma once
#include <cstdint>

#include "device/ptx/address.cuh"
#include "device/ptx/mbarrier.cuh"

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

/// Which cluster of the grid this is.
__device__ __forceinline__ std::uint32_t cluster_index() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
#else
  return blockIdx.x;
#endif
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

/// Makes a barrier that counts the bytes of put_in_block, once. One thread does it; then the
/// cluster meets. expect_puts: one thread says how many; some may be here by then. wait_for_puts:
/// they are here.
__device__ __forceinline__ void init_puts(std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  mbarrier_init(barrier, 1);
  fence_mbarrier_init();
#endif
}
__device__ __forceinline__ void expect_puts(std::uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  mbarrier_expect(barrier, bytes);
#endif
}
__device__ __forceinline__ void wait_for_puts(std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(barrier, 0);
#endif
}

/// Writes `value` to this object of block `rank` and counts its bytes at the barrier there, both
/// when it is there: whoever waits at that barrier reads it. Requires: a launch with clusters.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
__device__ __forceinline__ void put_in_block(float* shared, float value, std::uint64_t* barrier,
                                             int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 counted, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [counted];\n"
      "}\n" ::"r"(shared_address(shared)),
      "f"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
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
