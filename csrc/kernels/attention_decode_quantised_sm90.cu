#include "kernels/attention_decode_kernel.cuh"
#include "kernels/attention_launch.h"

namespace ridgeline::attention_launch {
namespace {

using namespace attention_decode;

template <DType kCache>
void launch_cache(const AttentionParams& p, Stream stream) {
  if (config::max_split_rows(p.max_q, p.heads / p.kv_heads) <= config::kMmaRows)
    return launch_tiles<Tile<kCache, 128, 1>>(p, stream);
  launch_tiles<Tile<kCache, 128, 2>>(p, stream);
}

}  // namespace

void decode_quantised_sm90(const AttentionParams& p, Stream stream) {
  if (p.kv_dtype == DType::kInt8) return launch_cache<DType::kInt8>(p, stream);
  launch_cache<DType::kFloat8E4M3>(p, stream);
}

}  // namespace ridgeline::attention_launch
