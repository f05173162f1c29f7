#include <algorithm>
#include <cstdint>

#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/quantize_tensor_clusters.cuh"
#include "kernels/quantize_tile.cuh"

namespace ridgeline {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kThreads = 512;  // of a chunk
constexpr int kManyPieces = 4;  // of a chunk a thread: loads in flight
constexpr int kFewChunks = 2 * 132;  // up to so many, threads have one piece each: more SMs work

/// A tensor that no cluster holds, as pieces of 16 bytes.
struct TensorLaunch {
  QuantizeParams params;
  bool vectors;
  unsigned pieces;  // of the tensor
  unsigned across;  // of a row
  unsigned chunks;
  unsigned partials;
};

// ---- Kernels ------------------------------------------------------------------------------------

/// A thread's pieces of one chunk. kFlat: whole, aligned pieces that lie together; else the pieces
/// of rows, of which one may be narrower.
template <class T, bool kFlat, int kEach>
struct Chunk {
  static constexpr int kPiece = device::Vec<T>::kSize;

  const TensorLaunch& launch;
  unsigned first;  // piece
  device::Vec<T, kPiece> pieces[kEach];

  __device__ Chunk(const TensorLaunch& launch, unsigned chunk)
      : launch(launch), first(chunk * (kEach * kThreads) + threadIdx.x) {}

  /// Calls fn(piece, its place in x, in q, how many elements exist).
  template <class Fn>
  __device__ void visit(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned number = first + i * kThreads;
      const bool exists = number < launch.pieces;
      if constexpr (kFlat) {
        const std::int64_t at = static_cast<std::int64_t>(number) * kPiece;
        fn(pieces[i], at, at, exists ? kPiece : 0);
      } else {
        const std::int64_t row = number / launch.across;  // divided in 32 bits
        const int column = static_cast<int>(number % launch.across) * kPiece;
        fn(pieces[i], row * launch.params.stride_x_row + column, row * launch.params.cols + column,
           exists ? launch.params.cols - column : 0);
      }
    }
  }

  __device__ void load() {
    const T* x = static_cast<const T*>(launch.params.x);
    visit([&](auto& piece, std::int64_t at, std::int64_t, int count) {
      if (kFlat || launch.vectors) piece = load_some<true, kPiece>(x + at, count);
      else piece = load_some<false, kPiece>(x + at, count);
    });
  }

  __device__ float amax() const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      largest = device::MaxOrNaN::combine(largest, magnitude(pieces[i]));
    return largest;
  }

  __device__ void store(float inverse) {
    auto* q = static_cast<std::uint8_t*>(launch.params.q);
    visit([&](auto& piece, std::int64_t, std::int64_t at, int count) {
      if (kFlat || launch.vectors) store_some<true>(q + at, piece, count, inverse);
      else store_some<false>(q + at, piece, count, inverse);
    });
  }
};

/// The first pass over a tensor that no cluster holds. Grid: up to kPartials blocks, which
/// share the chunks out; each leaves its largest magnitude. Bytes: x in: bandwidth.
template <class T, bool kFlat, int kEach>
__global__ void __launch_bounds__(kThreads)
    tensor_amax_kernel(const __grid_constant__ TensorLaunch launch) {
  __shared__ float maxima[kThreads / device::kWarpSize];
  ptx::wait_for_dependencies();
  ptx::launch_dependents();  // after the wait: x is complete when the second pass starts
  float amax = 0.0f;
  for (unsigned i = blockIdx.x; i < launch.chunks; i += gridDim.x) {
    Chunk<T, kFlat, kEach> chunk(launch, i);
    chunk.load();
    amax = device::MaxOrNaN::combine(amax, chunk.amax());
  }
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  if (threadIdx.x == 0) launch.params.partials[blockIdx.x] = amax;
}

/// The second, whose first blocks read while the first pass runs (H200, bf16 64 x 8192: 3.17 us
/// where it reads after the wait, 2.92 so). Grid: the chunks, backwards: what the first pass read
/// last may still be in L2. Bytes: x in as far as L2 has not kept it, codes out: bandwidth.
template <class T, bool kFlat, int kEach>
__global__ void __launch_bounds__(kThreads)
    tensor_codes_kernel(const __grid_constant__ TensorLaunch launch) {
  __shared__ float maxima[kThreads / device::kWarpSize];
  Chunk<T, kFlat, kEach> chunk(launch, gridDim.x - 1 - blockIdx.x);
  chunk.load();  // before the wait: the first pass writes nothing of x
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  float amax = 0.0f;
  for (unsigned i = threadIdx.x; i < launch.partials; i += kThreads)
    amax = device::MaxOrNaN::combine(amax, launch.params.partials[i]);
  amax = device::block_reduce<device::MaxOrNaN>(amax, maxima);
  const float scale = scale_of_amax(amax, DType::kFloat8E4M3);
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.params.scale = scale;
  chunk.store(1.0f / scale);
}

}  // namespace

void quantize_tensor(QuantizeParams params, bool vectors, Stream stream) {
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool together = params.stride_x_row == params.cols;
    if (together && vectors && quantize_clusters::quantize<T>(params, stream)) return;
    const bool flat = together && vectors;
    const std::int64_t across = ceil_div(params.cols, device::Vec<T>::kSize);
    const std::int32_t pieces = checked_int32(params.rows * across, "x: pieces of 16 bytes");
    const auto launch_passes = [&](auto is_flat, auto each) {
      const int chunks = ceil_div(pieces, each() * kThreads);
      const int partials = std::min(chunks, QuantizeParams::kPartials);
      const TensorLaunch launch{.params = params,
                                .vectors = vectors,
                                .pieces = static_cast<unsigned>(pieces),
                                .across = static_cast<unsigned>(across),
                                .chunks = static_cast<unsigned>(chunks),
                                .partials = static_cast<unsigned>(partials)};
      device::launch_chained<tensor_amax_kernel<T, is_flat(), each()>>(
          dim3(partials), dim3(kThreads), 0, stream, launch, "quantize_fp8");
      device::launch_chained<tensor_codes_kernel<T, is_flat(), each()>>(
          dim3(chunks), dim3(kThreads), 0, stream, launch, "quantize_fp8");
    };
    if (!flat) return launch_passes(std::false_type{}, Int<kManyPieces>{});
    if (pieces <= kFewChunks * kThreads) return launch_passes(std::true_type{}, Int<1>{});
    launch_passes(std::true_type{}, Int<kManyPieces>{});
  });
}

}  // namespace ridgeline
