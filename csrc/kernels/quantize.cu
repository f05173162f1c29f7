#include "kernels/quantize.h"

#include <cstdint>

#include "common/math.h"
#include "common/quant_scale.h"
#include "device/encode.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"

namespace ridgeline {
namespace {

using Granularity = QuantizeParams::Granularity;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kExtent = QuantizeParams::kExtent;
constexpr int kMaxWarps = 512 / device::kWarpSize;
constexpr int kGroupThreads = 128;
constexpr int kGroupsEach = 4;     // groups a thread has a piece of: four loads in flight
constexpr int kFewBlocks = 2 * 132;  // up to so many, threads have one group each: more SMs work
constexpr int kTileThreads = 512;  // of 128 x 128 elements, four 16-byte pieces of bf16 a thread

/// What a pass over tiles of 128 x 128 does.
enum class Pass : std::uint8_t { kBlockScales, kTensorMaximum, kTensorCodes };

struct TileLaunch {
  QuantizeParams params;
  Pass pass;
};

// ---- Phases -------------------------------------------------------------------------------------

template <class T, int kWidth>
__device__ float magnitude(const device::Vec<T, kWidth>& piece) {
  float amax = 0.0f;
  for (const float value : device::floats(piece).data)
    amax = device::MaxOrNaN::combine(amax, fabsf(value));
  return amax;
}

template <class T, int kWidth>
__device__ void store_codes(std::uint8_t* q, const device::Vec<T, kWidth>& piece, float inverse) {
  device::Vec<float, kWidth> values = device::floats(piece);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values.data[j] *= inverse;
  device::store(q, device::encode<true>(values));
}

/// A piece of kPiece elements at `data`, of which `count` exist; the others are zeros. kVector: all
/// or none exist, and the address is aligned.
template <bool kVector, int kPiece, class T>
__device__ device::Vec<T, kPiece> load_some(const T* data, int count) {
  device::Vec<T, kPiece> piece;
  if constexpr (kVector) {
    if (count > 0) return device::load_vec<kPiece>(data);
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j)
    piece.data[j] = !kVector && j < count ? data[j] : device::from_float<T>(0.0f);
  return piece;
}

template <bool kVector, int kPiece, class T>
__device__ void store_some(std::uint8_t* q, const device::Vec<T, kPiece>& piece, int count,
                           float inverse) {
  if constexpr (kVector) {
    if (count > 0) store_codes(q, piece, inverse);
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      if (j < count) q[j] = device::encode_e4m3(device::to_float(piece.data[j]) * inverse);
  }
}

// ---- Kernels ------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: one float a warp. Bytes: the row in, its codes out: bandwidth.
template <class T, class Row>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    quantize_rows_kernel(const __grid_constant__ QuantizeParams params) {
  __shared__ float maxima[kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  Row row(x, params.cols);
  row.load(x);
  float amax = 0.0f;
  row.visit([&](int, int, const auto& piece) {
    amax = device::MaxOrNaN::combine(amax, magnitude(piece));
  });
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
  if (threadIdx.x == 0) params.scale[index] = scale;

  auto* q = static_cast<std::uint8_t*>(params.q) + index * params.cols;
  row.visit([&](int, int column, const auto& piece) {
    store_codes(q + column, piece, 1.0f / scale);
  });
}

/// Grid: the groups of all rows, one dimension. Block: 128 threads; 16 neighbours (fp32: 32) own a
/// group of 128 columns, a piece of 16 bytes each, kEach groups at a time. Bytes: x in, codes out:
/// bandwidth.
template <class T, bool kVector, int kEach>
__global__ void __launch_bounds__(kGroupThreads)
    quantize_groups_kernel(const __grid_constant__ QuantizeParams params) {
  constexpr int kPiece = device::Vec<T>::kSize;
  constexpr int kLanes = kExtent / kPiece;
  constexpr int kGroupsABlock = kGroupThreads / kLanes;
  const unsigned across = ceil_div(params.cols, kExtent);
  const unsigned groups = static_cast<unsigned>(params.rows) * across;
  const unsigned first = blockIdx.x * (kGroupsABlock * kEach) + threadIdx.x / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  device::Vec<T, kPiece> pieces[kEach];
  std::int64_t rows[kEach];
  int columns[kEach], counts[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned group = first + i * kGroupsABlock;  // divided in 32 bits
    rows[i] = group / across;
    columns[i] = static_cast<int>(group % across) * kExtent + lane * kPiece;
    counts[i] = group < groups ? params.cols - columns[i] : 0;
    pieces[i] = load_some<kVector, kPiece>(
        static_cast<const T*>(params.x) + rows[i] * params.stride_x_row + columns[i], counts[i]);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float amax = device::warp_reduce<device::MaxOrNaN, kLanes>(magnitude(pieces[i]));
    const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
    const unsigned group = first + i * kGroupsABlock;
    if (lane == 0 && group < groups) params.scale[group] = scale;
    auto* q = static_cast<std::uint8_t*>(params.q) + rows[i] * params.cols + columns[i];
    store_some<kVector>(q, pieces[i], counts[i], 1.0f / scale);
  }
}

/// Grid: the tiles of 128 x 128, one dimension. Block: 512 threads, which hold the tile in
/// registers. Shared memory: one float a warp. Bytes: x in, codes out: bandwidth.
///
/// A scale of the whole tensor takes two passes after it was set to 0. The first raises it to the
/// largest scale of a tile: the bits of non-negative floats, and of NaN above them, order as
/// integers. The second encodes, taking 0 (all values are zero) for 1, and one block writes that 1:
/// the others read either. It goes backwards: what the first read last is still in L2.
template <class T, bool kVector>
__global__ void __launch_bounds__(kTileThreads)
    quantize_tiles_kernel(const __grid_constant__ TileLaunch launch) {
  __shared__ float maxima[kMaxWarps];
  constexpr int kPiece = device::Vec<T>::kSize;
  constexpr int kAcross = kExtent / kPiece;
  constexpr int kEach = kExtent * kAcross / kTileThreads;
  const QuantizeParams& params = launch.params;
  const std::int64_t tile =
      launch.pass == Pass::kTensorCodes ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int tiles_across = ceil_div(params.cols, kExtent);
  const int column = static_cast<int>(tile % tiles_across) * kExtent +
                     static_cast<int>(threadIdx.x) % kAcross * kPiece;
  const std::int64_t first_row = tile / tiles_across * kExtent + threadIdx.x / kAcross;
  constexpr int kDown = kTileThreads / kAcross;
  const auto row_of = [&](int i) { return first_row + i * kDown; };
  const auto count_of = [&](int i) { return row_of(i) < params.rows ? params.cols - column : 0; };

  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  device::Vec<T, kPiece> pieces[kEach];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    pieces[i] = load_some<kVector, kPiece>(
        static_cast<const T*>(params.x) + row_of(i) * params.stride_x_row + column, count_of(i));
#pragma unroll
  for (int i = 0; i < kEach; ++i) amax = device::MaxOrNaN::combine(amax, magnitude(pieces[i]));

  float scale = 0.0f;
  if (launch.pass == Pass::kTensorCodes) {
    scale = *params.scale == 0.0f ? 1.0f : *params.scale;
    if (tile == 0 && threadIdx.x == 0) *params.scale = scale;
  } else {
    amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
    scale = scale_of_amax(amax, DType::kFloat8E4M3);
    if (launch.pass == Pass::kTensorMaximum) {
      if (threadIdx.x == 0 && amax != 0.0f)
        atomicMax(reinterpret_cast<int*>(params.scale), __float_as_int(scale));
      return;
    }
    if (threadIdx.x == 0) params.scale[tile] = scale;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    store_some<kVector>(static_cast<std::uint8_t*>(params.q) + row_of(i) * params.cols + column,
                        pieces[i], count_of(i), 1.0f / scale);
}

/// Grid: enough blocks for `count` scales; each becomes `value`.
struct FillScales {
  float* scale;
  std::int64_t count;
  float value;
};

__global__ void __launch_bounds__(kGroupThreads)
    fill_scales_kernel(const __grid_constant__ FillScales fill) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < fill.count) fill.scale[i] = fill.value;
}

// ---- Launch -------------------------------------------------------------------------------------

void fill_scales(const FillScales& fill, Stream stream) {
  if (fill.count == 0) return;
  const std::int64_t blocks = ceil_div<std::int64_t>(fill.count, kGroupThreads);
  device::launch_chained<fill_scales_kernel>(dim3(checked_int32(blocks, "x: rows")),
                                             dim3(kGroupThreads), 0, stream, fill, "quantize_fp8");
}

template <class T>
void quantize_rows(const QuantizeParams& params, const device::RowLayout& layout, Stream stream) {
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  device::dispatch_row<T, false, true>(layout, [&](auto row_type, int threads) {
    using Row = typename decltype(row_type)::type;
    device::launch_chained<quantize_rows_kernel<T, Row>>(dim3(rows), dim3(threads), 0, stream,
                                                         params, "quantize_fp8");
  });
}

template <class T>
void quantize_groups(const QuantizeParams& params, bool vectors, Stream stream) {
  constexpr int kLanes = kExtent / device::Vec<T>::kSize;
  constexpr int kGroupsABlock = kGroupThreads / kLanes;
  const std::int32_t groups =
      checked_int32(params.rows * ceil_div(params.cols, kExtent), "x: groups");
  dispatch_bool(vectors, [&](auto vector) {
    dispatch_bool(groups <= kFewBlocks * kGroupsEach * kGroupsABlock, [&](auto few) {
      constexpr int kEach = few() ? 1 : kGroupsEach;
      device::launch_chained<quantize_groups_kernel<T, vector(), kEach>>(
          dim3(ceil_div(groups, kEach * kGroupsABlock)), dim3(kGroupThreads), 0, stream, params,
          "quantize_fp8");
    });
  });
}

template <class T>
void quantize_tiles(const QuantizeParams& params, bool vectors, Pass pass, Stream stream) {
  const std::int64_t tiles =
      ceil_div<std::int64_t>(params.rows, kExtent) * ceil_div(params.cols, kExtent);
  const std::int32_t grid = checked_int32(tiles, "x: blocks");
  const TileLaunch launch{.params = params, .pass = pass};
  dispatch_bool(vectors, [&](auto vector) {
    device::launch_chained<quantize_tiles_kernel<T, vector()>>(
        dim3(grid), dim3(kTileThreads), 0, stream, launch, "quantize_fp8");
  });
}

}  // namespace

void quantize_fp8(const QuantizeParams& params, Stream stream) {
  const bool empty = params.rows == 0 || params.cols == 0;
  const bool per_tensor = params.granularity == Granularity::kTensor;
  if (per_tensor) fill_scales({params.scale, 1, empty ? 1.0f : 0.0f}, stream);
  if (empty && params.granularity == Granularity::kRow)
    fill_scales({params.scale, params.rows, 1.0f}, stream);
  if (empty) return;
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.q}, {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes}),
      .few = params.rows <= device::kFewRows};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (params.granularity) {
      case Granularity::kRow: return quantize_rows<T>(params, layout, stream);
      case Granularity::kGroup: return quantize_groups<T>(params, layout.vectors, stream);
      case Granularity::kBlock:
        return quantize_tiles<T>(params, layout.vectors, Pass::kBlockScales, stream);
      case Granularity::kTensor:
        quantize_tiles<T>(params, layout.vectors, Pass::kTensorMaximum, stream);
        return quantize_tiles<T>(params, layout.vectors, Pass::kTensorCodes, stream);
    }
  });
}

}  // namespace ridgeline
