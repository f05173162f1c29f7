#include <string>

#include "bindings/gemm.h"
#include "bindings/tensor.h"
#include "build_info.h"

/// Every schema of the library, once. Optional tensors are absent features; sizes come from tensors.
STABLE_TORCH_LIBRARY(ridgeline, m) {
  m.def("build_id() -> str");

  m.def("rmsnorm(Tensor x, Tensor weight, float eps, float offset, bool weights_ready) -> Tensor");
  m.def(
      "rmsnorm_quant(Tensor x, Tensor weight, float eps, float offset, str out_quant, "
      "bool weights_ready) -> (Tensor, Tensor)");
  m.def(
      "add_rmsnorm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float offset, "
      "bool weights_ready) -> Tensor");
  m.def(
      "add_rmsnorm_quant(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float offset, "
      "str out_quant, bool weights_ready) -> (Tensor, Tensor)");
  m.def("layernorm(Tensor x, Tensor weight, Tensor? bias, float eps, bool weights_ready) -> Tensor");
  m.def(
      "layernorm_gelu(Tensor x, Tensor weight, Tensor? bias, float eps, str approximate, "
      "bool weights_ready) -> Tensor");

  m.def("bias_gelu(Tensor x, Tensor bias, str approximate, bool weights_ready) -> Tensor");
  m.def("silu_mul(Tensor x) -> Tensor");
  m.def("gelu_mul(Tensor x, str approximate) -> Tensor");

  m.def("row_reduce(Tensor x, str op) -> Tensor");
  m.def("softmax(Tensor x) -> Tensor");

  m.def("quantize_fp8(Tensor x, str granularity) -> (Tensor, Tensor)");

  m.def(
      "rope(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin, bool interleaved) -> ()");
  m.def(
      "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
      "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()");
  m.def(
      "rope_write_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots, Tensor(d!)? k_scale, "
      "Tensor(e!)? v_scale, bool interleaved) -> ()");
  m.def(
      "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs, Tensor(c!)? k_scale, "
      "Tensor(d!)? v_scale) -> ()");

  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual, "
      "Tensor? norm_weight, float norm_eps, bool batch_invariant, bool weights_ready) -> Tensor");
  m.def(
      "int4_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? perm, int N, "
      "int K, int group, Tensor? bias, Tensor? x_scale, str activation, Tensor? residual, "
      "Tensor? norm_weight, float norm_eps, bool batch_invariant, bool weights_ready) -> Tensor");
  m.def(
      "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? x_scale, "
      "str out_dtype, str activation, Tensor? residual, Tensor? norm_weight, float norm_eps, "
      "bool batch_invariant, bool weights_ready) -> Tensor");
  m.def(
      "gemm_plan(int M, int N, int K, str dtype, str format, str activation, bool library, "
      "bool batch_invariant) -> str");

  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor seeds, Tensor positions, Tensor? penalties, Tensor? token_counts, Tensor? bias, "
      "Tensor? mask) -> Tensor");
  m.def("top_logprobs(Tensor logits, Tensor tokens, int count) -> (Tensor, Tensor)");
}

namespace {
std::string build_id() { return ridgeline::kBuildId; }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CompositeExplicitAutograd, m) {
  m.impl("build_id", TORCH_BOX(&build_id));
  m.impl("gemm_plan", TORCH_BOX(&ridgeline::bindings::gemm_plan));
}
