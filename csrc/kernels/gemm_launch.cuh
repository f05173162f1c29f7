#pragma once
#include "device/launch.cuh"
#include "kernels/gemm_config.h"

/// The kernels that gemm() is made of, one file each. `partials` is float32 [segments, M, N].
namespace ridgeline::gemm_detail {

/// Lets a kernel take more than 48 KB of shared memory. The limit is a property of the kernel on
/// the current device, so it is set ahead of every launch.
template <class Params>
void allow_shared(void (*kernel)(Params), std::size_t bytes) {
  device::cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(bytes)),
                     "linear: shared memory");
}

/// Tensor cores; x of the output's dtype, it and its rows aligned to 16 bytes, and so far readable.
void launch_stream(const GemmParams& params, const gemm_config::Config& config, float* partials,
                   Stream stream);
void launch_tile(const GemmParams& params, const gemm_config::Config& config, float* partials,
                 Stream stream);

/// Hopper's kernels; x of the output's dtype, or e4m3 where the weight is, aligned to 16 bytes as
/// the weight is.
void launch_strips(const GemmParams& params, Stream stream);
void launch_digits(const GemmParams& params, Stream stream);
void launch_once(const GemmParams& params, Stream stream);
void launch_once_rows(const GemmParams& params, Stream stream);
void launch_held(const GemmParams& params, Stream stream);
void launch_cluster(const GemmParams& params, const gemm_config::Config& config, Stream stream);

/// The cluster kernel's tiles of gemm_config::kWideCols weight rows; x e4m3, or its terms.
void launch_wide(const GemmParams& params, int segments, Stream stream);

/// Hopper's kernels for many rows. Expand: x of the output's dtype, or e4m3, `shared`
/// gemm_config::shared_bytes() of any contents; fp8: x and weight e4m3, or int8.
void launch_expand(const GemmParams& params, const gemm_config::Config& config, void* shared,
                   Stream stream);
void launch_fp8(const GemmParams& params, const gemm_config::Config& config, Stream stream);

/// Hopper, 16 bits: GELU, its tanh form or gated SiLU, and no residual. Operands are aligned to 16
/// bytes, N is a multiple of 16.
void launch_turns(const GemmParams& params, Stream stream);

/// Any alignment, float32 arithmetic.
void launch_simple(const GemmParams& params, float* partials, Stream stream);

/// Rows of x as [M, stride] of the output's dtype: normalized, permuted, expanded from e4m3, padded
/// with zeros to `stride`.
void launch_prepare(const GemmParams& params, void* prepared, std::int64_t stride, Stream stream);

/// Rows of bf16 x, aligned to 16 bytes, as two terms of e4m3 in units of the row, a power of two:
/// [2, round_up(M, 8), K], K a multiple of 16. A unit is negative where its row has values that are
/// not finite; the terms have zeros for them.
constexpr int kTermsOfX = 2;
void launch_split_x(const GemmParams& params, void* terms, float* units, Stream stream);

/// Rows of e4m3 x as [M, stride], permuted, padded with zeros to `stride`, a multiple of 16: where
/// the copy engine cannot bring them as they are.
void launch_gather(const GemmParams& params, void* gathered, std::int64_t stride, Stream stream);

/// The epilogue over float32 partials of `segments` segments, or over a product [M, N] of the
/// output's dtype (segments = 0) whose bias is in it already.
void launch_finish(const GemmParams& params, const void* partials, int segments, Stream stream);

/// Whether cuBLASLt can be opened in this process.
bool library_available();

constexpr std::size_t kLibraryWorkspace = 32 << 20;  // what cuBLAS itself takes on Hopper

/// product = x W^T + bias by cuBLASLt, and what else makes y of it if it `finishes`. False if it has
/// no algorithm for the case; then nothing was enqueued.
bool launch_library(const GemmParams& params, bool finishes, void* product, void* workspace,
                    Stream stream);

}  // namespace ridgeline::gemm_detail
