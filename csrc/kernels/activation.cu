#include <cstdint>

#include "common/math.h"
#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/row.cuh"
#include "device/vec.cuh"
#include "kernels/activation.h"

namespace ridgeline {
namespace {

using Function = ActivationParams::Function;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kThreads = 128;

// Rows a thread works on at once: four loads (gated: eight) of 16 bytes in flight, where there are
// threads enough to fill the machine without that.
constexpr int kManyRows = 4;
constexpr std::int64_t kFillingPieces = 132 * 2048;

/// The parameters and how the pieces of 16 bytes (or single elements) are dealt out.
struct Launch {
  ActivationParams params;
  int pieces;        // in a row of y
  int column_tiles;  // blocks beside each other
  int across;        // threads of a block beside each other; the others lie below
};

// ---- Phases -------------------------------------------------------------------------------------

/// The pieces that a thread owns: one column of pieces, kRows rows of it.
template <int kWidth, int kRows>
struct Place {
  std::int64_t first_row;
  std::int64_t rows;
  int down;    // rows between two of a thread's
  int column;  // of y, in elements
  bool inside;

  __device__ explicit Place(const Launch& launch) {
    const std::int64_t tile = blockIdx.x;
    const int x = static_cast<int>(threadIdx.x) % launch.across;
    const int y = static_cast<int>(threadIdx.x) / launch.across;
    const int piece = static_cast<int>(tile % launch.column_tiles) * launch.across + x;
    down = static_cast<int>(blockDim.x) / launch.across;
    first_row = tile / launch.column_tiles * (down * kRows) + y;
    rows = launch.params.rows;
    column = piece * kWidth;
    inside = piece < launch.pieces;
  }

  __device__ std::int64_t row(int i) const { return first_row + i * down; }
  __device__ bool holds(int i) const { return inside && row(i) < rows; }
};

template <class T, int kWidth, int kRows>
__device__ void load_column(device::Vec<T, kWidth> (&pieces)[kRows],
                            const Place<kWidth, kRows>& place, const ActivationParams& params,
                            std::int64_t offset) {
  const T* x = static_cast<const T*>(params.x) + offset + place.column;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (place.holds(i))
      pieces[i] = device::load_vec<kWidth>(x + place.row(i) * params.stride_x_row);
}

/// Calls fn(act) with the call's activation of one value.
template <bool kFast, class Fn>
__device__ void with_function(Function function, Fn&& fn) {
  switch (function) {
    case Function::kGelu: return fn([](float v) { return device::gelu<kFast>(v); });
    case Function::kGeluTanh: return fn([](float v) { return device::gelu_tanh<kFast>(v); });
    case Function::kSilu: return fn([](float v) { return device::silu<kFast>(v); });
    case Function::kSwigluClamped: return;  // of gate and up: with_gated's
  }
}

/// Calls fn(product) with product(gate, up), the call's gated function. kClamped: kSwigluClamped.
template <bool kFast, bool kClamped, class Fn>
__device__ void with_gated(const ActivationParams& params, Fn&& fn) {
  if constexpr (kClamped)
    fn([&](float gate, float up) {
      return device::swiglu_clamped<kFast>(gate, up, params.limit, params.alpha);
    });
  else
    with_function<kFast>(params.function, [&](auto act) {
      fn([&](float gate, float up) { return act(gate) * up; });
    });
}

// ---- Kernels ------------------------------------------------------------------------------------

/// Grid: tiles of `across` pieces by the rows below, one dimension. Block: 128 threads; a thread
/// owns one column of pieces and reads its bias once. One row is spread over as many blocks as it
/// has tiles. Bytes: x in, y out; at most 20 instructions an element: bandwidth.
template <class T, int kWidth, int kRows>
__global__ void __launch_bounds__(kThreads) bias_act_kernel(const __grid_constant__ Launch launch) {
  const ActivationParams& params = launch.params;
  const Place<kWidth, kRows> place(launch);
  device::Vec<T, kWidth> x[kRows], bias;

  device::start_dependents();
  const auto load_bias = [&] {
    if (place.inside)
      bias = device::load_vec<kWidth>(static_cast<const T*>(params.bias) + place.column);
  };
  if (params.weights_ready) load_bias();
  device::wait_then_start_dependents();
  load_column(x, place, params, 0);
  if (!params.weights_ready) load_bias();

  T* y = static_cast<T*>(params.y) + place.column;
  const auto added = device::floats(bias);
  with_function<sizeof(T) == 2>(params.function, [&](auto act) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!place.holds(i)) continue;
      device::Vec<float, kWidth> values = device::floats(x[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values.data[j] = act(values.data[j] + added.data[j]);
      device::store(y + place.row(i) * params.cols, device::rounded<T>(values));
    }
  });
}

/// As above; a thread reads its pieces of both halves of x. Bytes: both halves in, y out.
template <class T, int kWidth, int kRows, bool kClamped>
__global__ void __launch_bounds__(kThreads)
    gated_act_kernel(const __grid_constant__ Launch launch) {
  const ActivationParams& params = launch.params;
  const Place<kWidth, kRows> place(launch);
  device::Vec<T, kWidth> gate[kRows], up[kRows];

  device::start_dependents();
  device::wait_then_start_dependents();
  load_column(gate, place, params, 0);
  load_column(up, place, params, params.cols);

  T* y = static_cast<T*>(params.y) + place.column;
  with_gated<sizeof(T) == 2, kClamped>(params, [&](auto product) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!place.holds(i)) continue;
      device::Vec<float, kWidth> values = device::floats(gate[i]), factors = device::floats(up[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values.data[j] = product(values.data[j], factors.data[j]);
      device::store(y + place.row(i) * params.cols, device::rounded<T>(values));
    }
  });
}

// ---- Launch -------------------------------------------------------------------------------------

/// Calls fn(Type<T>{}, Int<width>{}, Int<rows a thread>{}, launch, blocks).
template <class Fn>
void dispatch(const ActivationParams& params, Fn&& fn) {
  if (params.rows == 0 || params.cols == 0) return;
  const auto element = static_cast<std::int64_t>(size_of(params.dtype));
  // cols * element aligns the rows of y, the bias's end and the second half of x.
  const bool vectors = device::all_aligned(16, {params.x, params.bias, params.y},
                                           {params.stride_x_row * element, params.cols * element});
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVector = device::Vec<T>::kSize;
    const auto run = [&](auto width, auto rows_each) {
      Launch launch{
          .params = params, .pieces = params.cols / width, .column_tiles = 0, .across = 1};
      while (launch.across < kThreads && launch.across < launch.pieces) launch.across *= 2;
      launch.column_tiles = ceil_div(launch.pieces, launch.across);
      const std::int64_t rows_a_block = kThreads / launch.across * rows_each;
      const std::int64_t blocks = ceil_div(params.rows, rows_a_block) * launch.column_tiles;
      fn(type, width, rows_each, launch, checked_int32(blocks, "x: blocks"));
    };
    if (!vectors) return run(Int<1>{}, Int<kManyRows>{});
    if constexpr (sizeof(T) < sizeof(float))  // compile time is spared of the other
      if (params.rows * (params.cols / kVector) > kFillingPieces)
        return run(Int<kVector>{}, Int<kManyRows>{});
    run(Int<kVector>{}, Int<1>{});
  });
}

}  // namespace

void bias_act(const ActivationParams& params, Stream stream) {
  dispatch(params, [&](auto type, auto width, auto rows, const Launch& launch, int blocks) {
    using T = typename decltype(type)::type;
    device::launch_chained<bias_act_kernel<T, width(), rows()>>(dim3(blocks), dim3(kThreads), 0,
                                                                stream, launch, "bias_act");
  });
}

void gated_act(const ActivationParams& params, Stream stream) {
  dispatch_bool(params.function == Function::kSwigluClamped, [&](auto clamped) {
    dispatch(params, [&](auto type, auto width, auto rows, const Launch& launch, int blocks) {
      using T = typename decltype(type)::type;
      device::launch_chained<gated_act_kernel<T, width(), rows(), clamped()>>(
          dim3(blocks), dim3(kThreads), 0, stream, launch, "gated_act");
    });
  });
}

}  // namespace ridgeline
