#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/softmax.cuh"
#include "device/vec.cuh"
#include "kernels/attention.h"

namespace ridgeline {
namespace {

constexpr int kMergeThreads = 256;

/// One side's share of a row.
template <class T>
__device__ __forceinline__ void add_side(device::Vec<float, device::Vec<T>::kSize>& sum,
                                         const T* from, float weight) {
  if (weight == 0.0f) return;  // such a side may hold anything, NaN too
  const auto values = device::floats(device::load(from));
#pragma unroll
  for (int i = 0; i < device::Vec<T>::kSize; ++i) sum.data[i] += weight * values.data[i];
}

/// Grid: enough threads that each owns one 16-byte piece of the output; the first of a row also
/// writes its lse.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ MergeAttentionParams p) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  constexpr int kSize = device::Vec<T>::kSize;
  const int pieces = p.head_dim / kSize;
  const std::int64_t piece = std::int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  const std::int64_t row = piece / pieces;  // [batch, rows, heads]
  if (row >= p.batch * p.rows * p.heads) return;
  const std::int64_t head = row % p.heads, query = row / p.heads;
  const std::int64_t at = (query / p.rows * p.heads + head) * p.rows + query % p.rows;
  const float a = p.lse_a[at], b = p.lse_b[at];
  const float base = device::exponent_base(fmaxf(a, b));
  const float weight_a = expf(a - base), weight_b = expf(b - base), total = weight_a + weight_b;
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  device::Vec<float, kSize> sum{};
  const std::int64_t offset = piece * kSize;
  add_side(sum, static_cast<const T*>(p.out_a) + offset, weight_a * factor);
  add_side(sum, static_cast<const T*>(p.out_b) + offset, weight_b * factor);
  device::store(static_cast<T*>(p.out) + offset, device::rounded<T>(sum));
  if (piece % pieces == 0) p.lse[at] = base + logf(total);
}

}  // namespace

void merge_attention(const MergeAttentionParams& p, Stream stream) {
  const std::int64_t rows = p.batch * p.rows * p.heads;
  if (rows == 0) return;
  device::dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kSize = device::Vec<T>::kSize;
    check(p.head_dim > 0 && p.head_dim % kSize == 0,
          "out_a: expected a head size that is a positive multiple of ", kSize, ", got ",
          p.head_dim);
    const std::int64_t blocks = ceil_div<std::int64_t>(rows * (p.head_dim / kSize), kMergeThreads);
    device::launch_chained<merge_kernel<T>>(dim3(checked_int32(blocks, "merge_attention: blocks")),
                                            dim3(kMergeThreads), 0, stream, p, "merge_attention");
  });
}

}  // namespace ridgeline
