#include "common/math.h"
#include "device/dequant.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_epilogue.cuh"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kTile = 64;   // rows of x and of the weight a block owns
constexpr int kDepth = 16;  // columns at a time
constexpr int kEach = 4;    // rows and columns of the product a thread owns

struct SimpleParams {
  GemmParams gemm;
  float* partials;  // where the epilogue is another kernel's; else null
};

struct PrepareParams {
  GemmParams gemm;
  void* prepared;       // [M, stride] of the output's dtype
  std::int64_t stride;  // at least K
};

// ---- Phases -------------------------------------------------------------------------------------

/// One element of the weight as float32.
template <class T, WeightFormat kFormat>
__device__ float weight_at(const GemmParams& p, std::int64_t n, int k) {
  const std::int64_t at = n * p.weight.stride_row + k;
  if constexpr (kFormat == WeightFormat::kDense)
    return device::to_float(static_cast<const T*>(p.weight.data)[at]);
  if constexpr (kFormat == WeightFormat::kInt8)
    return static_cast<const std::int8_t*>(p.weight.data)[at];
  float value = device::dequantise(static_cast<const std::uint8_t*>(p.weight.data)[at],
                                   DType::kFloat8E4M3, 1.0f);
  if (p.weight.scale_layout == ScaleLayout::kBlock)
    value *= static_cast<const float*>(
        p.weight.scales)[n / kScaleBlock * ceil_div(p.K, kScaleBlock) + k / kScaleBlock];
  return value;
}

/// One element of x as float32.
template <class T, WeightFormat kFormat>
__device__ float x_at(const GemmParams& p, std::int64_t m, int k) {
  const std::int64_t at = m * p.x.stride_row + k;
  if constexpr (kFormat == WeightFormat::kInt8)
    return static_cast<const std::int8_t*>(p.x.data)[at];
  return device::to_float(static_cast<const T*>(p.x.data)[at]);
}

// ---- Kernels ------------------------------------------------------------------------------------

/// The product where tensor cores cannot go: float32, and rows that 16-byte loads cannot read.
/// Grid: (row tiles, tiles of weight rows) of 64 x 64. A thread owns 4 x 4 sums: over 16
/// columns in order, and these in order, so that rounding grows with K / 16. Shared memory: 16
/// columns of both operands in float32. Roofline: 2 M N K flops in fused multiply-adds.
template <class T, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    simple_kernel(const __grid_constant__ SimpleParams params) {
  __shared__ float x_tile[kDepth][kTile + 1], weight_tile[kDepth][kTile + 1];
  const GemmParams& p = params.gemm;
  const std::int64_t m0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const std::int64_t n0 = static_cast<std::int64_t>(blockIdx.y) * kTile;
  const int column = threadIdx.x % (kTile / kEach), row = threadIdx.x / (kTile / kEach);
  ptx::launch_dependents();
  ptx::wait_for_dependencies();

  float sums[kEach][kEach] = {};
  for (int k0 = 0; k0 < p.K; k0 += kDepth) {
    __syncthreads();  // everyone is done with the tiles
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int k = i % kDepth, r = i / kDepth;
      const bool in_k = k0 + k < p.K;
      x_tile[k][r] = in_k && m0 + r < p.M ? x_at<T, kFormat>(p, m0 + r, k0 + k) : 0.0f;
      weight_tile[k][r] = in_k && n0 + r < p.N ? weight_at<T, kFormat>(p, n0 + r, k0 + k) : 0.0f;
    }
    __syncthreads();  // the tiles are whole
    float parts[kEach][kEach] = {};
    for (int k = 0; k < kDepth; ++k) {
      float weight[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) weight[j] = weight_tile[k][column + j * (kTile / kEach)];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float value = x_tile[k][row + i * (kTile / kEach)];
#pragma unroll
        for (int j = 0; j < kEach; ++j) parts[i][j] = fmaf(value, weight[j], parts[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[i][j] += parts[i][j];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t m = m0 + row + i * (kTile / kEach), n = n0 + column + j * (kTile / kEach);
      if (m >= p.M || n >= p.N) continue;
      if (params.partials) {
        params.partials[m * p.N + n] = sums[i][j];
      } else {
        finish<T>(p, sums[i][j], m, n);
      }
    }
}

/// Rows of x as the product wants them. Grid: one block a row. Two passes over a row if it is
/// normalized; the second comes from L2. Bandwidth: 2 M K elements.
template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
  __shared__ float scratch[kThreads / device::kWarpSize];
  const GemmParams& p = params.gemm;
  const std::int64_t row = blockIdx.x;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const auto x_at = [&](int k) {
    const std::int64_t at = row * p.x.stride_row + k;
    if (p.x.dtype == DType::kFloat8E4M3)
      return device::dequantise(static_cast<const std::uint8_t*>(p.x.data)[at], DType::kFloat8E4M3,
                                1.0f);
    return device::to_float(static_cast<const T*>(p.x.data)[at]);
  };
  const auto norm_at = [&](int k) {
    return p.x.norm_dtype == DType::kFloat32
               ? static_cast<const float*>(p.x.norm_weight)[k]
               : device::to_float(static_cast<const T*>(p.x.norm_weight)[k]);
  };
  float scale = 1.0f;
  if (p.x.norm_weight) {
    float sum = 0.0f;
    for (int k = threadIdx.x; k < p.K; k += kThreads) sum += x_at(k) * x_at(k);
    scale = rsqrtf(device::block_reduce<device::Sum>(sum, scratch) / p.K + p.x.norm_eps);
  }
  T* out = static_cast<T*>(params.prepared) + row * params.stride;
  const int group_shift = p.x.scale_group == kWideGroup ? 8 : 7;  // `/` is a call's worth of code
  const float* scales = p.x.scale + row * ceil_div(p.K, p.x.scale_group);
  for (int k = threadIdx.x; k < params.stride; k += kThreads) {
    float value = 0.0f;
    if (k < p.K) {
      int from = p.x.perm ? p.x.perm[k] : k;
      if (from < 0 || from >= p.K) from = 0;
      value = x_at(from);
      if (p.x.norm_weight) value = value * scale * norm_at(from);
      if (p.x.scale_per_group) value *= scales[from >> group_shift];
    }
    out[k] = device::from_float<T>(value);
  }
}

/// The same where e4m3 becomes 16-bit floats and nothing else happens: 16 columns a thread. Grid:
/// enough threads. Bandwidth: 3 M K bytes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ PrepareParams params) {
  const GemmParams& p = params.gemm;
  const auto across = static_cast<unsigned>(params.stride / 16);
  const unsigned piece = blockIdx.x * kThreads + threadIdx.x, row = piece / across;
  const int column = static_cast<int>(piece % across) * 16;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if (row >= p.M) return;
  uint4 in{};
  if (column < p.K)
    in = *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(p.x.data) +
                                         row * p.x.stride_row + column);
  T* out = static_cast<T*>(params.prepared) + row * params.stride + column;
  device::store(out, device::dequantise8<T>({in.x, in.y}, DType::kFloat8E4M3, 1.0f));
  device::store(out + 8, device::dequantise8<T>({in.z, in.w}, DType::kFloat8E4M3, 1.0f));
}

/// 16 codes a thread. Grid: enough threads. Bandwidth: 2 M K bytes.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ PrepareParams params) {
  const GemmParams& p = params.gemm;
  const auto across = static_cast<unsigned>(params.stride / 16);
  const unsigned piece = blockIdx.x * kThreads + threadIdx.x, row = piece / across;
  const int column = static_cast<int>(piece % across) * 16;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  if (row >= p.M) return;
  const std::uint8_t* x = static_cast<const std::uint8_t*>(p.x.data) + row * p.x.stride_row;
  alignas(16) std::uint8_t codes[16] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (column + i < p.K) {
      const int from = p.x.perm ? p.x.perm[column + i] : column + i;
      codes[i] = x[from < 0 || from >= p.K ? 0 : from];
    }
  *reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(params.prepared) + row * params.stride +
                            column) = *reinterpret_cast<const uint4*>(codes);
}

// ---- Launch -------------------------------------------------------------------------------------

/// Whether 16 columns of x can be read at once.
bool reads_vectors(const GemmParams& p) {
  return !p.x.perm && reinterpret_cast<std::uintptr_t>(p.x.data) % 16 == 0 &&
         (p.M <= 1 || p.x.stride_row % 16 == 0);
}

/// A thread for each 16 columns of [M, stride].
dim3 pieces_grid(const GemmParams& p, std::int64_t stride) {
  return dim3(checked_int32(ceil_div<std::int64_t>(p.M * (stride / 16), kThreads), "linear: rows"));
}

}  // namespace

void launch_simple(const GemmParams& gemm, float* partials, Stream stream) {
  const SimpleParams params{.gemm = gemm, .partials = partials};
  const std::int64_t tiles_n = ceil_div<std::int64_t>(gemm.N, kTile);
  check(tiles_n <= 65535, "linear: weight rows must be at most ", 65535 * kTile, ", got ", gemm.N);
  const dim3 grid(checked_int32(ceil_div<std::int64_t>(gemm.M, kTile), "linear: row tiles"),
                  static_cast<unsigned>(tiles_n));
  device::dispatch_float(gemm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (gemm.weight.format == WeightFormat::kDense)
      return device::launch_chained<simple_kernel<T, WeightFormat::kDense>>(
          grid, dim3(kThreads), 0, stream, params, "linear: simple");
    if constexpr (sizeof(T) == 2) {
      if (gemm.weight.format == WeightFormat::kInt8)
        return device::launch_chained<simple_kernel<T, WeightFormat::kInt8>>(
            grid, dim3(kThreads), 0, stream, params, "linear: simple");
      check(gemm.weight.format == WeightFormat::kFp8,
            "linear: no kernel for unaligned int4 weights");
      device::launch_chained<simple_kernel<T, WeightFormat::kFp8>>(grid, dim3(kThreads), 0, stream,
                                                                   params, "linear: simple");
    }
  });
}

void launch_prepare(const GemmParams& gemm, void* prepared, std::int64_t stride, Stream stream) {
  const PrepareParams params{.gemm = gemm, .prepared = prepared, .stride = stride};
  const dim3 grid(checked_int32(gemm.M, "linear: rows"));
  const bool vectors = reads_vectors(gemm) && gemm.K % 16 == 0;
  device::dispatch_float(gemm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      if (vectors && gemm.x.dtype == DType::kFloat8E4M3 && !gemm.x.norm_weight &&
          !gemm.x.scale_per_group)
        return device::launch_chained<expand_kernel<T>>(pieces_grid(gemm, stride), dim3(kThreads),
                                                        0, stream, params, "linear: prepare");
    }
    device::launch_chained<prepare_kernel<T>>(grid, dim3(kThreads), 0, stream, params,
                                              "linear: prepare");
  });
}

void launch_gather(const GemmParams& gemm, void* gathered, std::int64_t stride, Stream stream) {
  const PrepareParams params{.gemm = gemm, .prepared = gathered, .stride = stride};
  device::launch_chained<gather_kernel>(pieces_grid(gemm, stride), dim3(kThreads), 0, stream,
                                        params, "linear: gather");
}

}  // namespace ridgeline::gemm_detail
