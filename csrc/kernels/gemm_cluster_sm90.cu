#include <algorithm>

#include "device/launch.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_cluster_kernel.cuh"
#include "kernels/gemm_launch.cuh"

/// The cluster kernel's launch: its maps, its shared memory and the kernel for a product.
namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_cluster;

template <class T, class E, class Layout, int kGroups = 2, int kUnits = 0>
void launch(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  constexpr WeightFormat kFormat = Layout::kFormat;
  constexpr bool kFp8X = Layout::kFp8X;
  constexpr int kTokens = Layout::kTokens, kCols = Layout::kCols;
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const int segments = config.segments;
  constexpr bool kFolds = kTokens == kNormTokens;
  const int most = config.tile_rows > 0 ? std::min(config.tile_rows, kTokens) : kTokens;
  const auto tiles_of_x = ceil_div<std::int64_t>(p.M, most);
  const int rows = kFolds ? kTokens : rows_of_tile(p.M, tiles_of_x);
  ClusterParams params{.gemm = p};
  params.paired = is_gated(p.activation);
  const int parts = params.paired ? 2 : 1;  // of the weight: gates and ups
  params.tile_rows = config.tile_cols;
  params.row_groups = ceil_div(config.tile_cols, kGroupRows);
  check(kUnits == 0 || params.row_groups == kUnits, "linear: no tiles of ", config.tile_cols,
        " weight rows");
  params.turns = kUnits > 0 || params.row_groups == 1 ? kGroups : 1;
  params.readers = 4 * (params.turns > 1 ? 1 : params.row_groups);
  params.x_box = round_up(rows, 8) * kRowBytes;
  params.x_bytes = Layout::kXBoxes * params.x_box;
  params.box_rows = config.tile_cols / parts;
  params.steps = ceil_div(p.K, kCols);
  const int others = p.out_cols() - config.rest.cols;
  params.before = config.of_rest ? others : 0;
  params.beside = config.of_rest && config.rest.beside;
  params.lets_rest_on = !config.of_rest && config.rest.cols > 0;
  params.segments = device::Divisor::of(segments);
  const dim3 grid(segments, tiles_of_x,
                  ceil_div(config.of_rest ? config.rest.cols : others, params.box_rows));
  const auto tiles = static_cast<int>(grid.y * grid.z);
  // Where stages are long, blocks that have an SM each take all of its memory for their rings.
  // H200, 64 rows, us: bf16 at 4096 x 4096 12.3 and 11.4, at 14336 x 4096 33.6 and 30.9; fp8 by
  // bf16 10.6 and 9.1, 29.7 and 21.1; int4 9.5 and 8.5, 22.4 and 19.9. But fp8 by fp8 7.3 and 8.0,
  // fp8 by 16 rows 7.2 and 8.3, and bf16 by 16 rows alone, where stages are few, 9.0 and 9.4, 4096
  // x 6144 13.2 and 15.0, 5120 x 5120 14.7 and 17.5; 8192 x 8192 38.0 and 32.3, 3072 x 8192, of 48
  // stages, with cold caches 15.2 and 13.1.
  constexpr int kFewStages = 40;
  const bool few_stages = kTokens <= 32 && !p.weights_ready &&
                          ceil_div(params.steps, segments) <= kFewStages;
  // So do those of more rows of x, whose sums do not fit half of it: 128 rows of int4 by e4m3 of
  // 3584 x 18944, K cut in four, wrote theirs over what neighbours send.
  constexpr bool kLong = kGroups > 2 || kTokens > gemm_config::kFewRows ||
                         (kTokens >= 64 && !kFp8X && kFormat != WeightFormat::kInt8);
  const bool is_long = kFormat == WeightFormat::kDense ? !few_stages : kLong;
  // Behind a kernel of few blocks they would stack by twos on the SMs that it leaves free. H200, 32
  // rows of int4 behind a norm of 32 blocks, us: 4096 x 6144 14.8 and 9.9, 4096 x 4096 9.3 and 7.3;
  // where this kernel follows itself 6.7 and, without blocks of the next one beside it, 8.3.
  const bool one_each = tiles <= gemm_config::kClusters[segments - 1];
  if constexpr (Layout::kMayBeAlone && kGroups == 2)
    if (one_each && !params.beside && p.M > 16 && (kTokens == 64 || !p.weights_ready))
      return launch<T, E, typename Layout::Alone, kGroups>(p, config, stream);
  // Sums of 128 rows and those of a neighbour do not fit half of it.
  const bool shares = (!one_each || params.beside) && kGroups == 2 &&
                      (kTokens <= 64 || segments < kBlocks<Layout, kGroups>);
  // Alone, blocks that have an SM each come while the kernel ahead still has some, but may stack by
  // twos then, by which long ones lose more. H200, fp8 by fp8, us in half of an SM and more: 16
  // rows of 8192 x 8192 by 64 weight rows 19.0 to 22.5 and 16.9, of 5120 x 13824 19.9 and 17.9, but
  // of 5120 x 5120, 20 stages, 8.3 and 8.8; 64 rows of 28672 x 8192 61.6 and 56.1.
  // Behind a kernel that makes x they come early: 16 rows of int4 of 4096 x 4096 7.7 and 6.3.
  constexpr int kManyStages = kTokens <= 32 ? 28 : 64;
  const bool stays_alone =
      p.weights_ready || p.x.made_ahead ||
      (Layout::kOfBytes && ceil_div(params.steps, segments) > kManyStages);
  params.shared_bytes = shares        ? gemm_config::kShareOfSm
                        : is_long     ? 2 * gemm_config::kShareOfSm
                        : stays_alone ? gemm_config::kShareOfStrips
                                      : gemm_config::kShareOfSm;
  params.rows_held = round_up(rows, 8);
  params.rows_each = ceil_div(rows, segments);
  // Half of a warpgroup's sums go through a stage of its own.
  constexpr int kGiven = kTokens / 16 * kGroupThreads * static_cast<int>(sizeof(float4));
  params.by_turns = kTokens <= 64 && kUnits == 0 && kGroups == 2 &&
                    (!Layout::kApart || params.tile_rows * Layout::kRowOfWeight >= kGiven) &&
                    ends_by_turns(p, params.row_groups, segments, sizeof(T));
  const int received = received_bytes<kTokens>(params, segments, params.rows_each);
  if constexpr (kFormat == WeightFormat::kInt4) {
    const int group = p.weight.group;
    params.group = device::Divisor::of(group);
    params.stage_groups = group % kCols == 0 || group >= p.K ? 1
                          : kCols % group == 0               ? kCols / group
                                                             : (kCols - 2) / group + 2;
    const bool one_group = group >= p.K;
    const int all_groups = one_group ? 1 : ceil_div(params.steps, segments);
    // Blocks that have all of K began later: H200, us, alone, 16 rows of 4096 x 28672, scales by
    // the stage and so, 21.0 and 21.9, by e4m3 21.9 and 22.9.
    const int all_bytes = all_groups * params.tile_rows * (p.weight.zeros ? 3 : 2);
    const bool fit = all_groups <= kMostGroups && all_bytes * kHeldShare <= params.shared_bytes;
    const bool may_wait = segments > 1 || kUnits == 1;
    if (Layout::kMayHold && may_wait && fit && (one_group || group == kCols)) {
      params.held_groups = all_groups;
      params.held_step = one_group ? 0 : params.box_rows;
    }
    const int bytes = std::max(params.stage_groups, params.held_groups) * params.box_rows;
    params.scale_bytes = 2 * bytes;
    params.zero_bytes = p.weight.zeros ? bytes : 0;
    params.zeros_behind = round_up(parts * params.scale_bytes, kBoxAlignment);
  }
  const int scale_bytes =
      params.zeros_behind + round_up(parts * params.zero_bytes, kBoxAlignment);
  int held_bytes = params.held_groups > 0 ? scale_bytes : 0;
  const int weight_bytes = params.tile_rows * Layout::kRowOfWeight + scale_bytes - held_bytes;
  if (kHoldsBlocks<Layout, kGroups> && p.weight.scale_layout == ScaleLayout::kBlock) {
    params.held_groups = ceil_div(params.box_rows - 1, kScaleBlock) + 1;
    held_bytes = round_up(parts * params.held_groups *
                              ceil_div(params.steps, segments) * static_cast<int>(sizeof(float)),
                          kBoxAlignment);
  }
  // The last operand of a short tile reaches over the last stage: not out of shared memory.
  const int own = kFixedBytes + kFactorBytes<kTokens, kGroups, kUnits>;
  const int behind = own + received + held_bytes;
  if (held_bytes > 0) params.held_at = params.shared_bytes - own - held_bytes;
  const int over = (params.row_groups * kGroupRows - params.tile_rows) * Layout::kRowOfWeight;
  cut_rings<Layout>(params, params.shared_bytes - std::max(behind, over), weight_bytes,
                    kFolds ? Layout::kNormBytes : 0,
                    params.turns > 1 ? 2 * params.turns : kFolds ? kNormWarps : 2);
  check(params.turns * params.rows_held * pitch_of_sums(params.row_groups) * 4 <= params.ring_bytes,
        "linear: no room for the sums of ", params.turns, " warpgroups");
  plan_stores<T>(params, kGroups * kGroupThreads, params.ring_bytes);
  const bool asks_l2 = !Layout::kExpandsInt4 || p.x.made_ahead;
  params.prefetched = shares    ? params.stages / 2
                      : asks_l2 ? std::min(params.stages, kPrefetched)
                                : 0;
  // Blocks of the next kernel that come at the start take the SMs that this one leaves free in
  // pairs, and end last: H200, fp8 by fp8, 16 rows, 4096 x 4096, 7.3 us so, 6.1 behind the last
  // request. Some stages ahead of it, they are ready sooner: 16 rows chained, 4096 x 6144, int4 7.5
  // and 6.5, fp8 by bf16 10.8 and 9.5; 8192 x 8192, fp8 by fp8 17.0 and 16.4; alone, 14336 x 4096
  // by 32 rows, 16.5 and 15.3, by bf16 23.1 and 19.4. But 3584 x 18944 in bf16, whose blocks some
  // SMs have two of, 37.3 and 41.5, alone 37.9 and 43.1.
  const bool early = one_each || segments > 1 ||
                     (p.weights_ready && kFormat != WeightFormat::kDense);
  params.released = params.lets_rest_on ? kNever : early ? kReleased : 0;
  params.unit = Layout::kExpandsInt4 ? device::kInt4Unit<T>
                : Layout::kInt4      ? device::kInt4AsE4m3Unit
                                     : 1.0f;
  constexpr int kXBytes = kFp8X ? 1 : 2;
  // A request takes its thread time: x comes in one where K is whole boxes. H200, 16 rows of int4,
  // 8192 x 8192, before an elected lane requested: 14.3 us, and 13.9 so.
  params.x_boxes = p.K % 64 == 0 ? Layout::kXBoxes : 1;
  params.x = params.x_boxes == 1
                 ? device::matrix_map({.data = p.x.data,
                                       .element_bytes = kXBytes,
                                       .rows = p.M,
                                       .cols = p.K,
                                       .stride = p.x.stride_row},
                                      round_up(rows, 8), kRowBytes / kXBytes, true)
                 : device::swizzled_map({.dtype = p.x.dtype,
                                         .data = p.x.data,
                                         .sizes = {64, p.M, p.K / 64, 1},
                                         .strides = {p.x.stride_row, 64, 64}},
                                        round_up(rows, 8), 64, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                        params.x_boxes);
  if constexpr (kFormat == WeightFormat::kInt4) {
    const int group = p.weight.group, words = ceil_div(p.K, Int4Layout::kCols) * Int4Layout::kWords;
    params.weight = device::matrix_map({.data = p.weight.data,
                                        .element_bytes = 4,
                                        .rows = p.N / kStripRows / parts,
                                        .cols = words,
                                        .stride = words},
                                       params.box_rows / kStripRows,
                                       kCols / Int4Layout::kCols * Int4Layout::kWords, false,
                                       kPromotion,
                                       {parts, p.N / kStripRows / parts * std::int64_t{words}});
    const auto map = [&](const void* data, int bytes) {
      return device::matrix_map({.data = data,
                                 .element_bytes = bytes,
                                 .rows = ceil_div(p.K, group),
                                 .cols = p.N / parts,
                                 .stride = p.N},
                                std::max(params.stage_groups, params.held_groups),
                                params.box_rows, false, kPromotion, {parts, p.N / parts});
    };
    params.scales = map(p.weight.scales, 2);
    if (p.weight.zeros) params.zeros = map(p.weight.zeros, 1);
  } else {
    constexpr int kBytes = kFormat == WeightFormat::kFp8 ? 1 : 2;
    params.weight = device::matrix_map({.data = p.weight.data,
                                        .element_bytes = kBytes,
                                        .rows = p.N,
                                        .cols = p.K,
                                        .stride = p.weight.stride_row},
                                       params.box_rows, kRowBytes / kBytes, true, kPromotion);
  }
  check(grid.z <= 65535, "linear: weight rows must be at most ", 65535 * params.box_rows,
        ", got ", p.N);
  device::launch_chained<cluster_sm90_kernel<T, E, Layout, kGroups, kUnits>>(
      grid, dim3(kBlockThreads<kTokens, kGroups>), params.shared_bytes, stream, params,
      "linear: cluster", segments);
}

template <class T, int kTokens>
void launch_format(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  using enum WeightFormat;
  switch (p.weight.format) {
    case kDense:
      return launch<T, T, StageLayout<kDense, false, kTokens>>(p, config, stream);
    case kInt4:
      if (p.x.dtype == DType::kFloat8E4M3)
        return launch<T, std::uint8_t, StageLayout<kInt4, true, kTokens>>(p, config, stream);
      return launch<T, T, StageLayout<kInt4, false, kTokens>>(p, config, stream);
    case kFp8:
      if (p.x.dtype == DType::kFloat8E4M3)
        return launch<T, std::uint8_t, StageLayout<kFp8, true, kTokens>>(p, config, stream);
      return launch<T, T, StageLayout<kFp8, false, kTokens>>(p, config, stream);
    case kInt8:
      return launch<T, std::int8_t, StageLayout<kInt8, false, kTokens>>(p, config, stream);
  }
}

void launch_norm(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  using enum WeightFormat;
  using T = __nv_bfloat16;
  check(p.M <= kNormTokens && p.x.dtype == DType::kBFloat16 && p.weight.format != kInt4,
        "linear: the cluster kernel folds norms of at most ", kNormTokens,
        " rows of bfloat16 by dense and fp8 weights, got ", p.M);
  if (p.weight.format == kDense)
    return launch<T, T, StageLayout<kDense, false, kNormTokens>>(p, config, stream);
  launch<T, T, StageLayout<kFp8, false, kNormTokens>>(p, config, stream);
}

/// Up to 32 rows of x by weights that are expanded: three warpgroups share out the stages of a tile
/// of up to kUnits times 64 weight rows.
template <int kUnits>
void launch_units(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  using enum WeightFormat;
  using T = __nv_bfloat16;
  constexpr int kRows = gemm_config::kRowsByStages;
  if (p.weight.format == kFp8)
    return launch<T, T, StageLayout<kFp8, false, kRows>, 3, kUnits>(p, config, stream);
  if (p.x.dtype == DType::kFloat8E4M3)
    return launch<T, std::uint8_t, StageLayout<kInt4, true, kRows>, 3, kUnits>(p, config, stream);
  if constexpr (kUnits <= gemm_config::kScaledUnitsByStages) {
    return launch<T, T, StageLayout<kInt4, false, kRows>, 3, kUnits>(p, config, stream);
  } else {
    check(false, "linear: no tiles of ", config.tile_cols, " rows of int4");
  }
}

/// Tiles of three warpgroups: of weights that are expanded, more than few rows of int4 alone.
void launch_broad(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  using enum WeightFormat;
  using T = __nv_bfloat16;
  const int rows = p.M <= 32 ? 32 : p.M <= gemm_config::kFewRows ? 64 : config.tile_rows;
  if (p.weight.format == kFp8)
    return dispatch_rows<32, 64>(rows, [&]<int kRows>() {
      launch<T, T, StageLayout<kFp8, false, kRows>, 3>(p, config, stream);
    });
  if (p.x.dtype == DType::kFloat8E4M3)
    return dispatch_rows<32, 64, kManyTokens>(rows, [&]<int kRows>() {
      launch<T, std::uint8_t, StageLayout<kInt4, true, kRows>, 3>(p, config, stream);
    });
  dispatch_rows<32, 64, 80, 88, 96, 112, kManyTokens>(rows, [&]<int kRows>() {
    launch<T, T, StageLayout<kInt4, false, kRows>, 3>(p, config, stream);
  });
}

template <class T>
void launch_rows(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  using enum WeightFormat;
  if (p.x.norm_weight) return launch_norm(p, config, stream);
  const bool other_bits = p.batch_invariant && p.weight.format == kInt4;  // by 32 rows
  if (p.M <= 32 && !other_bits) return launch_format<T, 32>(p, config, stream);
  if (p.weight.format == kDense && p.M > gemm_config::kFewRows) {
    const int rows = rows_of_tile(p.M, ceil_div<std::int64_t>(p.M, kManyTokens));
    const int enough = rows <= 80 ? 80 : rows <= 96 ? 96 : kManyTokens;
    return dispatch_rows<80, 96, kManyTokens>(enough, [&]<int kRows>() {
      launch<T, T, StageLayout<kDense, false, kRows>>(p, config, stream);
    });
  }
  if constexpr (std::is_same_v<T, __half>)
    if (config.tile_rows > gemm_config::kFewRows)
      return launch<T, T, StageLayout<kInt4, false, kManyTokens>>(p, config, stream);
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (config.tile_rows > gemm_config::kFewRows) {
      if (p.weight.format == kFp8)
        return launch<T, T, StageLayout<kFp8, false, kManyTokens>>(p, config, stream);
      if (p.x.dtype == DType::kFloat8E4M3)
        return launch<T, std::uint8_t, StageLayout<kInt4, true, kManyTokens>>(p, config, stream);
      return dispatch_rows<80, 88, 96, 112, kManyTokens, 176>(config.tile_rows, [&]<int kRows>() {
        launch<T, T, StageLayout<kInt4, false, kRows>>(p, config, stream);
      });
    }
  launch_format<T, 64>(p, config, stream);
}

}  // namespace

void launch_cluster(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  if (config.tile_cols == gemm_config::kShortCols && config.shares_stages)
    return launch<__nv_bfloat16, __nv_bfloat16, StageLayout<WeightFormat::kInt4, false, 64>, 3, 1>(
        p, config, stream);
  if (config.shares_stages)
    return dispatch_rows<2, 3, 4>(ceil_div(config.tile_cols, kGroupRows), [&]<int kUnits>() {
      launch_units<kUnits>(p, config, stream);
    });
  if (config.tile_cols == gemm_config::kWideCols) return launch_wide(p, config.segments, stream);
  if (config.tile_cols > 2 * kGroupRows) return launch_broad(p, config, stream);
  if (p.dtype == DType::kFloat16) return launch_rows<__half>(p, config, stream);
  launch_rows<__nv_bfloat16>(p, config, stream);
}

}  // namespace ridgeline::gemm_detail
