#include <algorithm>

#include "device/matrix_map.cuh"
#include "device/properties.cuh"
#include "device/ptx/wgmma_registers.cuh"
#include "kernels/gemm_launch.cuh"
#include "kernels/gemm_sm90_expand.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace gemm_expand;

// ---- Consumer -----------------------------------------------------------------------------------

template <class Tile>
using Sums = float[Tile::kBands][Tile::kRows / 8][4];

/// 64 weight rows of each band by the rows of x by 32 columns of K.
template <class Tile>
__device__ __forceinline__ void multiply(Sums<Tile>& sums, const Fragments<Tile>& weights,
                                         std::uint64_t x) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
      ptx::WgmmaRegisters<Tile::kRows, typename Tile::T, ptx::Contiguous::kInner>::mma(
          sums[band], weights.a[band][step], x + step * kStepBytes / 16);
  ptx::wgmma_commit();
}

/// While one set of fragments is multiplied, the other is expanded.
template <class Tile>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<Tile>& shared,
                                              Ring<Tile::kStages>& ring, Sums<Tile>& sums,
                                              const Work& work, const Consumer& me) {
#pragma unroll
  for (auto& band : sums)
#pragma unroll
    for (auto& piece : band)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
  if (work.steps == 0) return;
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  Weights<Tile> weights{.shared = shared, .launch = launch, .me = me};
  Fragments<Tile> first, second;
  weights.start(work);
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  weights.load(ring.stage, work.first_step);
  weights.expand(first, ring.stage, 0);
  int before = -1;
  for (int k = 1; k <= work.steps; ++k) {
    const int s = ring.stage;
    const std::uint64_t x = ptx::swizzled_operand(shared.x[s], 16, 8 * kRowBytes);
    multiply<Tile>(sums, first, x);
    ptx::wgmma_wait<1>();  // `second` of the stage before is used
    if (before >= 0) release(before);
    weights.expand(second, s, 1);
    multiply<Tile>(sums, second, x + kSteps * kStepBytes / 16);
    before = s;
    ring.next();
    if (k < work.steps) {
      ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
      weights.load(ring.stage, work.first_step + k);
      ptx::wgmma_wait<1>();  // `first` is used
      weights.expand(first, ring.stage, 0);
    }
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& band : sums) ptx::hold_registers(band);
  release(before);
}

// ---- Epilogue -----------------------------------------------------------------------------------

/// Scale and bias of this thread's weight rows.
template <class Tile>
struct RowFactors {
  float scale[Tile::kBands][2], bias[Tile::kBands][2];

  __device__ __forceinline__ void load(const Launch& launch, int tile, const Consumer& me) {
    using T = typename Tile::T;
    const GemmParams& p = launch.gemm;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = weight_row<Tile>(launch, tile, half_of<Tile>(me.warpgroup, band)) +
                      first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad + 8 * r;
        scale[band][r] = 1.0f;
        bias[band][r] = 0.0f;
        if (n >= p.N) continue;
        if (!Tile::kInt4 && p.weight.scale_layout != ScaleLayout::kBlock)
          scale[band][r] = static_cast<const float*>(
              p.weight.scales)[p.weight.scale_layout == ScaleLayout::kRow ? n : 0];
        if (p.bias) bias[band][r] = device::to_float(static_cast<const T*>(p.bias)[n]);
      }
  }
};

/// A band's 64 columns of y through a warpgroup's boxes, 64 rows of x at a time, transposed on the
/// way.
template <class Tile>
__device__ __forceinline__ void store_plain(const Launch& launch, Shared<Tile>& shared,
                                            const Place& place, const Sums<Tile>& sums,
                                            const RowFactors<Tile>& factors, const Consumer& me) {
  using T = typename Tile::T;
  constexpr int kPieces = kChunk / 8;
  const int matrix = me.lane / 8, chunk = me.warp * 2 + matrix % 2;
#pragma unroll
  for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
    for (int box = 0; box < Tile::kRows / kChunk; ++box) {
      auto& out = shared.out[me.warpgroup][box % 2];
      if (me.thread == 0) ptx::wait_stores_read<1>();
      me.meet();  // the box's last store has been read
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        std::uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // weight rows half j % 2 of piece i + j / 2
          const float(&of)[4] = sums[band][box * kPieces + i + j / 2];
          const float scale = factors.scale[band][j % 2], bias = factors.bias[band][j % 2];
          packed[j] = pack<T>(__fadd_rn(__fmul_rn(of[j % 2 * 2], scale), bias),
                              __fadd_rn(__fmul_rn(of[j % 2 * 2 + 1], scale), bias));
        }
        const int m = (i + matrix / 2) * 8 + me.lane % 8;
        ptx::stmatrix_transposed(&out[m][(chunk ^ (m % 8)) * 8], packed);
      }
      ptx::fence_async_shared();
      me.meet();  // the box is whole
      if (me.thread == 0) {
        const int column = weight_row<Tile>(launch, place.n, half_of<Tile>(me.warpgroup, band)) +
                           first_in_half<Tile>(me.warpgroup);
        ptx::store_matrix(&launch.y, out, column, place.m * Tile::kRows + box * kChunk);
        ptx::commit_stores();
      }
    }
}

/// kCount rows of x, the `index`-th so many, of a band, transposed, to the chunk's rows from `to`.
template <class Tile, int kCount>
__device__ __forceinline__ void put_rows(Chunk& chunk, const Sums<Tile>& sums, int band, int index,
                                         int to, const Consumer& me) {
#pragma unroll
  for (int b = 0; b < Tile::kBands; ++b)
#pragma unroll
    for (int c = 0; c < Tile::kRows / kCount; ++c) {
      if (b != band || c != index) continue;
#pragma unroll
      for (int i = 0; i < kCount / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *chunk.at(to + i * 8 + me.in_quad * 2 + j % 2, me.warp * 16 + me.quad + j / 2 * 8) =
              sums[b][c * kCount / 8 + i][j];
    }
}

template <class Tile>
__device__ __forceinline__ void store_chunks(const Launch& launch, Shared<Tile>& shared,
                                             const Work& work, const Sums<Tile>& sums,
                                             int thread) {
  using T = typename Tile::T;
  const GemmParams& p = launch.gemm;
  const bool paired = is_paired(launch);
  // One band, paired: gates and up rows are in different warpgroups, which finish half the rows
  // each; two bands: a warpgroup puts both into its chunk, the up rows below.
  const bool both = paired && Tile::kBands == 1;
  constexpr int kPerBand = Tile::kRows / kChunk;
  const int rows = paired && !both ? kChunk / 2 : kChunk;
#pragma unroll 1
  for (int c = 0; c < 2 * kSumsOfThread / kChunk; ++c) {
    const Consumer me(ptx::opaque(thread));  // no addresses of all rounds side by side in registers
    Chunk& own = shared.chunks[me.warpgroup];
    const auto meet = [&] {
      if (both) {
        ptx::named_barrier_sync(1 + kConsumers, kConsumers * kWarpgroup);
      } else {
        me.meet();
      }
    };
    const int band = paired ? 0 : c / kPerBand, index = paired ? c : c % kPerBand;
    const int half = paired ? 0 : half_of<Tile>(me.warpgroup, band);
    const Part part{.row = std::int64_t{work.place.m} * Tile::kRows + index * rows,
                    .column = weight_row<Tile>(launch, work.place.n, half) +
                              first_in_half<Tile>(me.warpgroup),
                    .begin = both ? me.warpgroup * (kChunk / 2) : 0,
                    .end = both ? (me.warpgroup + 1) * (kChunk / 2) : rows,
                    .columns = kChunk,
                    .up_rows = both ? kChunk : kChunk / 2,
                    .up_columns = 0};
    Columns columns;
    if (launch.partials == nullptr) columns.load<T>(p, part, me.thread);
    meet();  // the chunk before is read
    if (paired && !both) {
      put_rows<Tile, kChunk / 2>(own, sums, 0, index, 0, me);
      put_rows<Tile, kChunk / 2>(own, sums, Tile::kBands - 1, index, kChunk / 2, me);
    } else {
      put_rows<Tile, kChunk>(own, sums, band, index, 0, me);
    }
    meet();  // the chunk is whole
    if (launch.partials) {
      keep_chunk(p, own, part, launch.partials + work.segment * p.M * p.N, me.thread);
    } else {
      finish_chunk<T, true>(p, both ? shared.chunks[0] : own, part, columns, me.thread);
    }
  }
}

// ---- Kernel -------------------------------------------------------------------------------------

/// 16-bit x times a weight of 4 or 8 bits on Hopper. Grid: as many blocks as SMs. A block owns a
/// tile of 256 rows of x by 128 weight rows, or 128 by 256, at a time; one thread brings 64 columns
/// of K a stage by the copy engine. The weight is wgmma's first operand: two warpgroups expand it
/// into registers and multiply by the rows of x in shared memory, accumulating in float32.
/// Roofline: 2 M N K flops on the 16-bit tensor cores.
template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    expand_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.free[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are made
  ptx::wait_for_dependencies();

  if (threadIdx.x < kWarpgroup) {
    ptx::release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Tile>(launch, shared);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    const Consumer me(static_cast<int>(threadIdx.x));
    Ring<Tile::kStages> ring;
    const bool plain = is_plain(launch.gemm) && !launch.gemm.x.scale && !launch.partials;
    for_each_work(launch, [&](const Work& work) {
      RowFactors<Tile> factors;
      if (plain) factors.load(launch, work.place.n, me);
      Sums<Tile> sums;
      multiply_tile<Tile>(launch, shared, ring, sums, work, me);
      // The epilogue's addresses are not kept in registers while the tensor cores work.
      const Consumer here(ptx::opaque(static_cast<int>(threadIdx.x)));
      if (plain) {
        store_plain<Tile>(launch, shared, work.place, sums, factors, here);
      } else {
        store_chunks<Tile>(launch, shared, work, sums, static_cast<int>(threadIdx.x));
      }
    });
    if (me.thread == 0) ptx::wait_stores_read<0>();  // shared memory lives until then
  }
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Tile>
void launch_tiles(const GemmParams& p, int segments, float* partials, int together,
                  Stream stream) {
  const bool paired = is_gated(p.activation) && partials == nullptr;
  const int out_cols = p.out_cols();
  Launch launch{.gemm = p, .partials = partials, .segments = segments};
  launch.x =
      device::matrix_map({p.x.data, 2, p.M, p.K, p.x.stride_row}, Tile::kRows, kDepth, true);
  if constexpr (Tile::kInt4) {
    const std::int64_t words = std::int64_t{ceil_div(p.K, Int4Layout::kCols)} * Int4Layout::kWords;
    launch.weight = device::matrix_map(
        {p.weight.data, 4, ceil_div(p.N, Int4Layout::kRows), words, words},
        Tile::kBoxCols / Int4Layout::kRows, Int4Layout::kWords, false);
    const int groups = ceil_div(p.K, p.weight.group);
    launch.scales =
        device::matrix_map({p.weight.scales, 2, groups, p.N, p.N}, 1, Tile::kBoxCols, false);
    if (p.weight.zeros)
      launch.zeros =
          device::matrix_map({p.weight.zeros, 1, groups, p.N, p.N}, 1, Tile::kBoxCols, false);
    launch.groups = p.weight.group % kDepth == 0 ? 1 : 2;
  } else {
    launch.weight = device::matrix_map({p.weight.data, 1, p.N, p.K, p.weight.stride_row},
                                       Tile::kBoxCols, kDepth, true);
  }
  launch.y = device::matrix_map({p.y, 2, p.M, out_cols, out_cols}, kChunk, kOutColumns, true);
  launch.tiles = {
      .along_m =
          checked_int32(ceil_div<std::int64_t>(p.M, Tile::kRows), "linear: row tiles"),
      .along_n = paired ? ceil_div(p.N / 2, Tile::kBoxCols) : ceil_div(p.N, 2 * Tile::kBoxCols),
      .together = together};
  launch.all_steps = ceil_div(p.K, kDepth);
  launch.steps = ceil_div(launch.all_steps, segments);
  const std::int64_t count = std::int64_t{launch.tiles.along_m} * launch.tiles.along_n * segments;
  const int blocks = static_cast<int>(std::min<std::int64_t>(count, device::multiprocessors()));
  device::launch_chained<expand_kernel<Tile>>(dim3(blocks), dim3(kThreads), sizeof(Shared<Tile>),
                                              stream, launch, "linear: expanded weights");
}

template <class T, WeightFormat kFormat, bool kBlocks>
void launch_rows(const GemmParams& p, const gemm_config::Config& config, float* partials,
                 Stream stream) {
  constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  if (config.tile_rows == 256)
    return launch_tiles<Tile<T, kFormat, kBlocks, 1, kInt4 ? 5 : 4>>(p, config.segments, partials,
                                                                     kTogether, stream);
  launch_tiles<Tile<T, kFormat, kBlocks, 2, kInt4 ? 7 : 5>>(p, config.segments, partials, kTogether,
                                                            stream);
}

}  // namespace

void launch_expand(const GemmParams& p, const gemm_config::Config& config, float* partials,
                   Stream stream) {
  float* sums = config.fused ? nullptr : partials;
  device::dispatch_half(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.weight.format == WeightFormat::kInt4) {
      launch_rows<T, WeightFormat::kInt4, false>(p, config, sums, stream);
    } else if (p.weight.scale_layout == ScaleLayout::kBlock) {
      launch_rows<T, WeightFormat::kFp8, true>(p, config, sums, stream);
    } else {
      launch_rows<T, WeightFormat::kFp8, false>(p, config, sums, stream);
    }
  });
}

}  // namespace ridgeline::gemm_detail
