#pragma once
#include "common/types.h"

namespace ridgeline {

/// Applied to x W^T + bias. The gated ones halve the columns: y = act(first half) * second half.
enum class Activation : std::uint8_t { kNone, kGelu, kGeluTanh, kSilu, kRelu, kSiluMul, kGeluMul };

constexpr bool is_gated(Activation activation) {
  return activation == Activation::kSiluMul || activation == Activation::kGeluMul;
}

enum class WeightFormat : std::uint8_t {
  kDense,  // [N, K] of the output's dtype
  kInt4,   // Int4Layout below
  kFp8,    // [N, K] e4m3
  kInt8,   // [N, K] int8, of an int8 x alone: sums are exact in int32
  kFp4,    // Fp4Layout below, experts alone
};

constexpr int kFp4Group = 32;  // columns that share a power of two

/// Whether weights have codes of 4 bits, in Int4Layout or in Fp4Layout.
constexpr bool has_nibbles(WeightFormat format) {
  return format == WeightFormat::kInt4 || format == WeightFormat::kFp4;
}

/// Where products of int8 are summed in int32, -128 by -128 fits so many times.
constexpr std::int64_t kMostColumnsOfInt8 = 131071;

/// Where the float32 scales of fp8 weights apply; those of int8 are kTensor or kRow.
enum class ScaleLayout : std::uint8_t {
  kTensor,  // one for the whole
  kRow,     // [N], one an output column
  kBlock,   // [ceil(N / 128), ceil(K / 128)]
};

constexpr int kScaleBlock = 128;
constexpr int kWideGroup = 256;  // columns of x, or of y, that share a scale between two products

/// The int4 layout: blocks of 16 rows x 64 columns, [ceil(N / 16), ceil(K / 64)] of them, 512
/// bytes each, so that a row block streams from consecutive addresses. In a block each of 32 lanes
/// (g = lane / 4, t = lane % 4) owns 16 consecutive bytes: four words, one for each 16 columns.
/// Nibbles j and j + 4 of word f are columns 16 f + 2 t + 8 (j / 2) and the next one, of row
/// g + 8 (j % 2): the registers of the A operand of mma.m16n8k16 and, for each warp, of wgmma's,
/// or of the B operands of two n8 tiles; and one masked shift a register, to dequantise.
/// The padding is the zero point.
struct Int4Layout {
  static constexpr int kRows = 16;
  static constexpr int kCols = 64;
  static constexpr int kWords = 128;  // 32-bit words a block
  static constexpr int kSymmetricZero = 8;
};

/// The fp4 layout: the same order of blocks, of their words, and of what a word has: eight codes of
/// e2m1, which are a sign, two bits of exponent and one of mantissa. But each code lies so that a
/// rotation of the word puts it among the lowest exponents of a bfloat16, to which its value is
/// another power of two: in a half of the word, code j of the eight, or j + 4, has
///   j        0   1   2   3
///   sign    15   5*  9   3*    * in the other half
///   exponent 8   14  2   4
///            7   13  1   11
///   mantissa 6   12  0   10
/// and turned right by 0, 6, 26 and, but for the bit in 4, which 28 brings, 4 is in bits 15, 8, 7
/// and 6. Behind the words of a block are exponents, plus kBias: of its 16 rows for the first 32
/// columns, then for the others. They are from -126 to 1: 2^126 times such a power is finite in
/// bfloat16. Codes of the padding are zero.
struct Fp4Layout {
  static constexpr int kCodeBytes = Int4Layout::kWords * 4;
  static constexpr int kBytes = kCodeBytes + 2 * Int4Layout::kRows;  // of a block
  static constexpr int kBias = 127;
};

/// Bytes of a block of weights of 4 bits.
constexpr int block_bytes_of(WeightFormat format) {
  return format == WeightFormat::kFp4 ? Fp4Layout::kBytes : Fp4Layout::kCodeBytes;
}

/// The weight matrix [N, K]. Int4: value = (q - zero) * scale, rounded to the output's dtype.
struct GemmWeight {
  WeightFormat format = WeightFormat::kDense;
  const void* data = nullptr;
  std::int64_t stride_row = 0;                // elements; unused by kInt4
  const void* scales = nullptr;         // kInt4: [groups, N] as the output; else float32
  ScaleLayout scale_layout = ScaleLayout::kTensor;  // of kFp8 and kInt8
  const std::uint8_t* zeros = nullptr;        // kInt4: [groups, N], or null: 8
  std::int32_t group = 0;  // columns a scale of kInt4 covers: 32 i, or K

  /// Whether products are multiplied by a scale of their weight row, or of all.
  constexpr bool scales_products() const {
    return format == WeightFormat::kInt8 ||
           (format == WeightFormat::kFp8 && scale_layout != ScaleLayout::kBlock);
  }
};

/// The activations [M, K], and what happens to them before the product.
struct GemmInput {
  DType dtype = DType::kFloat32;              // the output's, or e4m3, or int8
  const void* data = nullptr;
  std::int64_t stride_row = 0;                // elements
  const float* scale = nullptr;               // of 8 bits: the product is multiplied by it
  bool scale_per_row = false;                 // scale is [M], else one value, ...
  bool scale_per_group = false;               // ... or [M, ceil(K / scale_group)], of the values
  std::int32_t scale_group = kScaleBlock;     // columns of x that share one: 128, or 256
  const void* whole = nullptr;                // bf16 [M, K] of which data is, in units of scale, ...
  std::int64_t stride_whole = 0;              // ... two terms of e4m3, [2, round_up(M, 8), K]
  bool made_ahead = false;                    // by the kernel ahead, which lets this one on early
  const std::int32_t* perm = nullptr;         // column c of the weight meets perm[c] of x
  bool to_codes = false;                      // one row that becomes e4m3, normalized or not
  const void* norm_weight = nullptr;          // rmsnorm over the row first; or null
  DType norm_dtype = DType::kFloat32;
  float norm_eps = 0.0f;
};

/// y = act(x W^T + bias) + residual, products and sums in float32.
///
/// Roofline: the weight's bytes, M K and M N elements; 2 M N K flops. Bandwidth up to some hundred
/// rows, tensor cores beyond. K = 0 is legal: the product is zero.
struct GemmParams {
  DType dtype = DType::kFloat32;              // of y, bias, residual, dense weight, int4 scales
  std::int64_t M = 0;                         // rows of x; 0 is legal
  std::int32_t N = 0;                         // rows of the weight
  std::int32_t K = 0;
  GemmInput x = {};
  GemmWeight weight = {};
  Activation activation = Activation::kNone;
  const void* bias = nullptr;                 // [N], or null
  const void* residual = nullptr;             // [M, out_cols], not y; or null
  std::int64_t stride_residual = 0;
  void* y = nullptr;                          // [M, out_cols], contiguous
  float* y_scale = nullptr;                   // [M, groups of out_cols]: y is e4m3, or null
  void* workspace = nullptr;                  // gemm_workspace_bytes(), aligned to 256
  bool batch_invariant = false;               // a row's bits do not depend on M
  bool weights_ready = false;                 // no kernel of the stream still writes the weight
  bool adds_to_y = false;                     // y += the rounded product; where gemm_adds()

  constexpr std::int32_t out_cols() const { return is_gated(activation) ? N / 2 : N; }
};

/// Bytes that gemm() needs on the current device. A function of shapes, strides and addresses.
std::size_t gemm_workspace_bytes(const GemmParams& params);

/// Whether gemm() takes `x.to_codes` on the current device: else quantize() or rmsnorm() makes
/// the codes.
bool gemm_makes_codes(const GemmParams& params);

/// Whether gemm() takes `adds_to_y` on the current device: else gemm_finish() adds the product.
bool gemm_adds(const GemmParams& params);

/// Whether gemm() takes `y_scale` on the current device: else quantize() makes the codes.
bool gemm_makes_groups(const GemmParams& params);

/// Enqueues one to three kernels; allocates nothing on the device.
void gemm(const GemmParams& params, Stream stream);

/// y = act(product) + residual, which y may be; of a product [M, N] with bias and scales in it.
void gemm_finish(const GemmParams& params, const void* product, Stream stream);

namespace cpu {

/// The product by the library's own loops: each weight tile is expanded to float32 once.
/// One order of K for every M.
std::size_t gemm_workspace_bytes(const GemmParams& params);
void gemm(const GemmParams& params);

/// The rows of x, normalized if asked, as [M, K] contiguous of its dtype, for a product done
/// elsewhere.
void gemm_prepare(const GemmParams& params, void* prepared);

/// y = act(product) + residual, which y may be, where the product [M, N] (bias included) was
/// computed elsewhere.
void gemm_finish(const GemmParams& params, const void* product);

}  // namespace cpu

}  // namespace ridgeline
