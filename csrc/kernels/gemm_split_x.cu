#include <cstdint>

#include "common/math.h"
#include "device/digits.cuh"
#include "device/encode.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

using T = __nv_bfloat16;

/// RowOf: row_of(m) is the row of x that row m of the terms is. Where kernels ahead decide it, the
/// product may not start before they are done.
template <class RowOf>
struct SplitParams {
  const T* x;  // [rows, cols]
  std::int64_t stride_x;
  RowOf row_of;
  std::int32_t cols;
  std::uint8_t* terms;
  std::int64_t stride_terms;  // from a row's to the next one's, ...
  std::int64_t second_term;   // ... from a term to the other, ...
  std::int32_t gap;           // ... and what lies between kColsTogether columns and the next
  float* units;               // [rows]
};
constexpr int kColsTogether = gemm_grouped::kColsOfTerm;

/// The largest of some words.
struct MaxWord {
  __device__ static std::uint32_t identity() { return 0; }
  __device__ static std::uint32_t combine(std::uint32_t a, std::uint32_t b) { return max(a, b); }
};

// ---- Phases -------------------------------------------------------------------------------------

/// The power of two in which the largest magnitude of a row is 224 at least and 448 at most, which
/// is e4m3's; or the smallest normal one.
__device__ __forceinline__ float unit_of(float largest) {
  constexpr std::uint32_t kExponent = 0x7f800000, kOne = 0x00800000;
  return __uint_as_float((__float_as_uint(largest * (1.0f / 448.0f)) & kExponent) + kOne);
}

template <int kCount>
__device__ __forceinline__ auto& pairs_of(device::Vec<T, kCount>& piece) {
  return reinterpret_cast<std::uint32_t(&)[kCount / 2]>(piece.data);
}

/// The nearest codes, and what they leave.
template <int kCount>
__device__ __forceinline__ device::Vec<std::uint8_t, kCount> take_term(
    device::Vec<float, kCount>& values) {
  const auto codes = device::encode<true>(values);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
        reinterpret_cast<const __nv_fp8x2_storage_t*>(codes.data)[i / 2], __NV_E4M3);
    const float2 of = __half22float2(__half2(pair));
    values.data[i] -= of.x;
    values.data[i + 1] -= of.y;
  }
  return codes;
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block a row. Block: a whole number of warps; a thread owns the pieces of the row that
/// Row deals it. Shared memory: two words a warp. Bytes: the row in, as many out.
///
/// Both terms are in the row's unit. Values down to 1/896 of the row's largest magnitude are exact,
/// smaller ones rounded by at most 2^-17 of it.
template <class Row, class RowOf>
__global__ void __launch_bounds__(Row::kMaxThreads, Row::kMinBlocks)
    split_x_kernel(const __grid_constant__ SplitParams<RowOf> params) {
  __shared__ std::uint32_t maxima[2][device::kMaxWarps];
  const std::int64_t m = blockIdx.x;
  if (!RowOf::kDecidedAhead) {
    ptx::launch_dependents();  // the product's blocks request weights meanwhile
    device::prefetch_early<Row>(params.x + params.row_of(m) * params.stride_x, params.cols);
  }
  ptx::wait_for_dependencies();
  if (RowOf::kDecidedAhead) ptx::launch_dependents();
  const T* x = params.x + params.row_of(m) * params.stride_x;
  Row row(x, params.cols);
  row.load(x);
  bool finite = true;
  const auto largest_of_row = [&](std::uint32_t* scratch) {
    std::uint32_t largest = 0;
    row.visit([&](int, int, auto& piece) {
      auto& pairs = pairs_of(piece);
      if (!finite) device::drop_not_finite<T>(pairs);
      largest = max(largest, device::largest_magnitude(pairs));
    });
    return device::block_reduce<MaxWord>(largest, scratch);
  };
  std::uint32_t largest = largest_of_row(maxima[0]);
  finite = largest < device::kNotFinite<T>;
  const bool any_nan = largest > device::kNotFinite<T>;
  if (!finite) largest = largest_of_row(maxima[1]);
  const float unit = unit_of(__uint_as_float(largest << 16)), inverse = 1.0f / unit;
  // NaN in x is NaN in all of y's row. Infinities take a slow walk over x and weight; of experts'
  // rows they are as NaN.
  const bool is_nan = any_nan || (RowOf::kDecidedAhead && !finite);
  if (threadIdx.x == 0)
    params.units[m] = is_nan ? __uint_as_float(0x7fffffffu) : finite ? unit : -unit;

  std::uint8_t* terms = params.terms + m * params.stride_terms;
  row.visit([&](int, int column, auto& piece) {
    if (!finite) device::drop_not_finite<T>(pairs_of(piece));
    auto values = device::floats(piece);
    for (float& value : values.data) value *= inverse;
    std::uint8_t* to = terms + column + column / kColsTogether * params.gap;
    device::store(to, take_term(values));
    device::store(to + params.second_term, take_term(values));
  });
  const int over = params.cols % kColsTogether;
  if (params.gap == 0 || over == 0) return;
  std::uint8_t* last = terms + params.cols / kColsTogether * (kColsTogether + params.gap);
  for (int column = over + threadIdx.x; column < kColsTogether; column += blockDim.x)
    last[column] = last[params.second_term + column] = 0;  // behind the last column of x
}

// ---- Launch -------------------------------------------------------------------------------------

struct InOrder {
  static constexpr bool kDecidedAhead = false;
  __device__ std::int64_t operator()(std::int64_t m) const { return m; }
};
struct OfExperts {
  static constexpr bool kDecidedAhead = true;
  GroupedGemmParams params;
  __device__ std::int64_t operator()(std::int64_t m) const {
    return gemm_grouped::row_of_x(params, m);
  }
};

template <class RowOf>
void launch(const GemmParams& p, const SplitParams<RowOf>& params, const char* name,
            Stream stream) {
  const device::RowLayout layout{
      .rows = p.M, .cols = p.K, .vectors = true,
      .lines = device::all_aligned(128, {p.x.data}, {p.x.stride_row * 2})};
  device::dispatch_row<T, true, true>(layout, [&](auto row_type, int threads) {
    using Row = typename decltype(row_type)::type;
    if constexpr (Row::kWidth > 1)
      device::launch_chained<split_x_kernel<Row, RowOf>>(
          dim3(static_cast<unsigned>(p.M)), dim3(threads), 0, stream, params, name);
  });
}

}  // namespace

void launch_split_x(const GemmParams& p, void* terms, float* units, Stream stream) {
  launch(p,
         SplitParams<InOrder>{.x = static_cast<const T*>(p.x.data),
                              .stride_x = p.x.stride_row,
                              .row_of = {},
                              .cols = p.K,
                              .terms = static_cast<std::uint8_t*>(terms),
                              .stride_terms = p.K,
                              .second_term = round_up<std::int64_t>(p.M, 8) * p.K,
                              .gap = 0,
                              .units = units},
         "linear: split x", stream);
}

}  // namespace ridgeline::gemm_detail

namespace ridgeline::gemm_grouped {

void launch_split_rows(const GroupedGemmParams& params, void* terms, float* units, Stream stream) {
  const GemmParams& p = params.gemm;
  using namespace gemm_detail;
  launch(p,
         SplitParams<OfExperts>{.x = static_cast<const T*>(p.x.data),
                                .stride_x = p.x.stride_row,
                                .row_of = {params},
                                .cols = p.K,
                                .terms = static_cast<std::uint8_t*>(terms),
                                .stride_terms = cols_of_terms(p.K),
                                .second_term = kColsOfTerm,
                                .gap = kColsOfTerm,
                                .units = units},
         "grouped_linear: split x", stream);
}

}  // namespace ridgeline::gemm_grouped
