#pragma once
#include "kernels/gemm_sm90_fp8_store.cuh"

/// The way of tiles of 112 gates and their ups to y.
namespace ridgeline::gemm_fp8 {

constexpr int kGates112 = gemm_config::kGateCols / 2;
constexpr int kGateBoxes = kGates112 / 16;  // times 16 columns of y

/// Those from kFirst to kLast of each warp's 16 rows, which leave as one box: of its rows of 224
/// bytes, without a swizzle, two at a time meet in the banks of shared memory.
template <class Tile, class Way, int kFirst, int kLast>
__device__ __forceinline__ void store_gates(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const Consumer& me) {
  using T = typename Tile::T;
  const float* scales = &shared.row_scales[me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad];
  const float row_scale[2] = {scales[0], scales[8]};
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
  static_assert(sizeof(shared.out[0]) >= 16 * kGates112 * sizeof(T));
  T* out = &shared.out[me.warpgroup * 4 + me.warp][0][0][0];
  if (kFirst == 0) {
    ptx::wait_stores_read<0>();
    __syncwarp();  // the last box has been read
  }
#pragma unroll
  for (int index = kFirst; index < kLast; ++index) {
    float gates[2][4], ups[2][4];
    take<Tile, Way::kTerms>(gates, shared, sums, index, row_scale, me);
    gemm_detail::activate<T>(Activation::kSiluMul, gates);
    take<Tile, Way::kTerms>(ups, shared, sums, kGateBoxes + index, row_scale, me);
    std::uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float(&gate)[4] = gates[j / 2];
      const float(&up)[4] = ups[j / 2];
      const int first = j % 2 * 2;
      packed[j] = pack<T>(__fmul_rn(gate[first], up[first]),
                          __fmul_rn(gate[first + 1], up[first + 1]));
    }
    ptx::stmatrix(out + row * kGates112 + index * 16 + matrix / 2 * 8, packed);
  }
  if (kLast != kGateBoxes) return;
  ptx::fence_async_shared();
  __syncwarp();  // the box is whole
  ptx::store_matrix_if(me.lane == 0, &launch.y, out, place.n * kGates112,
                       place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16);
  ptx::commit_stores();
}

}  // namespace ridgeline::gemm_fp8
