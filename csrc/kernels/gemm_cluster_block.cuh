#pragma once
#include "kernels/gemm_cluster_turns.cuh"

/// What a block of the cluster kernel is made of, and what it receives.
namespace ridgeline::gemm_cluster {

/// Stages of the weight that L2 is asked for by blocks that have an SM each ...
constexpr int kPrefetched = 4;
/// ... and that are still to be requested when the next kernel is let on.
constexpr int kReleased = 3;

/// The kernel of so few rows of x meets them with a norm, by further warps.
constexpr int kNormTokens = gemm_config::kNormRows;

/// Blocks of an SM: sums of 128 rows of x and the operands of an expanded weight are one's.
template <WeightFormat kFormat, int kTokens, int kGroups>
constexpr int kBlocks =
    kGroups > 2 || (kTokens == kManyTokens && kFormat != WeightFormat::kDense) ? 1 : 2;
template <int kTokens, int kGroups>
constexpr int kBlockThreads = kThreads + (kGroups - 2) * kGroupThreads +
                              (kTokens == kNormTokens ? (kNormWarps - 1) * 32 : 0);

/// Scale and bias of weight rows of three warpgroups, for which Fixed has no place; ahead of it.
constexpr int kBroadRows = 3 * kGroupRows;
struct Broad {
  alignas(16) float scale[kBroadRows], bias[kBroadRows];
};
template <int kGroups>
constexpr int kFactorBytes = kGroups > 2 ? static_cast<int>(sizeof(Broad)) : 0;

/// Octets of rows of x whose sums TurnsEnd takes.
template <int kTokens>
__host__ __device__ constexpr int octets_of_turns(const ClusterParams& params) {
  return kTokens == 64 ? 8 : params.rows_held <= 16 ? 2 : 4;
}

/// What a block receives that finishes so many rows: sums, and squares of a norm.
template <int kTokens>
__host__ __device__ constexpr int received_bytes(const ClusterParams& p, int segments, int rows) {
  constexpr int kSquares = kTokens == kNormTokens ? kNormTokens * 4 : 0;
  if (p.by_turns) return bytes_of_turns(octets_of_turns<kTokens>(p)) + kSquares;
  return (segments - 1) * (rows * p.row_groups * kGroupRows * 4 + kSquares);
}

}  // namespace ridgeline::gemm_cluster
