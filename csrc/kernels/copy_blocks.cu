#include <algorithm>

#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/kv_cache.h"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

constexpr int kCopyThreads = 256;
constexpr int kInFlight = 4;  // 16-byte loads a thread has under way
// 16 KB a step: a cache block of 128 KB feeds eight thread blocks.
constexpr int kChunkUnits = kCopyThreads * kInFlight;
constexpr int kTensors = 4;

struct CopyLaunch {
  CopyBlocksParams params;
  bool wide[kTensors];  // aligned for 16-byte accesses
};

// ---- Phases -----------------------------------------------------------------------------------

/// Where unit `unit` of a block lies, in bytes from the block's start.
template <class Piece>
__device__ __forceinline__ std::int64_t offset_of(const BlockCopy& copy, std::uint32_t unit) {
  const std::uint32_t in_row = copy.row_bytes / sizeof(Piece);
  const std::uint32_t row = unit / in_row;
  const std::uint32_t outer = row / copy.inner, inner = row % copy.inner;
  return outer * copy.stride_outer + inner * copy.stride_inner +
         std::int64_t{unit % in_row} * sizeof(Piece);
}

template <class Piece>
__device__ void copy_pieces(const BlockCopy& copy, std::int64_t source, std::int64_t destination) {
  const std::int64_t total =
      std::int64_t{copy.outer} * copy.inner * (copy.row_bytes / static_cast<int>(sizeof(Piece)));
  const char* from = copy.data + source * copy.stride_block;
  char* to = copy.data + destination * copy.stride_block;
  for (std::int64_t start = std::int64_t{blockIdx.y} * kChunkUnits; start < total;
       start += std::int64_t{gridDim.y} * kChunkUnits) {
    Piece pieces[kInFlight];
    std::int64_t offsets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const std::int64_t unit = start + i * kCopyThreads + threadIdx.x;
      offsets[i] = unit < total ? offset_of<Piece>(copy, static_cast<std::uint32_t>(unit)) : -1;
      if (offsets[i] >= 0) pieces[i] = *reinterpret_cast<const Piece*>(from + offsets[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (offsets[i] >= 0) *reinterpret_cast<Piece*>(to + offsets[i]) = pieces[i];
  }
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: pairs x chunks x tensors. A thread block copies every gridDim.y-th chunk of one block of
/// one tensor.
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const __grid_constant__ CopyLaunch launch) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const BlockCopy& copy = launch.params.tensors[blockIdx.z];
  if (copy.data == nullptr) return;
  const std::int64_t source = launch.params.pair[2 * std::int64_t{blockIdx.x}];
  const std::int64_t destination = launch.params.pair[2 * std::int64_t{blockIdx.x} + 1];
  const std::int64_t blocks = launch.params.num_blocks;
  if (source < 0 || source >= blocks || destination <= 0 || destination >= blocks) return;
  if (launch.wide[blockIdx.z]) {
    copy_pieces<uint4>(copy, source, destination);
  } else {
    copy_pieces<std::uint8_t>(copy, source, destination);
  }
}

// ---- Launch -----------------------------------------------------------------------------------

bool is_wide(const BlockCopy& copy) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(copy.data));
  return (address | copy.stride_block | copy.stride_outer | copy.stride_inner | copy.row_bytes) %
             16 ==
         0;
}

}  // namespace

void copy_blocks(const CopyBlocksParams& params, Stream stream) {
  CopyLaunch launch{.params = params, .wide = {}};
  std::int64_t units = 0;
  for (int i = 0; i < kTensors; ++i) {
    const BlockCopy& copy = params.tensors[i];
    if (copy.data == nullptr) continue;
    launch.wide[i] = is_wide(copy);
    const std::int64_t bytes = std::int64_t{copy.outer} * copy.inner * copy.row_bytes;
    units = std::max(
        units, std::int64_t{checked_int32(bytes, "bytes of a block")} / (launch.wide[i] ? 16 : 1));
  }
  if (params.pairs == 0 || units == 0) return;
  constexpr std::int64_t kMaxChunks = 256;
  const std::int64_t chunks = std::min(ceil_div(units, std::int64_t{kChunkUnits}), kMaxChunks);
  const dim3 grid(checked_int32(params.pairs, "pairs"), static_cast<unsigned>(chunks), kTensors);
  device::launch_chained<copy_blocks_kernel>(grid, dim3(kCopyThreads), 0, stream, launch,
                                             "copy_blocks");
}

}  // namespace ridgeline
