#include "common/dispatch.h"
#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"
#include "kernels/routing.h"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

constexpr int kCombineThreads = 128;
constexpr int kCombineBlocks = 8;    // of an SM, at least
constexpr int kCombineTogether = 8;  // rows that a thread has asked for before it takes one
static_assert(device::kWarpSize % kCombineTogether == 0);

// ---- Phases -----------------------------------------------------------------------------------

/// 16 bytes of a row, or one element: read once, so by way of L2 alone.
template <int kSize, class T>
__device__ __forceinline__ device::Vec<T, kSize> load_piece_of_row(const T* from) {
  device::Vec<T, kSize> piece;
  if constexpr (kSize == 1) {
    piece.data[0] = __ldcg(from);
  } else {
    static_assert(sizeof(piece) == sizeof(uint4));
    reinterpret_cast<uint4&>(piece) = __ldcg(reinterpret_cast<const uint4*>(from));
  }
  return piece;
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: tokens x pieces of a row; a thread owns 16 bytes of the output, or one element, and adds
/// up in fp32. A lane asks for one choice and has the others of its neighbours: where each asked
/// for all, 8192 tokens of eight rows of 2048 took 111 us, for 71 so, one token 2.5, for 1.3 (H200,
/// bf16). Bytes: per_token rows in, one out.
template <class T, int kSize>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_kernel(const __grid_constant__ CombineParams p) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const std::int64_t token = blockIdx.x;
  const std::int64_t column =
      (std::int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * kSize;
  const bool inside = column < p.width;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const T* x = static_cast<const T*>(p.x) + column;
  device::Vec<float, kSize> sum{};
  for (int first = 0; first < p.per_token; first += device::kWarpSize) {
    const int count = min(p.per_token - first, device::kWarpSize);
    const std::int64_t choice = token * p.per_token + first + min(lane, count - 1);
    const float own_weight = __ldcg(p.weights + choice);
    const std::int32_t place = __ldcg(p.places + choice);
    const std::int32_t own_row = place >= 0 && place < p.rows ? place : 0;
    for (int begin = 0; begin < count; begin += kCombineTogether) {
      device::Vec<T, kSize> piece[kCombineTogether];
#pragma unroll
      for (int j = 0; j < kCombineTogether; ++j) {
        const std::int64_t row = device::from_lane(own_row, begin + j);
        if (inside && begin + j < count)
          piece[j] = load_piece_of_row<kSize>(x + row * p.stride_x_row);
      }
#pragma unroll
      for (int j = 0; j < kCombineTogether; ++j) {
        const float weight = device::from_lane(own_weight, begin + j);
        if (begin + j >= count) continue;
        const auto values = device::floats(piece[j]);
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          sum.data[i] = __fmaf_rn(weight, values.data[i], sum.data[i]);
      }
    }
  }
  if (inside)
    device::store(static_cast<T*>(p.y) + token * p.width + column, device::rounded<T>(sum));
}

// ---- Launch -----------------------------------------------------------------------------------

template <class T, int kSize>
void launch_combine(const CombineParams& p, Stream stream) {
  constexpr std::int64_t kElements = kCombineThreads * kSize;
  const std::int64_t pieces = ceil_div(p.width, kElements);
  check(pieces <= 65535, "x: expected rows of at most ", 65535 * kElements, " elements, got ",
        p.width);
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(pieces));
  device::launch_chained<combine_kernel<T, kSize>>(grid, dim3(kCombineThreads), 0, stream, p,
                                                   "combine_experts");
}

}  // namespace

void combine_experts(const CombineParams& p, Stream stream) {
  if (p.tokens == 0 || p.width == 0) return;
  const auto element = static_cast<std::int64_t>(size_of(p.dtype));
  const bool wide =
      device::all_aligned(16, {p.x, p.y}, {p.stride_x_row * element, p.width * element});
  device::dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (wide) return launch_combine<T, device::Vec<T>::kSize>(p, stream);
    launch_combine<T, 1>(p, stream);
  });
}

}  // namespace ridgeline
