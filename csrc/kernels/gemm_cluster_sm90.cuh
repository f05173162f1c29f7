#pragma once
#include "device/dequant.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/matrix_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "kernels/gemm_config.h"
#include "kernels/gemm_epilogue.cuh"

/// The two roles in the cluster kernel: the warp that requests and the warpgroups that multiply.
namespace ridgeline::gemm_cluster {

using gemm_config::kStripRows;
using namespace gemm_detail;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kGroupRows = 64;   // weight rows of a warpgroup: of one wgmma
constexpr int kTileRows = 2 * kGroupRows;  // of a block
constexpr int kConsumers = 8;    // warps that multiply; one more requests
constexpr int kThreads = (kConsumers + 1) * 32;
constexpr int kRowBytes = 128;         // of an operand's row in a stage, swizzled
constexpr int kPitch = kTileRows + 4;  // of the sums
constexpr int kMaxGroups = 4;    // of 32 columns and more, in a stage

struct ClusterParams {
  CUtensorMap weight, x;
  CUtensorMap scales, zeros;     // of int4
  GemmParams gemm;
  std::int32_t paired;           // the second half of the warpgroups has the up rows of the first's
  std::int32_t stages;           // of K
  std::int32_t stage_groups;     // of int4: groups that a stage may touch
};

// ---- Shared memory ------------------------------------------------------------------------------

template <WeightFormat kFormat, bool kFp8X, int kTokens>
struct alignas(1024) Stage {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  // int8 is taken for columns of 16 bits, two in one: its bytes lie as a dense weight's.
  static constexpr bool kWide = kFormat == WeightFormat::kDense || kFormat == WeightFormat::kInt8;
  static constexpr int kCols = kWide ? 64 : 128;
  static constexpr int kXBoxes = kFp8X ? 1 : kCols / 64;
  char weight[2][kGroupRows * (kInt4 ? 64 : kRowBytes)];
  char x[kXBoxes][kTokens * kRowBytes];
  char scales[kInt4 ? 2 : 1][kInt4 ? kMaxGroups * kGroupRows * 2 : 16];
  char zeros[kInt4 ? 2 : 1][kInt4 ? kMaxGroups * kGroupRows : 16];
};

template <WeightFormat kFormat, bool kFp8X, int kTokens>
struct Shared {
  using StageOf = Stage<kFormat, kFp8X, kTokens>;
  static constexpr int kStages =
      (gemm_config::kShareOfSm - 1024) / static_cast<int>(sizeof(StageOf));
  static_assert(kStages >= 3);
  union {
    StageOf stages[kStages];
    float sums[kTokens][kPitch];  // [row of x][weight row], at the end
  };
  std::uint64_t full[kStages], empty[kStages];
};

// ---- Producer -----------------------------------------------------------------------------------

/// One thread of a warp of its own.
template <WeightFormat kFormat, bool kFp8X, int kTokens>
struct Producer {
  using SharedOf = Shared<kFormat, kFp8X, kTokens>;
  using StageOf = typename SharedOf::StageOf;
  const ClusterParams& params;
  SharedOf& shared;
  int begin;    // of the stages of K
  int rows[2];  // first weight row of either warpgroup
  std::uint64_t policy = ptx::evict_first();

  __device__ void request_weight(int i) const {
    const GemmParams& p = params.gemm;
    StageOf& stage = shared.stages[i % SharedOf::kStages];
    std::uint64_t* full = &shared.full[i % SharedOf::kStages];
    const int k0 = (begin + i) * StageOf::kCols;
    int bytes = sizeof stage.weight + sizeof stage.x;
    if constexpr (StageOf::kInt4)
      bytes += kTileRows * params.stage_groups * (p.weight.zeros ? 3 : 2);
    ptx::mbarrier_expect(full, bytes);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int first = rows[group];
      if constexpr (StageOf::kInt4) {
        ptx::copy_matrix(stage.weight[group], &params.weight, full,
                         k0 / Int4Layout::kCols * Int4Layout::kWords, first / kStripRows, policy);
        ptx::copy_matrix(stage.scales[group], &params.scales, full, first, k0 / p.weight.group,
                         policy);
        if (p.weight.zeros)
          ptx::copy_matrix(stage.zeros[group], &params.zeros, full, first, k0 / p.weight.group,
                           policy);
      } else {
        ptx::copy_matrix(stage.weight[group], &params.weight, full, k0, first, policy);
      }
    }
  }

  __device__ void request_x(int i) const {
    StageOf& stage = shared.stages[i % SharedOf::kStages];
#pragma unroll
    for (int box = 0; box < StageOf::kXBoxes; ++box)
      ptx::copy_matrix(stage.x[box], &params.x, &shared.full[i % SharedOf::kStages],
                       (begin + i) * StageOf::kCols + box * 64, 0);
  }

  __device__ void run(int count) const {
    constexpr int kStages = SharedOf::kStages;
    const bool ready = params.gemm.weights_ready;
    if (!ready) ptx::wait_for_dependencies();
    for (int i = 0; i < min(kStages, count); ++i) request_weight(i);
    if (ready) ptx::wait_for_dependencies();
    for (int i = 0; i < min(kStages, count); ++i) request_x(i);
    for (int i = kStages; i < count; ++i) {
      ptx::mbarrier_wait(&shared.empty[i % kStages], (i / kStages - 1) % 2);
      request_weight(i);
      request_x(i);
    }
  }
};

// ---- Consumer -----------------------------------------------------------------------------------

/// What a warpgroup keeps in registers: 64 weight rows by all rows of x.
template <class T, class E, WeightFormat kFormat, bool kFp8X, int kTokens>
struct Consumer {
  using SharedOf = Shared<kFormat, kFp8X, kTokens>;
  using StageOf = typename SharedOf::StageOf;
  using Wgmma = ptx::WgmmaFew<kTokens, E>;
  using Sums = SumOf<E>[kTokens / 8][4];
  const GemmParams& p;
  int group, warp, lane;  // warpgroup; warp in it
  int row;                // first weight row of the warpgroup
  Sums sums = {};

  __device__ static std::uint64_t operand(const char* start) {
    return ptx::swizzled_operand(start, 16, 8 * kRowBytes);
  }
  __device__ static void hold(Sums& values) {
    ptx::hold_registers(values);
  }

  /// Both operands from shared memory: four steps.
  __device__ void multiply_shared(const StageOf& stage, Sums& into, bool accumulate) {
    hold(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t a = operand(stage.weight[group] + step * 32);
      Wgmma::shared(into, a, operand(stage.x[0] + step * 32), accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Four operands from registers: 64 columns, box `box` of x.
  __device__ void multiply_registers(const StageOf& stage, const std::uint32_t (&a)[4][4], int box,
                                     Sums& into, bool accumulate) {
    hold(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma::registers(into, a[step], operand(stage.x[box] + step * 32), accumulate || step != 0);
    ptx::wgmma_commit();
  }

  /// The warp's 16 rows, 64 columns from `box` on, as operands.
  __device__ void expand_fp8(const StageOf& stage, int box, std::uint32_t (&a)[4][4]) const {
    const char* of_warp = stage.weight[group] + warp * kStripRows * kRowBytes;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = lane / 4 + j % 2 * 8;
        const char* chunk = of_warp + r * kRowBytes + (((box * 4 + step) ^ (r & 7)) * 16);
        const auto pair =
            *reinterpret_cast<const std::uint16_t*>(chunk + j / 2 * 8 + lane % 4 * 2);
        a[step][j] = device::convert_e4m3_pair<E>(pair);
      }
  }

  /// Scales and zero points of the thread's two rows, for group `g` of a stage.
  struct Scaling {
    device::Pair<T> scale[2], zero[2];

    __device__ void load(const GemmParams& p, const char* of_scales, const char* of_zeros, int at) {
      const T* scales = reinterpret_cast<const T*>(of_scales) + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = {scales[8 * i], scales[8 * i]};
        zero[i] = device::int4_zero<T>(p.weight.zeros
                                           ? static_cast<std::uint8_t>(of_zeros[at + 8 * i])
                                           : Int4Layout::kSymmetricZero);
      }
    }
  };

  /// The warp's 16 rows, 64 columns from `box` on, as operands. `into` columns of the stage's first
  /// group lie before the stage; of groups that a stage has one of, box 0 loads the scaling.
  __device__ void expand_int4(const StageOf& stage, int box, int into, int last, bool whole,
                              Scaling& scaling, std::uint32_t (&a)[4][4]) const {
    const uint4 raw =
        *reinterpret_cast<const uint4*>(stage.weight[group] + warp * 1024 + box * 512 + lane * 16);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    const int r = warp * kStripRows + lane / 4;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 0 && (!whole || (box == 0 && step == 0))) {  // 32 columns a group at least
        int g = 0;
        if (!whole) {
          const int at = into + min(box * 64 + step * 16, last);
          for (int next = p.weight.group; at >= next; next += p.weight.group) ++g;
        }
        scaling.load(p, stage.scales[group], stage.zeros[group], g * kGroupRows + r);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[step][j] = device::as_bits(
            __hmul2(device::as_pair<T>(device::expand_int4<T>(words[step], j, scaling.zero[j % 2])),
                    scaling.scale[j % 2]));
    }
  }

  __device__ void run(SharedOf& shared, int begin, int count) {
    constexpr int kStages = SharedOf::kStages;
    const auto release = [&](int i) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.empty[i % kStages]);
    };
    const bool whole = p.weight.group % StageOf::kCols == 0 || p.weight.group >= p.K;
    for (int i = 0; i < count; ++i) {
      const StageOf& stage = shared.stages[i % kStages];
      const int k0 = (begin + i) * StageOf::kCols;
      ptx::mbarrier_wait(&shared.full[i % kStages], i / kStages % 2);
      if constexpr (StageOf::kWide) {
        multiply_shared(stage, sums, true);
        ptx::wgmma_wait<1>();
        if (i > 0) release(i - 1);
      } else if constexpr (kFormat == WeightFormat::kInt4) {
        std::uint32_t a[2][4][4];
        Scaling scaling;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          expand_int4(stage, box, whole ? 0 : k0 % p.weight.group, p.K - 1 - k0, whole, scaling,
                      a[box]);
          multiply_registers(stage, a[box], box, sums, true);
        }
        ptx::wgmma_wait<0>();
        release(i);
      } else {
        Sums part;
        float scale = 1.0f;
        if (p.weight.scale_layout == ScaleLayout::kBlock)
          scale = static_cast<const float*>(
              p.weight.scales)[static_cast<std::int64_t>(min(row, p.N - 1) / kScaleBlock) *
                                   ceil_div(p.K, kScaleBlock) + begin + i];
        if constexpr (kFp8X) {
          multiply_shared(stage, part, false);
        } else {
          // With all rows the registers hold one set of operands only.
          constexpr int kSets = kTokens == 32 ? 2 : 1;
          std::uint32_t a[kSets][4][4];
#pragma unroll
          for (int box = 0; box < 2; ++box) {
            if (box == kSets) ptx::wgmma_wait<0>();
            expand_fp8(stage, box, a[box % kSets]);
            multiply_registers(stage, a[box % kSets], box, part, box != 0);
          }
        }
        ptx::wgmma_wait<0>();
        hold(part);
        release(i);
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) sums[j / 4][j % 4] += scale * part[j / 4][j % 4];
      }
    }
    ptx::wgmma_wait<0>();
    hold(sums);
  }

  /// The sums to their place, which is that of stages: once every consumer is done with those.
  __device__ void keep(float (*to)[kPitch]) const {
    ptx::named_barrier_sync(1, kConsumers * 32);  // every consumer has read its last stage
    const int r = group * kGroupRows + warp * kStripRows + lane / 4;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j)
      to[j / 4 * 8 + lane % 4 * 2 + j % 2][r + j % 4 / 2 * 8] =
          static_cast<float>(sums[j / 4][j % 4]);
  }
};

}  // namespace ridgeline::gemm_cluster
