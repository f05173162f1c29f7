#include "kernels/gemm_grouped_digits_sm90.cuh"

#include <algorithm>

#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"

namespace ridgeline::gemm_grouped {
namespace {

/// The warps that ask for weights find them, and the first of those tells the others: where all
/// did, the way to the first weights took longer. H200, lab, one token, 2048 x 1536 7.6 us and 7.3,
/// 768 x 2048 6.1 and 5.8; but fp8 strips of the former 9.0 and 9.1.
constexpr int kFound = 3, kFoundThreads = kStripThreads - (kRequesters - 1) * device::kWarpSize;

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: a block an SM. As the digits kernel (gemm_digits_sm90.cu), of strips of one expert after
/// the other: all strips that have rows are dealt evenly to the blocks, and warps of their own ask
/// for them. Where a block comes to rows that are not there those that multiply stage them, while
/// the rings are on their way.
/// Roofline: the bytes of the weights of the experts that have rows; x comes from L2, once a block.
template <class T, int kSpan>
__global__ void __launch_bounds__(kStripThreads, 1)
    grouped_digits_kernel(const __grid_constant__ GroupedDigitsParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  const DigitsParams& digits = params.digits;
  const StripLaunch& launch = params.launch;
  const GemmParams& p = launch.grouped.gemm;
  const int warp = device::warp_index(), lane = threadIdx.x % 32;
  const int each = kStripRows * launch.row_tile;
  char* ring = memory + warp * kDigitsStages * digits.stage_bytes;
  auto& barriers = *reinterpret_cast<GroupedBarriers*>(memory + kWarps * kDigitsStages *
                                                                    digits.stage_bytes);
  float* sums_at = reinterpret_cast<float*>(&barriers + 1);
  Span* spans = reinterpret_cast<Span*>(sums_at + kFinishers * launch.paired * kWarps * each);
  char* x = reinterpret_cast<char*>(
      spans + round_up(digits.chunks * (kChunkBlocks / kSpan) * launch.row_tile, 2));
  auto* lists = reinterpret_cast<RowTile*>(x + digits.chunks * kChunkBlocks *
                                                   block_bytes(launch.row_tile));

  ptx::launch_dependents();
  if (threadIdx.x == kThreads) barriers.sums.init(launch);
  if (lane == 0 && warp < kWarps) {
    for (int i = 0; i < kDigitsStages; ++i) {
      ptx::mbarrier_init(&barriers.full[warp][i], 1);
      ptx::mbarrier_init(&barriers.free[warp][i], device::kWarpSize);
    }
    ptx::prefetch_tensor_map(&digits.scales);
    if (p.weight.zeros) ptx::prefetch_tensor_map(&digits.zeros);
  }
  ptx::fence_mbarrier_init();
  __syncthreads();               // the barriers are made
  ptx::wait_for_dependencies();  // which weights are read is what the kernels ahead decide
  if (const int requester = warp - kWarps - kFinishers; requester >= 0) {
    const StripWalk walk(launch, lists + requester * launch.listed, lane);
    if (requester == 0) {
      if (lane == 0) barriers.share = {walk.strips, walk.item};
      ptx::named_barrier_arrive(kFound, kFoundThreads);
    }
    if (lane != 0) return;
    const std::uint64_t policy = ptx::evict_first();
    const auto request = [&](const ChunkSteps& at, int to, int stage, int parity) {
      ptx::mbarrier_wait(&barriers.free[to][stage], parity);
      request_chunk(params, at, memory + (to * kDigitsStages + stage) * digits.stage_bytes,
                             &barriers.full[to][stage], policy);
    };
    return request_chunks(walk, requester, kDigitsStages, request);
  }
  const LaneRows lane_rows(launch.grouped, lane);
  bool finite = true, once = false;  // once: one row of x is all rows
  int staged = 0, staged_end = -1;
  Pieces<T> pieces;
  // Behind the block's weights, which all are asked for at once, x would come a microsecond later.
  // H200, lab, us, one token, 2048 x 1536 7.57 and 6.41, 768 x 2048, rows that are one, 5.89 and
  // 5.24. Which rows are the block's is not known yet: where it made digits of all, eight of 768 x
  // 2048 took 7.1.
  if (params.early && warp < kWarps) {
    once = launch.grouped.x_rows == 1;
    const int rows = once ? 1 : static_cast<int>(p.M);
    pieces.load(params, warp, rows * digits.chunks, lane_rows.first_rows());
    if (once) {
      staged_end = static_cast<int>(p.M);
      finite = pieces.template store<kSpan>(params, 0, 1, x, spans);
      finite = !ptx::named_barrier_any(2, kThreads, !finite);  // x is whole
    }
  }
  ptx::named_barrier_sync(kFound, kFoundThreads);  // the block's share and its tiles are there
  StripWalk walk(launch, lists, barriers.share);
  if (warp >= kWarps) return finish_items<T>(walk, barriers.sums, sums_at, warp - kWarps);

  int stage = 0, parity = 0, tile = -1;
  RowTile rows{};
  XOfLane<1> few(x, spans, 1, lane);
  XOfLane<2> more(x, spans, 1, lane);
  for (int strip = 0, chunk = warp; walk.strips > 0; ++strip, chunk -= launch.chunks, walk.next()) {
    if (walk.tile != tile) {
      tile = walk.tile;
      rows = walk.rows();
      if (rows.first + rows.count > staged_end || (once && rows.count > 1)) {
        const int staging = walk.rows_together(), count = staging * digits.chunks;
        const bool loaded = params.early && staged_end < 0;  // all rows, in their order in y
        if (staged_end >= 0) ptx::named_barrier_sync(1, kThreads);  // every warp has read x
        once = false;
        staged = loaded ? 0 : rows.first;
        staged_end = rows.first + staging;
        finite = true;
        for (int piece = warp; loaded || piece < count; piece += kTogether * kWarps) {
          if (!loaded) pieces.load(params, piece, count, lane_rows.from(walk, lane));
          finite &= pieces.template store<kSpan>(params, rows.first - staged, staged_end - staged,
                                                 x, spans);
          if (loaded) break;
        }
        finite = !ptx::named_barrier_any(2, kThreads, !finite);  // x is whole
      }
      const int at = once ? 0 : rows.first - staged;
      few = XOfLane<1>(x + at * kRowBytes, spans + at, rows.count, lane);
      more = XOfLane<2>(x + at * kRowBytes, spans + at, rows.count, lane);
    }
    const int item = strip >> (launch.paired - 1), turn = chunk;
    if (chunk >= launch.chunks) {  // of others' columns alone
      if (launch.all_wait) {
        barriers.sums.wait_free(item);
        barriers.sums.arrive_done(item);
      }
      continue;
    }
    float* mine = sums_of(sums_at, launch, strip) + warp * each;
    const auto multiply = [&]<int kOfTiles>(const XOfLane<kOfTiles>& x_lane) {
      float sums[kOfTiles][2] = {};
      for (; chunk < launch.chunks; chunk += kWarps) {
        const char* of_chunk = ring + stage * digits.stage_bytes;
        ptx::mbarrier_wait(&barriers.full[warp][stage], parity);
        multiply_chunk<T, kSpan>(digits, of_chunk, x_lane, chunk, sums, lane);
        ptx::mbarrier_arrive(&barriers.free[warp][stage]);  // every lane, for what it read
        if (++stage == kDigitsStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      barriers.sums.wait_free(item);
#pragma unroll
      for (int tile = 0; tile < kOfTiles; ++tile) {
        const int m = tile * kTokens + lane % 4;
        if (m < rows.count)
#pragma unroll
          for (int i = 0; i < 2; ++i) mine[m * kStripRows + lane / 4 + i * 8] = sums[tile][i];
      }
    };
    if (rows.count <= kTokens) {
      multiply(few);
    } else {
      multiply(more);
    }
    if (!finite) {
      __syncwarp();  // they are added to
      for (int i = lane; i < rows.count * kStripRows; i += 32) {
        const int n = walk.weight_row() + i % kStripRows;
        const std::int64_t scales = rows.expert * launch.grouped.stride_scales + n;
        const std::int64_t row = row_of_x(launch.grouped, rows.first + i / kStripRows);
        mine[i] += products_not_finite<T>(
            p, strip_of(params, rows.expert, walk.weight_row()),
            static_cast<const T*>(p.weight.scales) + scales,
            p.weight.zeros ? p.weight.zeros + scales : nullptr,
            static_cast<const T*>(p.x.data) + row * p.x.stride_row, n, turn * kChunkCols,
            kChunkCols, kWarps * kChunkCols);
      }
    }
    barriers.sums.arrive_done(item);
  }
  clear_rows<T>(launch.grouped);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// Boxes of 16 columns of what int4 has a group of: [experts, groups, N].
CUtensorMap scales_map(const void* data, int bytes, const GroupedGemmParams& params, int groups) {
  const GemmParams& p = params.gemm;
  return experts_map(data, bytes, {p.N, ceil_div(p.K, p.weight.group), params.experts},
                     {p.N * bytes, params.stride_scales * bytes}, {kStripRows, groups});
}

template <class T, int kSpan>
void launch(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  const GemmParams& p = params.gemm;
  GroupedDigitsParams launched{.digits = {.gemm = p},
                               .launch = strip_launch(params, choice, kChunkCols)};
  DigitsParams& digits = launched.digits;
  digits.gemm.M = choice.tile_rows;
  digits.chunks = ceil_div(p.K, kChunkCols);
  launched.early = p.M <= choice.tile_rows && p.M * digits.chunks <= kMostEarly;
  launched.by_x_chunks = device::Divisor::of(digits.chunks);
  digits.group_shift = group_shift(p.weight.group);
  const int groups = groups_of_chunk(p.weight.group);
  launched.strip_bytes = ceil_div(p.K, Int4Layout::kCols) * Int4Layout::kWords * 4;
  launched.groups = groups;
  launched.scale_bytes = groups * (kScaleBytes + (p.weight.zeros ? kZeroBytes : 0));
  launched.by_group =
      device::Divisor::of(ceil_div(std::min(p.weight.group, p.K), kChunkCols));
  digits.scales = scales_map(p.weight.scales, 2, params, groups);
  if (p.weight.zeros) digits.zeros = scales_map(p.weight.zeros, 1, params, groups);
  digits.zeros_at = kChunkBlocks * 512 + round_up(groups * kScaleBytes, 128);
  digits.stage_bytes = digits_stage_bytes(p.weight.group, p.weight.zeros != nullptr);
  constexpr auto kKernel = grouped_digits_kernel<T, kSpan>;
  constexpr auto kName = "grouped_linear: digits";
  device::launch_chained<kKernel>(dim3(device::multiprocessors()), dim3(kStripThreads),
                                  kRings * kDigitsStages * digits.stage_bytes + choice.shared_bytes,
                                  stream, launched, kName);
}

template <class T>
void launch_spans(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  if (choice.span_cols > Int4Layout::kCols) return launch<T, 2>(params, choice, stream);
  launch<T, 1>(params, choice, stream);
}

}  // namespace

void launch_digits(const GroupedGemmParams& params, const Choice& choice, Stream stream) {
  device::dispatch_half(params.gemm.dtype, [&](auto type) {
    launch_spans<typename decltype(type)::type>(params, choice, stream);
  });
}

}  // namespace ridgeline::gemm_grouped
