#include "kernels/attention_sm90_kernel.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Launch -------------------------------------------------------------------------------------

/// Whether of head size 64 256 queries a tile, before 64 keys, beat 192 before 112. H200, 16k tokens,
/// 32 heads, us by 128 before 128, by 192 and by 256: causal, 512 keys 144, 157 and 128, 1k 227, 242,
/// 204, 2k 389, 368, 353, 4k 712, 649, 650, 8k 1364, 1180, 1245; full, 512 187, 205, 175, 1k 363, 391,
/// 342, 1.5k 500, 463, 462, 4k 1355, 1205, 1282. Most prompts are shorter than a block table is wide.
bool is_short(const AttentionParams& p) {
  if (!p.causal) return p.max_k <= 1536;
  return p.max_k <= (p.block_tables == nullptr ? 4096 : 8192);
}

/// Whether queries see so many keys that 192 of head size 128 beat 128. H200, 16k tokens, 16 heads,
/// us by 128 and by 192: full, 1k keys 247 and 276, 1.5k 388 and 370, 2k 526 and 510, 4k 1014 and
/// 960, 16k 3885 and 3687; causal, 2.5k 280 and 288, 3k 377 and 359, 4k 505 and 485, 8k 961 and 889,
/// 16k 1868 and 1726. One paged prompt, 32 heads: 4k 222 and 221, 8k 961 and 923, 16k 3745 and 3604;
/// but 2k queries behind 30k keys 1776 and 1864. Block tables may be wider than prompts are long.
bool sees_many(const AttentionParams& p) {
  if (p.window > 0) return false;
  if (p.block_tables != nullptr) return p.causal && p.max_q >= 6000;
  return p.max_k >= (p.causal ? 3000 : 1536);
}

template <class Tile>
void launch_tiles(const AttentionParams& p, Stream stream) {
  launch_works<prefill_sm90_kernel<Tile>, Tile>(p, stream);
}

}  // namespace

namespace attention_launch {

const char* prefill_obstacle(const AttentionParams& p) { return obstacle_sm90(p, queries_of(p)); }

void prefill_sm90(const AttentionParams& p, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    // One tile for every length where a row's bits must not depend on the rest.
    if (p.head_dim <= 64 && p.batch_invariant) {
      launch_tiles<Tile<T, 64, 2, config::prefill_keys(64), 2, 8>>(p, stream);
    } else if (p.head_dim <= 64 && is_short(p)) {
      launch_tiles<Tile<T, 64, 4, 64, 2, 16>>(p, stream);
    } else if (p.head_dim <= 64) {
      launch_tiles<Tile<T, 64, 3, 112, 2, 8>>(p, stream);
    } else if (p.head_dim <= 128 && sees_many(p) && !p.batch_invariant) {
      launch_tiles<Tile<T, 128, 3, 80, 2, 6>>(p, stream);
    } else if (p.head_dim <= 128) {
      launch_tiles<Tile<T, 128, 2, config::prefill_keys(128), 2, 5>>(p, stream);
    } else {
      launch_tiles<Tile<T, 256, 2, config::prefill_keys(256), 1, 5>>(p, stream);
    }
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
