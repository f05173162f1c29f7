#include <algorithm>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_once_weights.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_once;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRows = gemm_config::kOnceRows;  // of x, that an mma takes
constexpr int kPitch = kCols + 8;  // of a row of a slice of x: ldmatrix meets each bank once
constexpr int kMostStrips = 3;     // of a block

// ---- Shared memory ------------------------------------------------------------------------------

template <class T, int kStrips>
struct Shared {
  static constexpr int kSumPitch = kStrips * kStripRows + 4;  // lanes of a quad: different banks
  union Slice {
    alignas(16) T x[kRows][kPitch];
    float sums[kRows][kSumPitch];  // of the block's weight rows, when x is multiplied
  };
  Slice slices[kWarps];
  alignas(16) float squares[kRows][kWarps];  // of x, where it is normalized
};

// ---- Phases -------------------------------------------------------------------------------------

/// Eight columns a lane of each row of x.
template <class T, bool kFp8X>
struct XOfSlice {
  std::uint32_t pairs[kRows][4];

  /// Asks for those from `column` on, zeros past M and K.
  __device__ __forceinline__ void load(const GemmParams& p, int column) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const std::int64_t at = m * p.x.stride_row + column;
      uint4 raw{};
      if (m < p.M && column < p.K) {
        if constexpr (kFp8X) {
          const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(
              static_cast<const std::uint8_t*>(p.x.data) + at));
          raw.x = codes.x, raw.y = codes.y;
        } else {
          raw = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) + at));
        }
      }
      pairs[m][0] = raw.x, pairs[m][1] = raw.y, pairs[m][2] = raw.z, pairs[m][3] = raw.w;
    }
  }

  /// All to shared memory. Where x is normalized it meets the norm's weight; in lane 4 m the sum
  /// of the squares of row m's slice. A row at a time, for registers: one that is spilled while its
  /// load is on its way is waited for. H200, 8 rows of 4096 x 6144: 7.4 us, and 6.9 so.
  __device__ __forceinline__ float store(T (*rows)[kPitch], bool normalizes,
                                         const gemm_strips::Normed<T, 4>& norm, int lane) {
    float squares[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if constexpr (kFp8X) {
        std::uint32_t low[2], high[2];
        device::convert_e4m3<T>(pairs[m][0], low);
        device::convert_e4m3<T>(pairs[m][1], high);
        pairs[m][0] = low[0], pairs[m][1] = low[1], pairs[m][2] = high[0], pairs[m][3] = high[1];
      } else if (normalizes) {
        squares[m] = norm.weigh(pairs[m]);
      }
      *reinterpret_cast<uint4*>(&rows[m][lane * 8]) = {pairs[m][0], pairs[m][1], pairs[m][2],
                                                       pairs[m][3]};
    }
    if (kFp8X || !normalizes) return 0.0f;
    // Each time a lane keeps half of its rows and gives its neighbour the others.
#pragma unroll
    for (int kept = kRows / 2; kept > 0; kept /= 2) {
      const bool high = (lane & kept * 4) != 0;
#pragma unroll
      for (int m = 0; m < kept; ++m) {
        const float given = high ? squares[m] : squares[m + kept];
        squares[m] = (high ? squares[m + kept] : squares[m]) + device::shuffle_xor(given, kept * 4);
      }
    }
    return device::group_sum(squares[0], 4);
  }
};

/// sums[strip]: as mma leaves them. Weights are q less their zero points, exactly; sums over the
/// columns of a group are scaled.
template <class T, int kStrips>
__device__ __forceinline__ void multiply(const Int4Weights<T, kStrips>& weights,
                                         const T (*x)[kPitch], bool has_zeros, int lane,
                                         float (&sums)[kStrips][4]) {
#pragma unroll
  for (int span = 0; span < kSpans; ++span) {
    float acc[kStrips][4] = {};
    device::Int4Differences<T> of_rows[kStrips];
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        of_rows[s].set(j, has_zeros ? weights.zeros[s][span][j] : Int4Layout::kSymmetricZero);
#pragma unroll
    for (int half = 0; half < 2 * kBlocks / kSpans; ++half) {
      const int at = span * (kBlocks / kSpans) + half / 2;
      std::uint32_t of_x[4];  // of 32 columns: the operands of two steps
      ptx::ldmatrix(of_x, &x[lane % 8][at * Int4Layout::kCols + half % 2 * 32 + lane / 8 * 8]);
#pragma unroll
      for (int s = 0; s < kStrips; ++s)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint4& raw = weights.words[s][at];
          const std::uint32_t word =
              half % 2 == 0 ? (step == 0 ? raw.x : raw.y) : (step == 0 ? raw.z : raw.w);
          std::uint32_t a[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) a[j] = of_rows[s].expand(word, j);
          ptx::mma_m16n8k16<T>(acc[s], a, of_x[2 * step], of_x[2 * step + 1]);
        }
    }
#pragma unroll
    for (int s = 0; s < kStrips; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sums[s][j] = fmaf(device::to_float(weights.scales[s][span][j / 2]), acc[s][j], sums[s][j]);
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM, each with up to kStrips consecutive strips of 16 weight rows. As where x is
/// one row, a warp has a slice of their columns in registers, and all of the weight is asked for at
/// once; but the weight becomes 16-bit floats there, the operand of mma.m16n8k16, so that rows of x
/// cost the staging of their bytes and no more. All warps add up.
/// Roofline: the weight's bytes, once; x comes from L2, once a block.
template <class T, bool kFp8X, int kStrips>
__global__ void __launch_bounds__(kThreads, 1)
    once_rows_sm90_kernel(const __grid_constant__ OnceParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kStrips>*>(memory);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32, rows = static_cast<int>(p.M);
  const Place place{params.order.first_row(blockIdx.x), params.order.strips(blockIdx.x),
                    warp * kCols, lane};
  const bool here = place.column < p.K;  // the slice has columns
  const int column = place.column + lane * 8;
  auto& slice = shared.slices[warp];
  Int4Weights<T, kStrips> weights;
  weights.find(params, place);

  ptx::launch_dependents();
  if (warp == 0) prefetch_x(p, lane);
  if (params.prefetches && here) weights.prefetch(place);
  ptx::wait_for_dependencies();
  XOfSlice<T, kFp8X> x;
  x.load(p, column);
  if (here) weights.load(p, place);
  gemm_strips::Normed<T, 4> norm;
  norm.load(p, column);
  // A thread finishes an output.
  constexpr int kOfRow = kStrips * kStripRows;
  static_assert(kRows * kOfRow <= kThreads);
  const int m = threadIdx.x / kOfRow, at = threadIdx.x % kOfRow;
  const bool finishes = m < rows && at < place.strips * kStripRows;
  Operands operands;
  if (finishes) {
    load_of_column<T>(operands, p, place.row + at);
    load_of_row<T>(operands, p, m, place.row + at);
  }

  float sums[kStrips][4] = {};
  if (!here && lane < kRows) shared.squares[lane][warp] = 0.0f;
  if (here) {
    const float squares = x.store(slice.x, p.x.norm_weight != nullptr, norm, lane);
    if (lane % 4 == 0) shared.squares[lane / 4][warp] = squares;
    __syncwarp();  // the slice of x is there
    multiply<T, kStrips>(weights, slice.x, p.weight.zeros != nullptr, lane, sums);
    __syncwarp();  // and read
  }
#pragma unroll
  for (int s = 0; s < kStrips; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      slice.sums[lane % 4 * 2 + j % 2][s * kStripRows + lane / 4 + j / 2 * 8] = sums[s][j];
  __syncthreads();  // every warp's sums are there
  if (!finishes) return;
  if (!kFp8X && p.x.norm_weight) {
    float squares[4] = {};  // a loop took 0.3 us
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 of_warps = *reinterpret_cast<const float4*>(&shared.squares[m][w]);
      squares[0] += of_warps.x, squares[1] += of_warps.y;
      squares[2] += of_warps.z, squares[3] += of_warps.w;
    }
    operands.x_scale = gemm_strips::norm_factor(
        p, (squares[0] + squares[1]) + (squares[2] + squares[3]));
  }
  float totals[4] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) totals[w % 4] += shared.slices[w].sums[m][at];
  finish<T>(p, operands,
            ((totals[0] + totals[1]) + (totals[2] + totals[3])) * device::kInt4Unit<T>, m,
            place.row + at);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T, bool kFp8X, int kStrips>
void launch(const GemmParams& p, int blocks, Stream stream) {
  const int items = gemm_strips::strip_items(p);
  OnceParams params{.gemm = p, .order = gemm_strips::StripOrder::of(p, items, blocks)};
  params.group = device::Divisor::of(p.weight.group);
  // H200, us, without and so: 4 rows of 2048 x 4096 3.4 and 3.1, of 4096 x 6144 7.0 and 7.2.
  params.prefetches = p.K <= gemm_config::kOnceMostCols * 3 / 4 || items <= 2 * blocks;
  check(ceil_div(items, blocks) <= kStrips && p.M <= kRows &&
            p.K <= gemm_config::kOnceMostCols && !p.x.to_codes,
        "linear: the kernel of a weight in registers takes up to ", kStrips,
        " strips a block, got ", ceil_div(items, blocks));
  device::launch_chained<once_rows_sm90_kernel<T, kFp8X, kStrips>>(
      dim3(blocks), dim3(kThreads), sizeof(Shared<T, kStrips>), stream, params,
      "linear: once");
}

template <class T, bool kFp8X>
void launch_counts(const GemmParams& p, Stream stream) {
  const int items = gemm_strips::strip_items(p);
  const int blocks = std::min(items, device::multiprocessors());
  if (items <= 2 * blocks) return launch<T, kFp8X, 2>(p, blocks, stream);
  launch<T, kFp8X, kMostStrips>(p, blocks, stream);
}

template <class T>
void launch_x(const GemmParams& p, Stream stream) {
  if (p.x.dtype == DType::kFloat8E4M3) return launch_counts<T, true>(p, stream);
  launch_counts<T, false>(p, stream);
}

}  // namespace

void launch_once_rows(const GemmParams& p, Stream stream) {
  if (p.dtype == DType::kFloat16) return launch_x<__half>(p, stream);
  launch_x<__nv_bfloat16>(p, stream);
}

}  // namespace ridgeline::gemm_detail
