#include <algorithm>
#include <cstdint>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/quantize_tile.cuh"

namespace ridgeline {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kMaxWarps = kTileThreads / device::kWarpSize;
constexpr int kFewTiles = 132;

// A whole tensor in the registers of one cluster. More would wait for its few SMs (H200, bf16:
// 8 x 8192 1.3 us; 64 x 8192 in 16 blocks 3.4).
constexpr int kMostClusterBlocks = 8;
constexpr int kClusterThreads = 512;
constexpr int kHeldPieces = 2;

/// A tensor that no cluster holds.
struct TensorLaunch {
  QuantizeParams params;
  unsigned tiles;
  unsigned partials;
};

// ---- Kernels ------------------------------------------------------------------------------------

/// The first pass over a tensor that no cluster holds. Grid: up to kPartials blocks, which share
/// the tiles out; each leaves its largest magnitude. Bytes: x in: bandwidth.
template <class T, bool kVector>
__global__ void __launch_bounds__(kTileThreads)
    tensor_amax_kernel(const __grid_constant__ TensorLaunch launch) {
  __shared__ float maxima[kMaxWarps];
  ptx::wait_for_dependencies();
  ptx::launch_dependents();  // after the wait: x is complete when the second pass starts
  float amax = 0.0f;
  for (unsigned i = blockIdx.x; i < launch.tiles; i += gridDim.x) {
    Tile<T, kVector, kTileThreads> tile(launch.params, i);
    tile.load();
    amax = device::MaxOrNaN::combine(amax, tile.amax());
  }
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  if (threadIdx.x == 0) launch.params.partials[blockIdx.x] = amax;
}

/// The second, whose first blocks read while the first pass runs (H200, bf16 64 x 8192: 5.8 us
/// where both start their dependents first and wait, 3.9 so). Grid: the tiles, one dimension,
/// backwards: what the first read last may still be in L2. Bytes: x in as far as L2 has not kept
/// it, codes out: bandwidth.
template <class T, bool kVector>
__global__ void __launch_bounds__(kTileThreads)
    tensor_codes_kernel(const __grid_constant__ TensorLaunch launch) {
  __shared__ float maxima[kMaxWarps];
  const QuantizeParams& params = launch.params;
  Tile<T, kVector, kTileThreads> tile(params, gridDim.x - 1 - blockIdx.x);
  tile.load();  // before the wait: the first pass writes nothing of x
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  float amax = 0.0f;
  for (unsigned i = threadIdx.x; i < launch.partials; i += kTileThreads)
    amax = device::MaxOrNaN::combine(amax, params.partials[i]);
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.scale = scale;
  tile.store(scale);
}

/// A whole contiguous tensor in one cluster. Grid: its blocks. Block: the pieces of the tensor are
/// dealt out over all threads of the cluster in turn. Each warp writes its maximum into every block
/// and counts the bytes at the barrier there, so that one exchange is all that the blocks wait for.
/// Bytes: x in, codes out; few SMs read it: latency, and those SMs' share of L2.
template <class T>
__global__ void __launch_bounds__(kClusterThreads)
    tensor_cluster_kernel(const __grid_constant__ QuantizeParams params) {
  constexpr int kPiece = device::Vec<T>::kSize;
  __shared__ float maxima[kMostClusterBlocks * kClusterThreads / device::kWarpSize];
  __shared__ std::uint64_t arrived;
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int warps = static_cast<int>(blockDim.x) / device::kWarpSize;
  const int warp = device::warp_index(), lane = threadIdx.x % device::kWarpSize;
  device::start_dependents();
  if (threadIdx.x == 0) {
    ptx::init_puts(&arrived);
    ptx::expect_puts(&arrived, blocks * warps * static_cast<int>(sizeof(float)));
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block's barrier is made
  device::wait_then_start_dependents();

  const int count = static_cast<int>(params.rows) * params.cols;
  const auto offset = [&](int i) {
    return ((i * blocks + rank) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) *
           kPiece;
  };
  device::Vec<T> pieces[kHeldPieces];
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i)
    pieces[i] = load_some<true, kPiece>(static_cast<const T*>(params.x) + offset(i),
                                        count - offset(i));
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i)
    amax = device::MaxOrNaN::combine(amax, magnitude(pieces[i]));
  amax = device::warp_max_or_nan(amax);
  if (lane < blocks) ptx::put_in_block(&maxima[rank * warps + warp], amax, &arrived, lane);
  ptx::wait_for_puts(&arrived);  // every warp's maximum is here

  amax = 0.0f;
  for (int i = lane; i < blocks * warps; i += device::kWarpSize)
    amax = device::MaxOrNaN::combine(amax, maxima[i]);
  const float scale = scale_of_amax(device::warp_max_or_nan(amax), DType::kFloat8E4M3);
  if (rank == 0 && threadIdx.x == 0) *params.scale = scale;
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < kHeldPieces; ++i)
    store_some<true>(static_cast<std::uint8_t*>(params.q) + offset(i), pieces[i],
                     count - offset(i), inverse);
}

// ---- Launch -------------------------------------------------------------------------------------

struct ClusterShape {
  int blocks, threads;
};

/// Blocks first: each SM then reads and encodes less. Two at least: a launch without a cluster
/// takes st.async for an illegal instruction.
ClusterShape cluster_for(int pieces) {
  constexpr int kLeastThreads = 128;
  ClusterShape shape{2, kLeastThreads};
  while (shape.blocks < kMostClusterBlocks && shape.blocks * shape.threads < pieces)
    shape.blocks *= 2;
  while (shape.threads < kClusterThreads && shape.blocks * shape.threads < pieces)
    shape.threads *= 2;
  return shape;
}

/// Whether it was small enough, and the device and the loaded code have clusters.
template <class T>
bool quantize_in_cluster(const QuantizeParams& params, Stream stream) {
  constexpr auto kKernel = tensor_cluster_kernel<T>;
  const std::int64_t pieces = params.rows * (params.cols / device::Vec<T>::kSize);
  if (pieces > kMostClusterBlocks * kClusterThreads * kHeldPieces) return false;
  static const bool is_new = device::can_wait(kKernel);  // the code knows clusters
  if (!is_new || device::attribute(cudaDevAttrClusterLaunch) == 0) return false;
  const auto [blocks, threads] = cluster_for(static_cast<int>(pieces));
  device::launch_chained<kKernel>(dim3(blocks), dim3(threads), 0, stream, params, "quantize_fp8",
                                  blocks);
  return true;
}

}  // namespace

void quantize_tensor(QuantizeParams params, bool vectors, Stream stream) {
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params.stride_x_row == params.cols) {  // rows of any length, as well
      if (vectors && quantize_in_cluster<T>(params, stream)) return;
      for (; tiles_of(params) <= kFewTiles / 2 && params.rows % 2 == 0; params.rows /= 2)
        params.cols *= 2, params.stride_x_row *= 2;  // lower and more tiles: more SMs work
    }
    const std::int32_t tiles = checked_int32(tiles_of(params), "x: blocks");
    const int partials = std::min(tiles, QuantizeParams::kPartials);
    const TensorLaunch launch{.params = params,
                              .tiles = static_cast<unsigned>(tiles),
                              .partials = static_cast<unsigned>(partials)};
    dispatch_bool(vectors, [&](auto vector) {
      device::launch_chained<tensor_amax_kernel<T, vector()>>(
          dim3(partials), dim3(kTileThreads), 0, stream, launch, "quantize_fp8");
      device::launch_chained<tensor_codes_kernel<T, vector()>>(
          dim3(tiles), dim3(kTileThreads), 0, stream, launch, "quantize_fp8");
    });
  });
}

}  // namespace ridgeline
