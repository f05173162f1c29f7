#include "kernels/quantize_tile.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "common/quant_scale.h"
#include "device/encode.cuh"
#include "device/fill.cuh"
#include "device/launch.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"

namespace ridgeline {
namespace {

using Granularity = QuantizeParams::Granularity;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kGroupThreads = 128;
constexpr int kGroupsEach = 4;     // groups a thread has a piece of: four loads in flight
constexpr int kFewBlocks = 2 * 132;  // up to so many, threads have one group each: more SMs work
constexpr int kFewTileThreads = 1024;  // where not every SM has a tile
constexpr int kFewTiles = 132;

// ---- Kernels ------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: one float a warp. Bytes: the row in, its codes out: bandwidth.
/// H200, bf16 4096 x 14336, cold and behind the product that wrote them, us: 47.6 and 51.2; rows
/// held as full ones 45.2 and 52.0, and fetched ahead 44.7 and 47.2; 4096 x 4096 13.9, 14.0, 14.2.
template <class T, class Row>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    quantize_rows_kernel(const __grid_constant__ QuantizeParams params) {
  __shared__ float maxima[device::kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;

  device::start_dependents(params.rows <= device::kFewCodes);
  device::prefetch_early<Row>(x, params.cols);
  device::wait_then_start_dependents();
  Row row(x, params.cols);
  row.load(x);
  device::prefetch_ahead<Row, T>(params.x, params.stride_x_row, index, params.rows, params.cols);
  float amax = 0.0f;
  row.visit([&](int, int, const auto& piece) {
    amax = device::MaxOrNaN::combine(amax, magnitude(piece));
  });
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  const float scale = scale_of_amax(amax, params.codes);
  if (threadIdx.x == 0) params.scale[index] = scale;

  auto* q = static_cast<std::uint8_t*>(params.q) + index * params.cols;
  const float inverse = 1.0f / scale;
  const auto store_as = [&](auto is_e4m3) {
    row.visit([&](int, int column, const auto& piece) {
      store_codes<is_e4m3()>(q + column, piece, inverse);
    });
  };
  if (params.codes == DType::kFloat8E4M3) return store_as(std::true_type{});
  store_as(std::false_type{});
}

/// Of a group of kColumns what a thread has: 16 bytes, or what a warp's lanes make whole.
template <class T, int kColumns>
constexpr int kGroupPiece = std::max(device::Vec<T>::kSize, kColumns / device::kWarpSize);

/// Grid: the groups of all rows, one dimension. Block: 128 threads; neighbours own a group of
/// kColumns, a piece each: 16 of 16 bits and 32 of float32 128 columns, 32 others 256; kEach groups
/// at a time. Bytes: x in, codes out: bandwidth.
template <class T, int kColumns, bool kVector, int kEach>
__global__ void __launch_bounds__(kGroupThreads)
    quantize_groups_kernel(const __grid_constant__ QuantizeParams params) {
  constexpr int kPiece = kGroupPiece<T, kColumns>;
  constexpr int kLanes = kColumns / kPiece;
  constexpr int kGroupsABlock = kGroupThreads / kLanes;
  const unsigned across = ceil_div(params.cols, kColumns);
  const unsigned groups = static_cast<unsigned>(params.rows) * across;
  const unsigned first = blockIdx.x * (kGroupsABlock * kEach) + threadIdx.x / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;

  device::start_dependents(params.rows <= device::kFewCodes);
  device::wait_then_start_dependents();
  device::Vec<T, kPiece> pieces[kEach];
  std::int64_t rows[kEach];
  int columns[kEach], counts[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned group = first + i * kGroupsABlock;  // divided in 32 bits
    rows[i] = group / across;
    columns[i] = static_cast<int>(group % across) * kColumns + lane * kPiece;
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

/// Grid: the tiles, one dimension. Block: a tile in registers. Shared memory: one float a warp.
/// Bytes: x in, codes out: bandwidth.
template <class T, bool kVector, int kThreads>
__global__ void __launch_bounds__(kThreads)
    quantize_tiles_kernel(const __grid_constant__ QuantizeParams params) {
  __shared__ float maxima[kThreads / device::kWarpSize];
  Tile<T, kVector, kThreads> tile(params, blockIdx.x);
  device::start_dependents();
  device::wait_then_start_dependents();
  tile.load();
  const float amax = device::block_reduce<device::MaxOrNaN>(tile.amax(), maxima);
  const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
  if (threadIdx.x == 0) params.scale[blockIdx.x] = scale;
  tile.store(scale);
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T>
void quantize_rows(const QuantizeParams& params, const device::RowLayout& layout, Stream stream) {
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  device::dispatch_row<T, false, true, true>(layout, [&](auto row_type, int threads) {
    using Row = typename decltype(row_type)::type;
    device::launch_chained<quantize_rows_kernel<T, Row>>(dim3(rows), dim3(threads), 0, stream,
                                                         params, "quantize_fp8");
  });
}

template <class T, int kColumns>
void quantize_groups(const QuantizeParams& params, bool vectors, Stream stream) {
  constexpr int kPiece = kGroupPiece<T, kColumns>;
  constexpr int kGroupsABlock = kGroupThreads / (kColumns / kPiece);
  const std::int32_t groups =
      checked_int32(params.rows * ceil_div(params.cols, kColumns), "x: groups");
  vectors = vectors && kPiece == device::Vec<T>::kSize;
  dispatch_bool(vectors, [&](auto vector) {
    const auto run = [&](auto each) {
      device::launch_chained<quantize_groups_kernel<T, kColumns, vector(), each()>>(
          dim3(ceil_div(groups, each * kGroupsABlock)), dim3(kGroupThreads), 0, stream, params,
          "quantize_fp8");
    };
    if constexpr (vector())
      if (groups > kFewBlocks * kGroupsEach * kGroupsABlock) return run(Int<kGroupsEach>{});
    run(Int<1>{});
  });
}

template <class T>
void quantize_blocks(const QuantizeParams& params, bool vectors, Stream stream) {
  const std::int32_t tiles = checked_int32(tiles_of(params), "x: blocks");
  dispatch_bool(vectors, [&](auto vector) {
    const auto run = [&](auto threads) {
      device::launch_chained<quantize_tiles_kernel<T, vector(), threads()>>(
          dim3(tiles), dim3(threads), 0, stream, params, "quantize_fp8");
    };
    if constexpr (vector())
      if (tiles > kFewTiles) return run(Int<kTileThreads>{});
    run(Int<kFewTileThreads>{});
  });
}

}  // namespace

void quantize(const QuantizeParams& params, Stream stream) {
  const bool empty = params.rows == 0 || params.cols == 0;
  const bool per_tensor = params.granularity == Granularity::kTensor;
  const bool per_row = params.granularity == Granularity::kRow;
  if (empty && (per_tensor || per_row))
    device::fill_with_ones(params.scale, per_row ? params.rows : 1, stream, "quantize_fp8");
  if (empty) return;
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const device::RowLayout layout{
      .rows = params.rows,
      .cols = params.cols,
      .vectors = device::all_aligned(16, {params.x, params.q}, {x_bytes, params.cols * element}),
      .lines = device::all_aligned(128, {params.x}, {x_bytes}),
      .full = true};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (params.granularity) {
      case Granularity::kRow: return quantize_rows<T>(params, layout, stream);
      case Granularity::kGroup:
        return quantize_groups<T, kExtent>(params, layout.vectors, stream);
      case Granularity::kWideGroup:
        return quantize_groups<T, QuantizeParams::kWideExtent>(params, layout.vectors, stream);
      case Granularity::kBlock: return quantize_blocks<T>(params, layout.vectors, stream);
      case Granularity::kTensor: return quantize_tensor(params, layout.vectors, stream);
    }
  });
}

}  // namespace ridgeline
