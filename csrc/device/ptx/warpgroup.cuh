#pragma once

/// What a warpgroup (four consecutive warps) does as one: registers, named barriers, fences.
namespace ridgeline::ptx {

/// threadIdx.x, read anew: what is computed from it is computed where it is used, and not kept in
/// registers across a loop.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Gives registers of this warpgroup back, down to `kRegisters` a thread.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Takes registers that other warpgroups gave back, up to `kRegisters` a thread.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Arrives at a named barrier and waits there for `threads` arrivals in all.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// The same by warps for which `arrives` holds, without a branch.
__device__ __forceinline__ void named_barrier_sync_if(bool arrives, int barrier, int threads) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.s32 arrives, %2, 0;\n"
      "@arrives bar.sync %0, %1;\n"
      "}" ::"r"(barrier),
      "r"(threads), "r"(static_cast<int>(arrives))
      : "memory");
}

/// The same where warps reach one arrival at different places of a program: `bar` promises that all
/// who wait execute one and the same instruction.
__device__ __forceinline__ void unaligned_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// The same, and whether `condition` holds in any of the threads.
__device__ __forceinline__ bool named_barrier_any(int barrier, int threads, bool condition) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred all, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(condition))
      : "memory");
  return any != 0;
}

/// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Makes ordinary writes to shared memory visible to the tensor cores and the copy engine.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ridgeline::ptx
