#include <algorithm>

#include "device/properties.cuh"
#include "device/ptx/wgmma_shared.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_turns_store.cuh"

/// Dense products of many rows with an activation, or a residual, behind them. H200, bf16 with
/// bias, GELU of 8192 x 4096 x 1024 (M x N x K): cuBLASLt and a kernel behind it 128.6 us, this one
/// 105.3; gated SiLU of 4096 x 28672 x 4096 1577 and 1457. The sums without bias and GELU take
/// 95.8, so that 10 us of it are not hidden. Tried, and no faster: half of the weight's rows, or of
/// x, sent to both blocks of a cluster of two (in one run 123.3 us alone and 127.0 so; 4096 x 28672
/// x 4096 1439 and 1447).
namespace ridgeline::gemm_turns {
namespace {

// ---- Work ---------------------------------------------------------------------------------------

/// Calls fn(place) for every `step`th tile of this block, from its `first` on.
template <class Fn>
__device__ __forceinline__ void for_each_tile(const Launch& launch, int first, int step, Fn&& fn) {
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  const int blocks = static_cast<int>(gridDim.x);
  for (int i = static_cast<int>(blockIdx.x) + first * blocks; i < count; i += step * blocks)
    fn(place_of(launch.tiles, i));
}

/// The turn to multiply goes from one warpgroup to the other, so that one multiplies while the
/// other finishes its tile.
__device__ __forceinline__ void wait_for_turn(const Consumer& me) {
  ptx::named_barrier_sync(1 + me.warpgroup, kConsumers * kWarpgroup);
}
__device__ __forceinline__ void give_turn_to(int warpgroup) {
  ptx::named_barrier_arrive(1 + warpgroup, kConsumers * kWarpgroup);
}

// ---- Producer -----------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void produce(const Launch& launch, Shared<T>& shared) {
  Ring<kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  for_each_tile(launch, 0, 1, [&](const Place& place) {
    const CUtensorMap* x = launch.x.map_of(place.m);
    const int bytes = (launch.x.rows_of(place.m) + kSide) * kRowBytes;
    for (int k = 0; k < launch.steps; ++k, ring.next()) {
      std::uint64_t* full = &shared.full[ring.stage];
      ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
      ptx::mbarrier_expect(full, bytes);
      ptx::copy_matrix(shared.x[ring.stage], x, full, k * kDepth, place.m * kSide);
      ptx::copy_tensor_4d(shared.weight[ring.stage], &launch.weight, full, k * kDepth, 0, 0,
                          place.n * (kSide / 16));
    }
  });
}

// ---- Consumer -----------------------------------------------------------------------------------

/// The tile's first `kRowed` halves.
template <int kRowed, class T>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<T>& shared,
                                              Ring<kStages>& ring, Sums& sums,
                                              const Consumer& me) {
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  int before = -1;
  for (int k = 0; k < launch.steps; ++k, ring.next()) {
    const int s = ring.stage;
    const std::uint64_t x = ptx::swizzled_operand(shared.x[s], 16, 8 * kRowBytes);
    const std::uint64_t weight = ptx::swizzled_operand(shared.weight[s], 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[s], ring.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int half = 0; half < kRowed; ++half)
        ptx::WgmmaShared<kSide, T>::mma(
            sums[half], x + (half * kWarpgroupRows * kRowBytes + i * kStepBytes) / 16,
            weight + i * kStepBytes / 16, k != 0 || i != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (before >= 0) release(before);
    before = s;
  }
  give_turn_to(1 - me.warpgroup);
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < kRowed; ++half) ptx::hold_registers(sums[half]);
  release(before);
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: one block an SM, which takes tiles of 128 rows of x by 128 weight rows in turn. Block: a
/// thread that brings stages of 64 columns, two warpgroups that take tiles by turns. Shared memory:
/// six stages, 224 KB in all. float32 sums, one rounding, behind the activation.
/// 2 M N K flops on the tensor cores bound it: a tile of K = 1024 takes them 8200 cycles, GELU of
/// it the other warpgroup about half as long.
template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    turns_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<typename Tile::T>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.free[i], 1);
    }
    if constexpr (Tile::kAdds)
      for (auto& of_warp : shared.added)
        for (std::uint64_t& barrier : of_warp) ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&launch.x.whole);
    ptx::prefetch_tensor_map(&launch.x.last);
    ptx::prefetch_tensor_map(&launch.weight);
  }
  __syncthreads();  // the barriers are made
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
    if (threadIdx.x != 0) return;
    ptx::wait_for_dependencies();
    produce(launch, shared);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const Consumer me(static_cast<int>(threadIdx.x));
    Ring<kStages> ring;
    const auto leave_to_other = [&] {  // its tile's stages
      ring.stage += launch.steps;
      ring.parity ^= ring.stage / kStages % 2;
      ring.stage %= kStages;
    };
    if (me.warpgroup == 1) {
      give_turn_to(0);
      leave_to_other();
    }
    int added = 0;  // the parity of a residual's coming
    ptx::wait_for_dependencies();
    for_each_tile(launch, me.warpgroup, kConsumers, [&](const Place& place) {
      float2 bias[kEights];
      load_bias<Tile>(launch.gemm, place.n, bias, me);
      if (Tile::kAdds && me.lane == 0) {
        ptx::wait_stores_read<0>();
#pragma unroll
        for (int box = 0; box < 2; ++box)
          request_residual<Tile>(launch, shared, place, box, me);
      }
      Sums sums;
      wait_for_turn(me);
      if (launch.is_wide(place)) {
        multiply_tile<kHalves>(launch, shared, ring, sums, me);
      } else {
        multiply_tile<1>(launch, shared, ring, sums, me);
      }
      leave_to_other();
      store_tile<Tile>(launch, shared, place, sums, bias, added, me);
    });
    if (me.lane == 0) ptx::wait_stores_read<0>();  // shared memory lives until then
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// Boxes of a tile's weight rows: sixteen are two eights, or, gated, eight gates and their up rows.
CUtensorMap weight_map(const GemmParams& p) {
  const auto u64 = [](auto v) { return static_cast<cuuint64_t>(v); };
  const bool gated = is_gated(p.activation);
  const std::int64_t row = p.weight.stride_row * 2;
  const cuuint64_t sizes[] = {u64(p.K), 8, 2, u64(p.N / 16)};
  const cuuint64_t strides[] = {u64(row), u64(gated ? p.N / 2 * row : 8 * row),
                                u64(gated ? 8 * row : 16 * row)};
  const cuuint32_t box[] = {kDepth, 8, 2, kSide / 16}, ones[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = device::tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(p.weight.data), sizes, strides,
      box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "linear: cuTensorMapEncodeTiled refused the weight, code ",
        static_cast<int>(result));
  return map;
}

template <class Tile>
void launch_tiles(const GemmParams& p, Stream stream) {
  using T = typename Tile::T;
  const int element = sizeof(T);
  const auto x =
      device::RowTiles::of({p.x.data, element, p.M, p.K, p.x.stride_row}, kSide, kDepth);
  const auto boxes_of = [&](const void* data, std::int64_t stride) {
    return device::matrix_map({data, element, p.M, p.out_cols(), stride}, 16, kOutColumns, true);
  };
  const Launch launch{
      .gemm = p,
      .x = x,
      .weight = weight_map(p),
      .y = boxes_of(p.y, p.out_cols()),
      .residual = Tile::kAdds ? boxes_of(p.residual, p.stride_residual) : CUtensorMap{},
      .tiles = {.along_m = x.count,
                .along_n = ceil_div(p.out_cols(), Tile::kOutCols),
                .together = kTogether},
      .steps = ceil_div(p.K, kDepth)};
  const std::int64_t tiles = std::int64_t{launch.tiles.along_m} * launch.tiles.along_n;
  const int blocks = std::min(device::multiprocessors(), checked_int32(tiles, "linear: tiles"));
  device::launch_chained<turns_kernel<Tile>>(dim3(blocks), dim3(kThreads), sizeof(Shared<T>),
                                             stream, launch, "linear");
}

}  // namespace
}  // namespace ridgeline::gemm_turns

namespace ridgeline {

void gemm_detail::launch_turns(const GemmParams& p, Stream stream) {
  using namespace gemm_turns;
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (p.activation) {
      case Activation::kNone: return launch_tiles<Tile<T, Activation::kNone, true>>(p, stream);
      case Activation::kGelu: return launch_tiles<Tile<T, Activation::kGelu>>(p, stream);
      case Activation::kGeluTanh: return launch_tiles<Tile<T, Activation::kGeluTanh>>(p, stream);
      case Activation::kSiluMul: return launch_tiles<Tile<T, Activation::kSiluMul>>(p, stream);
      default: check(false, "linear: no kernel of two tiles by turns has this activation");
    }
  });
}

}  // namespace ridgeline
