#include <algorithm>

#include "device/ptx/cluster.cuh"
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
template <class T>
__device__ __forceinline__ void multiply(const Stage& stage, const XOfWarp<T>& x, bool has_zeros,
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

/// A thread's output of every strip, from the sums of all warps: y, or where K is cut a part for
/// the block of the cluster that finishes its row.
template <class T>
__device__ void finish_strips(const HeldParams& params, Shared& shared, float* parts, int first,
                              int strips, int slices) {
  const GemmParams& p = params.gemm;
  const int thread = threadIdx.x - kMultipliers, m = thread / kStripRows, at = thread % kStripRows;
  const bool paired = params.order.paired == 2, alone = ptx::cluster_blocks() == 1;
  const gemm_strips::KeptOperands<T> kept(p, params.order, strips, reinterpret_cast<char*>(parts));
  if (alone) kept.bring(params.order, first, m, at);
  kept.meet(1, kFinishers);
  float gate = 0.0f, x_scale = p.x.scale && alone && m < p.M
                                   ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
  for (int strip = 0; strip < strips; ++strip) {
    const bool up = paired && strip % 2 == 1;
    const int buffer = strip % kBuffers;
    ptx::mbarrier_wait(&shared.done[buffer], strip / kBuffers % 2);
    if (strip == 0 && alone && p.x.norm_weight) {
      float squares = 0.0f;
      for (int w = 0; w < slices; ++w) squares += shared.squares[m][w];
      x_scale = norm_factor(p, squares);
    }
    float totals[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      if (w < slices) totals[w % 4] += shared.of[w].sums[buffer][m][at];
    ptx::mbarrier_arrive(&shared.free[buffer]);
    const float total =
        ((totals[0] + totals[1]) + (totals[2] + totals[3])) * device::kInt4Unit<T>;
    if (m >= p.M) continue;
    if (!alone) {
      float* to = parts + ((ptx::cluster_rank() * params.strips + strip) * params.rows_each +
                           m % params.rows_each) * kStripRows + at;
      *ptx::in_block(to, m / params.rows_each) = total;
    } else if (paired && !up) {
      gate = total;
    } else {
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
}

/// Adds up the parts of the rows that this block of a cluster finishes.
template <class T>
__device__ void finish_parts(const HeldParams& params, const float* parts, int first, int strips) {
  const GemmParams& p = params.gemm;
  const int before = ptx::cluster_rank() * params.rows_each, blocks = ptx::cluster_blocks();
  const int rows = min(params.rows_each, static_cast<int>(p.M) - before);
  const bool paired = params.order.paired == 2;
  const auto total = [&](int strip, int m, int at) {
    float sum = 0.0f;
    for (int c = 0; c < blocks; ++c)
      sum += parts[((c * params.strips + strip) * params.rows_each + m) * kStripRows + at];
    return sum;
  };
  for (int i = threadIdx.x; i < strips / params.order.paired * rows * kStripRows; i += kThreads) {
    const int at = i % kStripRows, m = i / kStripRows % rows;
    const int strip = i / kStripRows / rows * params.order.paired;
    const int n = row_of(params.order, first, strip) + at;
    if (paired)
      finish_gated<T>(p, total(strip, m, at), total(strip + 1, m, at), before + m, n);
    else
      finish<T>(p, total(strip, m, at), before + m, n);
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a cluster of as many blocks as K has parts of 4096 columns, an SM each; clusters share out
/// strips of 16 weight rows. Of its block's columns a warp has 256: those of x stay in registers,
/// as operands of mma.m16n8k16, and those of the strips come one after the other through a ring of
/// its own. Further warps add up finished strips; of a cluster's blocks each finishes some rows.
/// Roofline: the weight's bytes, once; x comes from L2, once a cluster.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    held_sm90_kernel(const __grid_constant__ HeldParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* parts = reinterpret_cast<float*>(&shared + 1);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const bool alone = ptx::cluster_blocks() == 1;
  const int cluster = static_cast<int>(ptx::cluster_index());
  const int before = ptx::cluster_rank() * params.slices;
  const int slices = min(params.slices, ceil_div(p.K, kCols) - before);
  const int first = params.order.first_row(cluster), strips = params.order.strips(cluster);

  ptx::launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kBuffers; ++i) {
      ptx::mbarrier_init(&shared.done[i], slices * 32);
      ptx::mbarrier_init(&shared.free[i], kFinishers);
    }
  }
  if (!alone) ptx::cluster_arrive_relaxed();
  __syncthreads();  // the barriers are made
  if (warp == kWarps && !p.weights_ready) prefetch_x(p, lane);
  const int column = (before + warp) * kCols;
  Ring ring(params, shared.rings[warp % kWarps], first, strips, column, lane);
  const bool multiplies = warp < slices;
  if (multiplies && p.weights_ready)
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) ring.request(lane);
  ptx::wait_for_dependencies();
  if (!alone) ptx::cluster_wait();  // every block of it has begun: its parts may be written

  if (warp >= kWarps) {
    finish_strips<T>(params, shared, parts, first, strips, slices);
  } else if (multiplies) {
    XOfWarp<T> x;
    x.load(p, column, lane);
    if (!p.weights_ready)
#pragma unroll 1
      for (int i = 0; i < kStages; ++i) ring.request(lane);
    if (p.x.dtype == DType::kFloat8E4M3) x.expand();
    else if (p.x.norm_weight) x.normalize(shared, warp, lane);
    x.arrange(shared.of[warp].x, lane);
    for (int strip = 0; strip < strips; ++strip) {
      ptx::wait_copies<kStages - 1>();
      __syncwarp();  // every lane's copies of the stage are there
      float sums[4] = {};
      multiply<T>(shared.rings[warp][strip % kStages], x, p.weight.zeros != nullptr, lane, sums);
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
  if (alone) return;
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block's parts are there
  finish_parts<T>(params, parts, first, strips);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T>
void launch(const GemmParams& p, int blocks, Stream stream) {
  const int items = gemm_strips::strip_items(p);
  const int clusters = std::min<int>(items, gemm_config::kClusters[blocks - 1]);
  HeldParams params{.gemm = p, .order = gemm_strips::StripOrder::of(p, items, clusters)};
  params.group = device::Divisor::of(p.weight.group);
  params.slices = ceil_div(ceil_div(p.K, kCols), blocks);
  params.blocks = ceil_div(p.K, Int4Layout::kCols);
  params.strips = params.order.paired * ceil_div(items, clusters);
  params.rows_each = ceil_div(static_cast<int>(p.M), blocks);
  const int parts = blocks == 1 ? gemm_strips::KeptOperands<T>::bytes(p, params.order)
                                : blocks * params.strips * params.rows_each * kStripRows * 4;
  device::launch_chained<held_sm90_kernel<T>>(dim3(clusters * blocks), dim3(kThreads),
                                              sizeof(Shared) + parts, stream, params,
                                              "linear: held", blocks);
}

}  // namespace

void launch_held(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  check(p.M <= kHeldRows && (config.segments == 1 || !p.x.norm_weight),
        "linear: the kernel that holds x in registers takes at most ", kHeldRows,
        " rows, normalized ones up to 4096 columns, got ", p.M);
  if (p.dtype == DType::kFloat16) return launch<__half>(p, config.segments, stream);
  launch<__nv_bfloat16>(p, config.segments, stream);
}

}  // namespace ridgeline::gemm_detail
