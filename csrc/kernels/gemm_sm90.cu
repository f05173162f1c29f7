#include <algorithm>

#include "device/matrix_map.cuh"
#include "device/properties.cuh"
#include "device/ptx/wgmma_int8.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_sm90_fp8_blocks.cuh"
#include "kernels/gemm_sm90_fp8_codes.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_fp8;

// ---- Consumer -----------------------------------------------------------------------------------

/// int8: the tensor cores add up all columns, exactly; a stage is multiplied while the one before
/// is given back.
template <class Tile>
__device__ __forceinline__ void multiply_exactly(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                 Sums<Tile>& sums, const Work& work,
                                                 const Consumer& me) {
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  int products[Tile::kCols / 8][4] = {}, before = -1;
  for (int k = 0; k < work.steps; ++k, ring.next()) {
    const std::uint64_t x = ptx::swizzled_operand(
        shared.x[ring.stage][me.warpgroup * kWarpgroupRows], 16, 8 * kRowBytes);
    const std::uint64_t weight =
        ptx::swizzled_operand(shared.weight[ring.stage], 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      ptx::WgmmaInt8<Tile::kCols>::mma(products, x + i * kStepBytes / 16,
                                       weight + i * kStepBytes / 16, true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (before >= 0) release(before);
    before = ring.stage;
  }
  ptx::wgmma_wait<0>();
  ptx::hold_registers(products);
  release(before);
#pragma unroll
  for (int i = 0; i < Tile::kCols / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[0][i][j] = static_cast<float>(products[i][j]);
}

template <class Tile>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<Tile>& shared,
                                              Ring<Tile::kStages>& ring, Sums<Tile>& sums,
                                              const Work& work, const Consumer& me) {
  clear<Tile>(sums);
  if constexpr (Tile::kBlocks) {
    multiply_blocks<Tile>(launch, shared, ring, sums, work);
  } else {
    const auto nothing = [](int) {};
    const auto add = [](float& sum, float product, int) { sum += product; };
    int k = 0;
    for (; k + Tile::kAddEvery <= work.steps; k += Tile::kAddEvery)
      multiply_stages<Tile, Tile::kAddEvery>(shared, ring, sums, me, nothing, add);
    for (; k < work.steps; ++k) multiply_stages<Tile, 1>(shared, ring, sums, me, nothing, add);
  }
}

/// Tiles, or a segment of one, one behind the other.
template <class Tile, class Way>
__device__ __forceinline__ void consume(const Launch& launch, Shared<Tile>& shared,
                                        const Consumer& me) {
  constexpr int kMost = Tile::kCols / kAtOnce;
  const GemmParams& p = launch.gemm;
  Ring<Tile::kStages> ring;
  int columns_parity = 0;
  for_each_work<Tile>(launch, [&](const Work& work) {
    Sums<Tile> sums;
    if constexpr (Tile::kInt8) {
      multiply_exactly<Tile>(shared, ring, sums, work, me);
    } else {
      multiply_tile<Tile>(launch, shared, ring, sums, work, me);
    }
    // The epilogue's addresses are not kept in registers while the tensor cores work.
    const Consumer here(ptx::opaque(static_cast<int>(threadIdx.x)));
    ptx::mbarrier_wait(&shared.columns_full, columns_parity);
    columns_parity ^= 1;
    if constexpr (Tile::kSplit) {
      store_split<Tile>(launch, shared, sums, here);
    } else {
      Pairs residual[kMost];
      if constexpr (Way::kKnown)
        if (Way::has_residual(p)) take_residual<Tile>(residual, shared, ring, here);
      const auto store = [&](auto way) {
        store_boxes<Tile, decltype(way), 0, kMost>(launch, shared, ring, work.place, sums, residual,
                                                   here);
      };
      // Beside scales of blocks there are no registers for gates and their up sums.
      constexpr bool kMayGate = !Tile::kHasKnown && !Tile::kBlocks;
      if constexpr (Way::kKnown || Tile::kHasKnown) {
        store(Way{});
      } else if (is_plain(p)) {
        store(KnownWay<Activation::kNone>{});
      } else if (kMayGate && p.activation == Activation::kSiluMul && !p.residual) {
        if constexpr (kMayGate) store(KnownWay<Activation::kSiluMul>{});
      } else {
        store(Way{});
      }
      if (!Way::kKnown && launch.copies_residual) ring.skip(residual_stages<Tile>(p));
      ptx::mbarrier_arrive(&shared.columns_free);  // every lane, for what it read
    }
  });
}

// ---- Kernel -------------------------------------------------------------------------------------

/// e4m3 times e4m3, or int8 times int8, on Hopper. Grid: as many blocks as SMs; where tiles are
/// fewer, a cluster of blocks for each, which share its columns of K. A block owns a tile of 128
/// rows of x by kCols weight rows at a time; one thread brings 128 columns of K a stage by the copy
/// engine, two warpgroups of 64 rows multiply. Of e4m3 the tensor cores keep 14 bits of a sum: its
/// parts of 256 columns are added in float32, or those of 128 columns times their scales; of int8
/// all.
/// Roofline: 2 M N K flops on the 8-bit tensor cores.
template <class Tile, class Way>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.free[i], kConsumers);
    }
    ptx::mbarrier_init(&shared.columns_full, device::kWarpSize);
    ptx::mbarrier_init(&shared.columns_free, kConsumers * kWarpgroup);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made

  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Tile>(launch, shared);
    if (threadIdx.x / device::kWarpSize == 1) {
      ptx::wait_for_dependencies();
      bring_columns<Tile, Way>(launch, shared);
    }
    if (Tile::kSplit) {  // as the consumers do
      ptx::cluster_arrive();
      ptx::cluster_wait();
      ptx::cluster_arrive();
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    ptx::wait_for_dependencies();
    const Consumer me(static_cast<int>(threadIdx.x));
    if constexpr (Tile::kMakesCodes) {
      consume_pairs<Tile>(launch, shared, me);
    } else if constexpr (Way::kKnown && Tile::kOverlaps) {
      consume_overlapped<Tile, Way>(launch, shared, me);
    } else {
      consume<Tile, Way>(launch, shared, me);
    }
    if (me.lane == 0) ptx::wait_stores_read<0>();  // shared memory lives until then
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// As many row tiles side by side as have 16 MB of x, which L2 keeps while the weight goes by: it
/// comes from memory the fewer times. The card draws all its power then, and memory's part is time:
/// half a second of 4096 rows of 4096 x 28672 at a time, H200, 8, 16 and 32 tiles 808, 793 and 795
/// us, of 14336 x 4096 8 and 16 tiles 373 and 374.
int tiles_together(std::int64_t K) {
  constexpr std::int64_t kMostBytes = 16 << 20;
  int together = kTogether;
  while (together < 4 * kTogether && 2 * together * kRows * K <= kMostBytes) together *= 2;
  return together;
}

template <class Tile, class Way = AnyWay>
void launch_tiles(const GemmParams& p, int segments, Stream stream) {
  const int out_cols = p.out_cols();
  Launch launch{.gemm = p, .segments = segments};
  launch.x = device::RowTiles::of({p.x.data, 1, p.M, p.K, p.x.stride_row}, kRows, kRowBytes);
  const device::MatrixView weight{p.weight.data, 1, p.N, p.K, p.weight.stride_row};
  launch.weight = Tile::kMakesCodes ? device::dealt_rows_map(weight)
                                    : device::matrix_map(weight, Tile::kCols / 2, kRowBytes, true);
  launch.y = Tile::kMakesCodes
                 ? device::matrix_map({p.y, 1, p.M, out_cols, out_cols}, 16, kCodeColumns, false)
                 : device::matrix_map({p.y, 2, p.M, out_cols, out_cols, p.dtype}, 16,
                                      Tile::kOfGates ? kGates112 : kOutColumns, !Tile::kOfGates);
  launch.copies_residual = !Tile::kSplit && is_mappable(residual_of(p));
  if (launch.copies_residual)
    launch.residual = device::matrix_map(residual_of(p), kRows, kOutColumns, true);
  launch.tiles = {.along_m = launch.x.count,
                  .along_n = ceil_div(out_cols, is_gated(p.activation) && !Tile::kMakesCodes
                                                    ? Tile::kCols / 2
                                                    : Tile::kCols),
                  .together = tiles_together(p.K)};
  // Behind the last columns of K are zeros.
  launch.steps = ceil_div(p.K, kRowBytes);
  if (Way::kKnown && Tile::kOverlaps) launch.steps = round_up(launch.steps, Tile::kAddEvery);
  const std::int64_t count = std::int64_t{launch.tiles.along_m} * launch.tiles.along_n;
  const std::int64_t blocks =
      Tile::kSplit ? count * segments : std::min<std::int64_t>(count, device::multiprocessors());
  device::launch_chained<fp8_kernel<Tile, Way>>(dim3(checked_int32(blocks, "linear: blocks")),
                                                dim3(kThreads), sizeof(Shared<Tile>), stream,
                                                launch, "linear: fp8", segments);
}

template <class T, class E, Groups kGroups>
void launch_tile_of(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  const auto launch = [&]<class Whole>(Whole) {
    with_way<Whole>(p, [&](auto way) { launch_tiles<Whole, decltype(way)>(p, 1, stream); });
  };
  if (config.tile_cols == 256) return launch(Tile<T, E, 256, kGroups, false>{});
  if (config.segments == 1) return launch(Tile<T, E, 128, kGroups, false>{});
  launch_tiles<Tile<T, E, 128, kGroups, true>>(p, config.segments, stream);
}

}  // namespace

void launch_fp8(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      using Scaled = KnownWay<Activation::kNone, false, Terms::kScales>;
      const auto launch = [&]<Groups kGroups>() {
        launch_tiles<Tile<T, std::uint8_t, 256, kGroups, false>, Scaled>(p, 1, stream);
      };
      if (p.y_scale) return launch.template operator()<Groups::kOfY>();
      if (p.x.scale_per_group && p.x.scale_group == kWideGroup)
        return launch.template operator()<Groups::kOfX>();
      if (config.tile_cols == gemm_config::kGateCols) {
        using Gates = KnownWay<Activation::kSiluMul, false, Terms::kScales>;
        constexpr int kCols = gemm_config::kGateCols;
        return launch_tiles<Tile<T, std::uint8_t, kCols, Groups::kNone, false>, Gates>(p, 1,
                                                                                      stream);
      }
    }
    if (p.weight.format == WeightFormat::kInt8)
      return launch_tile_of<T, std::int8_t, Groups::kNone>(p, config, stream);
    if (p.weight.scale_layout == ScaleLayout::kBlock || p.x.scale_per_group)
      return launch_tile_of<T, std::uint8_t, Groups::kBlocks>(p, config, stream);
    launch_tile_of<T, std::uint8_t, Groups::kNone>(p, config, stream);
  });
}

}  // namespace ridgeline::gemm_detail
