#include "kernels/norm.h"

#include <algorithm>

#include "common/dispatch.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace ridgeline {
namespace {

// ---- Constants -------------------------------------------------------------------------------------------------

constexpr int kMaxThreads = 512;  // 128 registers a thread: four pieces of x and of weight without a spill
constexpr int kMaxWarps = kMaxThreads / device::kWarpSize;
constexpr int kThreadsWanted = 128;  // H200, bf16 8192 x 4096: 33.9 us; with 256 threads 37.6

// ---- Phases ----------------------------------------------------------------------------------------------------

/// This thread's share of a row, kept in registers between the two passes so that x is read once.
template <class T, int kVecs>
struct RowShare {
  device::Vec<T> vecs[kVecs];

  __device__ static int column(int i) { return (i * blockDim.x + threadIdx.x) * device::Vec<T>::kSize; }

  __device__ void load(const T* row, int cols) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (column(i) < cols) vecs[i] = device::load(row + column(i));
  }

  __device__ float sum_of_squares(int cols) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (column(i) < cols)
        for (T element : vecs[i].data) sum += device::to_float(element) * device::to_float(element);
    return sum;
  }

  __device__ void store_scaled(T* row, const RowShare& weight, float scale, int cols) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (column(i) >= cols) continue;
      device::Vec<T> out;
#pragma unroll
      for (int j = 0; j < device::Vec<T>::kSize; ++j)
        out.data[j] = device::from_float<T>(device::to_float(vecs[i].data[j]) * scale *
                                            device::to_float(weight.vecs[i].data[j]));
      device::store(row + column(i), out);
    }
  }
};

// ---- Kernel ----------------------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns kVecs 16-byte pieces of the row.
/// Shared memory: one float a warp. The weight is loaded ahead of the wait only if
/// the caller says that it is at rest; the row always after it.
template <class T, int kVecs>
__global__ void __launch_bounds__(kMaxThreads) rmsnorm_kernel(const __grid_constant__ RmsNormParams params) {
  __shared__ float partial_sums[kMaxWarps];
  const int cols = params.cols;
  const std::int64_t row = blockIdx.x;

  ptx::launch_dependents();
  RowShare<T, kVecs> weight, x;
  if (params.weights_ready) weight.load(static_cast<const T*>(params.weight), cols);
  ptx::wait_for_dependencies();
  if (!params.weights_ready) weight.load(static_cast<const T*>(params.weight), cols);

  x.load(static_cast<const T*>(params.x) + row * params.stride_x_row, cols);
  const float sum = device::block_reduce<device::Sum>(x.sum_of_squares(cols), partial_sums);
  const float scale = rsqrtf(sum / cols + params.eps);
  x.store_scaled(static_cast<T*>(params.y) + row * params.stride_y_row, weight, scale, cols);
}

}  // namespace

// ---- Launch ----------------------------------------------------------------------------------------------------

void rmsnorm(const RmsNormParams& params, Stream stream) {
  if (params.rows == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "rmsnorm: rows");
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kElements = device::Vec<T>::kSize;
    check(params.cols > 0 && params.cols % kElements == 0, "rmsnorm: cols must be a positive multiple of ", kElements,
          ", got ", params.cols);
    const int vecs = params.cols / kElements;
    const int per_thread = (vecs + kMaxThreads - 1) / kMaxThreads;
    const int wanted = (vecs + kThreadsWanted - 1) / kThreadsWanted;
    dispatch_at_least<1, 2, 4>(std::max(per_thread, std::min(wanted, 4)), "rmsnorm: 16-byte pieces a thread", [&](auto n) {
      const int needed = (vecs + n - 1) / n;
      const int threads = (needed + device::kWarpSize - 1) / device::kWarpSize * device::kWarpSize;
      device::launch_chained<rmsnorm_kernel<T, n>>(dim3(rows), dim3(threads), 0, stream, params, "rmsnorm");
    });
  });
}

}  // namespace ridgeline
