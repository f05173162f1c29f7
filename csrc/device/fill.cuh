#pragma once
#include <cstdint>

#include "common/math.h"
#include "device/launch.cuh"
#include "device/row.cuh"

namespace ridgeline::device {

/// `count` floats at `to` become `value`.
struct Fill {
  float* to;
  std::int64_t count;
  float value;
};

constexpr int kFillThreads = 128;

/// Grid: enough blocks for a float a thread.
template <class Params>
__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ Params fill) {
  start_dependents();
  wait_then_start_dependents();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < fill.count) fill.to[i] = fill.value;
}

/// The scales of rows without columns.
inline void fill_with_ones(float* to, std::int64_t count, Stream stream, const char* name) {
  if (count == 0) return;
  const std::int64_t blocks = ceil_div<std::int64_t>(count, kFillThreads);
  launch_chained<fill_kernel<Fill>>(dim3(checked_int32(blocks, "x: rows")), dim3(kFillThreads), 0,
                                    stream, Fill{to, count, 1.0f}, name);
}

}  // namespace ridgeline::device
