#pragma once
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_sm90_expand_parts.cuh"

/// How the expanding kernel multiplies int4 by e4m3.
namespace ridgeline::gemm_expand {

/// Where a lane's words and scales lie in a stage. Of 16 columns a lane's word has 2 t, 2 t + 1,
/// 2 t + 8 and 2 t + 9, with t = lane % 4, and its operand 4 t to 4 t + 3: they are in the words of
/// two neighbours, of which it takes the even or the odd bytes.
struct CodesAt {
  int words, scales, bytes;

  template <class Tile>
  __device__ __forceinline__ static CodesAt of(const Consumer& me) {
    const int neighbour = me.in_quad % 2 * 2 - me.in_quad;
    return {ptx::opaque(me.warpgroup * Tile::kBoxBytes + me.warp * 1024 +
                        (me.lane + neighbour) * 16),
            ptx::opaque(me.warpgroup * Tile::kBoxCols + me.warp * 16 + me.quad),
            ptx::opaque(me.in_quad < 2 ? 0x6420 : 0x7531)};
  }
};

/// 64 columns of int4 on the way to e4m3: what a thread has of a warp's 16 rows.
struct Int4Words {
  std::uint32_t of[4];

  template <class Tile>
  __device__ __forceinline__ void load(const Shared<Tile>& shared, int stage, int box,
                                       const CodesAt& at) {
    const auto* from =
        reinterpret_cast<const uint4*>(&shared.weight[stage][0][at.words + box * 512]);
    const uint4 low = from[0], high = from[1];
    of[0] = __byte_perm(low.x, high.x, at.bytes);
    of[1] = __byte_perm(low.y, high.y, at.bytes);
    of[2] = __byte_perm(low.z, high.z, at.bytes);
    of[3] = __byte_perm(low.w, high.w, at.bytes);
  }
};

/// 128 of them as operands, and their scales.
struct Codes {
  std::uint32_t a[kSteps][4];
  float scale[2];

  __device__ __forceinline__ void expand(const Int4Words& words, int box) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t(&to)[4] = a[2 * box + i / 2];
      device::int4_as_e4m3(words.of[i], to[i % 2 * 2], to[i % 2 * 2 + 1]);
    }
  }

  template <class Tile>
  __device__ __forceinline__ void take_scales(const Shared<Tile>& shared, int stage,
                                              const CodesAt& at) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scale[r] = device::to_float(shared.scales[stage].of[0][0][at.scales + 8 * r]);
  }

  template <class Tile>
  __device__ __forceinline__ void take(const Shared<Tile>& shared, int stage, const CodesAt& at) {
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      Int4Words words;
      words.load<Tile>(shared, stage, box, at);
      expand(words, box);
    }
    take_scales<Tile>(shared, stage, at);
  }
};

/// kRows rows of x from `first` on by a stage's 128 columns.
template <class Tile, int kRows>
__device__ __forceinline__ void multiply_rows(float (&products)[kRows / 8][4],
                                              const Codes& weights, const Shared<Tile>& shared,
                                              int stage, int first) {
  const std::uint64_t x =
      ptx::swizzled_operand(shared.x[stage], 16, 8 * kRowBytes) + first * kRowBytes / 16;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    ptx::WgmmaFp8Registers<kRows>::mma(products, weights.a[i], x + i * kStepBytes / 16, i != 0);
  ptx::wgmma_commit();
}

/// Adds their products, times the scales of their groups.
template <class Tile, int kRows>
__device__ __forceinline__ void add_products(Sums<Tile>& sums, float (&products)[kRows / 8][4],
                                             const Codes& weights, int first) {
  ptx::hold_registers(products);
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& sum = sums[0][first / 8 + i][j];
      sum = fmaf(weights.scale[j / 2], products[i][j], sum);
    }
}

/// 128 rows of x: half of them are multiplied while the products of the other half are added, and
/// the next stage is expanded beside both.
template <class Tile>
__device__ __forceinline__ void multiply_few_rows(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                  Sums<Tile>& sums, const Work& work,
                                                  const Consumer& me) {
  constexpr int kHalf = Tile::kRows / 2;
  const CodesAt at = CodesAt::of<Tile>(me);
  float products[2][kHalf / 8][4];
  const auto multiply = [&](const Codes& weights, int half) {
    multiply_rows<Tile, kHalf>(products[half], weights, shared, ring.stage, half * kHalf);
  };
  const auto add = [&](const Codes& weights, int half) {
    add_products<Tile, kHalf>(sums, products[half], weights, half * kHalf);
  };
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  const auto go_on = [&](const Codes& weights, Codes& next) {
    multiply(weights, 1);
    ptx::wgmma_wait<1>();
    add(weights, 0);
    const int s = ring.stage;
    ring.next();
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    next.take<Tile>(shared, ring.stage, at);
    multiply(next, 0);
    ptx::wgmma_wait<1>();
    release(s);
    add(weights, 1);
  };
  const auto end = [&](const Codes& weights) {
    multiply(weights, 1);
    ptx::wgmma_wait<0>();
    release(ring.stage);
    ring.next();
    add(weights, 0);
    add(weights, 1);
  };
  Codes even, odd;
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  even.take<Tile>(shared, ring.stage, at);
  multiply(even, 0);
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

/// More rows: beside their sums there are no registers for the products of both halves, nor for the
/// next stage's weights. The other warpgroup multiplies meanwhile.
template <class Tile>
__device__ __forceinline__ void multiply_many_rows(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                   Sums<Tile>& sums, const Work& work,
                                                   const Consumer& me) {
  constexpr int kHalf = Tile::kRows / 2;
  const CodesAt at = CodesAt::of<Tile>(me);
  Codes weights;
  float products[kHalf / 8][4];
  const auto multiply = [&](int half) {
    multiply_rows<Tile, kHalf>(products, weights, shared, ring.stage, half * kHalf);
  };
  const auto add = [&](int half) {
    add_products<Tile, kHalf>(sums, products, weights, half * kHalf);
  };
  const auto begin = [&] {
    multiply(0);
    ptx::wgmma_wait<0>();
  };
  const auto go_on = [&] {  // the second's products are under way then
    add(0);
    multiply(1);
  };
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  // The loop's end is where a stage's weights are expanded, or its first products are there. H200,
  // us, the former and so: 4096 rows of 4096 x 4096 134 and 126, even shares of 512 rows of 4096 x
  // 28672 128 and 118; but segments of 512 rows of 14336 x 4096 62.0 and 63.7.
  constexpr bool kEndsWithProducts = Tile::kWhole;
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  weights.take<Tile>(shared, ring.stage, at);
  if (kEndsWithProducts) begin();
#pragma unroll 1
  for (int k = 1; k < work.steps; ++k) {
    if (!kEndsWithProducts) begin();
    go_on();
    const int s = ring.stage;
    ring.next();
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    ptx::wgmma_wait<0>();
    release(s);
    add(1);
    weights.take<Tile>(shared, ring.stage, at);
    if (kEndsWithProducts) begin();
  }
  if (!kEndsWithProducts) begin();
  go_on();
  ptx::wgmma_wait<0>();
  release(ring.stage);
  ring.next();
  add(1);
}

/// e4m3 x: products of a stage are added, times their group's scales, in float32, for the tensor
/// cores keep 14 bits of a sum.
template <class Tile>
__device__ __forceinline__ void multiply_fp8_tile(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                  Sums<Tile>& sums, const Work& work,
                                                  const Consumer& me) {
#pragma unroll
  for (auto& piece : sums[0])
#pragma unroll
    for (float& sum : piece) sum = 0.0f;
  if constexpr (Tile::kRows > 128) {
    multiply_many_rows<Tile>(shared, ring, sums, work, me);
  } else {
    multiply_few_rows<Tile>(shared, ring, sums, work, me);
  }
}

}  // namespace ridgeline::gemm_expand
