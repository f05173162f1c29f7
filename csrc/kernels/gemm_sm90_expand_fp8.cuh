#pragma once
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_sm90_expand_parts.cuh"

/// How the expanding kernel multiplies int4 by e4m3.
namespace ridgeline::gemm_expand {

/// 128 columns of int4 as e4m3: what a thread has of a warp's 16 rows.
struct Fp8Weights {
  std::uint32_t a[kSteps][4];
  float scale[2];

  template <class Tile>
  __device__ __forceinline__ void expand(const Shared<Tile>& shared, int stage,
                                         const Consumer& me) {
    const std::uint8_t* rows = shared.weight[stage][me.warpgroup] + me.warp * 1024 + me.lane * 16;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint4 words = *reinterpret_cast<const uint4*>(rows + block * 512);
      device::int4_as_e4m3(words.x, a[2 * block][0], a[2 * block][1]);
      device::int4_as_e4m3(words.y, a[2 * block][2], a[2 * block][3]);
      device::int4_as_e4m3(words.z, a[2 * block + 1][0], a[2 * block + 1][1]);
      device::int4_as_e4m3(words.w, a[2 * block + 1][2], a[2 * block + 1][3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scale[r] = device::to_float(
                     shared.scales[stage].of[0][me.warpgroup][me.warp * 16 + me.quad + 8 * r]) *
                 device::kInt4AsE4m3Unit;
  }
};

/// e4m3 x: products of a stage are added, times their group's scales, in float32, for the tensor
/// cores keep 14 bits of a sum. Half of the rows of x are multiplied while the products of the
/// other half are added, and the next stage is expanded beside both: H200, us, all rows at once and
/// so: 4096 x 6144 by 256 and 512 rows 23.4 and 22.5, 42.2 and 40.0, 8192 x 8192 by 4096 591, 555.
template <class Tile>
__device__ __forceinline__ void multiply_fp8_tile(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                  Sums<Tile>& sums, const Work& work,
                                                  const Consumer& me) {
#pragma unroll
  for (auto& piece : sums[0])
#pragma unroll
    for (float& sum : piece) sum = 0.0f;
  constexpr int kHalf = Tile::kRows / 2;
  float products[2][kHalf / 8][4];
  const auto multiply = [&](const Fp8Weights& weights, int half) {
    const std::uint64_t x = ptx::swizzled_operand(shared.x[ring.stage], 16, 8 * kRowBytes) +
                            half * kHalf * kRowBytes / 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      ptx::WgmmaFp8Registers<kHalf>::mma(products[half], weights.a[i], x + i * kStepBytes / 16,
                                         i != 0);
    ptx::wgmma_commit();
  };
  const auto add = [&](const Fp8Weights& weights, int half) {
    ptx::hold_registers(products[half]);
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& sum = sums[0][half * (kHalf / 8) + i][j];
        sum = fmaf(weights.scale[j / 2], products[half][i][j], sum);
      }
  };
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  const auto go_on = [&](const Fp8Weights& weights, Fp8Weights& next) {
    const int s = ring.stage;
    ring.next();
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    next.expand(shared, ring.stage, me);
    ptx::wgmma_wait<1>();
    add(weights, 0);
    multiply(next, 0);
    ptx::wgmma_wait<1>();
    release(s);
    add(weights, 1);
    multiply(next, 1);
  };
  const auto end = [&](const Fp8Weights& weights) {
    ptx::wgmma_wait<0>();
    release(ring.stage);
    ring.next();
    add(weights, 0);
    add(weights, 1);
  };
  Fp8Weights even, odd;
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  even.expand(shared, ring.stage, me);
  multiply(even, 0);
  multiply(even, 1);
  // No branch between products that are under way: those would wait for each other.
#pragma unroll 1
  for (int k = 1; k + 1 < work.steps; k += 2) {
    go_on(even, odd);
    go_on(odd, even);
  }
  if (work.steps % 2 == 0) {
    go_on(even, odd);
    end(odd);
  } else {
    end(even);
  }
}

}  // namespace ridgeline::gemm_expand
