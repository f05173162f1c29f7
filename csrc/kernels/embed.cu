#include "kernels/embed.h"

#include "common/math.h"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/vec.cuh"

namespace ridgeline {
namespace {

// ---- Constants --------------------------------------------------------------------------------

constexpr int kEmbedThreads = 128;  // a row of 4096 16-bit elements takes four SMs

struct EmbedLaunch {
  EmbedParams params;
  bool wide;  // aligned for 16-byte accesses
};

// ---- Phases -----------------------------------------------------------------------------------

__device__ __forceinline__ std::int64_t id_at(const void* ids, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? static_cast<const std::int64_t*>(ids)[i]
                                : static_cast<const std::int32_t*>(ids)[i];
}

__device__ __forceinline__ std::int64_t row_or_0(std::int64_t row, std::int64_t rows) {
  return row >= 0 && row < rows ? row : 0;
}

/// Elements `first` and on of a row of `width`; what is past its end stays as it is.
template <class T, int kVec>
__device__ __forceinline__ void load_piece(device::Vec<T, kVec>& piece, const T* row,
                                           std::int64_t first, std::int64_t width, bool wide) {
  if (wide) {
    piece = device::load(row + first);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j)
    if (first + j < width) piece.data[j] = row[first + j];
}

/// A piece of a token's row, from element `first` on. Loads wait for each other: the id, the token
/// that it stands for, the row.
template <class T>
__device__ __forceinline__ device::Vec<T> embedded(const EmbedLaunch& launch, std::int64_t token,
                                                   std::int64_t first) {
  constexpr int kVec = device::Vec<T>::kSize;
  const EmbedParams& params = launch.params;
  std::int64_t id = id_at(params.ids, params.index_dtype, token);
  if (id < 0 && params.last_tokens != nullptr && -1 - id < params.last_count)
    id = params.last_tokens[-1 - id];
  const T* row =
      static_cast<const T*>(params.weight) + row_or_0(id, params.rows) * params.stride;
  device::Vec<T> piece;
  load_piece(piece, row, first, params.width, launch.wide);
  if (params.scale != 1.0f) {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      piece.data[j] = device::from_float<T>(device::to_float(piece.data[j]) * params.scale);
  }
  if (params.positions != nullptr) {
    const std::int64_t position =
        row_or_0(id_at(params.positions, params.index_dtype, token), params.position_rows);
    device::Vec<T> other;
    load_piece(other,
               static_cast<const T*>(params.position_weight) + position * params.position_stride,
               first, params.width, launch.wide);
    device::add(piece, other);
  }
  return piece;
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: tokens x pieces of a row; a thread moves 16 bytes.
template <class T>
__global__ void __launch_bounds__(kEmbedThreads)
    embed_kernel(const __grid_constant__ EmbedLaunch launch) {
  constexpr int kVec = device::Vec<T>::kSize;
  const EmbedParams& params = launch.params;
  const std::int64_t token = blockIdx.x;
  const std::int64_t first = (std::int64_t{blockIdx.y} * kEmbedThreads + threadIdx.x) * kVec;
  ptx::launch_dependents();
  if (!params.inputs_ready) ptx::wait_for_dependencies();
  device::Vec<T> piece;
  if (first < params.width) piece = embedded<T>(launch, token, first);
  // Kernels ahead may still read what `out` was before; and who waits for this one waits for them.
  if (params.inputs_ready) ptx::wait_for_dependencies();
  if (first >= params.width) return;
  T* out = static_cast<T*>(params.out) + token * params.width + first;
  if (launch.wide) {
    device::store(out, piece);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j)
    if (first + j < params.width) out[j] = piece.data[j];
}

// ---- Launch -----------------------------------------------------------------------------------

bool is_wide(const EmbedParams& p) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const auto address = [](const void* data) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  };
  return (address(p.weight) | address(p.position_weight) | address(p.out) | p.stride * size |
          p.position_stride * size | p.width * size) % 16 == 0;
}

}  // namespace

void embed(const EmbedParams& params, Stream stream) {
  if (params.tokens == 0 || params.width == 0) return;
  const EmbedLaunch launch{.params = params, .wide = is_wide(params)};
  const auto start = [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr std::int64_t kElements = kEmbedThreads * device::Vec<T>::kSize;
    const std::int64_t pieces = ceil_div(params.width, kElements);
    check(pieces <= 65535, "weight: expected rows of at most ", 65535 * kElements,
          " elements, got ", params.width);
    const dim3 grid(checked_int32(params.tokens, "tokens"), static_cast<unsigned>(pieces));
    device::launch_chained<embed_kernel<T>>(grid, dim3(kEmbedThreads), 0, stream, launch, "embed");
  };
  // Words of int32 are copied as floats are.
  if (params.dtype == DType::kInt32) return start(Type<float>{});
  device::dispatch_float(params.dtype, start);
}

}  // namespace ridgeline
