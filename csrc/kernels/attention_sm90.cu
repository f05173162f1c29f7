#include "kernels/attention_sm90_kernel.cuh"

namespace ridgeline {
namespace {

using namespace attention_sm90;

// ---- Launch -------------------------------------------------------------------------------------

/// Keys, up to which 128 queries a tile of head size 64 beat 192. H200, 16k tokens, 32 heads, us by
/// 128 and by 192: full, 1k keys 353 and 394, 1.5k 494 and 457, 2k 698 and 665, 3k 967 and 863, 4k
/// 1359 and 1231; causal, 1k 219 and 253, 1.5k 296 and 283, 2k 393 and 381, 4k 720 and 679.
constexpr int kShort = 1024;

/// Whether each query sees all of so many contiguous keys that 192 of head size 128 beat 128. H200,
/// 16k tokens, 16 heads, us by 128 and by 192: 1.5k keys 388 and 370, 2k 526 and 510, 3k 730 and 670,
/// 4k 1014 and 960, 16k 3885 and 3687; 1k 247 and 276; causal, 2k 299 and 307, 4k 543 and 540.
bool sees_many(const AttentionParams& p) {
  return !p.causal && p.window == 0 && p.block_tables == nullptr && p.max_k >= 1536;
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
    if (p.head_dim <= 64 && (p.max_k <= kShort || p.batch_invariant)) {
      launch_tiles<Tile<T, 64, 2, config::prefill_keys(64), 2, 8>>(p, stream);
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
