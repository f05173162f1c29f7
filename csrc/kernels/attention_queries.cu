#include "device/dequant.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_workspace.h"
#include "kernels/attention_launch.h"

namespace ridgeline {
namespace {

namespace config = attention_config;

constexpr int kQueryThreads = 128;
constexpr int kPiece = 8;  // columns

struct Expansion {
  AttentionParams attention;
  __nv_bfloat16* to;  // [rows, heads, head_dim]
  bool few_only;      // queries of sequences of few
};

/// Queries in e4m3 times their scales, each rounded once to bf16. Grid: a block a row of q.
/// Roofline: one byte read and two written an element: bandwidth.
__global__ void __launch_bounds__(kQueryThreads)
    expand_queries_kernel(const __grid_constant__ Expansion expansion) {
  const AttentionParams& p = expansion.attention;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int row = static_cast<int>(blockIdx.x);
  if (expansion.few_only) {
    const int b = config::sequence_at(p, row);
    if (b < 0 || !config::is_split(p, config::sequence_of(p, b).q_len)) return;
  }
  const std::int64_t stride = p.cu_q != nullptr ? p.stride_q_row : p.stride_q_batch;
  const auto* from = static_cast<const std::uint8_t*>(p.q) + row * stride;
  __nv_bfloat16* to = expansion.to + std::int64_t{row} * p.heads * p.head_dim;
  const int pieces = p.head_dim / kPiece;
  for (int i = static_cast<int>(threadIdx.x); i < p.heads * pieces; i += kQueryThreads) {
    const int head = i / pieces, column = i % pieces * kPiece;
    const uint2 codes = *reinterpret_cast<const uint2*>(from + head * p.stride_q_head + column);
    const float scale = p.q_scale[row * p.stride_qs_row + head * p.stride_qs_head];
    device::store(to + head * p.head_dim + column,
                  device::dequantise8<__nv_bfloat16>(codes, DType::kFloat8E4M3, scale));
  }
}

}  // namespace

namespace attention_launch {

AttentionParams expand_queries(const AttentionParams& p, bool few_only, Stream stream) {
  auto* to = reinterpret_cast<__nv_bfloat16*>(static_cast<char*>(p.workspace) +
                                              config::queries_offset(p));
  const auto rows = static_cast<unsigned>(checked_int32(config::tokens(p), "q: rows"));
  device::launch_chained<expand_queries_kernel>(
      dim3(rows), dim3(kQueryThreads), 0, stream,
      Expansion{.attention = p, .to = to, .few_only = few_only}, "attention: queries");
  AttentionParams wide = p;
  wide.q = to;
  wide.q_scale = nullptr;
  wide.stride_q_head = p.head_dim;
  (p.cu_q != nullptr ? wide.stride_q_row : wide.stride_q_batch) =
      std::int64_t{p.heads} * p.head_dim;
  return wide;
}

}  // namespace attention_launch
}  // namespace ridgeline
