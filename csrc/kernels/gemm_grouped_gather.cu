#include <algorithm>

#include "common/math.h"
#include "device/divisor.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/gemm_grouped_launch.cuh"

namespace ridgeline::gemm_grouped {
namespace {

constexpr int kThreads = 256;

struct GatherParams {
  GroupedGemmParams grouped;
  uint4* to;
  std::int32_t vectors, stride;  // 16 bytes each: of a row, and between rows of x
  std::int32_t pieces;           // of all rows, ...
  device::Divisor by_pieces;     // ... and of one
};

constexpr int kTogether = 4;  // of a lane's vectors
constexpr int kPieceVectors = kTogether * device::kWarpSize;

/// Rows of x in the order of y, a warp a piece of one at a time: long rows of few a warp each took
/// up to 40 us (14336 columns, H200). Grid: as many blocks as run at once.
/// Roofline: the rows in and out, bandwidth.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherParams params) {
  ptx::wait_for_dependencies();
  ptx::launch_dependents();  // now: the next kernel begins with what those ahead of this one wrote
  const auto* x = static_cast<const uint4*>(params.grouped.gemm.x.data);
  const int lane = threadIdx.x % device::kWarpSize;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / device::kWarpSize;
  const int warps = gridDim.x * (kThreads / device::kWarpSize);
  for (int piece = warp; piece < params.pieces; piece += warps) {
    const int s = params.by_pieces.divide(piece);
    const int first = (piece - s * ceil_div(params.vectors, kPieceVectors)) * kPieceVectors + lane;
    const uint4* from = x + row_of_x(params.grouped, s) * params.stride;
    uint4* to = params.to + std::int64_t{s} * params.vectors;
    uint4 vectors[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (const int v = first + i * device::kWarpSize; v < params.vectors) vectors[i] = from[v];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (const int v = first + i * device::kWarpSize; v < params.vectors) to[v] = vectors[i];
  }
}

struct ClearParams {
  unsigned* to;
  std::int64_t count;
};

/// Grid: a thread a count.
__global__ void __launch_bounds__(kThreads)
    clear_kernel(const __grid_constant__ ClearParams params) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < params.count) params.to[i] = 0;
}

}  // namespace

void launch_clear(unsigned* to, std::int64_t count, Stream stream) {
  device::launch_chained<clear_kernel>(
      dim3(static_cast<unsigned>(ceil_div<std::int64_t>(count, kThreads))), dim3(kThreads), 0,
      stream, ClearParams{to, count}, "grouped_linear: counts of rows");
}

void launch_gather(const GroupedGemmParams& params, void* to, Stream stream) {
  const GemmParams& p = params.gemm;
  const auto bytes = static_cast<std::int64_t>(size_of(p.x.dtype));
  const int vectors = checked_int32(p.K * bytes / 16, "grouped_linear: columns");
  const int of_row = ceil_div(vectors, kPieceVectors);
  const GatherParams gather{
      .grouped = params,
      .to = static_cast<uint4*>(to),
      .vectors = vectors,
      .stride = checked_int32(p.x.stride_row * bytes / 16, "grouped_linear: stride of x"),
      .pieces = checked_int32(p.M * of_row, "grouped_linear: pieces of rows"),
      .by_pieces = device::Divisor::of(of_row)};
  const std::int64_t wanted = ceil_div<std::int64_t>(gather.pieces, kThreads / device::kWarpSize);
  const auto blocks = std::min<std::int64_t>(wanted, device::multiprocessors() * 8);
  device::launch_chained<gather_kernel>(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                                        stream, gather, "grouped_linear: rows of x");
}

}  // namespace ridgeline::gemm_grouped
