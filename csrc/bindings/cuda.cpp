#include <string>

#include "bindings/activation.h"
#include "bindings/attention.h"
#include "bindings/cuda_backend.h"
#include "bindings/embedding.h"
#include "bindings/kv_cache.h"
#include "bindings/gemm.h"
#include "bindings/gemm_grouped.h"
#include "bindings/norm.h"
#include "bindings/sampling.h"
#include "bindings/quantize.h"
#include "bindings/reduction.h"
#include "bindings/rope_attention.h"
#include "bindings/routing.h"
#include "build_info.h"
#include "common/launch_trace.h"

namespace {

std::string cuda_build_id() { return ridgeline::kBuildId; }
std::string cuda_architectures() { return ridgeline::kCudaArchitectures; }

/// The build id that _C registered.
std::string core_build_id() {
  StableIValue result{};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("ridgeline::build_id", "", &result, TORCH_ABI_VERSION));
  return torch::stable::detail::to<std::string>(result);
}

/// The trace of this thread; a new begin drops what an op that failed left behind.
thread_local std::string trace_text;

void begin_launch_trace() {
  trace_text.clear();
  ridgeline::launch_trace::open = &trace_text;
}

std::string end_launch_trace() {
  ridgeline::launch_trace::open = nullptr;
  return trace_text;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ridgeline, m) {
  m.def("cuda_build_id() -> str");
  m.def("cuda_architectures() -> str");
  m.def("begin_launch_trace() -> ()");
  m.def("end_launch_trace() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CompositeExplicitAutograd, m) {
  m.impl("cuda_build_id", TORCH_BOX(&cuda_build_id));
  m.impl("cuda_architectures", TORCH_BOX(&cuda_architectures));
  m.impl("begin_launch_trace", TORCH_BOX(&begin_launch_trace));
  m.impl("end_launch_trace", TORCH_BOX(&end_launch_trace));
}

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CUDA, m) {
  using namespace ridgeline::bindings;
  // Kernels of another build may disagree with _C on a schema: they stay unregistered, and the
  // loader says why when a CUDA tensor arrives.
  if (core_build_id() != ridgeline::kBuildId) return;
  register_attention<Cuda>(m);
  register_kv_cache<Cuda>(m);
  register_rope_attention<Cuda>(m);
  register_sampling<Cuda>(m);
  register_activation<Cuda>(m);
  register_gemm<Cuda>(m);
  register_grouped_gemm<Cuda>(m);
  register_routing<Cuda>(m);
  register_embedding<Cuda>(m);
  register_norm<Cuda>(m);
  register_quantize<Cuda>(m);
  register_reduction<Cuda>(m);
}
