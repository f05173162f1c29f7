#include "kernels/gemm_cluster_sm90.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/matrix_map.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_cluster_finish.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_cluster;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: (segments of K, tiles of 128 weight rows); the segments of a tile are a cluster. One warp
/// requests stages of 64 or 128 columns of the tile and of all rows of x; two warpgroups multiply
/// 64 weight rows each by 32 or 64 rows of x, the weight as wgmma's operand of 64 rows: 16-bit
/// floats, int8, and fp8 with an fp8 x, from shared memory, the others expanded into registers. At
/// the end each block adds up, in order, its part of the cluster's sums, which it reads from shared
/// memory next door. Sums in float32, of int8 first in int32; of fp8 by fp8, of which the tensor
/// cores keep 14 bits, every 128 columns anew.
/// Roofline: the weight's bytes, once; x comes from L2, once a tile and segment.
template <class T, class E, WeightFormat kFormat, bool kFp8X, int kTokens>
__global__ void __launch_bounds__(kThreads, 2)
    cluster_sm90_kernel(const __grid_constant__ ClusterParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using SharedOf = Shared<kFormat, kFp8X, kTokens>;
  extern __shared__ __align__(1024) char memory[];
  SharedOf& shared = *reinterpret_cast<SharedOf*>(memory);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int segment = blockIdx.x, segments = gridDim.x;
  
  const int first = blockIdx.y * (params.paired ? kGroupRows : kTileRows);  // column of the product
  const int rows[2] = {first, params.paired ? first + p.N / 2 : first + kGroupRows};
  const int begin = params.stages * segment / segments;
  const int count = params.stages * (segment + 1) / segments - begin;

  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&params.weight);
    ptx::prefetch_tensor_map(&params.x);
#pragma unroll
    for (int i = 0; i < SharedOf::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made
  if (warp == kConsumers) {
    if (lane == 0)
      Producer<kFormat, kFp8X, kTokens>{params, shared, begin, {rows[0], rows[1]}}.run(count);
  } else {
    ptx::wait_for_dependencies();
    Consumer<T, E, kFormat, kFp8X, kTokens> consumer{p, warp / 4, warp % 4, lane,
                                                      warp / 4 == 0 ? rows[0] : rows[1]};
    consumer.run(shared, begin, count);
    consumer.keep(shared.sums);
  }
  Finish<T> finish{params, first};
  finish.load();
  if (segments > 1) {
    ptx::cluster_sync();  // every block's sums are in its shared memory
  } else {
    __syncthreads();  // the sums are whole
  }
  finish.run(shared.sums);
  if (segments > 1) ptx::cluster_sync();  // nobody reads this block's sums any more
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, class E, WeightFormat kFormat, bool kFp8X, int kTokens>
void launch(const GemmParams& p, int segments, Stream stream) {
  using SharedOf = Shared<kFormat, kFp8X, kTokens>;
  constexpr int kCols = SharedOf::StageOf::kCols;
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  ClusterParams params{.gemm = p};
  params.stages = ceil_div(p.K, kCols);
  params.paired = is_gated(p.activation);
  constexpr int kXBytes = kFp8X ? 1 : 2;
  params.x = device::matrix_map({.data = p.x.data,
                                 .element_bytes = kXBytes,
                                 .rows = p.M,
                                 .cols = p.K,
                                 .stride = p.x.stride_row},
                                kTokens, kRowBytes / kXBytes, true);
  if constexpr (kFormat == WeightFormat::kInt4) {
    const int group = p.weight.group, words = ceil_div(p.K, Int4Layout::kCols) * Int4Layout::kWords;
    params.stage_groups = group % kCols == 0 || group >= p.K ? 1
                          : kCols % group == 0               ? kCols / group
                                                             : (kCols - 2) / group + 2;
    params.weight = device::matrix_map({.data = p.weight.data,
                                        .element_bytes = 4,
                                        .rows = p.N / kStripRows,
                                        .cols = words,
                                        .stride = words},
                                       kGroupRows / kStripRows,
                                       kCols / Int4Layout::kCols * Int4Layout::kWords, false,
                                       kPromotion);
    const auto map = [&](const void* data, int bytes) {
      return device::matrix_map({.data = data,
                                 .element_bytes = bytes,
                                 .rows = ceil_div(p.K, group),
                                 .cols = p.N,
                                 .stride = p.N},
                                params.stage_groups, kGroupRows, false, kPromotion);
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
                                       kGroupRows, kRowBytes / kBytes, true, kPromotion);
  }
  const int tiles = ceil_div(p.out_cols(), params.paired ? kGroupRows : kTileRows);
  check(tiles <= 65535, "linear: weight rows must be at most ", 65535 * kTileRows, ", got ", p.N);
  constexpr int kBytes = std::max<int>(sizeof(SharedOf), gemm_config::kShareOfSm);
  device::launch_chained<cluster_sm90_kernel<T, E, kFormat, kFp8X, kTokens>>(
      dim3(segments, tiles), dim3(kThreads), kBytes, stream, params,
      "linear: cluster", segments);
}

template <class T, int kTokens>
void launch_format(const GemmParams& p, int segments, Stream stream) {
  constexpr auto kFp8 = WeightFormat::kFp8;
  switch (p.weight.format) {
    case WeightFormat::kDense:
      return launch<T, T, WeightFormat::kDense, false, kTokens>(p, segments, stream);
    case WeightFormat::kInt4:
      return launch<T, T, WeightFormat::kInt4, false, kTokens>(p, segments, stream);
    case WeightFormat::kFp8:
      if (p.x.dtype == DType::kFloat8E4M3)
        return launch<T, std::uint8_t, kFp8, true, kTokens>(p, segments, stream);
      return launch<T, T, kFp8, false, kTokens>(p, segments, stream);
    case WeightFormat::kInt8:
      return launch<T, std::int8_t, WeightFormat::kInt8, false, kTokens>(p, segments, stream);
  }
}

template <class T>
void launch_rows(const GemmParams& p, int segments, Stream stream) {
  if (p.M <= 32) return launch_format<T, 32>(p, segments, stream);
  launch_format<T, 64>(p, segments, stream);
}

}  // namespace

void launch_cluster(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  check(p.M <= gemm_config::kFewRows, "linear: the cluster kernel takes at most ",
        gemm_config::kFewRows, " rows, got ", p.M);
  if (p.dtype == DType::kFloat16) return launch_rows<__half>(p, config.segments, stream);
  launch_rows<__nv_bfloat16>(p, config.segments, stream);
}

}  // namespace ridgeline::gemm_detail
