#include <algorithm>

#include "device/matrix_map.cuh"
#include "device/properties.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_sm90_fp8.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_fp8;

// ---- Consumer -----------------------------------------------------------------------------------

template <class Tile>
using Sums = float[Tile::kParts][Tile::kPartCols / 8][4];

/// kCount stages: each part's products of all of them, which are then added to its sums.
template <class Tile, int kCount>
__device__ __forceinline__ void multiply_stages(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                Sums<Tile>& sums, const BlockScales& scales,
                                                const Consumer& me) {
  std::uint64_t x[kCount], weight[kCount];
  int stages[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j, ring.next()) {
    stages[j] = ring.stage;
    x[j] = ptx::swizzled_operand(shared.x[ring.stage][me.warpgroup * kWarpgroupRows], 16,
                                 8 * kRowBytes);
    weight[j] = ptx::swizzled_operand(shared.weight[ring.stage], 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  }
#pragma unroll
  for (int part = 0; part < Tile::kParts; ++part) {
    float products[Tile::kPartCols / 8][4];
    constexpr int kPartBytes = Tile::kPartCols * kRowBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::WgmmaFp8<Tile::kPartCols>::mma(products, x[j] + i * kStepBytes / 16,
                                            weight[j] + (part * kPartBytes + i * kStepBytes) / 16,
                                            j != 0 || i != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(products);
    if (part == Tile::kParts - 1 && me.thread == 0)
#pragma unroll
      for (int stage : stages) ptx::mbarrier_arrive(&shared.free[stage]);
#pragma unroll
    for (int i = 0; i < Tile::kPartCols / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Tile::kBlocks) {
          const int half = (part * Tile::kPartCols + i * 8) / (Tile::kCols / 2);
          sums[part][i][j] += products[i][j] * scales.factor[half][j / 2];
        } else {
          sums[part][i][j] += products[i][j];
        }
      }
  }
}

template <class Tile>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<Tile>& shared,
                                              Ring<Tile::kStages>& ring, Sums<Tile>& sums,
                                              const Work& work, const Consumer& me) {
#pragma unroll
  for (auto& part : sums)
#pragma unroll
    for (auto& piece : part)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
  BlockScales scales;
  if constexpr (Tile::kBlocks) scales.start<Tile>(launch, work, me);
  int k = 0;
  for (; k + Tile::kAddEvery <= work.steps; k += Tile::kAddEvery) {
    if constexpr (Tile::kBlocks) scales.advance(k + 1, work.steps);
    multiply_stages<Tile, Tile::kAddEvery>(shared, ring, sums, scales, me);
  }
  if constexpr (Tile::kAddEvery > 1)
    for (; k < work.steps; ++k) multiply_stages<Tile, 1>(shared, ring, sums, scales, me);
}

// ---- Epilogue -----------------------------------------------------------------------------------

[[maybe_unused]] __device__ __forceinline__ void load_row_scales(const GemmParams& p,
                                                                 const Place& place,
                                                                 const Consumer& me,
                                                                 float (&row_scale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m =
        place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad + 8 * r;
    const bool scaled = p.x.scale && !p.x.scale_per_group && m < p.M;
    row_scale[r] = scaled ? p.x.scale[p.x.scale_per_row ? m : 0] : 1.0f;
  }
}

/// Each warp's 16 rows through its own boxes, 64 columns at a time.
template <class Tile>
__device__ __forceinline__ void store_plain(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const float (&row_scale)[2], const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kPieces = kOutColumns / 8, kPerPart = Tile::kPartCols / 8;
  const int matrix = me.lane / 8, row = matrix % 2 * 8 + me.lane % 8;
#pragma unroll
  for (int box = 0; box < Tile::kCols / kOutColumns; ++box) {
    auto& out = shared.out[me.warpgroup * 4 + me.warp][box % 2];
    if (me.lane == 0) ptx::wait_stores_read<1>();
    __syncwarp();  // the box's last store has been read
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int piece = box * kPieces + i + j;
        const float4 columns = *reinterpret_cast<const float4*>(
            &shared.columns[piece * 8 + me.in_quad * 2]);  // scale, bias, scale, bias
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float(&of)[4] = sums[piece / kPerPart][piece % kPerPart];
          const float first = __fmul_rn(__fmul_rn(of[2 * r], row_scale[r]), columns.x);
          const float second = __fmul_rn(__fmul_rn(of[2 * r + 1], row_scale[r]), columns.z);
          packed[2 * j + r] =
              pack<T>(__fadd_rn(first, columns.y), __fadd_rn(second, columns.w));
        }
      }
      ptx::stmatrix(&out[row][((i + matrix / 2) ^ (row % 8)) * 8], packed);
    }
    ptx::fence_async_shared();
    __syncwarp();  // the box is whole
    if (me.lane == 0) {
      ptx::store_matrix(&launch.y, out, place.n * Tile::kCols + box * kOutColumns,
                        place.m * kRows + me.warpgroup * kWarpgroupRows + me.warp * 16);
      ptx::commit_stores();
    }
  }
}

/// Chunk `index` of the sums, times the scales of their rows: 64 columns, or 32 gates and their up
/// columns.
template <class Tile>
__device__ __forceinline__ void put_chunk(Chunk& chunk, const Sums<Tile>& sums, int index,
                                          bool gated, const float (&row_scale)[2],
                                          const Consumer& me) {
  constexpr int kPieces = kChunk / 8, kPerPart = Tile::kPartCols / 8;
#pragma unroll
  for (int c = 0; c < Tile::kCols / kChunk; ++c) {
    if (c != index) continue;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // Of the tile's pieces of eight columns; the second half of a gated tile is up.
      const int plain = c * kPieces + i;
      constexpr int kUp = Tile::kCols / 16;
      const int paired = c * kPieces / 2 + i % (kPieces / 2) + i / (kPieces / 2) * kUp;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2 pair;
        pair.x = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r]
                       : sums[plain / kPerPart][plain % kPerPart][2 * r];
        pair.y = gated ? sums[paired / kPerPart][paired % kPerPart][2 * r + 1]
                       : sums[plain / kPerPart][plain % kPerPart][2 * r + 1];
        pair.x = __fmul_rn(pair.x, row_scale[r]);
        pair.y = __fmul_rn(pair.y, row_scale[r]);
        *reinterpret_cast<float2*>(
            chunk.at(me.warp * 16 + me.quad + 8 * r, i * 8 + me.in_quad * 2)) = pair;
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void store_chunks(const Launch& launch, Shared<Tile>& shared,
                                             const Place& place, const Sums<Tile>& sums,
                                             const float (&row_scale)[2], const Consumer& me) {
  using T = typename Tile::T;
  const GemmParams& p = launch.gemm;
  const bool gated = is_gated(p.activation);
  const int columns = gated ? kChunk / 2 : kChunk;
  Chunk& chunk = shared.chunks[me.warpgroup];
#pragma unroll 1
  for (int c = 0; c < Tile::kChunks; ++c) {
    const Part part{.row = place.m * kRows + me.warpgroup * kWarpgroupRows,
                    .column = (place.n * Tile::kChunks + c) * columns,
                    .begin = 0,
                    .end = kWarpgroupRows,
                    .columns = columns,
                    .up_rows = 0,
                    .up_columns = kChunk / 2};
    Columns of_thread;
    of_thread.load<T>(p, part, me.thread);
    me.meet();  // the chunk before is read
    put_chunk<Tile>(chunk, sums, c, gated, row_scale, me);
    me.meet();  // the chunk is whole
    finish_chunk<T, false>(
        p, [&](int row, int column) { return device::load_vec<kEach>(chunk.at(row, column)); },
        part, of_thread, me.thread);
  }
}

/// The sums of all segments, of which each block of the cluster finishes some rows.
template <class Tile>
__device__ __forceinline__ void store_split(const Launch& launch, Shared<Tile>& shared,
                                            const Sums<Tile>& sums, const Consumer& me) {
  const GemmParams& p = launch.gemm;
  const Work work = segment_of(launch.tiles, launch.segments, launch.steps,
                               ptx::opaque(static_cast<int>(blockIdx.x)));
  const bool gated = is_gated(p.activation);
  const int columns = gated ? kChunk / 2 : kChunk;
  auto& split = shared.split();
  const float one[2] = {1.0f, 1.0f};
  me.meet_all();  // nobody reads the stages any more
#pragma unroll
  for (int c = 0; c < Tile::kChunks; ++c)
    put_chunk<Tile>(split.chunks[c][me.warpgroup], sums, c, gated, one, me);
  ptx::cluster_arrive();
  ptx::cluster_wait();  // the sums of every segment are in shared memory
#pragma unroll 1
  for (int c = 0; c < Tile::kChunks; ++c) {
    Part part{.row = work.place.m * kRows + me.warpgroup * kWarpgroupRows,
              .column = (work.place.n * Tile::kChunks + c) * columns,
              .begin = 0,
              .end = kWarpgroupRows,
              .columns = columns,
              .up_rows = 0,
              .up_columns = kChunk / 2};
    take_share(part, work, launch.segments);
    Columns of_thread;
    const Column* first = shared.columns + c * columns + me.thread * kEach % columns;
    of_thread.take(first, gated ? first + Tile::kCols / 2 : first);
    finish_chunk<typename Tile::T, true>(
        p,
        [&](int row, int column) {
          return split.chunks[c][me.warpgroup].total(row, column, launch.segments);
        },
        part, of_thread, me.thread);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // nobody reads this block's sums any more
}

// ---- Kernel -------------------------------------------------------------------------------------

/// e4m3 times e4m3 on Hopper. Grid: as many blocks as SMs; where tiles are fewer, a cluster of
/// blocks for each, which share its columns of K. A block owns a tile of 128 rows of x by kCols
/// weight rows at a time; one thread brings 128 columns of K a stage by the copy engine, two
/// warpgroups of 64 rows multiply. The tensor cores keep 14 bits of a sum: its parts of 256 columns
/// are added in float32, or those of 128 columns times their scales.
/// Roofline: 2 M N K flops on the fp8 tensor cores.
template <class Tile>
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
    ptx::mbarrier_init(&shared.columns_full, 1);
    ptx::mbarrier_init(&shared.columns_free, kConsumers * 4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made

  const bool plain = is_plain(launch.gemm) && !Tile::kSplit;
  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Tile>(launch, shared);
    if (threadIdx.x / device::kWarpSize == 1 && (plain || Tile::kSplit)) {
      ptx::wait_for_dependencies();
      bring_columns<Tile>(launch, shared);
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
    Ring<Tile::kStages> ring;
    int columns_parity = 0;
    for_each_work<Tile>(launch, [&](const Work& work) {
      float row_scale[2];
      if (!Tile::kBlocks) load_row_scales(launch.gemm, work.place, me, row_scale);
      Sums<Tile> sums;
      multiply_tile<Tile>(launch, shared, ring, sums, work, me);
      // The epilogue's addresses are not kept in registers while the tensor cores work.
      const Consumer here(ptx::opaque(static_cast<int>(threadIdx.x)));
      if (Tile::kBlocks) load_row_scales(launch.gemm, work.place, here, row_scale);
      if (plain || Tile::kSplit) ptx::mbarrier_wait(&shared.columns_full, columns_parity);
      columns_parity ^= 1;
      if constexpr (Tile::kSplit) {
        store_split<Tile>(launch, shared, sums, here);
      } else if (plain) {
        store_plain<Tile>(launch, shared, work.place, sums, row_scale, here);
        if (me.lane == 0) ptx::mbarrier_arrive(&shared.columns_free);
      } else {
        store_chunks<Tile>(launch, shared, work.place, sums, row_scale, here);
      }
    });
    if (me.lane == 0) ptx::wait_stores_read<0>();  // shared memory lives until then
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Tile>
void launch_tiles(const GemmParams& p, int segments, Stream stream) {
  const int out_cols = p.out_cols();
  Launch launch{.gemm = p, .segments = segments};
  launch.x = device::matrix_map({p.x.data, 1, p.M, p.K, p.x.stride_row}, kRows, kRowBytes, true);
  launch.weight = device::matrix_map({p.weight.data, 1, p.N, p.K, p.weight.stride_row},
                                     Tile::kCols / 2, kRowBytes, true);
  launch.y = device::matrix_map({p.y, 2, p.M, out_cols, out_cols}, 16, kOutColumns, true);
  launch.tiles = {.along_m = checked_int32(ceil_div<std::int64_t>(p.M, kRows), "linear: row tiles"),
                  .along_n =
                      ceil_div(out_cols, is_gated(p.activation) ? Tile::kCols / 2 : Tile::kCols),
                  .together = kTogether};
  launch.steps = ceil_div(p.K, kRowBytes);
  const std::int64_t count = std::int64_t{launch.tiles.along_m} * launch.tiles.along_n;
  const std::int64_t blocks =
      Tile::kSplit ? count * segments : std::min<std::int64_t>(count, device::multiprocessors());
  device::launch_chained<fp8_kernel<Tile>>(dim3(checked_int32(blocks, "linear: blocks")),
                                           dim3(kThreads), sizeof(Shared<Tile>), stream, launch,
                                           "linear: fp8", segments);
}

template <class T, bool kBlocks>
void launch_tile_of(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  if (config.tile_cols == 256) return launch_tiles<Tile<T, 256, kBlocks, false>>(p, 1, stream);
  if (config.segments == 1) return launch_tiles<Tile<T, 128, kBlocks, false>>(p, 1, stream);
  launch_tiles<Tile<T, 128, kBlocks, true>>(p, config.segments, stream);
}

}  // namespace

void launch_fp8(const GemmParams& p, const gemm_config::Config& config, Stream stream) {
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.weight.scale_layout == ScaleLayout::kBlock || p.x.scale_per_group)
      return launch_tile_of<T, true>(p, config, stream);
    launch_tile_of<T, false>(p, config, stream);
  });
}

}  // namespace ridgeline::gemm_detail
