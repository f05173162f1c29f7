#pragma once
#include <cstdint>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/global_order.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/ticket.h"
#include "kernels/quantize_tile.cuh"

/// A whole contiguous tensor in the registers of one cluster, or of several that write each other
/// their maxima: x is read once, by one launch.
namespace ridgeline::quantize_clusters {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kBlocks = 8;     // of a cluster, at most
constexpr int kThreads = 512;  // of a block, at most
constexpr int kMostHeld = 4;   // pieces a thread
constexpr int kWarps = kThreads / device::kWarpSize;
constexpr int kMostClusters = 16;
static_assert(2 * kBlocks * kMostClusters * kMostClusters <= QuantizeParams::kWorkspace);

// How often a block looks for another cluster's maximum, 0.1 ms or so in all, before it stops
// counting on that cluster to run beside its own.
constexpr int kPatience = 256;

struct Launch {
  QuantizeParams params;
  std::uint64_t ticket;  // its low 16 bits are zero
  std::int32_t clusters;
};

// ---- Shared memory ------------------------------------------------------------------------------

struct Shared {
  float maxima[kBlocks * kWarps];  // of the cluster's warps
  std::uint64_t arrived;           // counts their bytes
  float amax;                      // of all clusters,
  bool complete;                   // or of those that were heard
};

// ---- Phases -------------------------------------------------------------------------------------

/// Maxima on their way between clusters, a word each in params.partials: the launch's ticket and
/// the 16 bits of a magnitude, or a sign where the reader has left. Blocks of one rank write to
/// each other. Who reads a word clears it, or who wrote it if the reader has left: a captured
/// launch runs again with the same ticket. Else memory is of any contents: that it holds a ticket
/// of 48 random bits is not to be expected.
struct Mail {
  static constexpr std::uint64_t kLeft = 0x8000;

  const Launch& launch;
  int rank, cluster;

  __device__ unsigned long long* word(int to, int from) const {
    return reinterpret_cast<unsigned long long*>(launch.params.partials) +
           (rank * launch.clusters + to) * launch.clusters + from;
  }
  __device__ bool is_ours(std::uint64_t word) const { return (word ^ launch.ticket) >> 16 == 0; }

  /// The largest maximum, and whether all were heard, in every lane of the one warp that calls.
  template <class T>
  __device__ float exchange(float amax, bool& complete) const {
    const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
    const bool is_other = lane < launch.clusters && lane != cluster;
    unsigned long long *const mine = word(cluster, lane), *const theirs = word(lane, cluster);
    const T own = device::from_float<T>(amax);
    std::uint64_t got = launch.ticket | reinterpret_cast<const std::uint16_t&>(own);
    std::uint64_t there = 0;
    if (is_other) there = atomicExch(theirs, got);
    bool waits = is_other;
#pragma unroll 1  // instructions come from memory too: unrolled, 64 x 8192 took 0.3 us more
    for (int i = 0; i < kPatience && device::any_lane(waits); ++i) {
      if (waits) got = ptx::load_from_l2(mine);
      waits = waits && !is_ours(got);
    }
    if (waits) got = atomicExch(mine, launch.ticket | kLeft);
    waits = waits && !is_ours(got);
    if (is_other && !waits) *mine = 0;
    if (there == (launch.ticket | kLeft)) *theirs = 0;
    complete = !device::any_lane(waits);
    const auto bits = static_cast<std::uint16_t>(got);
    return device::warp_max_or_nan(waits ? 0.0f
                                         : device::to_float(reinterpret_cast<const T&>(bits)));
  }
};

/// This thread's share of the tensor's maximum where other clusters do not run: all blocks alike.
template <class T>
__device__ float amax_of_tensor(const QuantizeParams& params, int count) {
  constexpr int kPiece = device::Vec<T>::kSize;
  const int step = static_cast<int>(blockDim.x) * kPiece;
  float amax = 0.0f;
  for (int at = static_cast<int>(threadIdx.x) * kPiece; at < count; at += step)
    amax = device::MaxOrNaN::combine(amax,
                                     magnitude(device::load(static_cast<const T*>(params.x) + at)));
  return amax;
}

/// The tensor's maximum from the cluster's, in every thread.
template <class T>
__device__ float amax_of_clusters(const Mail& mail, Shared& shared, float amax, int count) {
  if (threadIdx.x < device::kWarpSize) {
    bool complete;
    amax = mail.exchange<T>(amax, complete);
    if (threadIdx.x == 0) shared.amax = amax, shared.complete = complete;
  }
  __syncthreads();  // warp 0 has heard
  if (shared.complete) return shared.amax;
  return device::block_reduce<device::MaxOrNaN>(amax_of_tensor<T>(mail.launch.params, count),
                                                shared.maxima);
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Grid: the clusters' blocks. Block: the pieces of the tensor are dealt out over all threads in
/// turn. Each warp writes its maximum into every block of its cluster and counts the bytes at the
/// barrier there, so that one exchange is all that the blocks wait for; then clusters exchange
/// theirs. Bytes: x in, codes out: latency, and with one cluster its few SMs' share of L2.
template <class T, int kHeld>
__global__ void __launch_bounds__(kThreads)
    tensor_clusters_kernel(const __grid_constant__ Launch launch) {
  constexpr int kPiece = device::Vec<T>::kSize;
  __shared__ Shared shared;
  const QuantizeParams& params = launch.params;
  const T* x = static_cast<const T*>(params.x);
  const int blocks = ptx::cluster_blocks(), rank = ptx::cluster_rank();
  const int warps = static_cast<int>(blockDim.x) / device::kWarpSize;
  const int warp = device::warp_index(), lane = threadIdx.x % device::kWarpSize;
  const Mail mail{launch, rank, static_cast<int>(ptx::cluster_index())};
  const int count = static_cast<int>(params.rows) * params.cols;
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kPiece;
  const int step = static_cast<int>(gridDim.x * blockDim.x) * kPiece;
  const auto offset = [&](int i) { return first + i * step; };
  device::start_dependents();
  if (threadIdx.x == 0) {
    ptx::init_puts(&shared.arrived);
    ptx::expect_puts(&shared.arrived, blocks * warps * static_cast<int>(sizeof(float)));
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // every block's barrier is made
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (launch.clusters > 1 && threadIdx.x == 0 && offset(i) < count)
      ptx::prefetch_l2(x + offset(i),
                       min(count - offset(i), static_cast<int>(blockDim.x) * kPiece) * sizeof(T));
  device::wait_then_start_dependents();

  device::Vec<T> pieces[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    pieces[i] = load_some<true, kPiece>(x + offset(i), count - offset(i));
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    amax = device::MaxOrNaN::combine(amax, magnitude(pieces[i]));
  amax = device::warp_max_or_nan(amax);
  if (lane < blocks)
    ptx::put_in_block(&shared.maxima[rank * warps + warp], amax, &shared.arrived, lane);
  ptx::wait_for_puts(&shared.arrived);  // every warp's maximum is here

  amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlocks * kWarps; i += device::kWarpSize)
    if (i + lane < blocks * warps) amax = device::MaxOrNaN::combine(amax, shared.maxima[i + lane]);
  amax = device::warp_max_or_nan(amax);
  if constexpr (sizeof(T) == 2)
    if (launch.clusters > 1) amax = amax_of_clusters<T>(mail, shared, amax, count);
  const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.scale = scale;
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    store_some<true>(static_cast<std::uint8_t*>(params.q) + offset(i), pieces[i],
                     count - offset(i), inverse);
}

// ---- Launch -------------------------------------------------------------------------------------

struct Shape {
  int clusters, blocks, threads;

  constexpr int all() const { return clusters * blocks * threads; }
};

/// One cluster for up to 256 KB. Its blocks first: each SM then reads and encodes less. Two at
/// least: a launch without a cluster takes st.async for an illegal instruction.
constexpr Shape one_cluster(int pieces) {
  constexpr int kLeastThreads = 128;
  Shape shape{1, 2, kLeastThreads};
  while (shape.blocks < kBlocks && shape.all() < pieces) shape.blocks *= 2;
  while (shape.threads < kThreads && shape.all() < pieces) shape.threads *= 2;
  return shape;
}

/// More of 16 bits: the SMs of a cluster share a part of L2's bandwidth (H200, bf16: 64 x 4096 in 8
/// clusters 2.06 us, in one of 16 blocks 2.11, in two passes 2.62; 64 x 8192 2.29, in two passes
/// 2.96; 256 x 8192 in 16 clusters 3.81, in two passes 5.33).
constexpr Shape many_clusters(int pieces) {
  const Shape shape{8, kBlocks, 256};
  return pieces <= shape.all() * kMostHeld ? shape : Shape{kMostClusters, kBlocks, kThreads};
}

/// Whether it was small enough, and the device and the loaded code have clusters.
template <class T>
bool quantize(const QuantizeParams& params, Stream stream) {
  constexpr int kFew = kMostHeld / 2;
  constexpr int kMostOfOne = kBlocks * kThreads * kMostHeld;
  constexpr int kMost = sizeof(T) == 2 ? kMostClusters * kMostOfOne : kMostOfOne;
  const std::int64_t pieces = params.rows * (params.cols / device::Vec<T>::kSize);
  if (pieces > kMost) return false;
  if (!device::has_clusters<tensor_clusters_kernel<T, kFew>>()) return false;
  const auto count = static_cast<int>(pieces);
  const Shape shape = count <= kMostOfOne ? one_cluster(count) : many_clusters(count);
  const Launch launch{params, device::new_ticket() << 16, shape.clusters};
  dispatch_bool(count <= shape.all() * kFew, [&](auto is_few) {
    device::launch_chained<tensor_clusters_kernel<T, is_few() ? kFew : kMostHeld>>(
        dim3(shape.clusters * shape.blocks), dim3(shape.threads), 0, stream, launch,
        "quantize_fp8", shape.blocks);
  });
  return true;
}

}  // namespace ridgeline::quantize_clusters
