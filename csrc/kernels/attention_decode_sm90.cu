#include "kernels/attention_decode_kernel.cuh"
#include "kernels/attention_launch.h"

namespace ridgeline::attention_launch {
namespace {

using namespace attention_decode;

template <DType kCache>
void launch_cache(const AttentionParams& p, Stream stream) {
  const int columns = config::decode_columns(p);
  if (columns == 64) return launch_tiles<Tile<kCache, 64, 1>>(p, stream);
  if (columns == 128) return launch_tiles<Tile<kCache, 128, 1>>(p, stream);
  launch_tiles<Tile<kCache, 256, 1>>(p, stream);
}

}  // namespace

bool covers_decode_sm90(const AttentionParams& p) {
  return device::runs_sm90a() && config::has_decode_tile(p) &&
         device::is_mappable(keys_of(p)) && device::is_mappable(values_of(p)) &&
         (p.k_scale == nullptr || (p.stride_ks_batch % 2 == 0 && p.stride_vs_batch % 2 == 0));
}

void decode_sm90(const AttentionParams& p, Stream stream) {
  if (p.k_scale != nullptr) return decode_quantised_sm90(p, stream);
  if (p.dtype == DType::kBFloat16) return launch_cache<DType::kBFloat16>(p, stream);
  launch_cache<DType::kFloat16>(p, stream);
}

}  // namespace ridgeline::attention_launch
