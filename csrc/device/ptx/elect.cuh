#pragma once

namespace ridgeline::ptx {

/// Whether this thread is the one of its warp that acts for it. Requires: all of the warp is here.
/// The compiler knows that one thread follows: it gives the copy engine uniform registers as they
/// are, where behind `lane == 0` each request is a loop over the values that lanes may have.
/// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
__device__ __forceinline__ bool elect_one() {
  int elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.s32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace ridgeline::ptx
