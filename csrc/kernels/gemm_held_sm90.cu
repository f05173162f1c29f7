#include <algorithm>

#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/mma.cuh"
#include "kernels/gemm_held_stage.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_strip_outputs.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_held;

// ---- Phases -------------------------------------------------------------------------------------

/// A stage by x: weights are q less their zero points, exactly; sums over the columns of a group
/// are scaled.
__device__ __forceinline__ void multiply(const Stage& stage, const XOfWarp& x, bool has_zeros,
                                         int lane, float (&sums)[4]) {
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
    float acc[4] = {};
    device::Int4Differences<T> of_rows;
    T scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = lane / 4 + r * 8;
      scales[r] = reinterpret_cast<const T&>(stage.scales[span][at]);
      of_rows.set(r, has_zeros ? stage.zeros[span][at] : Int4Layout::kSymmetricZero);
    }
#pragma unroll
    for (int i = span * (kBlocks / kSpans); i < (span + 1) * (kBlocks / kSpans); ++i) {
      const uint4 raw = stage.words[i][lane];
      const std::uint32_t of_steps[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        std::uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = of_rows.expand(of_steps[step], j);
        ptx::mma_m16n8k16<T>(acc, a, x.words[i][step * 2], x.words[i][step * 2 + 1]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = fmaf(device::to_float(scales[j / 2]), acc[j], sums[j]);
  }
}

/// A thread's output of every strip, from the sums of all warps.
__device__ void finish_strips(const HeldParams& params, Shared& shared, char* kept_at, int first,
                              int strips) {
  const GemmParams& p = params.gemm;
  const int thread = threadIdx.x - kMultipliers, m = thread / kStripRows, at = thread % kStripRows;
  const bool paired = params.order.paired == 2;
  const gemm_strips::KeptOperands<T> kept(p, params.order, strips, kept_at);
  kept.bring(params.order, first, m, at);
  kept.meet(1, kFinishers);
  float gate = 0.0f, x_scale = 1.0f;
  for (int strip = 0; strip < strips; ++strip) {
    const bool up = paired && strip % 2 == 1;
    const int buffer = strip % kBuffers;
    ptx::mbarrier_wait(&shared.done[buffer], strip / kBuffers % 2);
    if (strip == 0 && p.x.norm_weight) {
      float squares = 0.0f;
      for (int w = 0; w < params.slices; ++w) squares += shared.squares[m][w];
      x_scale = norm_factor(p, squares);
    }
    float totals[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      if (w < params.slices) totals[w % 4] += shared.of[w].sums[buffer][m][at];
    ptx::mbarrier_arrive(&shared.free[buffer]);
    const float total =
        ((totals[0] + totals[1]) + (totals[2] + totals[3])) * device::kInt4Unit<T>;
    if (m >= p.M) continue;
    if (paired && !up) {
      gate = total;
      continue;
    }
    const int column = strip / params.order.paired * kStripRows + at, n = first + column;
    const Operands own{.x_scale = x_scale,
                       .bias = kept.bias(false, column),
                       .residual = kept.residual(m, column)};
    if (paired)
      finish_gated<T>(p, own, {.x_scale = x_scale, .bias = kept.bias(true, column)}, gate, total,
                      m, n);
    else
      finish<T>(p, own, total, m, n);
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM; blocks share out strips of 16 weight rows. A warp has 256 columns: those of
/// x, which meet its norm there, stay in registers, as operands of mma.m16n8k16, and those of the
/// strips come one after the other through a ring of its own. Further warps add up finished strips.
/// Roofline: the weight's bytes, once; x comes from L2, once a block.
__global__ void __launch_bounds__(kThreads, 1)
    held_sm90_kernel(const __grid_constant__ HeldParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int block = static_cast<int>(blockIdx.x);
  const int first = params.order.first_row(block), strips = params.order.strips(block);

  ptx::launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(&shared.done[i], params.slices * 32);
      ptx::mbarrier_init(&shared.free[i], kFinishers);
    }
  }
  __syncthreads();  // the barriers are made
  if (warp == kWarps && !p.weights_ready) prefetch_x(p, lane);
  const int column = warp * kCols;
  Ring ring(params, shared.rings[warp % kWarps], first, strips, column, lane);
  const bool multiplies = warp < params.slices;
  if (multiplies && p.weights_ready)
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) ring.request(lane);
  ptx::wait_for_dependencies();

  if (warp >= kWarps) {
    finish_strips(params, shared, memory + sizeof(Shared), first, strips);
  } else if (multiplies) {
    XOfWarp x;
    x.load(p, column, lane);
    if (!p.weights_ready)
#pragma unroll 1
      for (int i = 0; i < kStages; ++i) ring.request(lane);
    if (p.x.norm_weight) x.normalize(shared, warp, lane);
    x.arrange(shared.of[warp].x, lane);
    for (int strip = 0; strip < strips; ++strip) {
      ptx::wait_copies<kStages - 1>();
      __syncwarp();  // every lane's copies of the stage are there
      float sums[4] = {};
      multiply(shared.rings[warp][strip % kStages], x, p.weight.zeros != nullptr, lane, sums);
      __syncwarp();  // every lane has read the stage
      ring.request(lane);
      const int buffer = strip % kBuffers;
      ptx::mbarrier_wait(&shared.free[buffer], strip / kBuffers % 2 ^ 1);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        shared.of[warp].sums[buffer][lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = sums[j];
      ptx::mbarrier_arrive(&shared.done[buffer]);  // this lane's sums, and its squares, are there
    }
  }
#endif
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

void launch_held(const GemmParams& p, Stream stream) {
  check(p.M <= kHeldRows && p.K <= gemm_config::kOnceMostCols && p.dtype == DType::kBFloat16,
        "linear: the kernel that holds x in registers takes at most ", kHeldRows, " rows of ",
        gemm_config::kOnceMostCols, " columns of bfloat16, got ", p.M, " of ", p.K);
  const int items = gemm_strips::strip_items(p);
  const int blocks = std::min<int>(items, device::multiprocessors());
  HeldParams params{.gemm = p, .order = gemm_strips::StripOrder::of(p, items, blocks)};
  params.group = device::Divisor::of(p.weight.group);
  params.slices = ceil_div(p.K, kCols);
  params.blocks = ceil_div(p.K, Int4Layout::kCols);
  device::launch_chained<held_sm90_kernel>(
      dim3(blocks), dim3(kThreads),
      sizeof(Shared) + gemm_strips::KeptOperands<T>::bytes(p, params.order), stream, params,
      "linear: held");
}

}  // namespace ridgeline::gemm_detail
