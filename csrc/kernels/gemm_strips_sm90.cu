#include "kernels/gemm_strips_sm90.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_strip_outputs.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_strips;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM, each with consecutive strips of 16 weight rows. A block streams a strip
/// after the other; its warps share out the columns, a chunk each by turns, through rings of their
/// own in shared memory, and multiply chunks by all rows of x, which stay in shared memory, with
/// mma.m16n8k16: the weight is the operand of 16 rows. Further warps add up finished strips. Sums
/// in float32.
/// Roofline: the weight's bytes, once; x comes from L2, once a block.
template <class T, class E, WeightFormat kFormat, bool kFp8X>
__global__ void __launch_bounds__(kThreads + kMostFinishers * 32, 2)
    strips_sm90_kernel(const __grid_constant__ StripsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kFp8 = kFormat == WeightFormat::kFp8;
  extern __shared__ __align__(1024) char memory[];
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32, rows = static_cast<int>(p.M);
  const int ring_bytes = params.stages * kChunkBytes;
  char* ring = memory + warp * ring_bytes;
  Shared& shared = *reinterpret_cast<Shared*>(memory + kWarps * ring_bytes);
  float* sums_at = reinterpret_cast<float*>(&shared + 1);
  const int each = sums_each(p);
  char* x = reinterpret_cast<char*>(sums_at + kSumBuffers * kWarps * each);
  float* units = reinterpret_cast<float*>(x + rows * params.pitch);
  Requests<kFormat> requests(params, warp);

  ptx::launch_dependents();
  if (threadIdx.x == 0) shared.sums.init();
  FirstRequests<Requests<kFormat>> weight_first{requests, params.stages, ring, kChunkBytes,
                                                shared.full[warp]};
  if (lane == 0 && warp < kWarps) {
    for (int i = 0; i < params.stages; ++i) ptx::mbarrier_init(&shared.full[warp][i], 1);
    ptx::prefetch_tensor_map(&params.weight);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made
  if (warp >= kWarps) {
    if (warp == kWarps && !p.weights_ready) prefetch_x(p, lane);
    if (threadIdx.x == kWarps * 32) prefetch_norm(p);
    ptx::wait_for_dependencies();
    return finish_strips<T>(p, params.order, shared.sums, sums_at, memory + params.operands_at,
                            shared.squares, &shared.codes.scale);
  }
  weight_first.begin(p.weights_ready);
  shared.squares.clear(warp, lane);
  const bool makes_codes = kFp8X && p.x.to_codes;
  EarlyNorm<T> norm;
  if (makes_codes) norm.load(p);
  ptx::wait_for_dependencies();
  const auto request = [&] { weight_first.finish(); };
  if constexpr (kFp8X)
    if (makes_codes)
      stage_codes<T, kFormat>(x, shared.squares, shared.codes, params, norm, request);
  if (!makes_codes) stage_x<T, E, kFormat, kFp8X>(x, units, shared.squares, params, request);
  request();  // a warp that stages nothing
  if (params.chunks % kWarps == 0) {
    __syncwarp();  // of x a warp meets what it staged itself
  } else {
    ptx::named_barrier_sync(1, kThreads);  // x is whole
  }

  // For ldmatrix the row of x that a thread addresses, for fp8 its own columns of a row. Rows past
  // the last repeat it; their sums are not kept.
  const char* x_lane = x + min(kFp8 ? lane / 4 : lane % 8, rows - 1) * params.pitch +
                       (kFp8 ? lane % 4 * 8 : lane / 8 * 16);
  const int strips = params.order.strips(blockIdx.x);
  int stage = 0, parity = 0, row = params.order.first_row(blockIdx.x);
  for (int strip = 0, chunk = warp; strip < strips; ++strip, chunk -= params.chunks) {
    Sums<E> whole;  // dense and int8
    float sums[4] = {};
    for (; chunk < params.chunks; chunk += kWarps) {
      const char* weight = ring + stage * kChunkBytes;
      float scales[kBoxes];  // of fp8 by blocks
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) scales[box] = 1.0f;
      if (kFp8 && p.weight.scale_layout == ScaleLayout::kBlock) {
        const int blocks = ceil_div(p.K, kScaleBlock);
        const float* of_row = static_cast<const float*>(p.weight.scales) +
                              static_cast<std::int64_t>(row / kScaleBlock) * blocks;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          scales[box] = of_row[min(chunk * kBoxes + box, blocks - 1)];
      }
      float of_x[2];
      if constexpr (kUnits<T, E, kFp8X>)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          of_x[i] = units[chunk * rows + min(lane % 4 * 2 + i, rows - 1)];
      ptx::mbarrier_wait(&shared.full[warp][stage], parity);
      if constexpr (kFp8) {
        Sums<E> parts[kBoxes];
        multiply_fp8<E>(weight, x_lane, chunk * kChunkCols<kFormat> * 2, parts, lane);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[i] += scales[box] * (kUnits<T, E, kFp8X> ? of_x[i % 2] : 1.0f) * parts[box].get(i);
      } else {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          multiply_dense<E>(weight + box * kBoxBytes, x_lane,
                            (chunk * kBoxes + box) * kBoxCols<kFormat> * 2, whole, lane);
      }
      __syncwarp();  // every lane has read the stage
      requests.next(ring + stage * kChunkBytes, &shared.full[warp][stage]);
      if (++stage == params.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if constexpr (!kFp8)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = whole.get(i);
    shared.sums.wait_free(strip);
    float* mine = sums_at + (strip % kSumBuffers * kWarps + warp) * each;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = lane % 4 * 2 + i % 2;
      if (m < rows) mine[m * kStripRows + lane / 4 + i / 2 * 8] = sums[i];
    }
    shared.sums.arrive_done(strip);  // this lane's sums are written
    row = params.order.next_row(row, strip % 2 == 1);
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, class E, WeightFormat kFormat, bool kFp8X>
void launch(const GemmParams& p, Stream stream) {
  constexpr int kBytes = kFormat == WeightFormat::kFp8 ? 1 : 2;
  const int items = strip_items(p), blocks = std::min(items, device::multiprocessors());
  StripsParams params{.gemm = p, .order = StripOrder::of(p, items, blocks)};
  params.weight = device::matrix_map({.data = p.weight.data,
                                      .element_bytes = kBytes,
                                      .rows = p.N,
                                      .cols = p.K,
                                      .stride = p.weight.stride_row},
                                     kStripRows, kRowBytes / kBytes, true, kPromotion);
  params.chunks = ceil_div(p.K, kChunkCols<kFormat>);
  // Rows of x start in different banks: 16 bytes apart for ldmatrix, 32 for two words a thread.
  params.pitch =
      params.chunks * kChunkCols<kFormat> * 2 + (kFormat == WeightFormat::kFp8 ? 32 : 16);
  const int fixed = sizeof(Shared) + sums_bytes(p) +
                    static_cast<int>(p.M) * (params.pitch + (params.chunks + 1) * 4);
  const int others = fixed + KeptOperands<T>::bytes(p, params.order);
  const bool fits = kMostStages * kWarps * kChunkBytes + others <= share_of(p);
  const bool deep = fits && (kFormat == WeightFormat::kDense || p.M == 1);
  params.stages = deep ? kMostStages : kMostStages - 1;
  params.operands_at = params.stages * kWarps * kChunkBytes + fixed;
  const int shared = params.stages * kWarps * kChunkBytes + others;
  constexpr auto kKernel = strips_sm90_kernel<T, E, kFormat, kFp8X>;
  constexpr auto kName = "linear: strips";
  prefer_shared_memory<kKernel>(kName);
  device::launch_chained<kKernel>(dim3(blocks), dim3(kThreads + finishers_of(p) * 32),
                                  std::max(shared, share_of(p)), stream, params, kName);
}

template <class T>
void launch_format(const GemmParams& p, Stream stream) {
  constexpr auto kDense = WeightFormat::kDense, kFp8 = WeightFormat::kFp8;
  if (p.weight.format == kDense) return launch<T, T, kDense, false>(p, stream);
  if (p.weight.format == WeightFormat::kInt8)
    return launch<T, std::int8_t, WeightFormat::kInt8, false>(p, stream);
  if (p.x.dtype == DType::kFloat8E4M3 || p.x.to_codes)
    return launch<T, __half, kFp8, true>(p, stream);
  launch<T, __half, kFp8, false>(p, stream);
}

}  // namespace

void launch_strips(const GemmParams& p, Stream stream) {
  check(p.M <= gemm_config::kStripsRows, "linear: the strips kernel takes at most ",
        gemm_config::kStripsRows, " rows, got ", p.M);
  if (p.dtype == DType::kFloat16) return launch_format<__half>(p, stream);
  launch_format<__nv_bfloat16>(p, stream);
}

}  // namespace ridgeline::gemm_detail
