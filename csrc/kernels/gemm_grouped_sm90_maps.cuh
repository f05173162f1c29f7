#pragma once
#include "device/matrix_map.cuh"
#include "kernels/gemm_grouped_sm90.cuh"

/// What the copy engine is told of experts' weights.
namespace ridgeline::gemm_grouped {

/// Boxes of a tile's weight rows in the order that they are requested in.
template <class Tile>
CUtensorMap weight_map(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  const bool gated = is_gated(p.activation);
  CUtensorMap map;
  CUresult result;
  const auto u64 = [](auto v) { return static_cast<cuuint64_t>(v); };
  const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  if constexpr (Tile::kNibbles) {
    const std::int64_t strips = ceil_div(p.N, 16);
    const std::int64_t strip =
        std::int64_t{ceil_div(p.K, Int4Layout::kCols)} * block_bytes_of(Tile::kFormat);
    constexpr int kEach = Tile::kWordsEach;
    const cuuint64_t sizes[] = {u64(strip / (4 * kEach)), 2, u64(ceil_div(p.N, 32)),
                                u64(params.experts)};
    const cuuint64_t strides[] = {u64(gated ? strips / 2 * strip : strip),
                                  u64(gated ? strip : 2 * strip), u64(strips * strip)};
    const cuuint32_t box[] = {Tile::kStripBytes / (4 * kEach), 2, Tile::kCols / 32, 1};
    result = device::tensor_map_encoder()(
        &map, kEach == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT64 : CU_TENSOR_MAP_DATA_TYPE_UINT32, 4,
        const_cast<void*>(p.weight.data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  } else {
    constexpr bool kDense = Tile::kFormat == WeightFormat::kDense;
    constexpr int kBytes = kDense ? 2 : 1;
    const std::int64_t row = p.weight.stride_row * kBytes;
    const cuuint64_t sizes[] = {u64(p.K), 8, 2, u64(p.N / 16), u64(params.experts)};
    const cuuint64_t strides[] = {u64(row), u64(gated ? p.N / 2 * row : 8 * row),
                                  u64(gated ? 8 * row : 16 * row),
                                  u64(params.stride_expert)};
    const cuuint32_t box[] = {Tile::kDepth, 8, 2, Tile::kCols / 16, 1};
    result = device::tensor_map_encoder()(
        &map, kDense ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 5,
        const_cast<void*>(p.weight.data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        Tile::kExpands ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
        // Boxes of 128 bytes a row, few rows of x: fetching 256 took 1 to 3% longer (H200, lab).
        Tile::kPlansAhead ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  check(result == CUDA_SUCCESS, "grouped_linear: cuTensorMapEncodeTiled refused the weight, code ",
        static_cast<int>(result));
  return map;
}

/// Boxes of int4's scales and zero points of a tile's weight rows.
template <class Tile>
void add_scales(Launch& launch) {
  const GroupedGemmParams& params = launch.grouped;
  const GemmParams& p = params.gemm;
  const bool gated = is_gated(p.activation);
  const auto u64 = [](auto v) { return static_cast<cuuint64_t>(v); };
  const int groups = ceil_div(p.K, p.weight.group);
  const auto map_of = [&](const void* data, int bytes, CUtensorMapDataType type) {
    const cuuint64_t sizes[] = {u64(gated ? p.N / 2 : p.N), u64(gated ? 2 : 1), u64(groups),
                                u64(params.experts)};
    const cuuint64_t strides[] = {u64((gated ? p.N / 2 : p.N) * bytes), u64(p.N * bytes),
                                  u64(params.stride_scales * bytes)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(gated ? Tile::kCols / 2 : Tile::kCols),
                              gated ? 2u : 1u, 1, 1};
    const cuuint32_t ones[] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result = device::tensor_map_encoder()(
        &map, type, 4, const_cast<void*>(data), sizes, strides, box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS, "grouped_linear: cuTensorMapEncodeTiled refused scales, code ",
          static_cast<int>(result));
    return map;
  };
  launch.scales = map_of(p.weight.scales, 2, CU_TENSOR_MAP_DATA_TYPE_UINT16);
  if (p.weight.zeros)
    launch.zeros = map_of(p.weight.zeros, 1, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  launch.group = device::Divisor::of(p.weight.group);
  const bool one = Tile::kBoxes != 4 &&
                   (p.weight.group % Tile::kDepth == 0 || groups == 1);
  launch.groups = one ? 1 : Tile::kScaleSets;
}

}  // namespace ridgeline::gemm_grouped
