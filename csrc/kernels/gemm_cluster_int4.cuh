#pragma once
#include "device/dequant.cuh"
#include "kernels/gemm_cluster_sm90.cuh"

/// Where a thread of the cluster kernel finds its int4 in a stage, how that becomes operands, and
/// how products in parts become sums.
namespace ridgeline::gemm_cluster {

/// kHeld: of the scales of all stages, which are one request.
template <class T, class Layout, bool kHeld>
struct Int4 {
  const ClusterParams* params;
  int lane;
  int words, scales, zeros;  // bytes from Stage::weight, scales of all stages from the ring

  __device__ Int4() {}
  __device__ Int4(const ClusterParams& params, int strip, int lane)
      : params(&params), lane(lane) {
    const int r = strip * kStripRows + lane / 4;
    const int part = params.paired && r >= params.box_rows ? 1 : 0, at = r - part * params.box_rows;
    words = params.weights_at + strip * kStripRows * Layout::kRowOfWeight + lane * 16;
    const int ahead = kHeld ? params.held_at : params.weights_at;
    scales = ahead + Layout::scales_at(params) + part * params.scale_bytes + at * 2;
    zeros = ahead + Layout::zeros_at(params) + part * params.zero_bytes + at;
  }

  /// Where a stage's scales and zero points are counted from.
  struct Scales {
    const char* at;
    int before;  // rows' worth of other groups, ahead of its own
  };

  /// Scale and zero point of the thread's row r or r + 8, of group `g` of the stage.
  __device__ T scale_of(const Scales& of, int g, int r) const {
    return (reinterpret_cast<const T*>(of.at + scales) + of.before + g * params->box_rows)[8 * r];
  }
  __device__ std::uint32_t zero_of(const Scales& of, int g, int r) const {
    return static_cast<std::uint8_t>(
        (of.at + zeros + of.before + g * params->box_rows)[8 * r]);
  }

  template <bool kZeros>
  __device__ device::Int4Rows<T, kZeros> rows_of(const Scales& of, int g) const {
    device::Int4Rows<T, kZeros> rows;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows.set(r, scale_of(of, g, r), kZeros ? zero_of(of, g, r) : Int4Layout::kSymmetricZero);
    return rows;
  }

  /// Where a stage has several groups and starts `into` columns after its first: that of column
  /// `at`, of which the last that there is may be before.
  __device__ int group_of(int into, int at, int last) const {
    int g = 0;
    for (int next = params->gemm.weight.group; into + min(at, last) >= next;
         next += params->gemm.weight.group)
      ++g;
    return g;
  }

  /// Of 64 columns, 16 a word.
  __device__ uint4 words_of(const char* weight, int box) const {
    return *reinterpret_cast<const uint4*>(weight + words + box * 512);
  }

  /// Those columns of the warp's 16 rows as operands, the first 32 by `low`.
  template <class Rows>
  __device__ static void expand(const uint4& words, const Rows& low, const Rows& high,
                                std::uint32_t (&a)[4][4]) {
    const std::uint32_t of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) a[step][j] = (step < 2 ? low : high).expand(of[step], j);
  }

  /// 128 columns less 8 as operands of e4m3, in units of 1 / kInt4AsE4m3Unit. Of 16 columns a
  /// lane's word has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, with t = lane % 4, and its operand 4 t to
  /// 4 t + 3: they are in the words of two neighbours.
  __device__ void expand_to_e4m3(const char* weight, std::uint32_t (&a)[4][4]) const {
    const int neighbour = lane % 2 * 2 - lane % 4, bytes = lane % 4 < 2 ? 0x6420 : 0x7531;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const auto* from = reinterpret_cast<const uint4*>(weight + words + box * 512) + neighbour;
      const uint4 low = from[0], high = from[1];
      const std::uint32_t of[4] = {
          __byte_perm(low.x, high.x, bytes), __byte_perm(low.y, high.y, bytes),
          __byte_perm(low.z, high.z, bytes), __byte_perm(low.w, high.w, bytes)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t(&to)[4] = a[box * 2 + i / 2];
        device::int4_as_e4m3(of[i], to[i % 2 * 2], to[i % 2 * 2 + 1]);
      }
    }
  }

  /// Scales of the thread's two rows.
  __device__ float2 scales_of_rows(const Scales& of) const {
    return {device::to_float(scale_of(of, 0, 0)), device::to_float(scale_of(of, 0, 1))};
  }
};

}  // namespace ridgeline::gemm_cluster
