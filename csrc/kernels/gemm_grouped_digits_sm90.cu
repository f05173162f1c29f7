#include "kernels/gemm_grouped_digits_sm90.cuh"

#include <algorithm>

#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"

namespace ridgeline::gemm_grouped {
namespace {

constexpr int kMostTileRows = 2 * kTokens;  // of x that a strip meets at a time

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM. As the digits kernel (gemm_digits_sm90.cu), of strips of one expert after
/// the other: all strips that have rows are dealt evenly to the blocks. Where a block comes to
/// another row tile its warps stage that tile's rows of x, while the rings are on their way.
/// Roofline: the bytes of the weights of the experts that have rows; x comes from L2, once a block.
template <class T, int kSpan>
__global__ void __launch_bounds__(kThreads + kFinishers * 32, 1)
    grouped_digits_kernel(const __grid_constant__ GroupedDigitsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  const DigitsParams& digits = params.digits;
  const GemmParams& p = params.grouped.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int row_tile = static_cast<int>(digits.gemm.M);
  char* ring = memory + warp * params.stages * digits.stage_bytes;
  auto& barriers = *reinterpret_cast<GroupedBarriers*>(memory + kWarps * params.stages *
                                                                    digits.stage_bytes);
  float* sums_at = reinterpret_cast<float*>(&barriers + 1);
  Span* spans = reinterpret_cast<Span*>(
      sums_at + kFinishers * params.paired * kWarps * sums_each(digits.gemm));
  char* x = reinterpret_cast<char*>(
      spans + round_up(digits.chunks * (kChunkBlocks / kSpan) * row_tile, 2));
  auto* offsets = reinterpret_cast<std::int32_t*>(x + digits.chunks * kChunkBlocks *
                                                          block_bytes(row_tile));
  const Tables tables{offsets, offsets + params.grouped.experts + 1};

  ptx::launch_dependents();
  if (threadIdx.x == kThreads)
    for (int i = 0; i < kFinishers; ++i) {
      ptx::mbarrier_init(&barriers.done[i], kWarps * params.paired);
      ptx::mbarrier_init(&barriers.free[i], 1);
    }
  if (lane == 0 && warp < kWarps) {
    for (int i = 0; i < params.stages; ++i) ptx::mbarrier_init(&barriers.full[warp][i], 1);
    ptx::prefetch_tensor_map(&digits.scales);
    if (p.weight.zeros) ptx::prefetch_tensor_map(&digits.zeros);
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_dependencies();  // which weights are read is what the kernels ahead decide
  if (warp == 0) tables.fill(params.grouped, row_tile, lane);
  __syncthreads();  // the barriers are made, and the tiles counted

  StripWalk walk(params, tables);
  if (warp >= kWarps) return finish_items<T>(params, walk, barriers, sums_at, warp - kWarps);

  GroupedRequests requests(walk, warp);
  if (lane == 0)
    for (int i = 0; i < params.stages; ++i)
      requests.next(ring + i * digits.stage_bytes, &barriers.full[warp][i]);
  const std::int64_t begin = std::int64_t{tables.offsets[params.grouped.experts]} * p.out_cols();
  for (std::int64_t i = begin + std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < p.M * p.out_cols(); i += std::int64_t{gridDim.x} * kThreads)
    static_cast<T*>(p.y)[i] = device::from_float<T>(0.0f);  // rows of no expert

  int stage = 0, parity = 0, staged = -1;
  bool finite = true;
  TileRows rows{};
  XOfLane<1> few(x, spans, 1, lane);
  XOfLane<2> more(x, spans, 1, lane);
  for (int strip = 0, chunk = warp; walk.strips > 0; ++strip, chunk -= digits.chunks, walk.next()) {
    if (walk.tile != staged) {
      if (staged >= 0) ptx::named_barrier_sync(1, kThreads);  // every warp has read x
      staged = walk.tile;
      rows = walk.rows();
      finite = stage_tile<T, kSpan>(params, rows, warp, x, spans);
      finite = !ptx::named_barrier_any(2, kThreads, !finite);  // x is whole
      few = XOfLane<1>(x, spans, rows.count, lane);
      more = XOfLane<2>(x, spans, rows.count, lane);
    }
    const int item = strip >> (params.paired - 1), turn = chunk;
    float* mine = sums_of(sums_at, params, strip) + warp * sums_each(digits.gemm);
    const auto multiply = [&]<int kOfTiles>(const XOfLane<kOfTiles>& x_lane) {
      float sums[kOfTiles][2] = {};
      for (; chunk < digits.chunks; chunk += kWarps) {
        const char* of_chunk = ring + stage * digits.stage_bytes;
        ptx::mbarrier_wait(&barriers.full[warp][stage], parity);
        multiply_chunk<T, kSpan>(digits, of_chunk, x_lane, chunk, sums, lane);
        __syncwarp();  // every lane has read the stage
        if (lane == 0)
          requests.next(ring + stage * digits.stage_bytes, &barriers.full[warp][stage]);
        if (++stage == params.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      ptx::mbarrier_wait(&barriers.free[item % kFinishers], item / kFinishers % 2 ^ 1);
#pragma unroll
      for (int tile = 0; tile < kOfTiles; ++tile) {
        const int m = tile * kTokens + lane % 4;
        if (m < rows.count)
#pragma unroll
          for (int i = 0; i < 2; ++i) mine[m * kStripRows + lane / 4 + i * 8] = sums[tile][i];
      }
    };
    if (rows.count <= kTokens) {
      multiply(few);
    } else {
      multiply(more);
    }
    if (!finite) {
      __syncwarp();  // they are added to
      for (int i = lane; i < rows.count * kStripRows; i += 32) {
        const int n = walk.row() + i % kStripRows;
        const std::int64_t scales = walk.expert * params.grouped.stride_scales + n;
        const std::int64_t row = row_of_x(params.grouped, rows.first + i / kStripRows);
        mine[i] += products_not_finite<T>(
            p, walk.weight(), static_cast<const T*>(p.weight.scales) + scales,
            p.weight.zeros ? p.weight.zeros + scales : nullptr,
            static_cast<const T*>(p.x.data) + row * p.x.stride_row, n, turn * kChunkCols,
            kChunkCols, kWarps * kChunkCols);
      }
    }
    __syncwarp();  // the sums of every lane are written
    if (lane == 0) ptx::mbarrier_arrive(&barriers.done[item % kFinishers]);
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// Boxes of 16 columns of what int4 has a group of: [experts, groups, N].
CUtensorMap scales_map(const void* data, int bytes, const GroupedGemmParams& params, int groups) {
  const GemmParams& p = params.gemm;
  const auto u64 = [](auto v) { return static_cast<cuuint64_t>(v); };
  const cuuint64_t sizes[] = {u64(p.N), u64(ceil_div(p.K, p.weight.group)), u64(params.experts), 1};
  const cuuint64_t strides[] = {u64(p.N * bytes), u64(params.stride_scales * bytes),
                                u64(params.stride_scales * bytes * params.experts)};
  const cuuint32_t box[] = {kStripRows, static_cast<cuuint32_t>(groups), 1, 1};
  const cuuint32_t ones[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = device::tensor_map_encoder()(
      &map, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 4,
      const_cast<void*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "grouped_linear: cuTensorMapEncodeTiled refused scales, code ",
        static_cast<int>(result));
  return map;
}

/// Where a block's shared memory goes.
struct Sizes {
  int row_tile, stages;
  std::int64_t bytes;
};

constexpr int kMostBytes = 227 * 1024;

int paired_of(const GroupedGemmParams& params) { return is_gated(params.gemm.activation) ? 2 : 1; }

std::int64_t bytes_without_rings(const GroupedGemmParams& params, int row_tile) {
  const int chunks = ceil_div(params.gemm.K, kChunkCols);
  const int spans = round_up(chunks * kChunkBlocks * row_tile, 2);
  return static_cast<std::int64_t>(sizeof(GroupedBarriers)) +
         kFinishers * paired_of(params) * kWarps * kStripRows * row_tile * 4 +
         spans * sizeof(Span) + chunks * kChunkBlocks * block_bytes(row_tile) +
         2 * (params.experts + 1) * 4;
}

int group_shift(const GemmParams& p) {
  int shift = 0;
  while ((1 << shift) < std::min(p.weight.group, kChunkCols)) ++shift;
  return shift;
}

int stage_bytes(const GemmParams& p) {
  const int groups = kChunkCols >> group_shift(p);
  return kChunkBytes + round_up(groups * kScaleBytes, 128) +
         (p.weight.zeros ? round_up(groups * kZeroBytes, 128) : 0);
}

/// As many rows of x as a tile may have, and as many stages as fit then.
Sizes sizes_of(const GroupedGemmParams& params) {
  const int of_ring = kWarps * stage_bytes(params.gemm);
  int rows = static_cast<int>(std::min<std::int64_t>(params.gemm.M, kMostTileRows));
  while (rows > 1 && bytes_without_rings(params, rows) + 2 * of_ring > kMostBytes) --rows;
  const std::int64_t fixed = bytes_without_rings(params, rows);
  const int stages = static_cast<int>(
      std::min<std::int64_t>(kMostStages, (kMostBytes - fixed) / of_ring));
  return {rows, stages, fixed + stages * of_ring};
}

template <class T, int kSpan>
void launch(const GroupedGemmParams& params, Stream stream) {
  const Sizes sizes = sizes_of(params);
  const GemmParams& p = params.gemm;
  GroupedDigitsParams launched{.digits = {.gemm = p}, .grouped = params};
  DigitsParams& digits = launched.digits;
  digits.gemm.M = sizes.row_tile;
  digits.chunks = ceil_div(p.K, kChunkCols);
  digits.group_shift = group_shift(p);
  const int groups = kChunkCols >> digits.group_shift;
  digits.scales = scales_map(p.weight.scales, 2, params, groups);
  if (p.weight.zeros) digits.zeros = scales_map(p.weight.zeros, 1, params, groups);
  digits.zeros_at = kChunkBytes + round_up(groups * kScaleBytes, 128);
  digits.stage_bytes = stage_bytes(p);
  launched.paired = paired_of(params);
  launched.items = p.N / kStripRows / launched.paired;
  launched.stages = sizes.stages;
  constexpr auto kKernel = grouped_digits_kernel<T, kSpan>;
  constexpr auto kName = "grouped_linear: digits";
  device::launch_chained<kKernel>(dim3(device::multiprocessors()),
                                  dim3(kThreads + kFinishers * device::kWarpSize), sizes.bytes,
                                  stream, launched, kName);
}

template <class T>
void launch_spans(const GroupedGemmParams& params, Stream stream) {
  const GemmParams& p = params.gemm;
  const bool wide = p.weight.group % (2 * Int4Layout::kCols) == 0 || p.weight.group >= p.K;
  if (wide) return launch<T, 2>(params, stream);
  launch<T, 1>(params, stream);
}

}  // namespace

/// Few rows an expert, of which a strip of one meets all: H200, us, 16 tokens of top 2 in 8 experts
/// of 4096 x 28672 167 so, 159 by expansion. And chunks for every warp: one token of 128 experts of
/// 768 x 2048 12.8, 8.5 by expansion.
constexpr int kMeanRows = 2;

bool is_for_digits(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  if (p.weight.format != WeightFormat::kInt4 || p.batch_invariant) return false;
  const int group = p.weight.group;
  const bool divides = group % Int4Layout::kCols == 0 && kChunkCols % group == 0;
  if (!divides && group % kChunkCols != 0 && group < p.K) return false;
  return ceil_div(p.K, kChunkCols) >= kWarps && p.M <= std::int64_t{kMeanRows} * params.experts &&
         sizes_of(params).stages >= 2;
}

void launch_digits(const GroupedGemmParams& params, Stream stream) {
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_spans<typename decltype(type)::type>(params, stream);
  });
}

}  // namespace ridgeline::gemm_grouped
