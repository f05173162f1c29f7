#pragma once
#include <algorithm>
#include <utility>

#include "kernels/gemm_cluster_consumer.cuh"
#include "kernels/gemm_cluster_int4.cuh"

/// The cluster kernel's loops over stages of int4.
namespace ridgeline::gemm_cluster {

/// kHeld: the scales of all stages are one request.
template <class Consumer, bool kHeld>
struct Int4Loops {
  using T = typename Consumer::T;
  using Layout = typename Consumer::Layout;
  using Weights = Int4<T, Layout, kHeld>;
  static constexpr int kUnits = Consumer::kUnits, kTokens = Consumer::kTokens;
  Consumer& by;
  const ClusterParams& params = by.params;

  /// Where the warp's strips are in a stage.
  struct Units {
    Weights of[kUnits];
  };
  __device__ Units units() const {
    Units units;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) units.of[u] = Weights(params, by.strip_of(u), by.lane);
    return units;
  }
  /// Where the scales of a stage are, the `i`-th that the block has.
  __device__ typename Weights::Scales scales_of(const Stage& stage, int i) const {
    if (kHeld) return {by.ring, i * params.held_step};
    return {stage.weight, 0};
  }
  __device__ void wait_for_scales() const {
    if (kHeld) ptx::mbarrier_wait(&by.fixed.scaled, 0);
  }

  /// Stages that lie in one group, by up to kRows rows of x: what is expanded is the difference to
  /// the zero point.
  template <int kRows>
  __device__ __forceinline__ void run_scaled_sums() {
    const Units units = this->units();
    const bool has_zeros = params.gemm.weight.zeros != nullptr;
    device::Int4Differences<T> differences;
    differences.set(0, Int4Layout::kSymmetricZero);
    differences.set(1, Int4Layout::kSymmetricZero);
    uint4 words[2];
    wait_for_scales();
    by.template run_scaled_sums<kRows>(
        [&](int u, const Stage& stage, int i) {
          const Weights& weights = units.of[u];
          const auto scales = scales_of(stage, i);
          words[0] = weights.words_of(stage.weight, 0);
          words[1] = weights.words_of(stage.weight, 1);
          const float2 scale = weights.scales_of_rows(scales);
          if (has_zeros)
#pragma unroll
            for (int r = 0; r < 2; ++r) differences.set(r, weights.zero_of(scales, 0, r));
          return scale;
        },
        [&](int, int box, std::uint32_t(&a)[4][4]) {
          Weights::expand(words[box], differences, differences, a);
        });
  }

  /// Scales in the operands.
  template <bool kZeros>
  __device__ __forceinline__ void run_scaled_rows() {
    const GemmParams& p = params.gemm;
    const Units units = this->units();
    wait_for_scales();
    if (p.weight.group % Layout::kCols == 0 || p.weight.group >= p.K) {
      device::Int4Rows<T, kZeros> rows;
      return by.run_expanded([&](int i, const Stage& stage, int u, int box,
                                 std::uint32_t(&a)[4][4]) {
        const Weights& weights = units.of[u];
        if (box == 0) rows = weights.template rows_of<kZeros>(scales_of(stage, i), 0);
        weights.expand(weights.words_of(stage.weight, box), rows, rows, a);
      });
    }
    by.run_expanded([&](int i, const Stage& stage, int u, int box, std::uint32_t(&a)[4][4]) {
      const Weights& weights = units.of[u];
      const int k0 = (by.begin + i) * Layout::kCols, last = p.K - 1 - k0;
      const int into = k0 - params.group.divide(k0) * p.weight.group;
      const auto rows_at = [&](int at) {  // of a group, 32 columns at least
        return weights.template rows_of<kZeros>(scales_of(stage, i),
                                                weights.group_of(into, at, last));
      };
      const auto low = rows_at(box * 64), high = rows_at(box * 64 + 32);
      weights.expand(weights.words_of(stage.weight, box), low, high, a);
    });
  }

  /// By e4m3, stages that lie in one group, without zero points: products of a stage are scaled and
  /// added in float32. While they run, up to 32 rows of x, the next stage is expanded. In a broad
  /// tile of 128 rows there are registers for the products of half.
  template <int kRows>
  __device__ __forceinline__ void run_as_e4m3() {
    constexpr int kAtOnce = Consumer::kBroad ? std::min(kRows, 64) : kRows;
    constexpr bool kAhead = kRows <= (Consumer::kBroad ? 64 : 32);
    // Two sets by turns: copied into one, the next operands were written while the tensor cores
    // still read the last (CUDA 13.0, where the expansion is behind a branch).
    constexpr int kOperands = kAhead ? 2 : 1;
    constexpr int kItems = kUnits % kOperands == 0 ? kUnits : kUnits * kOperands;
    static_assert(kAhead || kUnits == 1);
    if (by.turn >= by.count) return;
    auto reader = by.reader();
    std::uint32_t a[kOperands][4][4] = {};
    const Units units = this->units();
    wait_for_scales();
    int i = by.turn;
    Stage stage = reader.wait();
    const auto expand = [&](int u, std::uint32_t (&to)[4][4]) {
      if (by.has_strip(u)) units.of[u].expand_to_e4m3(stage.weight, to);
    };
    expand(0, a[0]);
    // Returns whether there are more.
    const auto take_item = [&]<int j>() __attribute__((always_inline)) {
      constexpr int u = j % kUnits, now = j % kOperands, then = (j + 1) % kOperands;
      constexpr bool kEnds = u == kUnits - 1;  // the stage
      float part[kAtOnce / 8][4];
      float2 scale;
#pragma unroll
      for (int first = 0; first < kRows; first += kAtOnce) {
        by.multiply_registers(stage.x + operand_step(first * kRowBytes), a[now], part, false);
        if (first == 0) scale = units.of[u].scales_of_rows(scales_of(stage, i));
        if (first == kRows - kAtOnce) break;
        ptx::wgmma_wait<0>();
        ptx::hold_registers(part);
        add_scaled(by.sums[u], part, scale, first / 8);
      }
      const int place = reader.stage;
      bool more = true;
      const auto go_on = [&] {
        if (kEnds) {
          more = i + by.turns < by.count;
          if (more) i += by.turns, reader.advance(by.turns), stage = reader.wait();
        }
        if (more) expand((u + 1) % kUnits, a[then]);
      };
      if (kAhead) go_on();
      ptx::wgmma_wait<0>();
      ptx::hold_registers(part);
      ptx::hold_registers(a[now]);
      if (kEnds && kAhead) by.release(place);
      add_scaled(by.sums[u], part, scale, (kRows - kAtOnce) / 8);
      if (!kAhead) by.release(place), go_on();
      return more;
    };
    [&]<int... j>(std::integer_sequence<int, j...>) __attribute__((always_inline)) {
      while ((take_item.template operator()<j>() && ...)) continue;
    }(std::make_integer_sequence<int, kItems>());
  }

  __device__ __forceinline__ void run() {
    const GemmParams& p = params.gemm;
    const bool whole = p.weight.group % Layout::kCols == 0 || p.weight.group >= p.K;
    constexpr int kFew = std::min(kTokens, 32);
    if constexpr (Layout::kFp8X) {
      if (kTokens == 32 && params.rows_held <= 16) {
        run_as_e4m3<16>();
      } else {
        run_as_e4m3<kTokens>();
      }
    } else if (whole && kTokens <= 32 && params.rows_held <= 16) {
      run_scaled_sums<16>();
    } else if (whole && kTokens <= 32) {
      run_scaled_sums<kFew>();
    } else if (p.weight.zeros) {
      run_scaled_rows<true>();
    } else {
      run_scaled_rows<false>();
    }
  }
};

template <class Consumer>
__device__ __forceinline__ void run_int4(Consumer& by) {
  constexpr bool kMayHold = Consumer::Layout::kMayHold;
  if (kMayHold && by.params.held_at > 0) {
    Int4Loops<Consumer, kMayHold>{by}.run();
  } else {
    Int4Loops<Consumer, false>{by}.run();
  }
}

}  // namespace ridgeline::gemm_cluster
