#pragma once
#include <cuda.h>

#include "device/dequant.cuh"
#include "device/divisor.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of the kernel for weights of 4 or 8 bits works on, the warp that brings it, and how
/// a weight becomes an operand.
namespace ridgeline::gemm_expand {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kSteps = 4;       // of a stage: so often one wgmma is deep
constexpr int kStepBytes = 32;  // 16 columns of x, or 32 of e4m3

/// kRows_ rows of x by kBands bands of 64 weight rows a warpgroup: 256 by 128 expand each weight
/// half as often, 128 by 256 suit fewer rows, 128 by 128 make tiles where those are few. kBlocks:
/// fp8 weights with scales of 128 x 128. kSplit: the blocks of a cluster share a tile's columns
/// of K. kFp8X: x is e4m3, its columns in the order of gemm_detail::launch_reorder, and int4
/// becomes e4m3.
template <class T_, WeightFormat kFormat_, bool kBlocks_, int kRows_, int kBands_, bool kSplit_,
          bool kFp8X_ = false>
struct Tile {
  using T = T_;
  static constexpr bool kFp8X = kFp8X_;
  static constexpr int kDepth = kFp8X ? 128 : 64;  // columns of K a stage
  static constexpr bool kInt4 = kFormat_ == WeightFormat::kInt4;
  static constexpr bool kBlocks = kBlocks_;
  static constexpr bool kInPlace = kInt4 && !kFp8X && std::is_same_v<T, __nv_bfloat16>;
  static constexpr float kUnit = kInPlace ? device::kInt4InPlaceUnit : 1.0f;  // of sums
  static constexpr bool kSplit = kSplit_;
  static constexpr int kBands = kBands_;
  static constexpr int kRows = kRows_;                      // of x: wgmma's columns
  static constexpr int kBoxCols = kBands * kWarpgroupRows;  // weight rows of half a tile
  static constexpr int kBoxBytes = kBoxCols * kDepth / (kInt4 ? 2 : 1);
  static constexpr int kStages = kFp8X          ? 7
                                 : kRows == 256 ? (kInt4 ? 5 : 4)
                                 : kBands == 2  ? (kInt4 ? 7 : 5)
                                                : 8;
  static constexpr int kChunks = kBands * kRows / kChunk;   // of a warpgroup's sums
};

struct Launch {
  GemmParams gemm;
  CUtensorMap x, weight, scales, zeros, y;
  Tiles tiles;
  int segments;  // of K
  int steps;     // stages, in all
  int groups;    // scales a stage has of each row: 1 or 2; int4
  device::Divisor group;  // its columns; int4
};

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) std::uint8_t x[Tile::kStages][Tile::kRows][kRowBytes];
  alignas(1024) std::uint8_t weight[Tile::kStages][2][Tile::kBoxBytes];
  union {
    alignas(1024) T out[kConsumers][2][kChunk][kOutColumns];
    Chunk chunks[kConsumers];
  };
  struct Scales {
    alignas(128) T of[2][2][Tile::kBoxCols];  // of 32 columns of K, of a half of the tile
    alignas(128) std::uint8_t zeros[2][2][round_up(Tile::kBoxCols, 128)];
  };
  alignas(128) Scales scales[Tile::kInt4 ? Tile::kStages : 1];
  Column columns[2 * Tile::kBoxCols];
  alignas(8) std::uint64_t full[Tile::kStages], free[Tile::kStages];

  /// In the place of the stages, once nobody reads them.
  __device__ __forceinline__ Split<Tile::kChunks>& split() {
    static_assert(sizeof(x) + sizeof(weight) >= sizeof(Split<Tile::kChunks>));
    return reinterpret_cast<Split<Tile::kChunks>&>(x);
  }
};

// ---- Work ---------------------------------------------------------------------------------------

template <class Tile, class Fn>
__device__ __forceinline__ void for_each_work(const Launch& launch, Fn&& fn) {
  gemm_sm90::for_each_work<Tile::kSplit>(launch.tiles, launch.segments, launch.steps, fn);
}

/// First weight row of a half of tile `n`: halves follow each other, or are gate and up.
template <class Tile>
__device__ __forceinline__ int weight_row(const Launch& launch, int n, int half) {
  return is_gated(launch.gemm.activation) ? n * Tile::kBoxCols + half * (launch.gemm.N / 2)
                                          : (2 * n + half) * Tile::kBoxCols;
}

/// Where a warpgroup's band lies: in which half, and its first row there. Two bands: one of each
/// half, so that a thread holds a gate and its up row.
template <class Tile>
__device__ __forceinline__ int half_of(int warpgroup, int band) {
  return Tile::kBands == 2 ? band : warpgroup;
}
template <class Tile>
__device__ __forceinline__ int first_in_half(int warpgroup) {
  return Tile::kBands == 2 ? warpgroup * kWarpgroupRows : 0;
}

// ---- Producers ----------------------------------------------------------------------------------

/// How many threads, of a warp each, request parts of a stage: x, the weight, and int4's scales of
/// either half. One thread took 650 cycles for x and the weight; the products of 64 columns in a
/// tile of 128 x 128 take 512. H200, int4, 4096 x 4096, us, where another asked for all scales, and
/// so: 128 rows 16.6 and 15.8, 256 rows 22.1 and 20.4, 512 rows 31.9 and 28.2.
template <class Tile>
constexpr int kProducers = Tile::kInt4 ? 4 : 2;

/// request(work, k, stage) for each stage, `bytes` of it, as soon as it is free.
template <class Tile, class Request>
__device__ __forceinline__ void for_each_stage(const Launch& launch, Shared<Tile>& shared,
                                               int bytes, Request&& request) {
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  for_each_work<Tile>(launch, [&](const Work& work) {
    for (int k = work.first_step; k < work.first_step + work.steps; ++k, ring.next()) {
      ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
      ptx::mbarrier_expect(&shared.full[ring.stage], bytes);
      request(work, k, ring.stage);
    }
  });
}

template <class Tile>
__device__ __forceinline__ void produce_x(const Launch& launch, Shared<Tile>& shared) {
  for_each_stage<Tile>(launch, shared, sizeof(shared.x[0]), [&](const Work& work, int k, int s) {
    ptx::copy_matrix(shared.x[s], &launch.x, &shared.full[s], k * Tile::kDepth,
                     work.place.m * Tile::kRows);
  });
}

template <class Tile>
__device__ __forceinline__ void produce_weight(const Launch& launch, Shared<Tile>& shared) {
  constexpr int kAcross =
      Tile::kInt4 ? Tile::kDepth / Int4Layout::kCols * Int4Layout::kWords : Tile::kDepth;
  constexpr int kRowsOfOne = Tile::kInt4 ? Int4Layout::kRows : 1;
  const auto request = [&](const Work& work, int k, int s) {
    for (int half = 0; half < 2; ++half)
      ptx::copy_matrix(shared.weight[s][half], &launch.weight, &shared.full[s], k * kAcross,
                       weight_row<Tile>(launch, work.place.n, half) / kRowsOfOne);
  };
  for_each_stage<Tile>(launch, shared, sizeof(shared.weight[0]), request);
}

/// Scales and zero points of int4, of half of the tile.
template <class Tile>
__device__ __forceinline__ void produce_scales(const Launch& launch, Shared<Tile>& shared,
                                               int half) {
  const bool has_zeros = launch.gemm.weight.zeros != nullptr;
  const int bytes = launch.groups * Tile::kBoxCols *
                    static_cast<int>(sizeof(typename Tile::T) + (has_zeros ? 1 : 0));
  for_each_stage<Tile>(launch, shared, bytes, [&](const Work& work, int k, int s) {
    auto& scales = shared.scales[s];
    const int row = weight_row<Tile>(launch, work.place.n, half);
    for (int i = 0; i < launch.groups; ++i) {
      const int group = launch.group.divide(k * Tile::kDepth + i * 32);
      ptx::copy_matrix(scales.of[i][half], &launch.scales, &shared.full[s], row, group);
      if (has_zeros)
        ptx::copy_matrix(scales.zeros[i][half], &launch.zeros, &shared.full[s], row, group);
    }
  });
}

/// What warp `warp` requests, by one thread.
template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared, int warp) {
  ptx::prefetch_tensor_map(warp == 0 ? &launch.x : warp == 1 ? &launch.weight : &launch.scales);
  if (warp == 0 || !launch.gemm.weights_ready) ptx::wait_for_dependencies();
  if (warp == 0) return produce_x<Tile>(launch, shared);
  if (warp == 1) return produce_weight<Tile>(launch, shared);
  if constexpr (Tile::kInt4) produce_scales<Tile>(launch, shared, warp - 2);
}

// ---- Weights ------------------------------------------------------------------------------------

/// The weights of 16 rows a warp of each band, 16 columns of K, as wgmma's A.
template <class Tile>
struct Fragments {
  std::uint32_t a[Tile::kBands][4];
};

/// What a warp holds of a stage while it expands it. kZeros: int4 has zero points.
template <class Tile, bool kZeros>
struct Weights {
  using T = typename Tile::T;
  using Low = device::Int4InPlace<false>;  // the nibbles of rows 0 to 7 of a warp's 16
  using High = device::Int4InPlace<true>;  // of rows 8 to 15

  const Shared<Tile>& shared;
  const Launch& launch;
  Consumer me;
  std::uint32_t words[Tile::kBands][kSteps];                      // int4
  device::Pair<T> scale[Tile::kBands][2];  // int4
  device::Pair<T> zero[Tile::kBands][2];   // int4: zero points; in place, without them, -8 scales
  const float* blocks[Tile::kBands];                              // fp8: scales of 128 columns each
  float block_scale[Tile::kBands];
  // int4: where the lane's words, scales and zero points lie in a stage. Instructions beside
  // products slow those down: with places made anew each stage, 128 and 256 rows of 14336 x 4096
  // took 35.7 and 51.5 us, so 34.7 and 49.5 (H200).
  int words_at[Tile::kBands], scales_at[Tile::kBands], zeros_at[Tile::kBands];

  __device__ __forceinline__ int row() const {
    return first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad;
  }

  __device__ __forceinline__ void load_scales(int stage, int group) {
    const auto& scales = shared.scales[stage];
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const T value = scales.of[group][0][scales_at[band] + 8 * r];
        std::uint32_t zero_point = Int4Layout::kSymmetricZero;
        if (kZeros) zero_point = scales.zeros[group][0][zeros_at[band] + 8 * r];
        if constexpr (Tile::kInPlace) {
          scale[band][r] = r == 0 ? Low::factor(value) : High::factor(value);
          zero[band][r] = !kZeros ? Low::offset(value)
                          : r == 0 ? Low::zero(zero_point)
                                   : High::zero(zero_point);
        } else {
          scale[band][r] = device::Pair<T>{value, value};
          zero[band][r] = device::int4_zero<T>(zero_point);
        }
      }
  }

  __device__ __forceinline__ void start(const Work& work) {
    const GemmParams& p = launch.gemm;
    if constexpr (Tile::kInt4) {
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        const int half = half_of<Tile>(me.warpgroup, band), block = row() / Int4Layout::kRows;
        words_at[band] = ptx::opaque(half * Tile::kBoxBytes +
                                     block * Int4Layout::kWords * 4 + me.lane * 16);
        scales_at[band] = ptx::opaque(half * Tile::kBoxCols + row());
        zeros_at[band] = ptx::opaque(half * round_up(Tile::kBoxCols, 128) + row());
      }
    }
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      if (!Tile::kBlocks) continue;
      // The warp's 16 rows are in one block: tiles, and the up rows, start at multiples of 16.
      const int n =
          weight_row<Tile>(launch, work.place.n, half_of<Tile>(me.warpgroup, band)) + row();
      blocks[band] = static_cast<const float*>(p.weight.scales) +
                     std::int64_t{min(n, p.N - 1) / kScaleBlock} * ceil_div(p.K, kScaleBlock);
    }
  }

  /// Stage `stage`, which holds columns [64 k, 64 k + 64).
  __device__ __forceinline__ void load(int stage, int k) {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      if (Tile::kBlocks) block_scale[band] = blocks[band][k / (kScaleBlock / Tile::kDepth)];
      if constexpr (Tile::kInt4) {
        const uint4 v = *reinterpret_cast<const uint4*>(&shared.weight[stage][0][words_at[band]]);
        words[band][0] = v.x;
        words[band][1] = v.y;
        words[band][2] = v.z;
        words[band][3] = v.w;
      }
    }
    if constexpr (Tile::kInt4) load_scales(stage, 0);
  }

  /// Columns [16 step, 16 step + 16) of the stage.
  __device__ __forceinline__ void expand(Fragments<Tile>& to, int stage, int step) {
    if (Tile::kInt4 && step == kSteps / 2 && launch.groups == 2) load_scales(stage, 1);
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Tile::kInPlace) {
          const std::uint32_t word = words[band][step] >> i / 2 * 8;
          const auto factor = scale[band][i % 2], other = zero[band][i % 2];
          to.a[band][i] = i % 2 == 0 ? (kZeros ? Low::expand_from(word, factor, other)
                                               : Low::expand(word, factor, other))
                                     : (kZeros ? High::expand_from(word, factor, other)
                                               : High::expand(word, factor, other));
        } else if constexpr (Tile::kInt4) {
          to.a[band][i] = device::expand_int4<T>(words[band][step], i, zero[band][i % 2],
                                                 scale[band][i % 2]);
        } else {
          // Rows of 64 bytes with the swizzle of their size: chunks of 16 move by row / 2.
          const std::uint8_t* rows = shared.weight[stage][half_of<Tile>(me.warpgroup, band)];
          const int r = row() + 8 * (i % 2), chunk = step ^ (me.quad / 2);
          std::uint32_t& value = to.a[band][i];
          value = device::convert_e4m3_pair<T>(*reinterpret_cast<const std::uint16_t*>(
              rows + r * Tile::kDepth + chunk * 16 + i / 2 * 8 + me.in_quad * 2));
          if (Tile::kBlocks) value = device::scale_pair<T>(value, block_scale[band]);
        }
      }
  }
};

}  // namespace ridgeline::gemm_expand
