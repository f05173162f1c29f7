#pragma once
#include <cuda.h>

#include "device/dequant.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of the kernel for weights of 4 or 8 bits works on, the warp that brings it, and how
/// a weight becomes an operand.
namespace ridgeline::gemm_expand {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kDepth = 64;  // columns of K a stage
constexpr int kSteps = 2;   // of 16 columns, whose weights are in registers at a time
constexpr int kStepBytes = 32;
constexpr int kSumsOfThread = 128;

/// kBands bands of 64 weight rows a warpgroup, by as many rows of x as its registers hold sums of:
/// one band and 256 rows expand each weight half as often, two bands and 128 rows suit fewer rows.
/// kBlocks: fp8 weights with scales of 128 x 128.
template <class T_, WeightFormat kFormat_, bool kBlocks_, int kBands_, int kStages_>
struct Tile {
  using T = T_;
  static constexpr bool kInt4 = kFormat_ == WeightFormat::kInt4;
  static constexpr bool kBlocks = kBlocks_;
  static constexpr int kBands = kBands_;
  static constexpr int kRows = 2 * kSumsOfThread / kBands;     // of x: wgmma's columns
  static constexpr int kBoxCols = kBands * kWarpgroupRows;     // weight rows of half a tile
  static constexpr int kStages = kStages_;
  static constexpr int kBoxBytes = kBoxCols * kDepth / (kInt4 ? 2 : 1);
};

struct Launch {
  GemmParams gemm;
  CUtensorMap x, weight, scales, zeros, y;
  Tiles tiles;
  float* partials;  // [segments, M, N] where the epilogue is another kernel's; else null
  int segments;     // of K
  int steps;        // stages a segment
  int all_steps;
  int groups;       // scales a stage has of each row: 1 or 2; int4
};

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) T x[Tile::kStages][Tile::kRows][kDepth];
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
  alignas(8) std::uint64_t full[Tile::kStages], free[Tile::kStages];
};

// ---- Work ---------------------------------------------------------------------------------------

struct Work {
  Place place;
  int segment, first_step, steps;
};

/// Calls fn(work) for each tile and segment of this block.
template <class Fn>
__device__ __forceinline__ void for_each_work(const Launch& launch, Fn&& fn) {
  const int tiles = launch.tiles.along_m * launch.tiles.along_n;
  for (int i = static_cast<int>(blockIdx.x); i < tiles * launch.segments;
       i += static_cast<int>(gridDim.x)) {
    Work work{.place = place_of(launch.tiles, i % tiles), .segment = i / tiles};
    work.first_step = work.segment * launch.steps;
    work.steps = max(0, min(launch.steps, launch.all_steps - work.first_step));
    fn(work);
  }
}

/// Whether the halves of a tile are gate and up; the kernel that adds segments pairs them itself.
__device__ __forceinline__ bool is_paired(const Launch& launch) {
  return is_gated(launch.gemm.activation) && launch.partials == nullptr;
}

/// First weight row of a half of tile `n`: halves follow each other, or are gate and up.
template <class Tile>
__device__ __forceinline__ int weight_row(const Launch& launch, int n, int half) {
  return is_paired(launch) ? n * Tile::kBoxCols + half * (launch.gemm.N / 2)
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

// ---- Producer -----------------------------------------------------------------------------------

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const GemmParams& p = launch.gemm;
  const bool has_zeros = p.weight.zeros != nullptr;
  int bytes = sizeof(shared.x[0]) + sizeof(shared.weight[0]);
  if (Tile::kInt4)
    bytes += launch.groups * 2 * Tile::kBoxCols *
             static_cast<int>(sizeof(typename Tile::T) + (has_zeros ? 1 : 0));
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  for_each_work(launch, [&](const Work& work) {
    for (int k = work.first_step; k < work.first_step + work.steps; ++k, ring.next()) {
      const int s = ring.stage;
      std::uint64_t* full = &shared.full[s];
      ptx::mbarrier_wait(&shared.free[s], ring.parity);
      ptx::mbarrier_expect(full, bytes);
      ptx::copy_matrix(shared.x[s], &launch.x, full, k * kDepth, work.place.m * Tile::kRows);
      for (int half = 0; half < 2; ++half) {
        const int row = weight_row<Tile>(launch, work.place.n, half);
        if constexpr (Tile::kInt4) {
          ptx::copy_matrix(shared.weight[s][half], &launch.weight, full, k * Int4Layout::kWords,
                           row / Int4Layout::kRows);
          for (int i = 0; i < launch.groups; ++i) {
            const int group = (k * kDepth + i * 32) / p.weight.group;
            ptx::copy_matrix(shared.scales[s].of[i][half], &launch.scales, full, row, group);
            if (has_zeros)
              ptx::copy_matrix(shared.scales[s].zeros[i][half], &launch.zeros, full, row, group);
          }
        } else {
          ptx::copy_matrix(shared.weight[s][half], &launch.weight, full, k * kDepth, row);
        }
      }
    }
  });
}

// ---- Weights ------------------------------------------------------------------------------------

/// The weights of 16 rows a warp of each band, 32 columns of K, as wgmma's A.
template <class Tile>
struct Fragments {
  std::uint32_t a[Tile::kBands][kSteps][4];
};

/// What a warp holds of a stage while it expands it.
template <class Tile>
struct Weights {
  using T = typename Tile::T;

  const Shared<Tile>& shared;
  const Launch& launch;
  Consumer me;
  std::uint32_t words[Tile::kBands][4];                           // int4
  device::Pair<T> scale[Tile::kBands][2], zero[Tile::kBands][2];  // int4; folded or plain
  bool folded;  // the scales are so small that one multiply-add expands
  const float* blocks[Tile::kBands];                              // fp8: scales of 128 columns each
  float block_scale[Tile::kBands];

  __device__ __forceinline__ int row() const {
    return first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad;
  }

  __device__ __forceinline__ void load_scales(int stage, int group) {
    const auto& scales = shared.scales[stage];
    const bool has_zeros = launch.gemm.weight.zeros != nullptr;
    T values[Tile::kBands][2];
    folded = !has_zeros;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        values[band][r] = scales.of[group][half_of<Tile>(me.warpgroup, band)][row() + 8 * r];
        folded = folded && fabsf(device::to_float(values[band][r])) < device::kFoldedBelow;
      }
    folded = __all_sync(0xffffffffu, folded);
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const T value = values[band][r];
        if (folded) {
          scale[band][r] = device::folded_scale<T>(value);
          const T minus_eight = static_cast<T>(-8.0f);
          zero[band][r] = __hmul2(device::Pair<T>{value, value},
                                  device::Pair<T>{minus_eight, minus_eight});
        } else {
          const int half = half_of<Tile>(me.warpgroup, band);
          scale[band][r] = device::Pair<T>{value, value};
          zero[band][r] = device::int4_zero<T>(
              has_zeros ? scales.zeros[group][half][row() + 8 * r] : Int4Layout::kSymmetricZero);
        }
      }
  }

  __device__ __forceinline__ void start(const Work& work) {
    const GemmParams& p = launch.gemm;
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
      if (Tile::kBlocks) block_scale[band] = blocks[band][k / (kScaleBlock / kDepth)];
      if constexpr (Tile::kInt4) {
        const int block = row() / Int4Layout::kRows;
        const uint4 v = *reinterpret_cast<const uint4*>(
            &shared.weight[stage][half_of<Tile>(me.warpgroup, band)]
                          [block * Int4Layout::kWords * 4 + me.lane * 16]);
        words[band][0] = v.x;
        words[band][1] = v.y;
        words[band][2] = v.z;
        words[band][3] = v.w;
      }
    }
    if constexpr (Tile::kInt4) load_scales(stage, 0);
  }

  /// Columns [32 part, 32 part + 32) of the stage.
  __device__ __forceinline__ void expand(Fragments<Tile>& to, int stage, int part) {
    if constexpr (!Tile::kInt4) {
      convert(to, stage, part);
    } else {
      if (part == 1 && launch.groups == 2) load_scales(stage, 1);
      if (folded) {
        each(part, to, [&](std::uint32_t word, int band, int i) {
          return device::expand_int4_folded<T>(word, i, scale[band][i % 2], zero[band][i % 2]);
        });
      } else {
        __syncwarp();  // keeps this a branch: predicated, its instructions would be issued always
        each(part, to, [&](std::uint32_t word, int band, int i) {
          return device::expand_int4<T>(word, i, zero[band][i % 2], scale[band][i % 2]);
        });
      }
    }
  }

 private:
  template <class Fn>
  __device__ __forceinline__ void each(int part, Fragments<Tile>& to, Fn&& fn) const {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to.a[band][step][i] = fn(words[band][part * kSteps + step], band, i);
  }

  __device__ __forceinline__ void convert(Fragments<Tile>& to, int stage, int part) const {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      const std::uint8_t* rows = shared.weight[stage][half_of<Tile>(me.warpgroup, band)];
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Rows of 64 bytes with the swizzle of their size: chunks of 16 move by row / 2.
          const int r = row() + 8 * (i % 2), chunk = (part * kSteps + step) ^ (me.quad / 2);
          std::uint32_t& value = to.a[band][step][i];
          value = device::convert_e4m3_pair<T>(*reinterpret_cast<const std::uint16_t*>(
              rows + r * kDepth + chunk * 16 + i / 2 * 8 + me.in_quad * 2));
          if (Tile::kBlocks) value = device::scale_pair<T>(value, block_scale[band]);
        }
    }
  }
};

}  // namespace ridgeline::gemm_expand
