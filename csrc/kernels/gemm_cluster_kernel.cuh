#pragma once
#include <algorithm>

#include "device/ptx/cluster.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_cluster_block.cuh"
#include "kernels/gemm_cluster_finish.cuh"
#include "kernels/gemm_cluster_loops.cuh"
#include "kernels/gemm_cluster_norm.cuh"
#include "kernels/gemm_cluster_producer.cuh"

namespace ridgeline::gemm_cluster {

/// Grid: (segments of K, tiles of up to kTokens rows of x, of 48 to 192 weight rows); the segments
/// of a tile are a cluster. Two warps request stages of 64 or 128 columns of the tile and of its
/// rows of x; kGroups warpgroups, two or three, multiply 64 weight rows by 16 to 176 rows of x: of
/// a longer tile the second has the rows from 64 on, those of up to 64 take stages by turns, and so
/// do three those of kUnits times 64, if that is not 0, the last of which may not be whole. The
/// weight is wgmma's operand of 64 rows: 16-bit floats, and fp8 with an fp8 x, from shared memory,
/// the others expanded into registers; what is behind a tile's last row is multiplied and left. At
/// the end each block adds up, in order, some rows of x, of which its neighbours send it their
/// sums. Sums in float32; of e4m3 by e4m3, of which the tensor cores keep 14 bits, every 128
/// columns anew. The kernel of 16 rows of x has three warps that meet it with its norm, and request
/// the first of it, in place of one. Roofline: the weight's bytes, once; x comes from L2, once a
/// tile and segment.
template <class T, class E, class Layout, int kGroups, int kUnits>
__global__ void __launch_bounds__(kBlockThreads<Layout::kTokens, kGroups>,
                                  (kBlocks<Layout, kGroups>))
    cluster_sm90_kernel(const __grid_constant__ ClusterParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTokens = Layout::kTokens;
  constexpr int kMultipliers = kGroups * kGroupThreads, kWarps = kMultipliers / 32;
  extern __shared__ __align__(1024) char memory[];
  // At the end, where a short tile's last operand may reach over the last stage.
  Fixed& fixed = *reinterpret_cast<Fixed*>(memory + params.shared_bytes - kFixedBytes);
  char* ring = memory;
  constexpr bool kFolds = kTokens == kNormTokens;
  char* received = ring + params.ring_bytes + (kFolds ? params.stages * Layout::kNormBytes : 0);
  const GemmParams& p = params.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int segment = blockIdx.x, segments = gridDim.x;
  // The last tile of several ends with x, and some rows are stored once more: what a copy brings
  // beyond x comes slowly.
  const int tile = params.rows_held, all = static_cast<int>(p.M);  // rows of x
  const int row0 = min(static_cast<int>(blockIdx.y) * tile, max(all - tile, 0));
  const int m = min(tile, all - row0);
  const int first = params.before + blockIdx.z * params.box_rows;  // column of y
  const int up_first = params.paired ? first + p.N / 2 : first;
  const auto [begin, count] = params.stages_of(segment);

  if (ptx::elect_one()) {
    const int rows = max(0, min(params.rows_each, m - segment * params.rows_each));
    make_barriers<kFolds>(fixed, params, warp, kBlockThreads<kTokens, kGroups> / 32,
                          received_bytes<kTokens>(params, segments, rows));
  }
  if (threadIdx.x == kBlockThreads<kTokens, kGroups> - 1) {
    ptx::prefetch_tensor_map(&params.weight);
    ptx::prefetch_tensor_map(&params.x);
  }
  __syncthreads();  // the barriers are made
  if (segments > 1) ptx::cluster_arrive_relaxed();
  const Producer<Layout> producer{params, fixed, ring, begin, count, first, up_first, row0};
  if (warp == kWarps) {
    if (ptx::elect_one()) producer.run_weight();
  } else if (warp > kWarps) {
    if (Layout::kAsksForX && warp == kWarps + 1 && !p.weights_ready)
      prefetch_ahead(p, lane, first);
    if constexpr (kFolds) {
      Normalizer<T, Layout>{producer, warp - kWarps - 1, lane}.run();
    } else {
      if (ptx::elect_one()) producer.run_x();
    }
  } else {
    const HeldScales held{params, begin, count, first, up_first};
    const bool holds = kHoldsBlocks<Layout, kGroups> && params.held_at > 0;
    if (holds && p.weights_ready) held.request<kMultipliers>(ring);
    if (holds && !p.weights_ready) held.prefetch<kMultipliers>();
    params.beside ? __threadfence() : ptx::wait_for_dependencies();
    if (holds && !p.weights_ready) held.request<kMultipliers>(ring);
    const int turn = params.turns > 1 ? warp / 4 : 0, unit = params.turns > 1 ? 0 : warp / 4;
    Finish<T> finish{params, fixed, reinterpret_cast<float*>(ring),
                     reinterpret_cast<float4*>(received), first, row0, m};
    if constexpr (kFactorBytes<kTokens, kGroups, kUnits> > 0) {
      auto& own = reinterpret_cast<OwnFactors<kUnits>*>(&fixed)[-1];
      finish.x_scale = own.x_scale, finish.scale = own.scale, finish.bias = own.bias;
      finish.threads = kMultipliers;
    }
    finish.bring_factors(up_first);
    const Strips strips = kUnits > 0 ? Strips::of(params, warp % 4, turn)
                                     : Strips{unit * 4 + warp % 4, true};
    Consumer<T, E, Layout, kGroups, kUnits> consumer{
        params, fixed,    ring, begin,  count, turn, params.turns,
        unit,   warp % 4, lane, strips, first,  up_first};
    run(consumer);
    if (params.by_turns) {
      ptx::cluster_wait();  // the barriers of both blocks are made
      const auto end = [&]<int kOctets>() {
        char* stages = ring + (Layout::kApart ? params.weights_at : 0);
        const TurnsEnd<T, kOctets, kFolds> turns{
            params, fixed, stages, reinterpret_cast<float4*>(received), first, row0, m};
        if (params.plain) {
          turns.template run<true>(consumer.sums[0]);
        } else {
          turns.template run<false>(consumer.sums[0]);
        }
      };
      if constexpr (kTokens == 64) {
        end.template operator()<8>();
      } else if constexpr (kFolds) {
        end.template operator()<2>();
      } else if constexpr (kTokens == 32) {
        params.rows_held <= 16 ? end.template operator()<2>() : end.template operator()<4>();
      }
      return;
    }
    ptx::named_barrier_sync(1, kMultipliers);  // every consumer has read its last stage
    finish.request_residual();
#pragma unroll
    for (int u = 0; u < std::max(kUnits, 1); ++u)
      if (consumer.has_strip(u))
        finish.keep(consumer.sums[u], turn, consumer.strip_of(u) * kStripRows);
    ptx::named_barrier_sync(1, kMultipliers);  // the block's sums are whole
    if (segments > 1) {
      ptx::cluster_wait();  // the barriers of all blocks are made
      finish.send();
      ptx::mbarrier_wait(&fixed.received, 0);
    }
    if (kFolds) {
      finish.fold_norm();
      ptx::named_barrier_sync(1, kMultipliers);  // the rows' scales are whole
    }
    finish.store();
  }
#endif
}

}  // namespace ridgeline::gemm_cluster
