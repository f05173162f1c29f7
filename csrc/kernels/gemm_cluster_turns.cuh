#pragma once
#include "device/digits.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_cluster_finish.cuh"

/// The end of a tile of 64 weight rows, whose warpgroups took stages by turns, in a cluster of two
/// blocks, where y is the sums with scales, bias and residual: from registers to registers, each
/// warpgroup its own rows of x. Same bits as by Finish. H200, lab, chained, by turns, us, 4096 x
/// 4096, Finish and so: 16 rows of int4 7.9 and 7.3, 64 9.1 and 8.9; fp8 by fp8 7.4 and 6.9, 8.4
/// and 8.0; fp8 by bf16 8.2 and 7.8, 9.6 and 9.3; int4 by e4m3 8.0 and 7.4, 8.9 and 8.5.
namespace ridgeline::gemm_cluster {

/// Whether it can. Two columns of y are stored at once. Not where kernels are alone, whose blocks
/// share SMs with the next one's: 16 rows of 4096 x 4096, fp8 by bf16, 7.6 and 8.5.
inline bool ends_by_turns(const GemmParams& p, int row_groups, int segments, std::size_t element) {
  const auto in_pairs = [&](const void* at, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(at) % (2 * element) == 0 && stride % 2 == 0;
  };
  return p.weights_ready && row_groups == 1 && segments == 2 &&
         p.activation == Activation::kNone && in_pairs(p.y, p.out_cols()) &&
         (!p.residual || in_pairs(p.residual, p.stride_residual));
}

/// Bytes that each of the blocks receives.
constexpr int bytes_of_turns(int octets) { return octets / 2 * 8 * kGroupRows * 4; }

/// A thread's sums are octets of rows of x: two rows, lane % 4 * 2 and the next, by two weight
/// rows, lane / 4 and the eighth after it; a pair here is the two of one weight row.
template <class T, int kOctets>
struct TurnsEnd {
  static constexpr int kGroupThreads = kConsumerThreads / 2;
  static constexpr int kKept = kOctets / 2;  // octets, of a warpgroup ...
  static constexpr int kPairs = kOctets / 2;  // ... and pairs, where a second block has as many

  const ClusterParams& params;
  Fixed& fixed;
  char* ring;
  float4* received;
  int first;         // column of the tile
  int row0, rows;    // of x
  int at = ptx::thread_index();  // read anew: registers are for the products until then
  int turn = at / kGroupThreads, thread = at % kGroupThreads, lane = at % 32;
  int rank = blockIdx.x;

  struct Place {
    int m, n;  // in the tile
    bool there;
  };
  /// Of the two values that a lane stores of pair `e` of its warpgroup: those of one row of x, of
  /// its weight row and its neighbour's.
  __device__ Place place_of(int e) const {
    const int m = (turn * kKept + e / 2) * 8 + lane % 4 * 2 + lane / 4 % 2;
    const int n = thread / 32 * kStripRows + e % 2 * 8 + lane / 8 * 2;
    return {m, n, m < rows && first + n < params.gemm.out_cols()};
  }

  __device__ std::uint32_t residual_of(int e) const {
    const GemmParams& p = params.gemm;
    const Place place = place_of(e);
    if (!p.residual || !place.there) return 0;
    return *reinterpret_cast<const std::uint32_t*>(static_cast<const T*>(p.residual) +
                                                   (row0 + place.m) * p.stride_residual + first +
                                                   place.n);
  }

  struct Factors {
    float x_scale;
    float2 scale, bias;
  };
  __device__ Factors factors_of(int e) const {
    const Place place = place_of(e);
    return {place.there ? fixed.x_scale[place.m] : 0.0f,
            *reinterpret_cast<const float2*>(fixed.scale + place.n),
            *reinterpret_cast<const float2*>(fixed.bias + place.n)};
  }

  __device__ void store(int e, const float (&pair)[2], const Factors& by,
                        std::uint32_t residual) const {
    const GemmParams& p = params.gemm;
    const bool odd = lane / 4 % 2 == 1;
    const float got = device::shuffle_xor(odd ? pair[0] : pair[1], 4);
    float2 value{scaled({by.x_scale, by.scale.x, by.bias.x}, odd ? got : pair[0]),
                 scaled({by.x_scale, by.scale.y, by.bias.y}, odd ? pair[1] : got)};
    if (p.residual) {
      const float2 more = device::floats_of(device::as_pair<T>(residual));
      value = {__fadd_rn(value.x, more.x), __fadd_rn(value.y, more.y)};
    }
    const Place place = place_of(e);
    if (place.there)
      device::store(static_cast<T*>(p.y) + std::int64_t{row0 + place.m} * p.out_cols() + first +
                        place.n,
                    device::rounded<T>(device::Vec<float, 2>{value.x, value.y}));
  }

  /// Two pairs of a thread side by side, where it has two.
  __device__ int inbox_at(int e) const {
    constexpr int kTogether = kPairs > 1 ? 2 : 1;
    return (e / kTogether * kConsumerThreads + at) * kTogether + e % kTogether;
  }

  template <int kAll, class Sum>
  __device__ void run(const Sum (&sums)[kAll][4]) const {
    float kept[2 * kKept][2];
    std::uint32_t residuals[kPairs];
#pragma unroll
    for (int e = 0; e < kPairs; ++e) residuals[e] = residual_of(rank * kPairs + e);
    ptx::named_barrier_sync(2 + turn, kGroupThreads);  // the warpgroup has read its last stage
    // Through a stage that is the warpgroup's own.
    auto* given = reinterpret_cast<float4*>(ring + turn * params.stage_bytes);
    const auto* got = reinterpret_cast<const float4*>(ring + (1 - turn) * params.stage_bytes);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      float mine[4], other[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto low = static_cast<float>(sums[i][j]);
        const auto high = static_cast<float>(sums[kKept + i][j]);
        mine[j] = turn == 0 ? low : high;
        other[j] = turn == 0 ? high : low;
      }
      given[i * kGroupThreads + thread] = {other[0], other[1], other[2], other[3]};
      kept[2 * i][0] = mine[0], kept[2 * i][1] = mine[1];
      kept[2 * i + 1][0] = mine[2], kept[2 * i + 1][1] = mine[3];
    }
    ptx::named_barrier_sync(1, kConsumerThreads);  // both have given theirs
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float4 part = got[i * kGroupThreads + thread];
      kept[2 * i][0] += part.x, kept[2 * i][1] += part.y;
      kept[2 * i + 1][0] += part.z, kept[2 * i + 1][1] += part.w;
    }
    float own[kPairs][2], sent[kPairs][2];
#pragma unroll
    for (int e = 0; e < kPairs; ++e)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        own[e][r] = rank == 0 ? kept[e][r] : kept[kPairs + e][r];
        sent[e][r] = rank == 0 ? kept[kPairs + e][r] : kept[e][r];
      }
    if constexpr (kPairs == 1) {
      ptx::put_in_block(reinterpret_cast<float2*>(received) + inbox_at(0),
                        {sent[0][0], sent[0][1]}, &fixed.received, 1 - rank);
    } else {
#pragma unroll
      for (int e = 0; e < kPairs; e += 2)
        ptx::put_in_block(received + inbox_at(e) / 2,
                          {sent[e][0], sent[e][1], sent[e + 1][0], sent[e + 1][1]},
                          &fixed.received, 1 - rank);
    }
    Factors by[kPairs];
#pragma unroll
    for (int e = 0; e < kPairs; ++e) by[e] = factors_of(rank * kPairs + e);
    ptx::mbarrier_wait(&fixed.received, 0);
    const auto* inbox = reinterpret_cast<const float2*>(received);
#pragma unroll
    for (int e = 0; e < kPairs; ++e) {
      const float2 part = inbox[inbox_at(e)];
      store(rank * kPairs + e, {own[e][0] + part.x, own[e][1] + part.y}, by[e], residuals[e]);
    }
  }
};

}  // namespace ridgeline::gemm_cluster
