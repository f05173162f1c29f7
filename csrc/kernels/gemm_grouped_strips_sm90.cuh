#pragma once
#include <cuda.h>

#include "device/fp4.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_grouped_walk_warps.cuh"
#include "kernels/gemm_strips_sm90.cuh"

/// What a warp of the strips kernel does where weights are experts': how the weight comes, and x.
namespace ridgeline::gemm_grouped {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kRingStages = 4;  // of a warp, at most

struct GroupedStripsParams {
  StripLaunch launch;
  CUtensorMap weight;        // [experts, N, K]; not of fp4
  std::int32_t pitch;        // bytes of a row of x in shared memory
  std::int32_t pieces;       // of a row of x
  std::int32_t stages;       // of a warp's ring
  std::int32_t strip_bytes;  // of fp4
  device::Divisor by_pieces;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; before them the rings, after them sums, x [row_tile][pitch], its factors, lists of
/// tiles.
struct alignas(128) GroupedStripsShared {
  std::uint64_t full[kWarps][kRingStages];  // a chunk is in
  std::uint64_t free[kWarps][kRingStages];  // it is multiplied
  SumBarriers sums;
};
static_assert(sizeof(GroupedStripsShared) == kStripsFixedBytes);
static_assert(kTokens == kStripTokens);
static_assert(kPieceCols == kChunkCols<WeightFormat::kFp8> && kBoxes == kBoxesOfChunk);
static_assert(kChunkCols<WeightFormat::kFp8> == strips_chunk_cols(WeightFormat::kFp8));
static_assert(kChunkCols<WeightFormat::kDense> == strips_chunk_cols(WeightFormat::kDense));
static_assert(strips_stage_bytes(WeightFormat::kDense) == kChunkBytes);

// ---- Phases -------------------------------------------------------------------------------------

/// Asks for a chunk. All lanes of the warp call it.
template <WeightFormat kFormat>
__device__ __forceinline__ void request_chunk(const GroupedStripsParams& params,
                                              const ChunkSteps& at, char* to, std::uint64_t* full,
                                              std::uint64_t policy) {
  const int row = at.weight_row(), expert = at.tile->expert;
  if constexpr (kFormat == WeightFormat::kFp4) {
    const GroupedGemmParams& p = params.launch.grouped;
    constexpr int kBytes = strips_stage_bytes(kFormat);
    const int first = at.chunk * kBytes, bytes = min(kBytes, params.strip_bytes - first);
    const char* strip = static_cast<const char*>(p.gemm.weight.data) + expert * p.stride_expert +
                        std::int64_t{static_cast<unsigned>(row) / kStripRows} * params.strip_bytes;
    if (!ptx::elect_one()) return;
    ptx::mbarrier_expect(full, bytes);
    ptx::copy_bulk(to, strip + first, bytes, full, policy);
  } else {
    if (!ptx::elect_one()) return;
    ptx::mbarrier_expect(full, kChunkBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::copy_tensor_4d(to + box * kBoxBytes, &params.weight, full,
                          (at.chunk * kBoxes + box) * kBoxCols<kFormat>, row, expert, 0, policy);
  }
}

constexpr int kFp4Blocks = strips_chunk_cols(WeightFormat::kFp4) / Int4Layout::kCols;

/// Where a strip ends within a chunk, the chunk's last blocks are what the ring held before. Zeros
/// of x meet them, so they have to be finite, as exponents of zero are.
__device__ __forceinline__ void clear_exponents(char* ring, int stages, int lane) {
  for (int i = lane; i < stages * kFp4Blocks * 2; i += device::kWarpSize)
    *reinterpret_cast<uint4*>(ring + i / 2 * Fp4Layout::kBytes + Fp4Layout::kCodeBytes +
                              i % 2 * kStripRows) = {};
}

/// A chunk of fp4 from byte `at` of a row of x. Codes meet x as they are, and a group's sums its
/// power of two: 8 tokens of top 4 in 128 experts of 2880 x 5760 took 70.8 us so, by weights 73.7,
/// and in chunks of 256 columns, which balance better, 86.5 (H200, lab).
__device__ __forceinline__ void multiply_fp4(const char* weight, const char* x, int at,
                                             Sums<__nv_bfloat16>& sums, int lane) {
#pragma unroll
  for (int block = 0; block < kFp4Blocks; ++block) {
    const char* codes = weight + block * Fp4Layout::kBytes;
    const char* exponents = codes + Fp4Layout::kCodeBytes + lane / 4;
    const uint4 raw = reinterpret_cast<const uint4*>(codes)[lane];
    const std::uint32_t words[2][2] = {{raw.x, raw.y}, {raw.z, raw.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int group = block * 2 + half;
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scale[r] = device::fp4_sum_scale(exponents[half * kStripRows + r * 8]);
      float part[4] = {};
      std::uint32_t b[4];
      ptx::ldmatrix(b, x + at + group * kFp4Group * 2);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        std::uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i] = device::Fp4Turns(i % 2 == 1).codes(words[half][step], i / 2 == 1);
        ptx::mma_m16n8k16<__nv_bfloat16>(part, a, b[2 * step], b[2 * step + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.of[half][i] = fmaf(part[i], scale[i / 2], sums.of[half][i]);
    }
  }
}

/// Of a chunk's boxes, for 16 weight rows from `row` on. Boxes are as wide as blocks.
__device__ __forceinline__ void load_scales(float (&of_box)[kBoxes],
                                            const GroupedGemmParams& params, int expert, int row,
                                            int chunk) {
  static_assert(kBoxCols<WeightFormat::kFp8> == kScaleBlock);
  const int blocks = ceil_div(params.gemm.K, kScaleBlock);
  const float* scales = static_cast<const float*>(params.gemm.weight.scales) +
                        expert * params.stride_scales +
                        gemm_detail::first_block_scale(params.gemm, row);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box)
    of_box[box] = scales[min(chunk * kBoxes + box, blocks - 1)];
}

/// Factors of sums of a chunk for a row of x, which lie in shared memory: its unit, or its scales.
template <class T, class E, bool kFp8X, bool kGroups>
constexpr int kFactors = kGroups ? kBoxes : kUnits<T, E, kFp8X> ? 1 : 0;

/// Up to kCount pieces of rows of x, kWarps apart, of `all`, to shared memory in E, zero from K on,
/// with their factors. `row` is the row of x that the lane's row of y is made of.
template <class T, class E, WeightFormat kFormat, bool kFp8X, bool kGroups, int kCount>
__device__ __forceinline__ void stage_pieces(const GroupedStripsParams& params, int first, int all,
                                             int row, char* to, float* factors) {
  const GemmParams& p = params.launch.grouped.gemm;
  const int lane = threadIdx.x % 32;
  std::uint32_t pairs[kCount][4];
  float scales[kCount];  // of the lane's columns
  int rows[kCount], pieces[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int piece = min(first + i * kWarps, all - 1);
    rows[i] = params.by_pieces.divide(piece);
    pieces[i] = piece - rows[i] * params.pieces;
    const int at = pieces[i] * kPieceCols + lane * 8;
    const std::int64_t row_of_x = device::from_lane(row, rows[i]);
    const char* from =
        static_cast<const char*>(p.x.data) + (row_of_x * p.x.stride_row + at) * (kFp8X ? 1 : 2);
    if constexpr (kGroups)
      scales[i] = at < p.K ? __ldcg(p.x.scale + row_of_x * ceil_div(p.K, kScaleBlock) +
                                    at / kScaleBlock)
                           : 0.0f;
    uint4 raw{};
    if (at < p.K) {
      if constexpr (kFp8X) {
        const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(from));
        raw.x = codes.x, raw.y = codes.y;
      } else {
        raw = __ldcg(reinterpret_cast<const uint4*>(from));
      }
    }
    pairs[i][0] = raw.x, pairs[i][1] = raw.y, pairs[i][2] = raw.z, pairs[i][3] = raw.w;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    std::uint32_t(&of)[4] = pairs[i];
    if constexpr (kFp8X) {
      std::uint32_t low[2], high[2];
      device::convert_e4m3<E>(of[0], low);
      device::convert_e4m3<E>(of[1], high);
      of[0] = low[0], of[1] = low[1], of[2] = high[0], of[3] = high[1];
    }
    if constexpr (kUnits<T, E, kFp8X>) {
      const auto unit = device::PowerUnit<15>::of(
          device::warp_max(static_cast<int>(device::largest_magnitude(of))), T{});
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = device::floats_of(device::as_pair<T>(of[j]));
        of[j] = device::as_bits(__floats2half2_rn(two.x * unit.inverse, two.y * unit.inverse));
      }
      if (lane == 0) factors[pieces[i] * params.launch.row_tile + rows[i]] = unit.unit;
    }
    if constexpr (kFormat == WeightFormat::kFp4)
#pragma unroll
      for (std::uint32_t& pair : of) pair = device::fp4_operand(pair);
    if constexpr (kGroups) {
      constexpr int kLanes = kScaleBlock / 8;  // whose columns have a scale
      if (lane % kLanes == 0)
        factors[(pieces[i] * kBoxes + lane / kLanes) * params.launch.row_tile + rows[i]] =
            scales[i];
    }
    char* at = to + rows[i] * params.pitch + (pieces[i] * kPieceCols + lane * 8) * 2;
    *reinterpret_cast<uint4*>(at) = {of[0], of[1], of[2], of[3]};
  }
}

/// A warp's part of `count` rows of x; `row` is the lane's.
template <class T, class E, WeightFormat kFormat, bool kFp8X, bool kGroups>
__device__ __forceinline__ void stage_rows(const GroupedStripsParams& params, int row, int count,
                                           int warp, char* to, float* factors) {
  constexpr int kTogether = 4;
  const int all = count * params.pieces;
  const auto stage = [&]<int kCount>(int first) {
    stage_pieces<T, E, kFormat, kFp8X, kGroups, kCount>(params, first, all, row, to, factors);
  };
  if (all <= kWarps) {
    if (warp < all) stage.template operator()<1>(warp);
  } else {
    for (int piece = warp; piece < all; piece += kTogether * kWarps)
      stage.template operator()<kTogether>(piece);
  }
}

}  // namespace ridgeline::gemm_grouped
