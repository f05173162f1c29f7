#pragma once
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_sm90_expand_parts.cuh"

/// The warps that bring what a block of the kernel for weights of 4 or 8 bits works on.
namespace ridgeline::gemm_expand {

/// How many threads, of a warp each, request parts of a stage: x, the weight, and int4's scales of
/// either half. One thread took 650 cycles for x and the weight; the products of 64 columns in a
/// tile of 128 x 128 take 512. H200, int4, 4096 x 4096, us, where another asked for all scales, and
/// so: 128 rows 16.6 and 15.8, 256 rows 22.1 and 20.4, 512 rows 31.9 and 28.2.
template <class Tile>
constexpr int kProducers = Tile::kInt4 ? 4 : 2;

/// request(work, k, stage) for each stage, bytes(work) of it, as soon as it is free. And
/// part(work, i, stage) for those of another block's sums, residual(work, i, stage) for its own.
template <class Tile, class Bytes, class Request, class Part, class Residual>
__device__ __forceinline__ void for_each_stage(const Launch& launch, Shared<Tile>& shared,
                                               Bytes&& bytes, Request&& request, Part&& part,
                                               Residual&& residual) {
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  for_each_work<Tile>(launch, [&](const Work& work) {
    for (int i = 0; i < work.steps; ++i, ring.next()) {
      const int k = work.first_step + i;
      ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
      ptx::mbarrier_expect(&shared.full[ring.stage], bytes(work));
      request(work, k < launch.steps ? k : k - launch.steps, ring.stage);
    }
    const int parts = takes_part<Tile>(launch, work) ? kPartStages : 0;
    for (int i = 0; i < parts; ++i, ring.next()) {
      ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
      part(work, i, ring.stage);
    }
    const int residuals = takes_residual(launch, work) ? residual_stages<Tile>(launch.gemm) : 0;
    for (int i = 0; i < residuals; ++i, ring.next()) {
      ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
      residual(work, i, ring.stage);
    }
  });
}

/// The same of a thread that brings nothing of these.
template <class Tile, class Bytes, class Request>
__device__ __forceinline__ void for_each_stage(const Launch& launch, Shared<Tile>& shared,
                                               Bytes&& bytes, Request&& request) {
  const auto none = [&](const Work&, int, int s) { ptx::mbarrier_arrive(&shared.full[s]); };
  for_each_stage<Tile>(launch, shared, bytes, request, none, none);
}

template <class Tile>
__device__ __forceinline__ void produce_x(const Launch& launch, Shared<Tile>& shared) {
  const auto bytes = [&](const Work& work) { return launch.x.rows_of(work.place.m) * kRowBytes; };
  const auto request = [&](const Work& work, int k, int s) {
    ptx::copy_matrix(shared.x[s], launch.x.map_of(work.place.m), &shared.full[s],
                     k * Tile::kDepth, work.place.m * Tile::kRows);
  };
  const auto part = [&](const Work& work, int i, int s) {
    if (i == 0) wait_for_part(launch, work.segment);
    bring_part<Tile>(launch, shared, work.segment, i, s);
  };
  const auto residual = [&](const Work& work, int i, int s) {
    const int half = half_of<Tile>(i, i / 2), first = first_in_half<Tile>(i % 2);
    const int rows = Tile::kRows / launch.segments;  // that this block finishes
    ptx::mbarrier_expect(&shared.full[s], rows * kRowBytes);
    ptx::copy_matrix(shared.x[s], &launch.residual, &shared.full[s],
                     weight_row<Tile>(launch, work.place.n, half) + first,
                     work.place.m * Tile::kRows + (launch.segments > 1 ? work.segment * rows : 0));
  };
  for_each_stage<Tile>(launch, shared, bytes, request, part, residual);
}

template <class Tile>
__device__ __forceinline__ void produce_weight(const Launch& launch, Shared<Tile>& shared) {
  constexpr int kAcross =
      Tile::kInt4 ? Tile::kDepth / Int4Layout::kCols * Int4Layout::kWords : Tile::kDepth;
  constexpr int kRowsOfOne = Tile::kInt4 ? Int4Layout::kRows : 1;
  const auto request = [&](const Work& work, int k, int s) {
    for (int half = 0; half < 2; ++half)
      ptx::copy_matrix(shared.weight[s][half], &launch.weight, &shared.full[s], k * kAcross,
                       weight_row<Tile>(launch, work.place.n, half) / kRowsOfOne);
  };
  const auto bytes = [](const Work&) { return static_cast<int>(sizeof(shared.weight[0])); };
  for_each_stage<Tile>(launch, shared, bytes, request);
}

/// Scales and zero points of int4, of half of the tile.
template <class Tile>
__device__ __forceinline__ void produce_scales(const Launch& launch, Shared<Tile>& shared,
                                               int half) {
  const bool has_zeros = launch.gemm.weight.zeros != nullptr;
  const auto bytes = [&](const Work&) {
    return launch.groups * Tile::kBoxCols *
           static_cast<int>(sizeof(typename Tile::T) + (has_zeros ? 1 : 0));
  };
  for_each_stage<Tile>(launch, shared, bytes, [&](const Work& work, int k, int s) {
    auto& scales = shared.scales[s];
    const int row = weight_row<Tile>(launch, work.place.n, half);
    for (int i = 0; i < launch.groups; ++i) {
      const int group = launch.group.divide(k * Tile::kDepth + i * 32);
      ptx::copy_matrix(scales.of[i][half], &launch.scales, &shared.full[s], row, group);
      if (has_zeros)
        ptx::copy_matrix(scales.zeros[i][half], &launch.zeros, &shared.full[s], row, group);
    }
  });
}

/// What warp `warp` requests, by one thread.
template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared, int warp) {
  if (warp == 0) ptx::prefetch_tensor_map(&launch.x.last);
  ptx::prefetch_tensor_map(warp == 0   ? &launch.x.whole
                           : warp == 1 ? &launch.weight
                                       : &launch.scales);
  if (warp == 0 || !launch.gemm.weights_ready) ptx::wait_for_dependencies();
  if (warp == 0) return produce_x<Tile>(launch, shared);
  if (warp == 1) return produce_weight<Tile>(launch, shared);
  if constexpr (Tile::kInt4) produce_scales<Tile>(launch, shared, warp - 2);
}

}  // namespace ridgeline::gemm_expand
