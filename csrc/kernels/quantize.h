#pragma once
#include "common/types.h"

namespace ridgeline {

/// q = x / scale as fp8 e4m3, nearest even; scale = (largest |x| of the extent) / 448, 1 if all are
/// zero, so value = q * scale. An infinity or NaN makes its whole extent dequantise to NaN. Rows
/// also as int8, their largest magnitude 127.
///
/// Roofline: reads x and writes q once, 3 bytes an element of 16 bits. "tensor" of more than
/// 4 MB (fp32: 256 KB) reads x twice: no code can be written before all is read, and L2 keeps
/// little of it.
struct QuantizeParams {
  enum class Granularity : std::uint8_t { kTensor, kRow, kGroup, kWideGroup, kBlock };

  static constexpr std::int32_t kExtent = 128;  // columns of a group; rows and columns of a block
  static constexpr std::int32_t kWideExtent = 256;  // columns of a wide group
  static constexpr std::int32_t kPartials = 1024;  // blocks of the first of two passes
  static constexpr std::int32_t kWorkspace = 4096;  // words for partial maxima or clusters

  DType dtype;                // of x
  Granularity granularity;
  DType codes = DType::kFloat8E4M3;  // of q; kInt8 of kRow alone
  std::int64_t rows;          // 0 is legal
  std::int32_t cols;          // 0 is legal; the last group or block of a row may be narrower
  const void* x;              // [rows, cols]
  std::int64_t stride_x_row;  // elements
  void* q;                    // [rows, cols] contiguous
  float* scale;               // tensor [1], row [rows], group [rows, ceil(cols / 128 or 256)],
                              // block [ceil(rows / 128), ceil(cols / 128)]; contiguous
  float* partials;            // [kWorkspace] for "tensor" on a GPU, of any contents; else null
};

/// Enqueues one kernel ("tensor" that is read twice: two) and allocates nothing.
void quantize(const QuantizeParams& params, Stream stream);

namespace cpu {
void quantize(const QuantizeParams& params);
}

}  // namespace ridgeline
