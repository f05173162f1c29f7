#include "kernels/gemm_digits_sm90.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_strip_outputs.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_digits;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM, each with consecutive strips of 16 weight rows. A block streams a strip
/// after the other; eight warps share out the columns, a chunk each by turns, through rings of
/// their own in shared memory, and multiply chunks by all rows of x, which stay in shared memory as
/// digits, with the integer mma.m16n8k32: the weight, as it is packed, is the operand of 16 rows.
/// Exact in int32 over 64 or 128 columns, whose sums are scaled in float32. Further warps add up
/// finished strips.
/// Roofline: the weight's bytes, once; x comes from L2, once a block.
template <class T, int kSpan, int kTiles>
__global__ void __launch_bounds__(kThreads + kMostFinishers * 32, kTiles == 1 ? 2 : 1)
    digits_sm90_kernel(const __grid_constant__ DigitsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32, rows = static_cast<int>(p.M);
  char* ring = memory + warp * kStages * params.stage_bytes;
  auto& barriers =
      *reinterpret_cast<Barriers*>(memory + kWarps * kStages * params.stage_bytes);
  float* sums_at = reinterpret_cast<float*>(&barriers + 1);
  const int each = sums_each(p);
  Span* spans = reinterpret_cast<Span*>(sums_at + kSumBuffers * kWarps * each);
  char* x = reinterpret_cast<char*>(
      spans + round_up(params.chunks * (kChunkBlocks / kSpan) * rows, 2));
  Requests requests(params, warp);

  ptx::launch_dependents();
  if (threadIdx.x == 0) barriers.sums.init();
  FirstRequests<Requests> first{requests, kStages, ring, params.stage_bytes, barriers.full[warp]};
  if (lane == 0 && warp < kWarps) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&barriers.full[warp][i], 1);
    ptx::prefetch_tensor_map(&params.scales);
    if (p.weight.zeros) ptx::prefetch_tensor_map(&params.zeros);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made
  if (warp >= kWarps) {
    if (warp == kWarps && !p.weights_ready) prefetch_x(p, lane);
    if (threadIdx.x == kWarps * 32) prefetch_norm(p);
    ptx::wait_for_dependencies();
    return finish_strips<T>(p, params.order, barriers.sums, sums_at, memory + params.operands_at,
                            barriers.squares, nullptr);
  }
  first.begin(p.weights_ready);
  barriers.squares.clear(warp, lane);
  ptx::wait_for_dependencies();
  const auto request = [&] { first.finish(); };
  const bool finite = stage_x<T, kSpan>(params, warp, x, spans, barriers.squares, request);
  request();  // a warp that stages nothing
  if (params.chunks % kWarps == 0) {
    __syncwarp();  // of x a warp meets what it staged itself
  } else {
    ptx::named_barrier_sync(1, kThreads);  // x is whole
  }

  const XOfLane<kTiles> x_lane(x, spans, rows, lane);
  const int strips = params.order.strips(blockIdx.x);
  int stage = 0, parity = 0, row = params.order.first_row(blockIdx.x);
  for (int strip = 0, chunk = warp; strip < strips; ++strip, chunk -= params.chunks) {
    float sums[kTiles][2] = {};
    for (; chunk < params.chunks; chunk += kWarps) {
      const char* of_chunk = ring + stage * params.stage_bytes;
      ptx::mbarrier_wait(&barriers.full[warp][stage], parity);
      multiply_chunk<T, kSpan>(params, of_chunk, x_lane, chunk, sums, lane);
      __syncwarp();  // every lane has read the stage
      requests.next(ring + stage * params.stage_bytes, &barriers.full[warp][stage]);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    barriers.sums.wait_free(strip);
    float* mine = sums_at + (strip % kSumBuffers * kWarps + warp) * each;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int m = tile * kTokens + lane % 4;
      if (m < rows)
#pragma unroll
        for (int i = 0; i < 2; ++i) mine[m * kStripRows + lane / 4 + i * 8] = sums[tile][i];
    }
    if (!finite) {
      __syncwarp();  // the sums of every lane are written
      const ChunkSource from(params, row, 0);
      for (int i = lane; i < each; i += 32) {
        const int n = row + i % kStripRows;
        mine[i] += products_not_finite<T>(
            p, from.weight, static_cast<const T*>(p.weight.scales) + n,
            p.weight.zeros ? p.weight.zeros + n : nullptr,
            static_cast<const char*>(p.x.data) +
                i / kStripRows * p.x.stride_row * (has_byte_x(p) ? 1 : 2),
            n, warp * kChunkCols, kChunkCols, kWarps * kChunkCols);
      }
    }
    barriers.sums.arrive_done(strip);  // this lane's sums are written
    row = params.order.next_row(row, strip % 2 == 1);
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// Boxes of 16 columns of what int4 has a group of: [groups, N].
CUtensorMap scales_map(const void* data, int element_bytes, const GemmParams& p, int groups) {
  return device::matrix_map({.data = data,
                             .element_bytes = element_bytes,
                             .rows = ceil_div(p.K, p.weight.group),
                             .cols = p.N,
                             .stride = p.N},
                            groups, kStripRows, false, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <class T, int kSpan, int kTiles>
void launch(const GemmParams& p, Stream stream) {
  const int items = strip_items(p), blocks = std::min(items, device::multiprocessors());
  DigitsParams params{.gemm = p, .order = StripOrder::of(p, items, blocks)};
  params.chunks = ceil_div(p.K, kChunkCols);
  while ((1 << params.group_shift) < std::min(p.weight.group, kChunkCols)) ++params.group_shift;
  params.by_group = device::Divisor::of(
      p.weight.group >= p.K ? params.chunks : std::max(p.weight.group / kChunkCols, 1));
  const int groups = kChunkCols >> params.group_shift;
  params.scales = scales_map(p.weight.scales, 2, p, groups);
  if (p.weight.zeros) params.zeros = scales_map(p.weight.zeros, 1, p, groups);
  params.zeros_at = kChunkBytes + round_up(groups * kScaleBytes, 128);
  params.stage_bytes =
      params.zeros_at + (p.weight.zeros ? round_up(groups * kZeroBytes, 128) : 0);
  const int rows = static_cast<int>(p.M), spans = params.chunks * (kChunkBlocks / kSpan) * rows;
  params.operands_at = kWarps * kStages * params.stage_bytes + sizeof(Barriers) + sums_bytes(p) +
                       round_up(spans, 2) * sizeof(Span) +
                       params.chunks * kChunkBlocks * block_bytes(rows);
  const int shared = params.operands_at + KeptOperands<T>::bytes(p, params.order);
  constexpr auto kKernel = digits_sm90_kernel<T, kSpan, kTiles>;
  constexpr auto kName = "linear: digits";
  prefer_shared_memory<kKernel>(kName);
  device::launch_chained<kKernel>(dim3(blocks), dim3(kThreads + finishers_of(p) * 32),
                                  std::max(shared, share_of(p)), stream, params, kName);
}

template <class T, int kSpan>
void launch_rows(const GemmParams& p, Stream stream) {
  if (p.M <= kTokens) return launch<T, kSpan, 1>(p, stream);
  launch<T, kSpan, 2>(p, stream);
}

template <class T>
void launch_spans(const GemmParams& p, Stream stream) {
  const bool wide = p.weight.group % (2 * Int4Layout::kCols) == 0 || p.weight.group >= p.K;
  if (wide) return launch_rows<T, 2>(p, stream);
  launch_rows<T, 1>(p, stream);
}

}  // namespace

void launch_digits(const GemmParams& p, Stream stream) {
  check(p.M <= gemm_config::kStripsRows, "linear: the digits kernel takes at most ",
        gemm_config::kStripsRows, " rows, got ", p.M);
  if (p.dtype == DType::kFloat16) return launch_spans<__half>(p, stream);
  launch_spans<__nv_bfloat16>(p, stream);
}

}  // namespace ridgeline::gemm_detail
