#pragma once
#include "device/launch.cuh"

/// What launch functions ask of the current device.
namespace ridgeline::device {

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

/// Whether the device, and the loaded code of `kernel`, have clusters.
template <auto kKernel>
bool has_clusters() {
  static const bool is_new = can_wait(kKernel);
  return is_new && attribute(cudaDevAttrClusterLaunch) != 0;
}

/// Whether this build has code of sm_90a and this device runs it: wgmma and setmaxnreg are in no
/// other architecture, earlier or later. The build says so by RIDGELINE_SM90A.
inline bool runs_sm90a() {
#ifdef RIDGELINE_SM90A
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor) == 0;
#else
  return false;
#endif
}

}  // namespace ridgeline::device
