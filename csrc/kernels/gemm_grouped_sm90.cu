#include <algorithm>

#include "device/matrix_map.cuh"
#include "kernels/gemm_grouped_sm90_consume.cuh"
#include "kernels/gemm_grouped_sm90_maps.cuh"
#include "kernels/gemm_grouped_sm90_produce.cuh"
#include "kernels/gemm_grouped_sm90_rows.cuh"

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
        ptx::mbarrier_init(&shared.planned.free[i], Tile::kMultipliers);
      }
    if constexpr (Tile::kInOrder)
      for (std::uint64_t& barrier : shared.planned.gathered) ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x == Tile::kThreads - 1) {
    ptx::prefetch_tensor_map(&launch.weight);
    if (Tile::kInt4) ptx::prefetch_tensor_map(&launch.scales);
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
    if constexpr (Tile::kPlanned) {
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

/// How many rows of x a stage has and how many stages the ring: of few rows, as shared memory
/// allows. Gives the number of blocks. H200, lab, us, one token of top 2 in 8 experts of 14336 x
/// 4096, whose tiles have an SM each: rings of eight stages of 32 rows 76.5 (bf16) and 40.8
/// (e4m3), of sixteen of 8 rows 58.1 and 32.3. Where two blocks share an SM eleven stages took
/// longer than eight: 4096 x 28672, e4m3, 62.1 and 60.2.
template <class Tile>
std::int64_t shape_ring(Launch& launch) {
  const GemmParams& p = launch.grouped.gemm;
  const int sms = device::multiprocessors();
  launch.row_tile = Tile::kRows;
  if (!Tile::kInOrder && p.M < Tile::kRows)
    launch.row_tile = round_up(static_cast<int>(p.M), Tile::kSome ? 16 : 8);
  if (Tile::kInOrder && !Tile::kSegments)
    launch.row_tile = row_tile_for(launch.grouped, launch.columns, Tile::kRows);
  // Of g experts with rows, each has a tile for its first row; the others fill tiles of row_tile.
  const std::int64_t groups = std::min<std::int64_t>(p.M, launch.grouped.experts);
  const std::int64_t most = std::max<std::int64_t>(
      1, (groups + (p.M - groups) / launch.row_tile) * launch.columns);
  launch.stage_bytes = stage_bytes_of<Tile>(launch.row_tile, launch.groups);
  const bool alone = most <= sms || Tile::kBlocksPerSm == 1;
  const int tables = round_up(static_cast<int>(table_bytes<Tile>(launch.grouped)), 16);
  const auto fixed = static_cast<int>(sizeof(Shared<Tile>)) + tables;
  const int left = (alone ? 227 : 113) * 1024 - fixed;
  const int slots = launch.gather.claims ? kFewestSlots : 0;
  launch.stages = std::min(alone ? kMaxStages : kStagesOfTwo,
                           (left - slots * kUnitBytes) / launch.stage_bytes);
  check(launch.stages >= 2, "grouped_linear: a ring of ", launch.stages, " stages");
  launch.ring_bytes = launch.stages * launch.stage_bytes;
  launch.gather.slots_at = launch.ring_bytes + tables;
  if (slots > 0)
    launch.gather.slots = std::min(kMostSlots, (left - launch.ring_bytes) / kUnitBytes);
  return std::min<std::int64_t>(most, sms * Tile::kBlocksPerSm);
}

template <class Tile>
void launch_tiles(const GroupedGemmParams& params, Stream stream) {
  const GemmParams& p = params.gemm;
  Launch launch{.grouped = params,
                .weight = weight_map<Tile>(params),
                .columns = ceil_div(p.N, Tile::kCols),
                .steps = ceil_div(p.K, Tile::kDepth)};
  if (Tile::kSome && Tile::kExpands && !Tile::kInt4) launch.steps = round_up(launch.steps, 2);
  const void* x = p.x.data;
  std::int64_t x_rows = params.x_rows, x_stride = p.x.stride_row;
  launch.ordered = is_ordered(params);
  if (gathers_inside(params)) {
    constexpr int kElements = kVector / static_cast<int>(sizeof(typename Tile::X));
    launch.gather = {.claims = claims_of(params),
                     .to = static_cast<uint4*>(p.workspace),
                     .vectors = p.K / kElements,
                     .stride = checked_int32(p.x.stride_row / kElements, "x: columns")};
    launch.gather.parts = ceil_div(launch.gather.vectors, kUnitVectors);
    launch_clear(launch.gather.claims, claims_count(params), stream);
  } else if (sm90_workspace_bytes(params) > 0) {
    (Tile::kMasked ? launch_gather_with_sums : launch_gather)(params, p.workspace, stream);
    launch.gathered = true;
  }
  if (sm90_workspace_bytes(params) > 0) {
    x = p.workspace;
    x_rows = p.M;
    x_stride = Tile::kMasked ? cols_with_sums(params) : p.K;
  }
  launch.gathered |= Tile::kTerms;  // the kernel that splits rows has waited
  launch.in_order = params.rows == nullptr || x == p.workspace;
  if constexpr (Tile::kInt4) add_scales<Tile>(launch);
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
  if (Tile::kInOrder && launch.row_tile > kManyRows)
    launch.x_behind = device::matrix_map(
        {x, static_cast<int>(sizeof(typename Tile::X)), x_rows, p.K, x_stride},
        launch.row_tile - kManyRows, Tile::kBoxDepth, true);
  device::launch_chained<grouped_sm90_kernel<Tile>>(
      dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads),
      sizeof(Shared<Tile>) + launch.gather.slots_at + launch.gather.slots * kUnitBytes, stream,
      launch, "grouped_linear");
}

template <class T, WeightFormat kFormat, int kRows, Int4As kAs, bool kBlocks = false>
void launch_some_of(const GroupedGemmParams& params, Stream stream) {
  if constexpr (kFormat == WeightFormat::kInt4)
    if (is_gated(params.gemm.activation))
      return launch_tiles<Tile<T, T, kFormat, 4, kRows, Int4Way{kAs, true}>>(params, stream);
  launch_tiles<Tile<T, T, kFormat, 4, kRows, Int4Way{kAs, false}, kBlocks>>(params, stream);
}

/// Int4 of groups of 128 columns.
template <class T, int kRows>
void launch_groups(const GroupedGemmParams& params, Stream stream) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (has_sums(params))
      return launch_some_of<T, WeightFormat::kInt4, kRows, Int4As::kMasked>(params, stream);
  launch_some_of<T, WeightFormat::kInt4, kRows, Int4As::kDifferences>(params, stream);
}

/// Tiles of as many rows as nearly all experts have, where rows are dealt at random. A kernel each:
/// where one had several loops ptxas had no registers for wgmma that run while others are prepared.
template <class T, WeightFormat kFormat, bool kBlocks>
void launch_some(const GroupedGemmParams& params, Stream stream) {
  const float most = most_rows(params);
  if constexpr (kFormat == WeightFormat::kInt4) {
    const bool whole = has_whole_groups(params);
    if (most <= 16 && whole) return launch_groups<T, 16>(params, stream);
    if (most <= 24 && whole) return launch_groups<T, 24>(params, stream);
    if (most <= 32 && whole) return launch_groups<T, 32>(params, stream);
    if (most <= 32) return launch_some_of<T, kFormat, 32, Int4As::kAny>(params, stream);
    if (!whole || params.gemm.weight.zeros)
      return launch_some_of<T, kFormat, 64, Int4As::kAny>(params, stream);
  }
  if constexpr (kFormat == WeightFormat::kInt4)  // 144 tokens of 14336 x 4096: 119 us, by 64 113
    if (most <= 46) return launch_some_of<T, kFormat, 48, Int4As::kScaled>(params, stream);
  if (most <= 64) return launch_some_of<T, kFormat, 64, Int4As::kScaled, kBlocks>(params, stream);
  launch_some_of<T, kFormat, 80, Int4As::kScaled, kBlocks>(params, stream);
}

template <class T, class X, WeightFormat kFormat, bool kBlocks = false>
void launch_x(const GroupedGemmParams& params, Stream stream) {
  if constexpr (kFormat == WeightFormat::kDense)
    if (params.segments > 1) return launch_tiles<Tile<T, X, kFormat, 2, 192>>(params, stream);
  if (is_for_digits(params)) return launch_digits(params, stream);
  if (is_for_strips(params)) return launch_expert_strips(params, stream);
  if constexpr (expands<X>(kFormat))
    if (has_some_rows(params)) return launch_some<T, kFormat, kBlocks>(params, stream);
  if constexpr (kFormat != WeightFormat::kInt4)
    if (has_few_rows(params))
      return launch_tiles<
          Tile<T, X, kFormat, expands<X>(kFormat) ? 2 : 1, 32, Int4Way{}, kBlocks>>(params, stream);
  if constexpr (sizeof(X) == 1)
    if (has_tall_tiles(params))
      return launch_tiles<Tile<T, X, kFormat, 2, kTallRows>>(params, stream);
  launch_tiles<Tile<T, X, kFormat, 2, kManyRows, Int4Way{}, kBlocks>>(params, stream);
}

/// fp8 by some rows of x in terms, which have no tiles of 80 rows: of 256 tokens of top 2 in 8
/// experts of 14336 x 4096 one expert has 84, and twice the tiles are two waves (H200, lab, us, 234
/// and, of 88 rows, 148).
template <bool kBlocks>
void launch_terms(const GroupedGemmParams& params, Stream stream) {
  const float most = most_rows(params);
  const auto launch = [&](auto rows) {
    launch_tiles<Tile<__nv_bfloat16, std::uint8_t, WeightFormat::kFp8, 4, decltype(rows)::value,
                      Int4Way{}, kBlocks>>(params, stream);
  };
  if (most <= 32) return launch(std::integral_constant<int, 32>{});
  if (most <= 48) return launch(std::integral_constant<int, 48>{});
  if (most <= 64) return launch(std::integral_constant<int, 64>{});
  launch(std::integral_constant<int, 88>{});
}

template <class T>
void launch_format(const GroupedGemmParams& params, Stream stream) {
  const bool fp8_x = params.gemm.x.dtype == DType::kFloat8E4M3;
  switch (params.gemm.weight.format) {
    case WeightFormat::kDense: return launch_x<T, T, WeightFormat::kDense>(params, stream);
    case WeightFormat::kInt4: return launch_x<T, T, WeightFormat::kInt4>(params, stream);
    case WeightFormat::kFp8:
      if (fp8_x) return launch_x<T, std::uint8_t, WeightFormat::kFp8>(params, stream);
      if (params.gemm.weight.scale_layout == ScaleLayout::kBlock)
        return launch_x<T, T, WeightFormat::kFp8, true>(params, stream);
      return launch_x<T, T, WeightFormat::kFp8>(params, stream);
    case WeightFormat::kInt8: break;  // no op has experts of it
  }
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace

bool runs_on_wgmma(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  const bool int4 = p.weight.format == WeightFormat::kInt4;
  const auto x_bytes = static_cast<std::int64_t>(size_of(p.x.dtype));
  const std::int64_t row_bytes =
      int4 ? 16 : p.weight.stride_row * (p.weight.format == WeightFormat::kFp8 ? 1 : 2);
  const bool fused = p.activation == Activation::kNone || p.activation == Activation::kSiluMul;
  return device::runs_sm90a() && fused && p.dtype != DType::kFloat32 && p.K > 0 &&
         params.experts > 0 && params.x_rows > 0 && p.N % (int4 ? 32 : 16) == 0 &&
         !(int4 && p.x.dtype == DType::kFloat8E4M3) && p.K * x_bytes % 16 == 0 &&
         p.x.stride_row * x_bytes % 16 == 0 && (params.x_rows <= 1 || p.x.stride_row > 0) &&
         row_bytes % 16 == 0 &&
         params.stride_expert % 16 == 0 && is_aligned(p.x.data) && is_aligned(p.weight.data) &&
         (!int4 || (is_aligned(p.weight.scales) && is_aligned(p.weight.zeros)));
}

std::size_t sm90_workspace_bytes(const GroupedGemmParams& params) {
  if (has_terms(params)) return terms_bytes(params) + params.gemm.M * sizeof(float);
  if (params.rows == nullptr || has_few_rows(params) || is_for_digits(params)) return 0;
  const std::int64_t counts = gathers_inside(params) ? claims_count(params) * 4 : 0;
  return static_cast<std::size_t>(gathered_bytes(params) + counts);
}

void launch_sm90(const GroupedGemmParams& params, Stream stream) {
  if (has_terms(params)) {
    const GroupedGemmParams terms = of_terms(params);
    launch_split_rows(params, params.gemm.workspace, const_cast<float*>(terms.gemm.x.scale),
                      stream);
    return params.gemm.weight.scale_layout == ScaleLayout::kBlock
               ? launch_terms<true>(terms, stream)
               : launch_terms<false>(terms, stream);
  }
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_format<typename decltype(type)::type>(params, stream);
  });
}

}  // namespace ridgeline::gemm_grouped
