#pragma once
#include <algorithm>

#include "common/check.h"
#include "kernels/gemm_cluster_turns.cuh"

/// What a block of the cluster kernel is made of, and what it receives.
namespace ridgeline::gemm_cluster {

/// Stages of the weight that L2 is asked for by blocks that have an SM each ...
constexpr int kPrefetched = 4;
/// ... and that are still to be requested when the next kernel is let on.
constexpr int kReleased = 3, kNever = -1;

/// Groups of the scales of all stages that a block holds at most, one request, and which part of
/// its shared memory they take: the ring keeps four stages.
constexpr int kMostGroups = 256, kHeldShare = 8;

/// The kernel of so few rows of x meets them with a norm, by further warps.
constexpr int kNormTokens = gemm_config::kNormRows;

/// Blocks of an SM: sums of 128 rows of x and the operands of an expanded weight are one's.
template <class Layout, int kGroups>
constexpr int kBlocks = kGroups > 2 || Layout::kAlone ||
                                (Layout::kTokens > gemm_config::kFewRows &&
                                 Layout::kFormat != WeightFormat::kDense)
                            ? 1
                            : 2;
/// Whether scales of blocks of fp8 weights are brought to shared memory.
template <class Layout, int kGroups>
constexpr bool kHoldsBlocks = Layout::kFormat == WeightFormat::kFp8 && !Layout::kFp8X &&
                              kBlocks<Layout, kGroups> == 1;
template <int kTokens, int kGroups>
constexpr int kBlockThreads = kThreads + (kGroups - 2) * kGroupThreads +
                              (kTokens == kNormTokens ? (kNormWarps - 1) * 32 : 0);

/// Scales and bias of tiles that three warpgroups have, or of more rows of x than kManyTokens, for
/// which Fixed has no place; ahead of it.
template <int kUnits>
struct OwnFactors {
  static constexpr int kRows = std::max(3, kUnits) * kGroupRows;
  alignas(16) float x_scale[kRows], scale[kRows], bias[kRows];
};
template <int kTokens, int kGroups, int kUnits>
constexpr int kFactorBytes =
    kGroups > 2 || kTokens > kManyTokens ? static_cast<int>(sizeof(OwnFactors<kUnits>)) : 0;

/// fn<kRows>() of those rows of x that `rows` is.
template <int... kRows, class Fn>
void dispatch_rows(int rows, Fn&& fn) {
  const bool found = ((rows == kRows && (fn.template operator()<kRows>(), true)) || ...);
  check(found, "linear: no tiles of ", rows, " rows");
}

/// Rows of x of each of `tiles`: whole octets where there are several. Each brings its own from L2.
inline int rows_of_tile(std::int64_t rows, std::int64_t tiles) {
  return static_cast<int>(std::min(rows, round_up<std::int64_t>(ceil_div(rows, tiles), 8)));
}

/// Whether kEach columns of y, of `element` bytes, are a vector, and those of the residual.
inline bool stores_vectors(const GemmParams& p, std::size_t element) {
  const auto in_vectors = [&](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % (kEach * element) == 0;
  };
  return p.out_cols() % kEach == 0 && in_vectors(p.y) &&
         (!p.residual || (in_vectors(p.residual) && p.stride_residual % kEach == 0));
}

/// Whether y is stored so, and where the residual comes: behind the sums, in the `bytes` of the
/// rings, where it has room.
template <class T>
void plan_stores(ClusterParams& params, int threads, int bytes) {
  const GemmParams& p = params.gemm;
  params.plain = p.activation == Activation::kNone;
  params.vectors = stores_vectors(p, sizeof(T));
  if (!params.vectors || !p.residual) return;
  const int step = threads / (params.box_rows / kEach);
  const int sums = params.turns * params.rows_held * pitch_of_sums(params.row_groups) *
                   static_cast<int>(sizeof(float));
  const int residual =
      ceil_div(params.rows_each, step) * threads * kEach * static_cast<int>(sizeof(T));
  params.vectors = sums + residual <= bytes;
  if (params.vectors) params.residual_at = sums;
}

/// Octets of rows of x whose sums TurnsEnd takes.
template <int kTokens>
__host__ __device__ constexpr int octets_of_turns(const ClusterParams& params) {
  return kTokens == 64 ? 8 : params.rows_held <= 16 ? 2 : 4;
}

/// What a block receives that finishes so many rows.
template <int kTokens>
__host__ __device__ constexpr int received_bytes(const ClusterParams& p, int segments, int rows) {
  if (p.by_turns) return bytes_of_turns(octets_of_turns<kTokens>(p));
  return (segments - 1) * rows * p.row_groups * kGroupRows * 4;
}

/// Makes the block's barriers, some by each of `warps` warps, of which one thread calls it; `bytes`
/// come from its neighbours, and squares of a norm. H200, us, by one thread of the block and so: 32
/// rows of fp8 by bf16 of 4096 x 4096 6.85 and 6.77, chained 16 rows of int4 5.34 and 5.30.
template <bool kFolds>
__device__ __forceinline__ void make_barriers(Fixed& fixed, const ClusterParams& params, int warp,
                                              int warps, int bytes) {
  for (int i = warp; i < kMaxStages; i += warps) {
    if (kFolds) ptx::mbarrier_init(&fixed.raw[i], 2);
    ptx::mbarrier_init(&fixed.full[i], 2);
    ptx::mbarrier_init(&fixed.empty[i], params.readers);
  }
  if (warp == warps - 1) {
    ptx::mbarrier_init(&fixed.scaled, 1);
    ptx::mbarrier_init(&fixed.received, 1);
    ptx::mbarrier_expect(&fixed.received, bytes);
    if (kFolds) {
      ptx::mbarrier_init(&fixed.squared, 2);
      ptx::mbarrier_expect(&fixed.squared, (gridDim.x - 1) * gemm_config::kNormRows * 4);
    }
  }
  ptx::fence_mbarrier_init();
}

/// Cuts `bytes` of shared memory into rings. A stage takes `weight_bytes` and its x, and `more`
/// besides; there are `fewest` of them at least.
template <class Layout>
inline void cut_rings(ClusterParams& params, int bytes, int weight_bytes, int more, int fewest) {
  const int turns = params.turns;
  const int both = params.x_bytes + weight_bytes;
  const int stage_bytes = Layout::kApart ? weight_bytes : round_up(both, kStageAlignment);
  // By turns, a stage is always the same warpgroup's: it waits for each of its phases.
  const auto fitting = [&](int left, int stage) {
    return std::min(kMaxStages, left / (stage + more)) / turns * turns;
  };
  params.stages = params.x_stages = fitting(bytes, Layout::kApart ? both : stage_bytes);
  check(params.stages >= fewest, "linear: a ring of ", params.stages, " stages");
  params.x_step = params.weight_step = stage_bytes;
  params.weights_at = params.x_bytes;
  if (Layout::kApart) {
    params.x_step = params.x_bytes;
    const int beside = (bytes - kEnoughOfFp8 * weight_bytes) / params.x_bytes;
    const int most = Layout::kXRing ? std::max(kFewestOfX, beside) : kStagesOfX;
    params.x_stages = std::min(most, params.stages);
    params.weights_at = params.x_stages * params.x_bytes;
    params.stages = fitting(bytes - params.weights_at, weight_bytes);
  }
  params.ring_bytes = (Layout::kApart ? params.weights_at : 0) + params.stages * stage_bytes;
}

}  // namespace ridgeline::gemm_cluster
