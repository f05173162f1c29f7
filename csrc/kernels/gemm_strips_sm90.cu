#include "kernels/gemm_strips_sm90.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_strips;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM, each with consecutive strips of 16 weight rows. A block streams a strip
/// after the other; its warps share out the columns, a chunk each by turns, through rings of their
/// own in shared memory, and multiply chunks by all rows of x, which stay in shared memory, with
/// mma.m16n8k16: the weight is the operand of 16 rows. Warps take turns in adding up a finished
/// strip while the others go on. Sums in float32.
/// Roofline: the weight's bytes, once; x comes from L2, once a block.
template <class T, class E, WeightFormat kFormat, bool kFp8X, int kSpan, int kTiles,
          class Cut>
__global__ void __launch_bounds__(Cut::kWarps * 32, Cut::kResident)
    strips_sm90_kernel(const __grid_constant__ StripsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  constexpr int kWarps = Cut::kWarps, kStages = Cut::kStages, kBoxes = Cut::kBoxes;
  constexpr int kCols = kBoxes * kBoxCols<kFormat>, kThreads = kWarps * 32;
  using SharedOf = Shared<kWarps, kStages, kBoxes>;
  extern __shared__ __align__(1024) char memory[];
  SharedOf& shared = *reinterpret_cast<SharedOf*>(memory);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32, rows = static_cast<int>(p.M);
  const int each = kStripRows * rows;  // sums of a warp
  float* sums_at = reinterpret_cast<float*>(memory + sizeof(SharedOf));
  char* scales_at = reinterpret_cast<char*>(sums_at + 2 * kWarps * each);
  const int scales_each = kInt4 ? params.room * kScaleBytes : 0;
  char* zeros_at = scales_at + params.ahead * scales_each;
  const int zeros_each = kInt4 ? params.room * kZeroBytes : 0;
  char* x = zeros_at + params.ahead * zeros_each;

  const int first = static_cast<int>(static_cast<std::int64_t>(params.items) * blockIdx.x /
                                     gridDim.x);
  const int strips = params.paired * (static_cast<int>(static_cast<std::int64_t>(params.items) *
                                                       (blockIdx.x + 1) / gridDim.x) - first);
  using RequestsOf = Requests<kFormat, kWarps, kBoxes>;
  RequestsOf requests(params, warp, first * kStripRows, strips);
  const auto row_of = [&](int strip) {
    return params.paired == 1 ? (first + strip) * kStripRows
                              : (first + strip / 2) * kStripRows + strip % 2 * (p.N / 2);
  };
  const auto request_scales = [&](int strip) {
    if (!kInt4 || strip >= strips) return;
    const int row = row_of(strip);
    const int slot = strip & (params.ahead - 1);
    std::uint64_t* scaled = &shared.scaled[slot];
    const int boxes = ceil_div(params.groups, kBoxGroups);
    ptx::mbarrier_expect(scaled, boxes * min(params.groups, kBoxGroups) *
                                     (kScaleBytes + (p.weight.zeros ? kZeroBytes : 0)));
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int group = box * kBoxGroups;
      ptx::copy_matrix(scales_at + slot * scales_each + group * kScaleBytes, &params.scales,
                       scaled, row, group, requests.policy);
      if (p.weight.zeros)
        ptx::copy_matrix(zeros_at + slot * zeros_each + group * kZeroBytes, &params.zeros, scaled,
                         row, group, requests.policy);
    }
  };

  ptx::launch_dependents();
  const int finishers = ceil_div(each, 32);  // warps that add up the sums of a strip
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kScaleBuffers; ++i) ptx::mbarrier_init(&shared.scaled[i], 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.done[i], kThreads);
      ptx::mbarrier_init(&shared.free[i], finishers * 32);
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&shared.full[warp][i], 1);
    ptx::fence_mbarrier_init();
    if (!p.weights_ready) ptx::wait_for_dependencies();
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      requests.next(shared.weight[warp][i], &shared.full[warp][i]);
    if (warp == 0)
      for (int i = 0; i < params.ahead; ++i) request_scales(i);
  }
  __syncwarp();
  ptx::wait_for_dependencies();
  if (kInt4 && !p.weight.zeros)
    for (int i = threadIdx.x; i < params.ahead * zeros_each / 4; i += kThreads)
      reinterpret_cast<std::uint32_t*>(zeros_at)[i] = Int4Layout::kSymmetricZero * 0x01010101u;
  stage_x<E, kFp8X, kThreads>(x, params, params.chunks * kCols);
  __syncthreads();  // x is whole, the barriers are made

  constexpr bool kFp8 = kFormat == WeightFormat::kFp8;
  const XOfLane<kTiles> x_lane(x, kFp8 ? lane / 4 : lane % 8, rows, params.pitch,
                               kFp8 ? lane % 4 * 8 : lane / 8 * 16);
  const int sum_row = lane / 4 * rows + lane % 4 * 2;  // this thread's first of the warp's
  int stage = 0, parity = 0, row = first * kStripRows;
  for (int strip = 0; strip < strips; ++strip) {
    const int buffer = strip % 2, turn = strip / 2 % 2;
    const int slot = strip & (params.ahead - 1);
    const ScalesOfLane of_lane{
        scales_at + slot * scales_each + lane / 4 * static_cast<int>(sizeof(T)),
        zeros_at + slot * zeros_each + lane / 4};
    if (kInt4) ptx::mbarrier_wait(&shared.scaled[slot], strip / params.ahead % 2);
    Sums<kTiles> whole;  // dense
    float sums[kTiles][4] = {};
    for (int chunk = warp; chunk < params.chunks; chunk += kWarps) {
      const char* weight = shared.weight[warp][stage];
      float scales[kBoxes];  // of fp8 by blocks
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) scales[box] = 1.0f;
      if (kFormat == WeightFormat::kFp8 && p.weight.scale_layout == ScaleLayout::kBlock) {
        const int blocks = ceil_div(p.K, kScaleBlock);
        const float* of_row = static_cast<const float*>(p.weight.scales) +
                              static_cast<std::int64_t>(row / kScaleBlock) * blocks;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          scales[box] = of_row[min(chunk * kBoxes + box, blocks - 1)];
      }
      ptx::mbarrier_wait(&shared.full[warp][stage], parity);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const char* weight_box = weight + box * kBoxBytes;
        const int box_in_row = chunk * kBoxes + box, at = box_in_row * kBoxCols<kFormat> * 2;
        if constexpr (kFormat == WeightFormat::kDense) {
          multiply_dense<E>(weight_box, x_lane, at, whole, lane);
        } else if constexpr (kFp8) {
          Sums<kTiles> part;
          multiply_fp8<E>(weight_box, x_lane, at, part, lane);
#pragma unroll
          for (int i = 0; i < kTiles * 4; ++i)
            sums[i / 4][i % 4] += scales[box] * part.get(i / 4, i % 4);
        } else {
          multiply_int4_box<T, kSpan>(params, weight_box, x_lane, box_in_row * 4, of_lane, sums,
                                      lane);
        }
      }
      __syncwarp();  // every lane has read the stage
      if (lane == 0) requests.next(shared.weight[warp][stage], &shared.full[warp][stage]);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if constexpr (kFormat == WeightFormat::kDense)
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] = whole.get(i / 4, i % 4);
    // The warp's sums, [weight row][row of x]; two strips by turns.
    float* of_strip = sums_at + buffer * kWarps * each;
    ptx::mbarrier_wait(&shared.free[buffer], turn ^ 1);
    float* mine = of_strip + warp * each + sum_row;
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const int m = i / 4 * kTokens + i % 2;
      if (lane % 4 * 2 + m < rows) mine[i % 4 / 2 * 8 * rows + m] = sums[i / 4][i % 4];
    }
    ptx::mbarrier_arrive(&shared.done[buffer]);  // this lane's sums are written
    const bool gate = params.paired == 2 && buffer == 0;
    const int next_row = RequestsOf::next_row(params, row, buffer == 1);
    const int share = (warp + kWarps - strip / params.paired * finishers % kWarps) % kWarps;
    if (!gate && share < finishers) {  // other warps each time, so that all are about as far
      if (params.paired == 2) ptx::mbarrier_wait(&shared.done[0], turn);
      ptx::mbarrier_wait(&shared.done[buffer], turn);
      if (kInt4 && lane == 0 && share == 0) {
        if (params.paired == 2) request_scales(strip - 1 + params.ahead);
        request_scales(strip + params.ahead);
      }
      finish_sum<T, kWarps>(params, sums_at, of_strip, share * 32 + lane, row);
      if (params.paired == 2) ptx::mbarrier_arrive(&shared.free[0]);
      ptx::mbarrier_arrive(&shared.free[buffer]);  // this lane has read the sums
    }
    row = next_row;
  }
#endif
}

/// How work is cut: blocks an SM, of kResident that fit; warps of a block, and the ring of each:
/// stages of so many boxes.
struct OneBlock {
  static constexpr int kBlocks = 1, kResident = 2, kWarps = 8, kStages = 2, kBoxes = 2;
};

/// Where expansion is what costs, twice the warps: they take the place of the next kernel's. H200,
/// int4, one row, us alone and chained: 4096 x 28672 28.2 and 27.0 with one block, 22.3 and 20.3
/// with two; 4096 x 4096 6.8 and 6.5, 6.3 and 5.7.
struct TwoBlocks {
  static constexpr int kBlocks = 2, kResident = 2, kWarps = 8, kStages = 1, kBoxes = 2;
};

// ---- Launch -------------------------------------------------------------------------------------

/// Boxes of 16 columns of what int4 has a group of: [groups, N].
CUtensorMap scales_map(const void* data, int element_bytes, int N, int groups) {
  return device::matrix_map({.data = data,
                             .element_bytes = element_bytes,
                             .rows = groups,
                             .cols = N,
                             .stride = N},
                            std::min(groups, kBoxGroups), kStripRows, false, kPromotion);
}

/// What of the parameters depends on the cut, and the shared memory of a block.
template <WeightFormat kFormat, class Cut>
int plan(StripsParams& params) {
  const GemmParams& p = params.gemm;
  constexpr int kCols = Cut::kBoxes * kBoxCols<kFormat>;
  params.paired = is_gated(p.activation) ? 2 : 1;
  params.items = ceil_div(p.N, kStripRows) / params.paired;
  params.chunks = ceil_div(p.K, kCols);
  // Rows of x start in different banks: 16 bytes apart for ldmatrix, 32 for two words a thread.
  params.pitch = params.chunks * kCols * 2 + (kFormat == WeightFormat::kFp8 ? 32 : 16);
  int bytes = sizeof(Shared<Cut::kWarps, Cut::kStages, Cut::kBoxes>) +
              static_cast<int>(p.M) * (2 * Cut::kWarps * kStripRows * 4 + params.pitch);
  if (kFormat == WeightFormat::kInt4) {
    params.groups = ceil_div(p.K, p.weight.group);
    params.room = round_up(round_up(params.groups, std::min(params.groups, kBoxGroups)), 8);
    params.ahead = params.groups <= kManyGroups ? kScaleBuffers : kScaleBuffers / 2;
    const int blocks_each = ceil_div(p.weight.group, Int4Layout::kCols);
    params.block_groups = ceil_div(1u << 31, static_cast<unsigned>(blocks_each));
    bytes += params.ahead * params.room * (kScaleBytes + kZeroBytes);
  }
  return bytes;
}

template <class T, class E, WeightFormat kFormat, bool kFp8X, int kSpan = 1, int kTiles = 1,
          class Cut = OneBlock>
void launch(const GemmParams& p, Stream stream) {
  constexpr auto kKernel = strips_sm90_kernel<T, E, kFormat, kFp8X, kSpan, kTiles, Cut>;
  StripsParams params{.gemm = p};
  const int shared = plan<kFormat, Cut>(params);
  if constexpr (kFormat == WeightFormat::kInt4) {
    params.scales = scales_map(p.weight.scales, 2, p.N, params.groups);
    if (p.weight.zeros) params.zeros = scales_map(p.weight.zeros, 1, p.N, params.groups);
  } else {
    constexpr int kBytes = kFormat == WeightFormat::kFp8 ? 1 : 2;
    params.weight = device::matrix_map({.data = p.weight.data,
                                        .element_bytes = kBytes,
                                        .rows = p.N,
                                        .cols = p.K,
                                        .stride = p.weight.stride_row},
                                       kStripRows, kRowBytes / kBytes, true, kPromotion);
  }
  const int blocks = std::min(params.items, Cut::kBlocks * device::multiprocessors());
  device::launch_chained<kKernel>(dim3(blocks), dim3(Cut::kWarps * 32),
                                  std::max(shared, gemm_config::kShareOfSm), stream, params,
                                  "linear: strips");
}

template <class T, int kSpan>
void launch_int4(const GemmParams& p, Stream stream) {
  constexpr auto kInt4 = WeightFormat::kInt4;
  if (p.M > kTokens) return launch<T, T, kInt4, false, kSpan, 2>(p, stream);
  StripsParams params{.gemm = p};
  if (plan<kInt4, TwoBlocks>(params) <= gemm_config::kShareOfSm)
    return launch<T, T, kInt4, false, kSpan, 1, TwoBlocks>(p, stream);
  launch<T, T, kInt4, false, kSpan>(p, stream);
}

template <class T>
void launch_format(const GemmParams& p, Stream stream) {
  constexpr auto kDense = WeightFormat::kDense, kFp8 = WeightFormat::kFp8;
  if (p.weight.format == kDense) return launch<T, T, kDense, false>(p, stream);
  if (p.weight.format == kFp8) {
    if (p.x.dtype == DType::kFloat8E4M3) return launch<T, __half, kFp8, true>(p, stream);
    return launch<T, T, kFp8, false>(p, stream);
  }
  const bool wide = p.weight.group % (2 * Int4Layout::kCols) == 0 || p.weight.group >= p.K;
  if (wide) return launch_int4<T, 2>(p, stream);
  launch_int4<T, 1>(p, stream);
}

}  // namespace

void launch_strips(const GemmParams& p, Stream stream) {
  const int most = p.weight.format == WeightFormat::kInt4 ? 2 * kTokens : kTokens;
  check(p.M <= most, "linear: the strips kernel takes at most ", most, " rows, got ", p.M);
  if (p.dtype == DType::kFloat16) return launch_format<__half>(p, stream);
  launch_format<__nv_bfloat16>(p, stream);
}

}  // namespace ridgeline::gemm_detail
