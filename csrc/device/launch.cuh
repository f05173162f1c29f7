#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/check.h"
#include "common/dispatch.h"
#include "common/types.h"

namespace ridgeline::device {

inline void cuda_check(cudaError_t error, const char* what) {
  check(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

/// Adds the launch to the trace that is open on this thread, and says whether there is one: then
/// nothing is launched.
bool record_launch(const void* kernel, const cudaLaunchConfig_t& config, const char* op);

/// Whether the code loaded for `kernel` is of compute 9.0 or later: older code has no wait, so it
/// must not start early.
template <class Params>
bool can_wait(void (*kernel)(Params)) {
  cudaFuncAttributes attributes{};
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

/// Launches with programmatic dependent launch allowed: the kernel may start before the one ahead
/// of it ends, and owes a wait_for_dependencies() in every block before it touches what any kernel
/// of the stream writes. `cluster` neighbours along the grid's x can read each other's shared
/// memory.
template <auto kKernel, class Params>
void launch_chained(dim3 grid, dim3 block, std::size_t shared, Stream stream, const Params& params,
                    const char* name, int cluster = 1) {
  static const bool chains = can_wait(kKernel);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (chains ? 1 : 0);
  if (shared > 48 * 1024)  // more than a kernel may take unasked, on each device anew
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)),
               name);
  if (cluster > 8)  // more than every Hopper GPU must have room for
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               name);
  if (record_launch(reinterpret_cast<const void*>(kKernel), config, name)) return;
  cuda_check(cudaLaunchKernelEx(&config, kKernel, params), name);
}

/// Calls fn(Type<T>{}) with the CUDA type of a floating `dtype`.
template <class Fn>
void dispatch_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(Type<float>{});
    case DType::kFloat16: return fn(Type<__half>{});
    case DType::kBFloat16: return fn(Type<__nv_bfloat16>{});
    default: check(false, "dtype must be float32, float16 or bfloat16, got ", name_of(dtype));
  }
}

/// The same of the two 16-bit types.
template <class Fn>
void dispatch_half(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat16: return fn(Type<__half>{});
    case DType::kBFloat16: return fn(Type<__nv_bfloat16>{});
    default: check(false, "dtype must be float16 or bfloat16, got ", name_of(dtype));
  }
}

}  // namespace ridgeline::device
