#include <algorithm>

#include "common/math.h"
#include "device/dequant.cuh"
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

constexpr int kAbreast = 2;  // pieces that a warp asks for before it takes one

/// The same with sums of columns, a warp 256 of a row at a time. A sum that is not finite makes the
/// row's outputs NaN. Each piece is two trips to L2. H200, lab, with the product behind it, two runs,
/// us, piece by piece and with eight terms where three are not zero, and so: 64 and 256 tokens of
/// top 8 in 128 experts of 2048 x 1536 60.1 66.1 and 56.0 65.0.
__global__ void __launch_bounds__(kThreads)
    gather_with_sums_kernel(const __grid_constant__ GatherParams params) {
  using T = __nv_bfloat16;
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  constexpr int kGroup = device::kWarpSize / 2;  // lanes whose columns, 128, have a sum
  const auto* x = static_cast<const uint4*>(params.grouped.gemm.x.data);
  const int lane = threadIdx.x % device::kWarpSize, in_group = lane % kGroup;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / device::kWarpSize;
  const int warps = gridDim.x * (kThreads / device::kWarpSize);
  const int of_row = ceil_div(params.vectors, device::kWarpSize);
  constexpr int kVectors = kColsWithSums / 8;
  for (int first = warp; first < params.pieces; first += kAbreast * warps) {
    uint4 raw[kAbreast] = {};
    uint4* to[kAbreast];
#pragma unroll
    for (int i = 0; i < kAbreast; ++i) {
      const int piece = first + i * warps;
      if (piece >= params.pieces) break;
      const int s = params.by_pieces.divide(piece);
      const int v = (piece - s * of_row) * device::kWarpSize + lane;
      if (v < params.vectors) raw[i] = x[row_of_x(params.grouped, s) * params.stride + v];
      to[i] = params.to + std::int64_t{piece} * kVectors;
    }
#pragma unroll
    for (int i = 0; i < kAbreast && first + i * warps < params.pieces; ++i) {
      auto& values = reinterpret_cast<device::Vec<T>&>(raw[i]);
      float sum = 0.0f;
#pragma unroll
      for (T& value : values.data) {
        const float scaled = device::to_float(value) * device::kInt4MaskedFactor;
        value = device::from_float<T>(scaled);
        sum += scaled;
      }
      sum = device::group_sum(sum, kGroup);
      device::Vec<T> terms{};
#pragma unroll
      for (int term = 0; term < 3; ++term) {
        terms.data[term] = device::from_float<T>(in_group == 0 ? sum : 0.0f);
        sum -= device::to_float(terms.data[term]);
      }
      device::store(reinterpret_cast<T*>(to[i] + lane), values);
      if (in_group < 2)
        device::store(
            reinterpret_cast<T*>(to[i] + device::kWarpSize + lane / kGroup * 2 + in_group), terms);
    }
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

/// Rows of x in pieces of so many vectors, a warp each.
template <auto kKernel>
void launch_pieces(const GroupedGemmParams& params, void* to, int piece_vectors, Stream stream,
                   const char* name) {
  const GemmParams& p = params.gemm;
  const auto bytes = static_cast<std::int64_t>(size_of(p.x.dtype));
  const int vectors = checked_int32(p.K * bytes / 16, "grouped_linear: columns");
  const int of_row = ceil_div(vectors, piece_vectors);
  const GatherParams gather{
      .grouped = params,
      .to = static_cast<uint4*>(to),
      .vectors = vectors,
      .stride = checked_int32(p.x.stride_row * bytes / 16, "grouped_linear: stride of x"),
      .pieces = checked_int32(p.M * of_row, "grouped_linear: pieces of rows"),
      .by_pieces = device::Divisor::of(of_row)};
  const std::int64_t wanted = ceil_div<std::int64_t>(gather.pieces, kThreads / device::kWarpSize);
  const auto blocks = std::min<std::int64_t>(wanted, device::multiprocessors() * 8);
  device::launch_chained<kKernel>(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                                  gather, name);
}

}  // namespace

void launch_clear(unsigned* to, std::int64_t count, Stream stream) {
  device::launch_chained<clear_kernel>(
      dim3(static_cast<unsigned>(ceil_div<std::int64_t>(count, kThreads))), dim3(kThreads), 0,
      stream, ClearParams{to, count}, "grouped_linear: counts of rows");
}

void launch_gather(const GroupedGemmParams& params, void* to, Stream stream) {
  launch_pieces<gather_kernel>(params, to, kPieceVectors, stream, "grouped_linear: rows of x");
}

void launch_gather_with_sums(const GroupedGemmParams& params, void* to, Stream stream) {
  launch_pieces<gather_with_sums_kernel>(params, to, device::kWarpSize, stream,
                                         "grouped_linear: rows of x with sums");
}

}  // namespace ridgeline::gemm_grouped
