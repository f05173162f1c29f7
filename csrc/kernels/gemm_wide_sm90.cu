#include <algorithm>

#include "device/launch.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_cluster_block.cuh"
#include "kernels/gemm_cluster_finish.cuh"
#include "kernels/gemm_cluster_producer.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_cluster;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kCols = gemm_config::kWideCols / 2;  // weight rows of a warpgroup: wgmma's columns
constexpr int kWideBytes = 2 * gemm_config::kShareOfSm;  // of shared memory
constexpr int kSumsOfRow = 4;  // row groups of 64 columns that a row of sums has room for
using Layout = StageLayout<WeightFormat::kFp8, true, 64>;
using Sums = float[kCols / 8][4];

// ---- Shared memory ------------------------------------------------------------------------------

struct Wide {
  Fixed fixed;
  alignas(16) float scale[gemm_config::kWideCols], bias[gemm_config::kWideCols];
};
constexpr int kOwnBytes = 4096;
static_assert(sizeof(Wide) <= kOwnBytes);

// ---- Phases -------------------------------------------------------------------------------------

/// 128 columns: x, both of its terms if it has two, by the warpgroup's weight rows.
template <int kTerms>
__device__ __forceinline__ void multiply(const ClusterParams& params, const Stage& stage, int group,
                                         Sums& part) {
  const std::uint64_t x[] = {stage.x, stage.x + operand_step(params.second_term)};
  const std::uint64_t rows = operand(stage.weight + params.weights_at + group * kCols * kRowBytes);
  ptx::hold_registers(part);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      ptx::WgmmaFp8<kCols>::mma(part, x[term] + step * kOperandStep, rows + step * kOperandStep,
                                step + term != 0);
  ptx::wgmma_commit();
}

/// The scales of blocks that a warpgroup's weight rows are in, of a stage's columns: of the rows'
/// first ones and, from an octet on that depends on the tile, of the others.
struct ScalesOfBlocks {
  const float* first;
  int second;  // from the first one's to the other's
  int octets;  // that have the first one's

  __device__ ScalesOfBlocks(const GemmParams& p, int row, int begin) {
    const int next = (min(row, p.N - 1) / kScaleBlock + 1) * kScaleBlock;  // row of the next block
    first = static_cast<const float*>(p.weight.scales) + first_block_scale(p, row) + begin;
    octets = (next - row) / 8;
    second = first_block_scale(p, next) - first_block_scale(p, row);
  }
  /// Those of `i` stages further.
  __device__ float2 at(int i) const { return {__ldg(first + i), __ldg(first + i + second)}; }

  __device__ void add(Sums& sums, const Sums& part, float2 scale) const {
#pragma unroll
    for (int i = 0; i < kCols / 8; ++i) {
      const float by = i < octets ? scale.x : scale.y;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(by, part[i][j], sums[i][j]);
    }
  }
};

/// Where store() of Finish takes them from: [row of x][weight row].
template <class Finish>
__device__ __forceinline__ void keep(const Finish& finish, const Sums& sums, int group) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float* to = finish.sums + (warp * 16 + lane / 4) * finish.pitch() + group * kCols + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kCols / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      *reinterpret_cast<float2*>(to + j * 8 * finish.pitch() + i * 8) = {sums[i][2 * j],
                                                                        sums[i][2 * j + 1]};
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (segments of K, tiles of 224 weight rows), an SM each; the segments of a tile are a
/// cluster. fp8 by up to 64 rows of e4m3, or by the two terms of bfloat16 (split_x_kernel). x is
/// wgmma's operand of 64 rows, and 112 weight rows are its columns for each of two warpgroups, both
/// from shared memory; two warps request stages of 128 columns of K, whose products are added in
/// float32, times the scales of the weight's blocks if it has them. x comes from L2 half as often
/// as where two blocks share an SM, and wgmma are half as many.
/// Roofline: the weight's bytes, once.
template <class T, int kTerms, bool kBlocks>
__global__ void __launch_bounds__(kThreads, 1)
    wide_kernel(const __grid_constant__ ClusterParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  // At the end: the last stage's operand of 64 rows may reach over x.
  Wide& own = *reinterpret_cast<Wide*>(memory + params.shared_bytes - kOwnBytes);
  Fixed& fixed = own.fixed;
  char* ring = memory;
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int first = blockIdx.y * params.box_rows;  // column of the product
  const int up_first = params.paired ? first + p.N / 2 : first;

  const int segment = blockIdx.x, segments = gridDim.x, m = static_cast<int>(p.M);
  const auto [begin, count] = params.stages_of(segment);

  if (ptx::elect_one()) {
    const int rows = max(0, min(params.rows_each, m - segment * params.rows_each));
    make_barriers<false>(fixed, params, warp, kThreads / 32,
                         received_bytes<64>(params, segments, rows));
  }
  if (threadIdx.x == kThreads - 1) {
    ptx::prefetch_tensor_map(&params.weight);
    ptx::prefetch_tensor_map(&params.x);
  }
  __syncthreads();  // the barriers are made
  if (segments > 1) ptx::cluster_arrive_relaxed();
  const Producer<Layout> producer{params, fixed, ring, begin, count, first, up_first, 0};
  if (warp == kConsumers) {
    if (ptx::elect_one()) producer.run_weight();
  } else if (warp == kConsumers + 1) {
    if (ptx::elect_one()) producer.run_x();
  } else {
    ptx::wait_for_dependencies();
    const Finish<T, kTerms> finish{
        .params = params,
        .fixed = fixed,
        .sums = reinterpret_cast<float*>(ring),
        .received = reinterpret_cast<float4*>(ring + params.ring_bytes),
        .first = first,
        .row0 = 0,
        .rows = m,
        .scale = own.scale,
        .bias = own.bias};
    finish.bring_factors(up_first);
    const int group = warp / 4;
    Sums sums = {};
    StageReader<false> reader{params, fixed, ring};
    const int row = params.paired ? group == 0 ? first : up_first : first + group * kCols;
    const ScalesOfBlocks blocks(p, row, begin);
#pragma unroll 1
    for (int i = 0; i < count; ++i, reader.advance(1)) {
      Sums part;
      float2 scale;
      if constexpr (kBlocks) scale = blocks.at(i);
      multiply<kTerms>(params, reader.wait(), group, part);
      ptx::wgmma_wait<0>();
      ptx::hold_registers(part);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&fixed.empty[reader.stage]);
      if constexpr (kBlocks) {
        blocks.add(sums, part, scale);
      } else {
#pragma unroll
        for (int j = 0; j < kCols / 2; ++j) sums[j / 4][j % 4] += part[j / 4][j % 4];
      }
    }
    ptx::named_barrier_sync(1, kConsumerThreads);  // every consumer has read its last stage
    finish.request_residual();
    keep(finish, sums, group);
    ptx::named_barrier_sync(1, kConsumerThreads);  // the block's sums are whole
    if (segments > 1) {
      ptx::cluster_wait();  // the barriers of all blocks are made
      finish.send();
      ptx::mbarrier_wait(&fixed.received, 0);
    }
    finish.store();
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, int kTerms, bool kBlocks = false>
void launch(const GemmParams& p, int segments, Stream stream) {
  const int x_rows = kTerms * round_up(static_cast<int>(p.M), 8);
  ClusterParams params{.gemm = p};
  params.paired = is_gated(p.activation);
  params.tile_rows = gemm_config::kWideCols;
  params.row_groups = kSumsOfRow;
  params.turns = 1;
  params.readers = kConsumers;
  params.segments = device::Divisor::of(segments);
  params.box_rows = params.tile_rows / (params.paired ? 2 : 1);
  params.x_box = x_rows * kRowBytes;
  params.second_term = kTerms > 1 ? params.x_box / kTerms : 0;
  params.x_bytes = params.weights_at = params.x_box;
  params.x_step = params.x_box + params.tile_rows * Layout::kRowOfWeight;
  params.weight_step = params.x_step;
  params.shared_bytes = kWideBytes;
  params.steps = ceil_div(p.K, Layout::kCols);
  params.rows_held = Layout::kTokens;  // keep() writes them all
  params.rows_each = ceil_div(static_cast<int>(p.M), segments);
  const int received = received_bytes<64>(params, segments, params.rows_each);
  params.stages = std::min(kMaxStages, (kWideBytes - kOwnBytes - received) / params.x_step);
  params.ring_bytes = params.stages * params.x_step;
  params.x_stages = params.stages;
  // All of the ring: H200, 64 rows of 4096 x 28672, none of it, half and so: fp8 by fp8 31.8, 30.5
  // and 29.6 us, by bf16 34.3, 33.2 and 32.7.
  params.prefetched = params.stages;
  params.released = segments > 1 ? kReleased : 0;
  plan_stores<T>(params, kConsumerThreads, params.ring_bytes);
  params.unit = 1.0f;
  params.x = device::matrix_map({.data = p.x.data,
                                 .element_bytes = 1,
                                 .rows = kTerms > 1 ? x_rows : p.M,
                                 .cols = p.K,
                                 .stride = p.x.stride_row},
                                x_rows, kRowBytes, true);
  params.weight = device::matrix_map({.data = p.weight.data,
                                      .element_bytes = 1,
                                      .rows = p.N,
                                      .cols = p.K,
                                      .stride = p.weight.stride_row},
                                     params.box_rows, kRowBytes, true,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  device::launch_chained<wide_kernel<T, kTerms, kBlocks>>(
      dim3(segments, ceil_div(p.out_cols(), params.box_rows)), dim3(kThreads), kWideBytes, stream,
      params, "linear: wide tiles", segments);
}

}  // namespace

void launch_wide(const GemmParams& p, int segments, Stream stream) {
  if (p.x.whole && !p.weight.scales_products())
    return launch<__nv_bfloat16, kTermsOfX, true>(p, segments, stream);
  if (p.x.whole) return launch<__nv_bfloat16, kTermsOfX>(p, segments, stream);
  device::dispatch_half(p.dtype, [&](auto type) {
    launch<typename decltype(type)::type, 1>(p, segments, stream);
  });
}

}  // namespace ridgeline::gemm_detail
