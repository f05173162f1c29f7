#include "kernels/gemm_sm90_expand_kernel.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_expand;

/// Tiles with kernels for ways to y, and one for any other.
template <class Tile>
void launch_ways(const GemmParams& p, const gemm_config::Config& config, void* parts,
                 Stream stream) {
  using enum Activation;
  if (p.activation == kNone && device::is_mappable(residual_of(p)))
    return launch_tiles<Tile, KnownWay<kNone, true>>(p, config, parts, stream);
  if (p.activation == kGelu && !p.residual)
    return launch_tiles<Tile, KnownWay<kGelu>>(p, config, parts, stream);
  if (p.activation == kSiluMul && !p.residual)
    return launch_tiles<Tile, KnownWay<kSiluMul>>(p, config, parts, stream);
  launch_tiles<Tile>(p, config, parts, stream);
}

/// Whole tiles of one band, but those of 256 rows.
template <class Tile>
void launch_one_band(const GemmParams& p, const gemm_config::Config& config, void* parts,
                     Stream stream) {
  if constexpr (Tile::kKnowsApart) {
    launch_ways<Tile>(p, config, parts, stream);
  } else {
    launch_tiles<Tile>(p, config, parts, stream);
  }
}

/// Tiles of 128 sums a thread: there are too few registers for a way beside any.
template <class Large>
void launch_large(const GemmParams& p, const gemm_config::Config& config, void* parts,
                  Stream stream) {
  if constexpr (Large::kFp8X)
    if (is_plain(p))
      return launch_tiles<Large, KnownWay<Activation::kNone>>(p, config, parts, stream);
  launch_ways<Large>(p, config, parts, stream);
}

/// Of e4m3 by float16 there are fewer kernels.
template <class T, WeightFormat kFormat>
constexpr bool kHasAllTiles =
    std::is_same_v<T, __nv_bfloat16> || kFormat == WeightFormat::kInt4;

/// Tiles of one band, a segment of K a block.
template <class T, WeightFormat kFormat, bool kBlocks>
void launch_segments(const GemmParams& p, const gemm_config::Config& config, void* parts,
                     Stream stream) {
  const auto launch = [&]<int kRows>() {
    launch_tiles<Tile<T, kFormat, kBlocks, kRows, 1, Cut::kSegments>>(p, config, parts, stream);
  };
  if constexpr (kHasAllTiles<T, kFormat>) {
    if (config.tile_rows == 256) return launch.template operator()<256>();
    if constexpr (kFormat == WeightFormat::kFp8)
      if (config.tile_rows == 224) return launch.template operator()<224>();
    if (config.tile_rows == 192) return launch.template operator()<192>();
    if (config.tile_rows == 160) return launch.template operator()<160>();
  }
  launch.template operator()<128>();
}

template <class T, WeightFormat kFormat, bool kBlocks>
void launch_tile_of(const GemmParams& p, const gemm_config::Config& config, void* parts,
                    Stream stream) {
  if (config.segments > 1) return launch_segments<T, kFormat, kBlocks>(p, config, parts, stream);
  const auto one_band = [&]<int kRows>() {
    launch_one_band<Tile<T, kFormat, kBlocks, kRows, 1, Cut::kTails>>(p, config, parts, stream);
  };
  if constexpr (kHasAllTiles<T, kFormat>) {
    if (config.tile_rows == 160) return one_band.template operator()<160>();
    if (config.tile_rows == 192) return one_band.template operator()<192>();
    if (config.tile_rows == 224) return one_band.template operator()<224>();
  }
  if (config.tile_rows == 256) {
    using Large = Tile<T, kFormat, kBlocks, 256, 1,
                       kHasAllTiles<T, kFormat> ? Cut::kTails : Cut::kNone>;
    if constexpr (std::is_same_v<T, __nv_bfloat16> && !kBlocks)
      return launch_large<Large>(p, config, parts, stream);
    return launch_tiles<Large>(p, config, parts, stream);
  }
  if (config.tile_cols == 256) {
    using Wide = Tile<T, kFormat, kBlocks, 128, 2, Cut::kNone>;
    if constexpr (Wide::kPlainApart)
      if (is_scaled_alone<Wide>(p))
        return launch_tiles<Wide, KnownWay<Activation::kNone>>(p, config, parts, stream);
    if constexpr (std::is_same_v<T, __nv_bfloat16> && !kBlocks)
      return launch_large<Wide>(p, config, parts, stream);
    return launch_tiles<Wide>(p, config, parts, stream);
  }
  one_band.template operator()<128>();
}

/// Int4 by e4m3, of which float16 has fewer kernels, too.
template <class T>
void launch_to_fp8(const GemmParams& p, const gemm_config::Config& config, void* parts,
                   Stream stream) {
  constexpr auto kInt4 = WeightFormat::kInt4;
  constexpr bool kHasAll = std::is_same_v<T, __nv_bfloat16>;
  const auto segments = [&]<int kRows>() {
    launch_tiles<Tile<T, kInt4, false, kRows, 1, Cut::kSegments, true>>(p, config, parts, stream);
  };
  if constexpr (kHasAll) {
    using Large = Tile<T, kInt4, false, 256, 1, Cut::kTails, true>;
    using Between = Tile<T, kInt4, false, 192, 1, Cut::kTails, true>;
    const bool cut = config.segments > 1;
    if (config.tile_rows == 256)
      return cut ? segments.template operator()<256>()
                 : launch_large<Large>(p, config, parts, stream);
    if (config.tile_rows == 192)
      return cut ? segments.template operator()<192>()
                 : launch_one_band<Between>(p, config, parts, stream);
  }
  if (config.segments > 1) return segments.template operator()<128>();
  launch_one_band<Tile<T, kInt4, false, 128, 1, kHasAll ? Cut::kTails : Cut::kNone, true>>(
      p, config, parts, stream);
}

}  // namespace

void launch_expand(const GemmParams& p, const gemm_config::Config& config, void* parts,
                   Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.weight.format == WeightFormat::kInt4 && p.x.dtype == DType::kFloat8E4M3) {
      launch_to_fp8<T>(p, config, parts, stream);
    } else if (p.weight.format == WeightFormat::kInt4) {
      launch_tile_of<T, WeightFormat::kInt4, false>(p, config, parts, stream);
    } else if (p.weight.scale_layout == ScaleLayout::kBlock) {
      launch_tile_of<T, WeightFormat::kFp8, true>(p, config, parts, stream);
    } else {
      launch_tile_of<T, WeightFormat::kFp8, false>(p, config, parts, stream);
    }
  });
}

}  // namespace ridgeline::gemm_detail
