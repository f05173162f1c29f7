#include "kernels/gemm_grouped.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "common/math.h"

namespace ridgeline::cpu {
namespace {

/// The CPU checks what the GPU cannot read without waiting.
void check_indices(const GroupedGemmParams& p) {
  std::int32_t before = 0;
  for (std::int32_t e = 0; e <= p.experts; ++e) {
    const std::int32_t offset = p.offsets[e];
    check(offset >= before && offset <= p.gemm.M && (e > 0 || offset == 0),
          "offsets: expected numbers from 0 to ", p.gemm.M, " that do not fall, got ", offset,
          " at ", e);
    before = offset;
  }
  for (std::int64_t s = 0; p.rows && s < p.offsets[p.experts]; ++s)
    check(p.rows[s] >= 0 && p.rows[s] < p.x_rows, "rows: expected rows of x in [0, ", p.x_rows,
          "), got ", p.rows[s], " at ", s);
}

/// The rows of x that one expert multiplies, one after the other, and their scales.
struct Gathered {
  std::vector<char> rows;
  std::vector<float> scales;

  void take(const GroupedGemmParams& p, std::int64_t begin, GemmParams& of_expert) {
    const std::int64_t stride = p.gemm.x.stride_row * size_of(p.gemm.x.dtype);
    const auto* x = static_cast<const char*>(p.gemm.x.data);
    of_expert.x.data = x + begin * stride;
    const GemmInput& input = p.gemm.x;
    const std::int64_t each = input.scale_per_group ? ceil_div(p.gemm.K, input.scale_group)
                              : input.scale_per_row ? 1
                                                    : 0;
    if (each > 0) of_expert.x.scale = input.scale + begin * each;
    if (!p.rows) return;
    const std::size_t bytes = p.gemm.K * size_of(p.gemm.x.dtype);
    rows.resize(of_expert.M * bytes);
    scales.resize(of_expert.M * each);
    for (std::int64_t i = 0; i < of_expert.M; ++i) {
      const std::int64_t row = p.rows[begin + i];
      std::memcpy(rows.data() + i * bytes, x + row * stride, bytes);
      std::copy_n(input.scale + row * each, each, scales.begin() + i * each);
    }
    of_expert.x.data = rows.data();
    of_expert.x.stride_row = p.gemm.K;
    if (each > 0) of_expert.x.scale = scales.data();
  }
};

}  // namespace

void grouped_gemm(const GroupedGemmParams& p) {
  check_indices(p);
  const std::size_t element = size_of(p.gemm.dtype);
  const bool packed = has_nibbles(p.gemm.weight.format);
  const std::size_t scale_bytes = packed ? element : sizeof(float);
  auto* y = static_cast<char*>(p.gemm.y);
  const std::int64_t cols = p.gemm.out_cols();
  Gathered gathered;
  std::vector<char> workspace;
  for (std::int32_t e = 0; e < p.experts; ++e) {
    const std::int64_t begin = p.offsets[e], count = p.offsets[e + 1] - begin;
    if (count == 0) continue;
    GemmParams of_expert = p.gemm;
    of_expert.M = count;
    gathered.take(p, begin, of_expert);
    GemmWeight& weight = of_expert.weight;
    weight.data = static_cast<const char*>(weight.data) + e * p.stride_expert;
    if (weight.scales)
      weight.scales = static_cast<const char*>(weight.scales) + e * p.stride_scales * scale_bytes;
    if (weight.zeros) weight.zeros += e * p.stride_scales;
    if (p.gemm.bias)
      of_expert.bias = static_cast<const char*>(p.gemm.bias) + e * p.gemm.N * element;
    of_expert.y = y + begin * cols * element;
    workspace.resize(cpu::gemm_workspace_bytes(of_expert));
    of_expert.workspace = workspace.data();
    cpu::gemm(of_expert);
  }
  const std::int64_t used = p.offsets[p.experts];
  std::memset(y + used * cols * element, 0, (p.gemm.M - used) * cols * element);
}

}  // namespace ridgeline::cpu
