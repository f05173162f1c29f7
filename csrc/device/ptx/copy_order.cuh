#pragma once

namespace ridgeline::ptx {

/// Orders what this thread has read and written, or knows to be written, before what the copy
/// engine then reads and writes for it.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ridgeline::ptx
