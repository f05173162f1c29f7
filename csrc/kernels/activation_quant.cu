#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "common/quant_scale.h"
#include "device/activation.cuh"
#include "device/encode.cuh"
#include "device/fill.cuh"
#include "device/launch.cuh"
#include "device/row.cuh"
#include "kernels/activation.h"

namespace ridgeline {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kGroupThreads = 128;
constexpr int kGroupsEach = 2;  // groups a thread has a piece of: four loads in flight
constexpr int kFewBlocks = 4 * 132;  // up to so many, threads have one group each: more SMs work

// ---- Phases -------------------------------------------------------------------------------------

/// silu(gate) * up in fp32.
template <class T, int kWidth>
__device__ device::Vec<float, kWidth> gated(const device::Vec<T, kWidth>& gate,
                                            const device::Vec<T, kWidth>& up) {
  device::Vec<float, kWidth> values = device::floats(gate), factors = device::floats(up);
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    values.data[j] = device::silu<sizeof(T) == 2>(values.data[j]) * factors.data[j];
  return values;
}

template <int kWidth>
__device__ float magnitude(const device::Vec<float, kWidth>& values) {
  float amax = 0.0f;
  for (const float value : values.data) amax = device::MaxOrNaN::combine(amax, fabsf(value));
  return amax;
}

template <int kWidth>
__device__ void store_codes(std::uint8_t* codes, device::Vec<float, kWidth> values, float inverse,
                            DType dtype) {
#pragma unroll
  for (float& value : values.data) value *= inverse;
  if (dtype == DType::kFloat8E4M3)
    device::store(codes, device::encode<true>(values));
  else
    device::store(codes, device::encode<false>(values));
}

// ---- Kernels ------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of both halves
/// that Row deals it. The product of a held row is kept in fp32. Shared memory: one float a warp.
/// Bytes: both halves in, codes out: bandwidth.
template <class T, class Row>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    gated_rows_kernel(const __grid_constant__ GatedQuantParams params) {
  __shared__ float maxima[device::kMaxWarps];
  const std::int64_t index = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;
  const T* other_half = x + params.cols;

  device::start_dependents();
  device::wait_then_start_dependents();
  Row gate(nullptr, params.cols), up(nullptr, params.cols);  // the same columns of both halves
  gate.load(x);
  up.load(other_half);
  device::Vec<float, Row::kWidth> kept[Row::kHeld ? Row::kPieces : 1];
  const auto product = [&](int i, int column, const auto& piece) {
    if constexpr (Row::kHeld) return gated(piece, up.piece(i));
    else return gated(piece, device::load_vec<Row::kWidth>(other_half + column));
  };
  float amax = 0.0f;
  gate.visit_padded([&](int i, int column, const auto& piece, bool) {
    const auto values = product(i, column, piece);
    if constexpr (Row::kHeld) kept[i] = values;
    amax = device::MaxOrNaN::combine(amax, magnitude(values));
  });
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  const float scale = scale_of_amax(amax, params.y_dtype);
  if (threadIdx.x == 0) params.y_scale[index] = scale;
  const float inverse = 1.0f / scale;
  auto* codes = static_cast<std::uint8_t*>(params.y) + index * params.cols;
  gate.visit([&](int i, int column, const auto& piece) {
    const auto values = Row::kHeld ? kept[i] : product(i, column, piece);
    store_codes(codes + column, values, inverse, params.y_dtype);
  });
}

/// Grid: the groups of all rows, one dimension. Block: 128 threads; a group of 128 columns belongs
/// to neighbours, a piece of 16 bytes of each half a thread, kEach groups at a time; element by
/// element where rows are not aligned. Bytes: both halves in, codes out: bandwidth.
template <class T, int kWidth, int kEach>
__global__ void __launch_bounds__(kGroupThreads)
    gated_groups_kernel(const __grid_constant__ GatedQuantParams params) {
  constexpr int kPiece = device::Vec<T>::kSize;
  constexpr int kLanes = kScaleGroup / kPiece, kGroups = kGroupThreads / kLanes;
  constexpr int kParts = kPiece / kWidth;  // vectors that a piece is moved in
  const unsigned across = ceil_div(params.cols, kScaleGroup);
  const unsigned groups = static_cast<unsigned>(params.rows) * across;
  const unsigned first = blockIdx.x * (kGroups * kEach) + threadIdx.x / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;

  device::start_dependents();
  device::wait_then_start_dependents();
  device::Vec<T, kWidth> gate[kEach][kParts], up[kEach][kParts];
  std::int64_t rows[kEach];
  int columns[kEach];
  const auto inside = [&](int i, int column) {
    return first + i * kGroups < groups && column < params.cols;
  };
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned group = first + i * kGroups;  // divided in 32 bits
    rows[i] = group / across;
    columns[i] = static_cast<int>(group % across) * kScaleGroup + lane * kPiece;
    const T* x = static_cast<const T*>(params.x) + rows[i] * params.stride_x_row + columns[i];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      gate[i][part] = {}, up[i][part] = {};
      if (!inside(i, columns[i] + part * kWidth)) continue;
      gate[i][part] = device::load_vec<kWidth>(x + part * kWidth);
      up[i][part] = device::load_vec<kWidth>(x + params.cols + part * kWidth);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    device::Vec<float, kWidth> values[kParts];
    float amax = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      values[part] = gated(gate[i][part], up[i][part]);
      amax = device::MaxOrNaN::combine(amax, magnitude(values[part]));
    }
    const float scale = scale_of_amax(device::warp_reduce<device::MaxOrNaN, kLanes>(amax),
                                      params.y_dtype);
    const unsigned group = first + i * kGroups;
    if (lane == 0 && group < groups) params.y_scale[group] = scale;
    const float inverse = 1.0f / scale;
    auto* codes = static_cast<std::uint8_t*>(params.y) + rows[i] * params.cols + columns[i];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (inside(i, columns[i] + part * kWidth))
        store_codes(codes + part * kWidth, values[part], inverse, params.y_dtype);
  }
}

// ---- Launch -------------------------------------------------------------------------------------

template <class T>
void by_row(const GatedQuantParams& params, const device::RowLayout& layout, Stream stream) {
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  device::dispatch_row<T, true, true>(layout, [&](auto row_type, int threads) {
    using Row = typename decltype(row_type)::type;
    device::launch_chained<gated_rows_kernel<T, Row>>(dim3(rows), dim3(threads), 0, stream, params,
                                                      "silu_mul");
  });
}

template <class T>
void by_group(const GatedQuantParams& params, bool vectors, Stream stream) {
  constexpr int kPiece = device::Vec<T>::kSize;
  constexpr int kGroups = kGroupThreads / (kScaleGroup / kPiece);
  const std::int32_t groups =
      checked_int32(params.rows * ceil_div(params.cols, kScaleGroup), "x: groups");
  dispatch_bool(vectors, [&](auto vector) {
    const auto run = [&](auto each) {
      device::launch_chained<gated_groups_kernel<T, vector() ? kPiece : 1, each()>>(
          dim3(ceil_div(groups, each * kGroups)), dim3(kGroupThreads), 0, stream, params,
          "silu_mul");
    };
    if constexpr (vector())
      if (groups > kFewBlocks * kGroupsEach * kGroups) return run(Int<kGroupsEach>{});
    run(Int<1>{});
  });
}

}  // namespace

void gated_act_quant(const GatedQuantParams& params, Stream stream) {
  if (params.cols == 0 && !params.by_group)
    device::fill_with_ones(params.y_scale, params.rows, stream, "silu_mul");
  if (params.rows == 0 || params.cols == 0) return;
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const bool vectors = device::all_aligned(16, {params.x, params.y},
                                           {params.stride_x_row * element, params.cols * element});
  // Halves are dealt out from their own begins.
  const device::RowLayout layout{.rows = params.rows,
                                 .cols = params.cols,
                                 .vectors = vectors,
                                 .lines = true};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params.by_group) return by_group<T>(params, vectors, stream);
    by_row<T>(params, layout, stream);
  });
}

}  // namespace ridgeline
