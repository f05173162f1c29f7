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

namespace ridgeline {
namespace {

using namespace attention_decode;

/// Calls fn(Tile{}) with the tile of the cache.
template <class Fn>
auto with_tile(const AttentionParams& p, Fn&& fn) {
  constexpr DType kBFloat16 = DType::kBFloat16, kFloat16 = DType::kFloat16;
  if (p.dtype == kBFloat16)
    return p.head_dim == 64 ? fn(Tile<kBFloat16, 64, 1>{}) : fn(Tile<kBFloat16, 128, 1>{});
  return p.head_dim == 64 ? fn(Tile<kFloat16, 64, 1>{}) : fn(Tile<kFloat16, 128, 1>{});
}

}  // namespace

bool attention_takes_fresh(const AttentionParams& p) {
  return p.dtype != DType::kFloat32 && p.q_scale == nullptr && p.k_scale == nullptr &&
         (p.head_dim == 64 || p.head_dim == 128) && p.heads / p.kv_heads <= config::kMmaRows &&
         guesses_tiles(p) && attention_launch::covers_decode_sm90(p) &&
         with_tile(p, [&](auto tile) { return takes_cluster<decltype(tile)>(p); });
}

void attention_of_fresh(const AttentionParams& p, const FreshKey& fresh, Stream stream) {
  with_tile(p, [&](auto tile) {
    Launch launch = launch_of<decltype(tile)>(p);
    launch.fresh = fresh;
    launch_clusters<decltype(tile)>(launch, stream);
  });
}

}  // namespace ridgeline
