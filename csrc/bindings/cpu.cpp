#include <torch/csrc/stable/c/shim.h>

#include "bindings/attention.h"
#include "bindings/gemm.h"
#include "bindings/gemm_grouped.h"
#include "bindings/activation.h"
#include "bindings/embedding.h"
#include "bindings/kv_cache.h"
#include "bindings/norm.h"
#include "bindings/sampling.h"
#include "bindings/quantize.h"
#include "bindings/reduction.h"
#include "bindings/rope_attention.h"
#include "bindings/routing.h"
#include "cpu/parallel.h"

namespace {

void parallel_for_of_torch(std::int64_t begin, std::int64_t end, std::int64_t grain,
                           ridgeline::cpu::RangeFn fn, void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, fn, context));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CPU, m) {
  using namespace ridgeline::bindings;
  ridgeline::cpu::set_parallel_for(&parallel_for_of_torch);
  register_attention<Cpu>(m);
  register_gemm<Cpu>(m);
  register_grouped_gemm<Cpu>(m);
  register_routing<Cpu>(m);
  register_activation<Cpu>(m);
  register_kv_cache<Cpu>(m);
  register_rope_attention<Cpu>(m);
  register_embedding<Cpu>(m);
  register_norm<Cpu>(m);
  register_sampling<Cpu>(m);
  register_quantize<Cpu>(m);
  register_reduction<Cpu>(m);
}
