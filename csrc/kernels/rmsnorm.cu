#include <cstdint>
#include <type_traits>

#include "common/math.h"
#include "common/quant_scale.h"
#include "device/encode.cuh"
#include "device/fill.cuh"
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/row.cuh"
#include "device/row_reduce.cuh"
#include "device/row_weight.cuh"
#include "kernels/norm.h"

namespace ridgeline {
namespace {

// ---- Phases -------------------------------------------------------------------------------------

template <class Piece>
__device__ float sum_of_squares(const Piece& piece) {
  float sum = 0.0f;
  for (const float value : device::floats(piece).data) sum = fmaf(value, value, sum);
  return sum;
}

template <int kWidth>
__device__ float magnitude(const device::Vec<float, kWidth>& values) {
  float amax = 0.0f;
  for (const float v : values.data) amax = device::MaxOrNaN::combine(amax, fabsf(v));
  return amax;
}

template <int kWidth>
__device__ device::Vec<float, kWidth> times(device::Vec<float, kWidth> values, float factor) {
  for (float& v : values.data) v *= factor;
  return values;
}

/// piece * scale * (weight + offset) in fp32.
template <class T, int kWidth>
__device__ device::Vec<float, kWidth> weighted(const device::Vec<T, kWidth>& piece,
                                               const device::Vec<float, kWidth>& weight,
                                               float scale, float offset) {
  device::Vec<float, kWidth> values = device::floats(piece);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values.data[j] *= scale * (weight.data[j] + offset);
  return values;
}

/// The lanes that have a group's columns.
template <class Row>
constexpr int kGroupLanes = kScaleGroup / Row::kWidth;

/// The largest magnitude in the group that this lane takes for the others.
template <class Row>
__device__ float amax_of_group(Row& row,
                               const device::Vec<float, Row::kWidth> (&values)[Row::kPieces]) {
  float amaxes[Row::kPieces];
  row.visit_padded([&](int i, int, const auto&, bool inside) {
    amaxes[i] = inside ? magnitude(values[i]) : 0.0f;
  });
  return device::warp_reduce_each<device::MaxOrNaN, kGroupLanes<Row>>(amaxes);
}

/// Writes e4m3 codes of a held row's weighted values with a scale a group: 16 lanes (fp32: 32) have
/// a group of 128 columns of each piece, since the row is dealt out from its own begin. They share
/// the divisions out: `amax` is that of the group of piece lane * kPieces / kLanes.
template <class Row>
__device__ void store_held_groups(const RmsNormParams& params, Row& row,
                                  const device::Vec<float, Row::kWidth> (&values)[Row::kPieces],
                                  float amax, float scale, std::uint8_t* codes) {
  constexpr int kLanes = kGroupLanes<Row>;
  const int lane = threadIdx.x % device::kWarpSize, first_lane = lane / kLanes * kLanes;
  const float own_scale = scale_of_amax(amax * scale, params.y_dtype);
  const float own_factor = __fdividef(scale, own_scale);
  float* scales =
      params.y_scale + device::row_index<Row>() * ceil_div(params.cols, kScaleGroup);
  row.visit_padded([&](int i, int column, const auto&, bool inside) {
    const int holder = first_lane + i * (kLanes / Row::kPieces);
    const float y_scale = device::from_lane(own_scale, holder);
    const float factor = device::from_lane(own_factor, holder);
    if (inside && lane == first_lane) scales[column / kScaleGroup] = y_scale;
    device::store_inside(codes + column, device::encode<true>(times(values[i], factor)), inside);
  });
}

/// The same of a row that is read again: a warp a group, four elements a lane.
template <class T, class Weight>
__device__ void store_streamed_groups(const RmsNormParams& params, const T* row,
                                      const Weight& weight, float scale, std::uint8_t* codes) {
  constexpr int kEach = kScaleGroup / device::kWarpSize;
  const int lane = threadIdx.x % device::kWarpSize, warps = blockDim.x / device::kWarpSize;
  const int groups = ceil_div(params.cols, kScaleGroup);
  float* scales = params.y_scale + static_cast<std::int64_t>(blockIdx.x) * groups;
  for (int group = threadIdx.x / device::kWarpSize; group < groups; group += warps) {
    float values[kEach], amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int column = group * kScaleGroup + j * device::kWarpSize + lane;
      values[j] = 0.0f;
      if (column < params.cols)
        values[j] = device::to_float(row[column]) * scale *
                    (weight.element(column) + params.offset);
      amax = device::MaxOrNaN::combine(amax, fabsf(values[j]));
    }
    amax = device::warp_reduce<device::MaxOrNaN>(amax);
    const float y_scale = scale_of_amax(amax, params.y_dtype);
    if (lane == 0) scales[group] = y_scale;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int column = group * kScaleGroup + j * device::kWarpSize + lane;
      const device::Vec<float, 1> value{{values[j] * (1.0f / y_scale)}};
      if (column < params.cols) device::store(codes + column, device::encode<true>(value));
    }
  }
}

/// Writes the row as 8-bit codes, and its scale or its groups'. The largest weighted values are
/// found before the norm is known, in the same pass as the sum of squares: a positive factor of the
/// whole row does not move them. The weighted values of a held row take its place in the registers
/// (H200, bf16 8192 x 8192 to e4m3: 50.6 us, weighted twice 58.1; by group 51.8, weighted twice and
/// all divided by each lane 81.9).
template <class Row, class Weight>
__device__ void store_codes(const RmsNormParams& params, Row& row, const Weight& weight,
                            float share_of_one, device::RowScratch& scratch) {
  const std::int64_t index = device::row_index<Row>();
  device::Vec<float, Row::kWidth> kept[Row::kHeld ? Row::kPieces : 1];
  const auto weighted_piece = [&](int i, int column, const auto& piece) {
    return weighted(piece, weight.at(i, column), 1.0f, params.offset);
  };
  float group_amax = 0.0f;
  const auto [squares, amax] = device::reduce_row<device::Sum, device::MaxOrNaN>(
      row, scratch,
      [&](int i, int column, const auto& piece) {
        const auto values = weighted_piece(i, column, piece);
        if constexpr (Row::kHeld) kept[i] = values;
        return make_float2(sum_of_squares(piece), magnitude(values));
      },
      [&] {
        if constexpr (Row::kHeld)
          if (params.by_group) group_amax = amax_of_group(row, kept);
      });
  const float scale = rsqrtf(squares * share_of_one + params.eps);
  auto* codes = static_cast<std::uint8_t*>(params.y) + index * params.cols;
  if (params.by_group) {
    if constexpr (Row::kHeld)
      return store_held_groups(params, row, kept, group_amax, scale, codes);
    else
      return store_streamed_groups(params, row.data(), weight, scale, codes);
  }
  const float y_scale = scale_of_amax(amax * scale, params.y_dtype);
  const float factor = scale / y_scale;
  if (threadIdx.x == 0) params.y_scale[index] = y_scale;
  const auto store_as = [&](auto is_e4m3) {
    row.visit([&](int i, int column, const auto& piece) {
      const auto values = Row::kHeld ? kept[i] : weighted_piece(i, column, piece);
      device::store(codes + column, device::encode<is_e4m3()>(times(values, factor)));
    });
  };
  if (params.y_dtype == DType::kFloat8E4M3) return store_as(std::true_type{});
  store_as(std::false_type{});
}

/// Writes the normalised row.
template <class T, class Row, class Weight>
__device__ void store_row(const RmsNormParams& params, Row& row, const Weight& weight,
                          float share_of_one, device::RowScratch& scratch) {
  const float squares = device::reduce_row<device::Sum>(
      row, scratch, [](int, int, const auto& piece) { return sum_of_squares(piece); });
  const float scale = rsqrtf(squares * share_of_one + params.eps);
  T* y = static_cast<T*>(params.y) + device::row_index<Row>() * params.cols;
  row.visit_padded([&](int i, int column, const auto& piece, bool inside) {
    const auto values = weighted(piece, weight.at(i, column), scale, params.offset);
    device::store_inside(y + column, device::rounded<T>(values), inside);
  });
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row, or a cluster. Block: a whole number of warps; a thread owns the pieces of
/// the row that Row deals it. Shared memory: two floats a segment. The weight is read ahead of the
/// wait only if the caller says that it is at rest; the row always after it.
///
/// The weight is kept in registers beside short and full rows. Many rows with a residual are not
/// held as full ones, which took the registers of other blocks (H200, bf16 8192 x 8192: 143 us,
/// else 133).
///
/// Bytes: the row in and out (in and out twice with a residual), the weight from L2. About six
/// instructions an element: bandwidth.
template <class T, class Row, bool kFloatWeight, bool kCodes>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    rmsnorm_kernel(const __grid_constant__ RmsNormParams params) {
  __shared__ device::RowScratch scratch;
  constexpr bool kAhead = Row::kPieces == 2 || Row::kFull;

  const bool few_codes = kCodes && params.rows <= device::kFewCodes;
  device::start_dependents(params.next_at_start || few_codes);
  device::open_scratch<Row>(scratch);
  const std::int64_t index = device::row_index<Row>();
  const float share_of_one = 1.0f / static_cast<float>(params.cols);
  const T* x = static_cast<const T*>(params.x) + index * params.stride_x_row;
  Row row(params.by_group ? nullptr : x, params.cols);  // groups are counted from the row's begin
  device::RowWeight<T, Row, kFloatWeight, kAhead> weight(row, params.weight);
  if (params.weights_ready) weight.load();
  T* const residual = static_cast<T*>(params.residual) + index * params.stride_residual_row;
  device::prefetch_early<Row>(x, params.cols);
  if (params.residual != nullptr) device::prefetch_early<Row>(residual, params.cols);
  device::wait_then_start_dependents();

  row.load(x);
  if (!params.weights_ready) weight.load();
  device::prefetch_ahead<Row, T>(params.x, params.stride_x_row, index, params.rows, params.cols);
  if (!Row::kFull && params.residual != nullptr) row.add_into(residual);
  if constexpr (kCodes) store_codes(params, row, weight, share_of_one, scratch);
  else store_row<T>(params, row, weight, share_of_one, scratch);
}

// ---- Launch -------------------------------------------------------------------------------------

constexpr auto kAnyKernel =
    rmsnorm_kernel<float, device::HeldRow<float, 2, false, true>, true, false>;

}  // namespace

void rmsnorm(const RmsNormParams& params, Stream stream) {
  if (params.cols == 0 && params.y_scale != nullptr && !params.by_group)
    device::fill_with_ones(params.y_scale, params.rows, stream, "rmsnorm");
  if (params.rows == 0 || params.cols == 0) return;
  const std::int32_t rows = checked_int32(params.rows, "x: rows");
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  const std::int64_t x_bytes = params.stride_x_row * element;
  const std::int64_t residual_bytes = params.stride_residual_row * element;
  // y is as long as the row in bytes or, in codes, aligned whenever the row is.
  const bool vectors =
      device::all_aligned(16, {params.x, params.residual, params.weight, params.y},
                          {x_bytes, residual_bytes, params.cols * element});
  const device::RowLayout layout{.rows = params.rows,
                                 .cols = params.cols,
                                 .vectors = vectors,
                                 .lines = device::all_aligned(128, {params.x}, {x_bytes}),
                                 .full = params.residual == nullptr,
                                 .most_blocks = device::has_clusters<kAnyKernel>() ? 4 : 1};
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dispatch_bool(params.weight_dtype == DType::kFloat32, [&](auto is_float) {
      constexpr bool kFloatWeight = is_float() || sizeof(T) == sizeof(float);
      // Beside float32 weights few rows are as many are, to spare compile time.
      device::dispatch_row<T, false, !kFloatWeight, !kFloatWeight, true>(
          layout, [&](auto row_type, int threads, int blocks = 1) {
            using Row = typename decltype(row_type)::type;
            dispatch_bool(params.y_scale != nullptr, [&](auto codes) {
              device::launch_chained<rmsnorm_kernel<T, Row, kFloatWeight, codes()>>(
                  dim3(rows * blocks), dim3(threads), 0, stream, params, "rmsnorm", blocks);
            });
          });
    });
  });
}

}  // namespace ridgeline
