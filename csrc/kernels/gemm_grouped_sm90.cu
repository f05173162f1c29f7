#include <algorithm>

#include "device/matrix_map.cuh"
#include "device/properties.cuh"
#include "kernels/gemm_grouped_sm90_consume.cuh"
#include "kernels/gemm_grouped_sm90_groups.cuh"
#include "kernels/gemm_grouped_sm90_maps.cuh"
#include "kernels/gemm_grouped_sm90_produce.cuh"

namespace ridgeline::gemm_grouped {
namespace {

// ---- Kernel -------------------------------------------------------------------------------------

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    grouped_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < launch.stages; ++i) {
      ptx::mbarrier_init(&shared.full[i], Tile::kFills);
      ptx::mbarrier_init(&shared.free[i], Tile::kReleases);
    }
    if constexpr (Tile::kPlanned)
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(&shared.planned.full[i], 2 * device::kWarpSize);
        ptx::mbarrier_init(&shared.planned.free[i],
                           Tile::kMultipliers + (launch.tiles_taken ? Tile::kAskers : 0));
      }
    if constexpr (Tile::kInOrder) {
      for (std::uint64_t& barrier : shared.planned.gathered) ptx::mbarrier_init(&barrier, 1);
      shared.planned.row_tile = 0;
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == Tile::kThreads - 1) {
    ptx::prefetch_tensor_map(&launch.weight);
    if (Tile::kFormat == WeightFormat::kInt4) ptx::prefetch_tensor_map(&launch.scales);
    if (launch.in_order) ptx::prefetch_tensor_map(&launch.x);
  }
  __syncthreads();               // the barriers are made
  // Which weights are read is what the kernels ahead decide: not the one that puts rows in order.
  if (!Tile::kStartsEarly || !launch.gathered) ptx::wait_for_dependencies();
  if constexpr (!Tile::kPlansAhead) {
    if (device::warp_index() == 0) fill_tables<Tile>(launch, shared);
    __syncthreads();  // the tables are there
  }

  if (threadIdx.x >= Tile::kMultipliers) {
    if constexpr (Tile::kConsumers > 1) ptx::release_registers<Tile::kFewRegisters>();
    const int thread = static_cast<int>(threadIdx.x) - Tile::kMultipliers;
    Plan first{};
    if constexpr (Tile::kPlansAhead) first = plan_first<Tile>(launch);
    const int warp = thread / device::kWarpSize;
    if constexpr (Tile::kPlanned)
      if (warp == kPlanner) return plan<Tile>(launch, shared);
    if constexpr (Tile::kInOrder)
      if (warp == kGatherer && launch.gather.claims) return gather<Tile>(launch, shared);
    produce<Tile>(launch, shared, first, thread);
  } else {
    if constexpr (Tile::kConsumers > 1) ptx::take_registers<Tile::kManyRegisters>();
    if constexpr (Tile::kPlansAhead) {
      if (device::warp_index() == 0) fill_tables<Tile>(launch, shared);
      ptx::named_barrier_sync(kConsumersBarrier, Tile::kMultipliers);  // the tables are there
      ptx::named_barrier_arrive(kTablesBarrier, Tile::kThreads);
    }
    clear_rows<Tile>(launch, shared);
    if constexpr (Tile::kInOrder)
      if (launch.gather.claims) gather_first<Tile>(launch, shared);
    if constexpr (Tile::kGroups) {
      consume_groups<Tile>(launch, shared);
    } else if constexpr (Tile::kPlanned) {
      consume_planned<Tile>(launch, shared);
    } else {
      consume<Tile>(launch, shared);
    }
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Tile>
std::size_t table_bytes(const GroupedGemmParams& params) {
  return (Tile::kInOrder ? 3 : 2) * (params.experts + 1) * sizeof(std::int32_t);
}

/// How many stages the ring has: of few rows of x, as shared memory allows. Gives the number of
/// blocks. H200, lab, us, one token of top 2 in 8 experts of 14336 x 4096, whose tiles have an SM
/// each: rings of eight stages of 32 rows 76.5 (bf16) and 40.8 (e4m3), of sixteen of 8 rows 58.1
/// and 32.3. Where two blocks share an SM eleven stages took longer than eight: 4096 x 28672, e4m3,
/// 62.1 and 60.2.
template <class Tile>
std::int64_t shape_ring(Launch& launch) {
  const GemmParams& p = launch.grouped.gemm;
  const int sms = device::multiprocessors();
  // Of g experts with rows, each has a tile for its first row; the others fill tiles of row_tile.
  const std::int64_t groups = std::min<std::int64_t>(p.M, launch.grouped.experts);
  const std::int64_t most = std::max<std::int64_t>(
      1, (groups + (p.M - groups) / launch.row_tile) * launch.columns);
  launch.stage_bytes = stage_bytes_of<Tile>(launch.row_tile, launch.groups);
  const bool alone = most <= sms || Tile::kBlocksPerSm == 1;
  const int tables = round_up(static_cast<int>(table_bytes<Tile>(launch.grouped)), 16);
  const auto fixed = static_cast<int>(sizeof(Shared<Tile>)) + tables;
  const int left = (alone ? 227 : 113) * 1024 - fixed;
  launch.stages = std::min(alone ? kMaxStages : kStagesOfTwo,
                           (left - launch.gather.slots_bytes()) / launch.stage_bytes);
  check(launch.stages >= 2, "grouped_linear: a ring of ", launch.stages, " stages");
  launch.ring_bytes = launch.stages * launch.stage_bytes;
  launch.gather.slots_at = launch.ring_bytes + tables;
  return std::min<std::int64_t>(most, sms * Tile::kBlocksPerSm);
}

template <class Tile>
void launch_tiles(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const GemmParams& p = params.gemm;
  Launch launch{.grouped = params,
                .weight = weight_map<Tile>(params),
                .ordered = choice.ordered,
                .columns = ceil_div(p.N, Tile::kCols),
                .steps = ceil_div(p.K, Tile::kDepth),
                .row_tile = choice.tile_rows};
  if (Tile::kSome && Tile::kExpands && !Tile::kNibbles) launch.steps = round_up(launch.steps, 2);
  const void* x = p.x.data;
  std::int64_t x_rows = params.x_rows, x_stride = p.x.stride_row;
  if (choice.claimed) {
    const bool in_order = choice.x != RowsOfX::kInPlace;
    launch.tiles_taken = reinterpret_cast<unsigned*>(static_cast<typename Tile::X*>(p.workspace) +
                                                     (in_order ? p.M * p.K : 0));
    launch_clear(launch.tiles_taken, counts_of(choice, p.M, params.experts), stream);
  }
  if (choice.x == RowsOfX::kMeanwhile) {
    constexpr int kElements = kVector / static_cast<int>(sizeof(typename Tile::X));
    launch.gather = {.claims = launch.tiles_taken + 1,
                     .to = static_cast<uint4*>(p.workspace),
                     .vectors = p.K / kElements,
                     .stride = checked_int32(p.x.stride_row / kElements, "x: columns")};
    const int tile_bytes = launch.row_tile * p.K * static_cast<int>(sizeof(typename Tile::X));
    launch.gather.ahead = ceil_div(kMostAhead, tile_bytes);
    launch.gather.unit_bytes = std::min(launch.gather.vectors, kUnitVectors) * kVector;
    launch.gather.slots = std::min(kMostSlots, kSlotsBytes / launch.gather.unit_bytes);
    launch.gather.parts = ceil_div(launch.gather.vectors, kUnitVectors);
  } else if (choice.x == RowsOfX::kGathered || choice.x == RowsOfX::kWithSums) {
    (Tile::kMasked ? launch_gather_with_sums : launch_gather)(params, p.workspace, stream);
    launch.gathered = true;
  }
  if (choice.x != RowsOfX::kInPlace && !Tile::kTerms) {
    x = p.workspace;
    x_rows = p.M;
    x_stride = Tile::kMasked ? cols_with_sums(p.K) : p.K;
  }
  launch.gathered |= Tile::kTerms;  // the kernel that splits rows has waited
  launch.in_order = params.rows == nullptr || x == p.workspace;
  if constexpr (Tile::kFormat == WeightFormat::kInt4) add_scales<Tile>(launch);
  const std::int64_t blocks = shape_ring<Tile>(launch);
  launch.joined = Tile::kLaidOut || (Tile::kBoxes > 1 && p.K % Tile::kBoxDepth == 0);
  const int box_rows = box_rows_of<Tile>(launch.row_tile);
  if (launch.joined) {
    launch.x = device::swizzled_map(
        {.dtype = p.x.dtype,
         .data = x,
         .sizes = {Tile::kBoxDepth, x_rows, (Tile::kLaidOut ? x_stride : p.K) / Tile::kBoxDepth,
                   1},
         .strides = {x_stride, Tile::kBoxDepth, Tile::kBoxDepth}},
        box_rows, Tile::kBoxDepth, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, Tile::kBoxesOfX);
  } else if (launch.in_order) {
    launch.x = device::matrix_map(
        {x, static_cast<int>(sizeof(typename Tile::X)), x_rows, p.K, x_stride}, box_rows,
        Tile::kBoxDepth, true);
  }
  if (Tile::kInOrder && (launch.row_tile > kManyRows || Tile::kBands > 1))
    launch.x_behind = device::matrix_map(
        {x, static_cast<int>(sizeof(typename Tile::X)), x_rows, p.K, x_stride},
        Tile::kBands > 1 ? kLastRows : launch.row_tile - kManyRows, Tile::kBoxDepth, true);
  device::launch_chained<grouped_sm90_kernel<Tile>>(
      dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads),
      sizeof(Shared<Tile>) + launch.gather.slots_at + launch.gather.slots_bytes(), stream, launch,
      "grouped_linear");
}

template <class T, WeightFormat kFormat, int kRows, Int4As kAs, bool kBlocks = false>
void launch_some_of(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  if constexpr (has_nibbles(kFormat))
    if (is_gated(params.gemm.activation))
      return launch_tiles<Tile<T, T, kFormat, 4, kRows, Way{kAs, true}>>(params, choice, stream);
  launch_tiles<Tile<T, T, kFormat, 4, kRows, Way{kAs, false}, kBlocks>>(params, choice, stream);
}

/// Int4 of groups of 128 columns.
template <class T, int kRows>
void launch_groups(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  constexpr auto kInt4 = WeightFormat::kInt4;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (choice.as == Int4As::kMasked)
      return launch_some_of<T, kInt4, kRows, Int4As::kMasked>(params, choice, stream);
  launch_some_of<T, kInt4, kRows, Int4As::kDifferences>(params, choice, stream);
}

/// A kernel each: where one had several loops ptxas had no registers for wgmma that run while
/// others are prepared.
template <class T, WeightFormat kFormat, bool kBlocks>
void launch_some(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  using enum Int4As;
  const int rows = choice.most_rows;
  constexpr bool kTall = has_nibbles(kFormat) && std::is_same_v<T, __nv_bfloat16>;
  if constexpr (has_nibbles(kFormat)) {
    if (kFormat == WeightFormat::kFp4 || choice.as == kAny) {
      if constexpr (kTall) {
        if (rows == 96) return launch_some_of<T, kFormat, 96, kAny>(params, choice, stream);
        if (rows == 128) return launch_some_of<T, kFormat, 128, kAny>(params, choice, stream);
      }
      return rows == 32 ? launch_some_of<T, kFormat, 32, kAny>(params, choice, stream)
                        : launch_some_of<T, kFormat, 64, kAny>(params, choice, stream);
    }
  }
  if constexpr (kFormat == WeightFormat::kInt4) {
    if (rows == 16) return launch_groups<T, 16>(params, choice, stream);
    if (rows == 24) return launch_groups<T, 24>(params, choice, stream);
    if (rows == 32) return launch_groups<T, 32>(params, choice, stream);
    if (rows == 48) return launch_some_of<T, kFormat, 48, kScaled>(params, choice, stream);
    if constexpr (kTall) {
      if (rows == 96) return launch_some_of<T, kFormat, 96, kScaled>(params, choice, stream);
      if (rows == 112) return launch_some_of<T, kFormat, 112, kScaled>(params, choice, stream);
      if (rows == 128) return launch_some_of<T, kFormat, 128, kScaled>(params, choice, stream);
    }
  }
  if constexpr (kFormat != WeightFormat::kFp4) {
    if (rows == 64)
      return launch_some_of<T, kFormat, 64, kScaled, kBlocks>(params, choice, stream);
    launch_some_of<T, kFormat, 80, kScaled, kBlocks>(params, choice, stream);
  }
}

template <class T, class X, WeightFormat kFormat, bool kBlocks = false>
void launch_x(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  if constexpr (expands<X>(kFormat))
    if (choice.path == Path::kSome)
      return launch_some<T, kFormat, kBlocks>(params, choice, stream);
  if constexpr (!has_nibbles(kFormat))
    if (choice.path == Path::kFew) {
      constexpr int kGroups = few_cols(kFormat, sizeof(X) == 1) / kWarpgroupRows;
      return launch_tiles<Tile<T, X, kFormat, kGroups, 32, Way{}, kBlocks>>(params, choice,
                                                                            stream);
    }
  if constexpr (kFormat == WeightFormat::kDense)
    if (choice.tile_cols == kWideCols)
      return launch_tiles<Tile<T, X, kFormat, 2, kWideRows, Way{.bands = 2}>>(params, choice,
                                                                              stream);
  if constexpr (kFormat == WeightFormat::kDense)
    if (choice.most_rows == kSegmentRows)
      return launch_tiles<Tile<T, X, kFormat, 2, kSegmentRows>>(params, choice, stream);
  if constexpr (sizeof(X) == 1)
    if (choice.most_rows == kTallRows)
      return launch_tiles<Tile<T, X, kFormat, 2, kTallRows>>(params, choice, stream);
  launch_tiles<Tile<T, X, kFormat, 2, kManyRows, Way{}, kBlocks>>(params, choice, stream);
}

template <bool kBlocks>
void launch_terms(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const auto launch = [&](auto rows) {
    launch_tiles<Tile<__nv_bfloat16, std::uint8_t, WeightFormat::kFp8, 4, decltype(rows)::value,
                      Way{}, kBlocks>>(params, choice, stream);
  };
  switch (choice.most_rows) {
    case 32: return launch(std::integral_constant<int, 32>{});
    case 48: return launch(std::integral_constant<int, 48>{});
    case 64: return launch(std::integral_constant<int, 64>{});
    default: launch(std::integral_constant<int, 88>{});
  }
}

/// x in terms, which a kernel ahead leaves at the start of the workspace; behind them are their
/// units.
void split_and_launch_terms(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const GemmParams& p = params.gemm;
  auto* units = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + terms_bytes(p.M, p.K));
  launch_split_rows(params, p.workspace, units, stream);
  GroupedGemmParams terms = params;
  GemmInput& x = terms.gemm.x;
  x.data = p.workspace;
  x.dtype = DType::kFloat8E4M3;
  x.stride_row = cols_of_terms(p.K);
  x.scale = units;
  x.scale_per_row = true;
  terms.rows = nullptr;
  terms.x_rows = p.M;
  p.weight.scale_layout == ScaleLayout::kBlock ? launch_terms<true>(terms, choice, stream)
                                               : launch_terms<false>(terms, choice, stream);
}

/// Rows of e4m3 with a scale for each 128 columns.
template <class T>
void launch_by_groups(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const auto launch = [&]<Way kWay>(std::integral_constant<Way, kWay>) {
    launch_tiles<Tile<T, std::uint8_t, WeightFormat::kFp8, 2, kGroupRows, kWay, true>>(
        params, choice, stream);
  };
  constexpr Way kPlain{}, kGated{.gated = true}, kCodes{.gated = true, .codes = true};
  if (params.gemm.y_scale) return launch(std::integral_constant<Way, kCodes>{});
  if (is_gated(params.gemm.activation)) return launch(std::integral_constant<Way, kGated>{});
  launch(std::integral_constant<Way, kPlain>{});
}

template <class T>
void launch_format(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const bool fp8_x = params.gemm.x.dtype == DType::kFloat8E4M3;
  switch (params.gemm.weight.format) {
    case WeightFormat::kDense: return launch_x<T, T, WeightFormat::kDense>(params, choice, stream);
    case WeightFormat::kInt4: return launch_x<T, T, WeightFormat::kInt4>(params, choice, stream);
    case WeightFormat::kFp8:
      if (choice.scales_groups) return launch_by_groups<T>(params, choice, stream);
      if (fp8_x) return launch_x<T, std::uint8_t, WeightFormat::kFp8>(params, choice, stream);
      if (params.gemm.weight.scale_layout == ScaleLayout::kBlock)
        return launch_x<T, T, WeightFormat::kFp8, true>(params, choice, stream);
      return launch_x<T, T, WeightFormat::kFp8>(params, choice, stream);
    case WeightFormat::kFp4:  // its op takes bfloat16 alone
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return launch_x<T, T, WeightFormat::kFp4>(params, choice, stream);
      break;
    case WeightFormat::kInt8: break;  // no op has experts of it
  }
}

}  // namespace

void launch_sm90(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  if (choice.path == Path::kDigits) return launch_digits(params, choice, stream);
  if (choice.path == Path::kStrips) return launch_expert_strips(params, choice, stream);
  if (choice.path == Path::kTerms) return split_and_launch_terms(params, choice, stream);
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_format<typename decltype(type)::type>(params, choice, stream);
  });
}

}  // namespace ridgeline::gemm_grouped
