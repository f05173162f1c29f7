#pragma once
#include <algorithm>

#include "device/matrix_map.cuh"
#include "device/properties.cuh"
#include "device/ticket.h"
#include "device/ptx/wgmma_registers_between.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_sm90_expand_fp8.cuh"
#include "kernels/gemm_sm90_expand_produce.cuh"
#include "kernels/gemm_sm90_expand_share.cuh"
#include "kernels/gemm_sm90_expand_store.cuh"
#include "kernels/gemm_sm90_expand_weights.cuh"

/// The kernel of tiles whose weight is expanded, and its launch.
namespace ridgeline::gemm_expand {

// ---- Consumer -----------------------------------------------------------------------------------

/// 64 weight rows of each band by the rows of x by 16 columns of K.
template <class Tile>
__device__ __forceinline__ void multiply(Sums<Tile>& sums, Fragments<Tile>& weights,
                                         std::uint64_t x) {
  ptx::hold_registers(weights.a);  // whole ahead of the fence, or the compiler serialises products
  ptx::wgmma_fence();
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band)
    ptx::WgmmaRegisters<Tile::kRows, typename Tile::T, ptx::Contiguous::kInner>::mma(
        sums[band], weights.a[band], x);
  ptx::wgmma_commit();
}

constexpr int kInFlight = 2;  // steps that are multiplied while others are expanded

/// The weights of four steps are in registers: those that are multiplied, those that come next, and
/// those that are expanded.
template <class Tile, bool kGeneral>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<Tile>& shared,
                                              Ring<Tile::kStages>& ring, Sums<Tile>& sums,
                                              const Work& work, const Consumer& me) {
#pragma unroll
  for (auto& band : sums)
#pragma unroll
    for (auto& piece : band)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  Weights<Tile, kGeneral> weights{.shared = shared, .launch = launch, .me = me};
  Fragments<Tile> fragments[kSteps];
  weights.start(work);
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  weights.load(ring.stage, work.first_step);
  weights.take_scales();
#pragma unroll
  for (int step = 0; step < kSteps - kInFlight; ++step)
    weights.expand(fragments[step], ring.stage, step);
  const auto next_stage = [&](int k) {
    ring.next();
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    weights.load(ring.stage, work.first_step + k);
  };
  int before = -1;
  for (int k = 1; k <= work.steps; ++k) {
    const int s = ring.stage;
    const std::uint64_t x = ptx::swizzled_operand(shared.x[s], 16, 8 * kRowBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply<Tile>(sums, fragments[step], x + step * kStepBytes / 16);
      ptx::wgmma_wait<kInFlight>();
      if (step == kInFlight - 1 && before >= 0) release(before);  // its last step is multiplied
      if (step < kInFlight) {
        weights.expand(fragments[step + kSteps - kInFlight], s, step + kSteps - kInFlight);
        if (Tile::kReadsAhead && step == kInFlight - 1 && k != work.steps) next_stage(k);
        continue;
      }
      if (k == work.steps) continue;
      if (!Tile::kReadsAhead && step == kInFlight) next_stage(k);
      if (step == kInFlight) weights.take_scales();
      weights.expand(fragments[step - kInFlight], ring.stage, step - kInFlight);
    }
    before = s;
  }
  ring.next();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& band : sums) ptx::hold_registers(band);
  release(before);
}

// ---- Kernel -------------------------------------------------------------------------------------

/// 16-bit x times a weight of 4 or 8 bits, or e4m3 x times one of 4, on Hopper. Grid: as many
/// blocks as SMs, or a few less where tiles are few: two or four blocks then take segments of a
/// tile's columns of K, or some the tails of others' tiles. A block owns kRows rows of x by 128 or
/// 256 weight rows at a time; threads of several warps bring 64 columns of K a stage (128 of e4m3)
/// by the copy engine. The weight is wgmma's first operand: two warpgroups expand it into registers
/// and multiply by the rows of x in shared memory, accumulating in float32.
/// Roofline: 2 M N K flops on the tensor cores of x's width.
template <class Tile, class Way>
__global__ void __launch_bounds__(kThreads, 1)
    expand_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], kProducers<Tile>);
      ptx::mbarrier_init(&shared.free[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made

  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
    const int warp = device::warp_index();
    if (threadIdx.x % device::kWarpSize == 0 && warp < kProducers<Tile>)
      produce<Tile>(launch, shared, warp);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_for_dependencies();
    const Consumer me(static_cast<int>(threadIdx.x));
    Ring<Tile::kStages> ring;
    int turn = 0;
    for_each_work<Tile>(launch, [&](const Work& work) {
      RowFactors<Tile> factors;
      if constexpr (Tile::kWhole) {
        factors.load(launch, work.place.n, me);
        if (Tile::kFp8X) request_x_scales<Tile>(launch, shared, factors, work, turn ^= 1, me);
      } else {
        bring_columns<Tile>(launch, shared, work, me);
      }
      Sums<Tile> sums;
      if constexpr (Tile::kFp8X) {
        multiply_fp8_tile<Tile>(shared, ring, sums, work, me);
      } else if (Tile::kInt4 && (launch.gemm.weight.zeros ||
                                 (Tile::kReadsAhead && launch.groups == 2))) {
        multiply_tile<Tile, Tile::kInt4>(launch, shared, ring, sums, work, me);
      } else {
        multiply_tile<Tile, false>(launch, shared, ring, sums, work, me);
      }
      // The epilogue's addresses are not kept in registers while the tensor cores work.
      const int thread = static_cast<int>(threadIdx.x);
      const Consumer here(ptx::opaque(thread));
      if constexpr (!Tile::kWhole) {
        if (launch.segments == 2) {
          exchange<Tile, 2>(launch, work, sums, here);
        } else {
          exchange<Tile, 4>(launch, work, sums, here);
        }
        store_share<Tile>(launch, shared, ring, sums, thread);
      } else {
        if constexpr (Tile::kTails) {
          if (work.is_tail) return leave_part<Tile>(launch, work.segment, sums, here);
          if (takes_part<Tile>(launch, work)) add_part<Tile>(shared, ring, sums, here);
        }
        if constexpr (Tile::kFp8X) {
          ptx::wait_copies<0>();
          here.meet();  // the scales of x are there
        }
        // Where the ring goes on is known here. Worked out behind the way to y, which threads take
        // apart, it left the uniform registers.
        const Ring<Tile::kStages> residual = ring;
        if (launch.copies_residual) ring.skip(residual_stages<Tile>(launch.gemm));
        if constexpr (Way::kPlain) {
          store_plain<Tile>(launch, shared, work.place, sums, factors, here);
        } else if constexpr (Way::kKnown) {
          store_known<Tile, Way>(launch, shared, residual, work.place, sums, factors, here);
        } else if (!Tile::kPlainApart && is_scaled_alone<Tile>(launch.gemm)) {
          store_plain<Tile>(launch, shared, work.place, sums, factors, here);
        } else if constexpr (Tile::kKnowsBeside) {
          store_beside<Tile>(launch, shared, residual, work.place, sums, factors, here);
        } else {
          store_any<Tile>(launch, shared, residual, work.place, sums, factors, here);
        }
      }
    });
    if (me.thread == 0) ptx::wait_stores_read<0>();  // shared memory lives until then
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Tile, class Way = AnyWay>
void launch_tiles(const GemmParams& p, const gemm_config::Config& config, void* parts,
                  Stream stream) {
  const int out_cols = p.out_cols(), cols = out_cols - config.rest.cols;
  constexpr int kDepth = Tile::kDepth;
  Launch launch{.gemm = p, .segments = config.segments, .steps = ceil_div(p.K, kDepth)};
  launch.x = device::RowTiles::of({p.x.data, Tile::kFp8X ? 1 : 2, p.M, p.K, p.x.stride_row},
                                  Tile::kRows, kDepth);
  if constexpr (Tile::kInt4) {
    const std::int64_t words = std::int64_t{ceil_div(p.K, Int4Layout::kCols)} * Int4Layout::kWords;
    launch.weight = device::matrix_map(
        {p.weight.data, 4, ceil_div(p.N, Int4Layout::kRows), words, words},
        Tile::kBoxCols / Int4Layout::kRows,
        kDepth / Int4Layout::kCols * Int4Layout::kWords, false);
    const int groups = ceil_div(p.K, p.weight.group);
    launch.scales =
        device::matrix_map({p.weight.scales, 2, groups, p.N, p.N}, 1, Tile::kBoxCols, false);
    if (p.weight.zeros)
      launch.zeros =
          device::matrix_map({p.weight.zeros, 1, groups, p.N, p.N}, 1, Tile::kBoxCols, false);
    launch.group = device::Divisor::of(p.weight.group);
    launch.groups = p.weight.group % kDepth == 0 || p.weight.group >= p.K ? 1 : 2;
  } else {
    launch.weight = device::matrix_map({p.weight.data, 1, p.N, p.K, p.weight.stride_row},
                                       Tile::kBoxCols, kDepth, true);
  }
  launch.y = device::matrix_map({p.y, 2, p.M, out_cols, out_cols},
                                is_scaled_alone<Tile>(p) ? Tile::kPlainRows : kOutRows,
                                kOutColumns, true);
  launch.copies_residual = device::is_mappable(residual_of(p));
  if (launch.copies_residual)
    launch.residual = device::matrix_map(residual_of(p), Tile::kRows / config.segments, kOutColumns,
                                         true);
  launch.tiles = {
      .along_m = launch.x.count,
      .along_n = is_gated(p.activation) ? ceil_div(cols, Tile::kBoxCols)
                                        : ceil_div(cols, 2 * Tile::kBoxCols),
      .together = kTogether};
  const int count = checked_int32(std::int64_t{launch.tiles.along_m} * launch.tiles.along_n,
                                  "linear: tiles");
  launch.tail = config.tail;
  launch.even = config.even;
  launch.helpers = config.tail > 0 ? ceil_div(count, config.tails) : 0;
  launch.parts = {.sums = reinterpret_cast<float4*>(static_cast<char*>(parts) +
                                                    gemm_config::kSignBytes),
                  .signs = static_cast<unsigned long long*>(parts),
                  .ticket = device::new_ticket()};
  int blocks = std::min(count, device::multiprocessors());
  if (config.tail > 0) blocks = count + launch.helpers;
  if (config.even) blocks = std::min(blocks, gemm_config::kBlocksWanted);  // slots for sums
  if (config.segments > 1) blocks = count * config.segments;
  device::launch_chained<expand_kernel<Tile, Way>>(dim3(blocks), dim3(kThreads),
                                                   sizeof(Shared<Tile>), stream, launch,
                                                   "linear: expanded weights");
}

}  // namespace ridgeline::gemm_expand
