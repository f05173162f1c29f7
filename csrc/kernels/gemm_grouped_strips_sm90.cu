#include "kernels/gemm_grouped_strips_sm90.cuh"

#include <algorithm>

#include "device/properties.cuh"
#include "device/ptx/copy_order.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/warpgroup.cuh"

namespace ridgeline::gemm_grouped {
namespace {

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM. As the strips kernel (gemm_strips_sm90.cu), of strips of one expert after
/// the other: all strips that have rows are dealt evenly to the blocks, and warps of their own ask
/// for them. Where a block comes to rows that are not there those that multiply stage them, while
/// the rings are on their way.
/// Roofline: the bytes of the weights of the experts that have rows; x comes from L2, once a block.
template <class T, class E, WeightFormat kFormat, bool kFp8X, bool kBlocks>
__global__ void __launch_bounds__(kStripThreads, 1)
    grouped_strips_kernel(const __grid_constant__ GroupedStripsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kFp8 = kFormat == WeightFormat::kFp8, kGroups = kFp8X && kBlocks;
  constexpr int kCols = strips_chunk_cols(kFormat), kStageBytes = strips_stage_bytes(kFormat);
  constexpr int kFactors = gemm_grouped::kFactors<T, E, kFp8X, kGroups>;
  extern __shared__ __align__(1024) char memory[];
  const StripLaunch& launch = params.launch;
  const int warp = device::warp_index(), lane = threadIdx.x % 32, row_tile = launch.row_tile;
  const int ring_bytes = params.stages * kStageBytes;
  char* ring = memory + warp * ring_bytes;
  auto& shared = *reinterpret_cast<GroupedStripsShared*>(memory + kWarps * ring_bytes);
  float* sums_at = reinterpret_cast<float*>(&shared + 1);
  const int each = kStripRows * row_tile;
  char* x = reinterpret_cast<char*>(sums_at + kFinishers * launch.paired * kWarps * each);
  float* factors = reinterpret_cast<float*>(x + row_tile * params.pitch);
  auto* lists = reinterpret_cast<RowTile*>(factors + kFactors * launch.chunks * row_tile);

  ptx::launch_dependents();
  if (threadIdx.x == kThreads) shared.sums.init(launch);
  if (lane == 0 && warp < kWarps) {
    for (int i = 0; i < params.stages; ++i) {
      ptx::mbarrier_init(&shared.full[warp][i], 1);
      ptx::mbarrier_init(&shared.free[warp][i], 1);
    }
    if (kFormat != WeightFormat::kFp4) ptx::prefetch_tensor_map(&params.weight);
  }
  if (kFormat == WeightFormat::kFp4 && warp < kWarps) {
    clear_exponents(ring, params.stages, lane);
    ptx::fence_copies();
  }
  ptx::fence_mbarrier_init();
  __syncthreads();               // the barriers are made
  ptx::wait_for_dependencies();  // which weights are read is what the kernels ahead decide
  const LaneRows lane_rows(launch.grouped, lane);
  StripWalk walk(launch, lists + warp * launch.listed, lane);
  if (warp >= kWarps + kFinishers) {
    const std::uint64_t policy = ptx::evict_first();
    const auto request = [&](const ChunkSteps& at, int to, int stage, int parity) {
      ptx::mbarrier_wait(&shared.free[to][stage], parity);
      request_chunk<kFormat>(params, at, memory + to * ring_bytes + stage * kStageBytes,
                             &shared.full[to][stage], policy);
    };
    return request_chunks(walk, warp - kWarps - kFinishers, params.stages, request);
  }
  if (warp >= kWarps) return finish_items<T>(walk, shared.sums, sums_at, warp - kWarps);

  int stage = 0, parity = 0, tile = -1, staged = 0, staged_end = -1;
  RowTile rows{};
  const char* x_lane = nullptr;
  for (int strip = 0, chunk = warp; walk.strips > 0; ++strip, chunk -= launch.chunks, walk.next()) {
    if (walk.tile != tile) {
      tile = walk.tile;
      rows = walk.rows();
      if (rows.first + rows.count > staged_end) {
        if (staged_end >= 0) ptx::named_barrier_sync(1, kThreads);  // every warp has read x
        const int staging = walk.rows_together();
        staged = rows.first;
        staged_end = staged + staging;
        stage_rows<T, E, kFormat, kFp8X, kGroups>(params, lane_rows.from(walk, lane), staging, warp,
                                                  x, factors);
        ptx::named_barrier_sync(2, kThreads);  // x is whole
      }
      // For ldmatrix the row of x that a thread addresses, for fp8 its own columns of a row. Rows
      // past the last repeat it; their sums are not kept.
      x_lane = x + (rows.first - staged + min(kFp8 ? lane / 4 : lane % 8, rows.count - 1)) *
                       params.pitch + (kFp8 ? lane % 4 * 8 : lane / 8 * 16);
    }
    const int item = strip >> (launch.paired - 1);
    if (chunk >= launch.chunks) {  // of others' columns alone
      if (launch.all_wait) {
        shared.sums.wait_free(item);
        shared.sums.arrive_done(item);
      }
      continue;
    }
    float* mine = sums_of(sums_at, launch, strip) + warp * each;
    const int row = walk.weight_row();
    Sums<E> whole;  // dense and fp4
    float sums[4] = {};
    for (; chunk < launch.chunks; chunk += kWarps) {
      const char* weight = ring + stage * kStageBytes;
      float of_x[2][std::max(kFactors, 1)];
      if constexpr (kFactors > 0)
#pragma unroll
        for (int i = 0; i < 2 * kFactors; ++i)
          of_x[i / kFactors][i % kFactors] =
              factors[(chunk * kFactors + i % kFactors) * row_tile + rows.first - staged +
                      min(lane % 4 * 2 + i / kFactors, rows.count - 1)];
      float of_box[kBoxes];  // scales of blocks
      if constexpr (kBlocks) load_scales(of_box, launch.grouped, rows.expert, row, chunk);
      ptx::mbarrier_wait(&shared.full[warp][stage], parity);
      if constexpr (kFp8) {
        Sums<E> parts[kBoxes];
        multiply_fp8<E>(weight, x_lane, chunk * kCols * 2, parts, lane);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[i] += (kFactors > 0 ? of_x[i % 2][kGroups ? box : 0] : 1.0f) *
                       (kBlocks ? of_box[box] : 1.0f) * parts[box].get(i);
      } else if constexpr (kFormat == WeightFormat::kFp4) {
        multiply_fp4(weight, x_lane, chunk * kCols * 2, whole, lane);
      } else {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          multiply_dense<E>(weight + box * kBoxBytes, x_lane,
                            (chunk * kBoxes + box) * kBoxCols<kFormat> * 2, whole, lane);
      }
      __syncwarp();  // every lane has read the stage
      if (lane == 0) ptx::mbarrier_arrive(&shared.free[warp][stage]);
      if (++stage == params.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if constexpr (!kFp8)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = whole.get(i);
    shared.sums.wait_free(item);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = lane % 4 * 2 + i % 2;
      if (m < rows.count) mine[m * kStripRows + lane / 4 + i / 2 * 8] = sums[i];
    }
    shared.sums.arrive_done(item);
  }
  clear_rows<T>(launch.grouped);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <WeightFormat kFormat>
CUtensorMap weight_map(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  if constexpr (kFormat == WeightFormat::kFp4) return {};
  constexpr int kBytes = kFormat == WeightFormat::kFp8 ? 1 : 2;
  return experts_map(p.weight.data, kBytes, {p.K, p.N, params.experts},
                     {p.weight.stride_row * kBytes, params.stride_expert},
                     {kBoxCols<kFormat>, kStripRows}, CU_TENSOR_MAP_SWIZZLE_128B);
}

/// Bytes of 16-bit weights that few rows touch, up to which rings of two stages are faster.
/// H200, lab, us, one token, of four and of two: bf16 768 x 2048 10.7 and 9.9, but of 4096 x 28672
/// 107.4 and 108.2; fp8 2048 x 1536 12.0 and 10.9, 768 x 2048 8.8 and 7.8.
constexpr std::int64_t kFewBytes = std::int64_t{40} << 20;

int stages_of(const GroupedGemmParams& params, const Choice& choice) {
  const GemmParams& p = params.gemm;
  const std::int64_t touched = std::min<std::int64_t>(p.M, params.experts) * params.stride_expert;
  const bool few = p.weight.format != WeightFormat::kDense || touched <= kFewBytes;
  return std::min(few ? kFewStages : kRingStages,
                  (kMostBytes - choice.shared_bytes) / strips_rings_bytes(p.weight.format, 1));
}

template <class T, class E, WeightFormat kFormat, bool kFp8X, bool kBlocks>
void launch(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const GemmParams& p = params.gemm;
  constexpr int kCols = strips_chunk_cols(kFormat);
  const int pieces = ceil_div(round_up(p.K, kCols), kPieceCols), stages = stages_of(params, choice);
  const GroupedStripsParams launched{
      .launch = strip_launch(params, choice, kCols),
      .weight = weight_map<kFormat>(params),
      .pitch = strips_pitch(p.K, kFormat),
      .pieces = pieces,
      .stages = stages,
      .strip_bytes = ceil_div(p.K, Int4Layout::kCols) * Fp4Layout::kBytes,
      .by_pieces = device::Divisor::of(pieces)};
  constexpr auto kKernel = grouped_strips_kernel<T, E, kFormat, kFp8X, kBlocks>;
  device::launch_chained<kKernel>(dim3(device::multiprocessors()), dim3(kStripThreads),
                                  choice.shared_bytes + strips_rings_bytes(kFormat, stages), stream,
                                  launched, "grouped_linear: strips");
}

template <class T>
void launch_strips_of(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const GemmParams& p = params.gemm;
  if (p.weight.format == WeightFormat::kFp4) {  // its op takes bfloat16 alone
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      launch<T, T, WeightFormat::kFp4, false, false>(params, choice, stream);
    return;
  }
  if (p.weight.format == WeightFormat::kDense)
    return launch<T, T, WeightFormat::kDense, false, false>(params, choice, stream);
  const bool blocks = p.weight.scale_layout == ScaleLayout::kBlock;
  if (p.x.dtype == DType::kFloat8E4M3 && blocks)
    return launch<T, __half, WeightFormat::kFp8, true, true>(params, choice, stream);
  if (p.x.dtype == DType::kFloat8E4M3)
    return launch<T, __half, WeightFormat::kFp8, true, false>(params, choice, stream);
  if (blocks) return launch<T, __half, WeightFormat::kFp8, false, true>(params, choice, stream);
  launch<T, __half, WeightFormat::kFp8, false, false>(params, choice, stream);
}

}  // namespace

void launch_expert_strips(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_strips_of<typename decltype(type)::type>(params, choice, stream);
  });
}

}  // namespace ridgeline::gemm_grouped
