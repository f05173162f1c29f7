#include <string>

#include "bindings/gemm_grouped_plan.h"
#include "bindings/gemm_plan.h"
#include "bindings/tensor.h"
#include "build_info.h"
#include "kernels/attention_workspace.h"

/// Every schema of the library, once. Optional tensors are absent features; sizes are tensors'.
STABLE_TORCH_LIBRARY(ridgeline, m) {
  m.def("build_id() -> str");

  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, float scale, "
      "int window, float softcap) -> (Tensor, Tensor)");
  m.def(
      "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, "
      "int max_k, Tensor? sinks, bool causal, float scale, int window, float softcap) "
      "-> (Tensor, Tensor)");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, "
      "Tensor seq_lens, Tensor? cu_q, int max_q, Tensor? k_start, Tensor? q_scale, "
      "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, bool causal, float scale, int window, "
      "float softcap, int shared_blocks, bool batch_invariant, Tensor(a!)? workspace, "
      "Tensor(b!)? counters) "
      "-> (Tensor, Tensor)");
  m.def(
      "attention_workspace(int batch, int heads, int kv_heads, int head_dim, int max_q, int max_k, "
      "int kv_bytes, int shared_keys, int quantised_rows) -> int");
  m.def(
      "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) "
      "-> (Tensor, Tensor)");

  m.def(
      "embed(Tensor ids, Tensor weight, Tensor? last_tokens, float scale, Tensor? positions, "
      "Tensor? position_weight, bool inputs_ready) -> Tensor");

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
  m.def(
      "layernorm(Tensor x, Tensor weight, Tensor? bias, float eps, bool weights_ready) -> Tensor");
  m.def(
      "layernorm_gelu(Tensor x, Tensor weight, Tensor? bias, float eps, str approximate, "
      "bool weights_ready) -> Tensor");

  m.def("bias_gelu(Tensor x, Tensor bias, str approximate, bool weights_ready) -> Tensor");
  m.def("silu_mul(Tensor x) -> Tensor");
  m.def("silu_mul_quant(Tensor x, str out_quant) -> (Tensor, Tensor)");
  m.def("gelu_mul(Tensor x, str approximate) -> Tensor");
  m.def("swiglu_clamped(Tensor x, float limit, float alpha) -> Tensor");

  m.def("row_reduce(Tensor x, str op) -> Tensor");
  m.def("softmax(Tensor x) -> Tensor");

  m.def("quantize_fp8(Tensor x, str granularity) -> (Tensor, Tensor)");
  m.def("quantize_int8(Tensor x) -> (Tensor, Tensor)");

  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual, "
      "Tensor? norm_weight, float norm_eps, bool batch_invariant, bool weights_ready) -> Tensor");
  m.def(
      "int4_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? perm, int N, "
      "int K, int group, Tensor? bias, Tensor? x_scale, str activation, Tensor? residual, "
      "Tensor? norm_weight, float norm_eps, bool batch_invariant, bool weights_ready, "
      "bool x_made_ahead) -> Tensor");
  m.def(
      "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? x_scale, "
      "str out_dtype, str activation, Tensor? residual, Tensor? norm_weight, float norm_eps, "
      "bool quantize_x, bool batch_invariant, bool weights_ready) -> Tensor");
  m.def(
      "fp8_linear_quant(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, "
      "Tensor? x_scale, str out_dtype, str activation, Tensor? residual, Tensor? norm_weight, "
      "float norm_eps, bool quantize_x, bool batch_invariant, bool weights_ready, str out_quant) "
      "-> (Tensor, Tensor)");
  m.def(
      "fp8_linear_add(Tensor x, Tensor weight, Tensor weight_scale, Tensor(a!) residual, "
      "Tensor? bias, Tensor? x_scale, bool quantize_x, bool batch_invariant, bool weights_ready) "
      "-> ()");
  m.def(
      "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor? bias, "
      "str out_dtype, str activation, Tensor? residual, bool batch_invariant, bool weights_ready, "
      "bool x_made_ahead) -> Tensor");
  m.def(
      "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? rows, Tensor? bias, "
      "str activation, bool batch_invariant) -> Tensor");
  m.def(
      "grouped_fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor offsets, "
      "Tensor? rows, Tensor? bias, Tensor? x_scale, str out_dtype, str activation, "
      "bool batch_invariant) -> Tensor");
  m.def(
      "grouped_fp8_linear_quant(Tensor x, Tensor weight, Tensor weight_scale, Tensor offsets, "
      "Tensor? rows, Tensor? bias, Tensor? x_scale, str out_dtype, str activation, "
      "bool batch_invariant, str out_quant) -> (Tensor, Tensor)");
  m.def(
      "grouped_int4_linear(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor offsets, "
      "int N, int K, int group, Tensor? rows, Tensor? bias, str activation, bool batch_invariant) "
      "-> Tensor");
  m.def(
      "grouped_fp4_linear(Tensor x, Tensor packed, Tensor offsets, int N, int K, "
      "Tensor? rows, Tensor? bias, str activation, bool batch_invariant) -> Tensor");
  m.def(
      "route_experts(Tensor logits, int per_token, bool normalized) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("order_experts(Tensor chosen, int experts) -> (Tensor, Tensor, Tensor)");
  m.def("combine_experts(Tensor x, Tensor places, Tensor weights) -> Tensor");
  m.def(
      "gemm_plan(int M, int N, int K, str dtype, str format, str activation, bool library, "
      "bool batch_invariant, bool hopper, bool weights_ready=False, bool norm=False, int sms=132, "
      "bool residual=False) -> str");
  m.def(
      "grouped_plan(int M, int experts, int N, int K, str dtype, str format, str activation, "
      "bool gathered, bool batch_invariant, bool hopper, int group=128, bool zeros=False, "
      "int sms=132) -> str");

  m.def(
      "rope(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin, bool interleaved) -> ()");
  m.def(
      "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
      "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()");
  m.def(
      "rope_write_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots, Tensor(d!)? k_scale, "
      "Tensor(e!)? v_scale, bool interleaved, bool weights_ready) -> ()");
  m.def(
      "rope_paged_attention(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, "
      "Tensor slots, bool interleaved, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor block_tables, Tensor seq_lens, Tensor? cu_q, int max_q, Tensor(d!)? k_scale, "
      "Tensor(e!)? v_scale, Tensor? sinks, float scale, int window, float softcap, "
      "int shared_blocks, bool batch_invariant, Tensor(f!)? workspace, Tensor(g!)? counters, "
      "bool weights_ready) -> (Tensor, Tensor)");
  m.def(
      "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor pairs, Tensor(c!)? k_scale, "
      "Tensor(d!)? v_scale) -> ()");

  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor seeds, Tensor positions, Tensor? penalties, Tensor? token_counts, Tensor? bias, "
      "Tensor? mask, Tensor(a!)? last_tokens) -> Tensor");
  m.def("top_logprobs(Tensor logits, Tensor tokens, int count) -> (Tensor, Tensor)");
}

namespace {
std::string build_id() { return ridgeline::kBuildId; }

std::int64_t attention_workspace(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads,
                                 std::int64_t head_dim, std::int64_t max_q, std::int64_t max_k,
                                 std::int64_t kv_bytes, std::int64_t shared_keys,
                                 std::int64_t quantised_rows) {
  using ridgeline::check;
  check(kv_heads > 0 && heads % kv_heads == 0, "heads: expected a multiple of kv_heads, ", kv_heads,
        ", got ", heads);
  check(kv_bytes == 1 || kv_bytes == 2, "kv_bytes: expected 1 or 2, got ", kv_bytes);
  ridgeline::AttentionParams p{};
  p.dtype = ridgeline::DType::kBFloat16;
  p.kv_dtype = kv_bytes == 1 ? ridgeline::DType::kInt8 : p.dtype;
  p.batch = ridgeline::checked_int32(batch, "batch");
  p.heads = ridgeline::checked_int32(heads, "heads");
  p.kv_heads = ridgeline::checked_int32(kv_heads, "kv_heads");
  p.head_dim = ridgeline::checked_int32(head_dim, "head_dim");
  p.max_q = ridgeline::checked_int32(max_q, "max_q");
  p.max_k = ridgeline::checked_int32(max_k, "max_k");
  p.total_q = quantised_rows > 0 ? quantised_rows : batch * max_q;
  p.shared_keys = ridgeline::checked_int32(shared_keys, "shared_keys");
  const std::int64_t bytes = ridgeline::attention_config::workspace_bytes(p, quantised_rows > 0);
  // Calls of few tokens may need more than those of all.
  const std::int64_t few = ridgeline::attention_config::kChunkTokens;
  p.total_q = p.total_q < few ? p.total_q : few;
  const std::int64_t cut = ridgeline::attention_config::workspace_bytes(p, quantised_rows > 0);
  return cut > bytes ? cut : bytes;
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CompositeExplicitAutograd, m) {
  m.impl("build_id", TORCH_BOX(&build_id));
  m.impl("gemm_plan", TORCH_BOX(&ridgeline::bindings::gemm_plan));
  m.impl("grouped_plan", TORCH_BOX(&ridgeline::bindings::grouped_plan));
  m.impl("attention_workspace", TORCH_BOX(&attention_workspace));
}
