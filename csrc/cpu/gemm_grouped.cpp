#include "kernels/gemm_grouped.h"

#include <cstring>
#include <vector>

#include "common/check.h"

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

}  // namespace

void grouped_gemm(const GroupedGemmParams& p) {
  check_indices(p);
  const std::size_t element = size_of(p.gemm.dtype);
  const auto* x = static_cast<const char*>(p.gemm.x.data);
  auto* y = static_cast<char*>(p.gemm.y);
  const std::int64_t cols = p.gemm.out_cols();
  std::vector<char> gathered, workspace;
  for (std::int32_t e = 0; e < p.experts; ++e) {
    const std::int64_t begin = p.offsets[e], count = p.offsets[e + 1] - begin;
    if (count == 0) continue;
    GemmParams of_expert = p.gemm;
    of_expert.M = count;
    of_expert.x.data = x + begin * p.gemm.x.stride_row * element;
    if (p.rows) {
      const std::size_t row_bytes = p.gemm.K * element;
      gathered.resize(count * row_bytes);
      for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(gathered.data() + i * row_bytes,
                    x + p.rows[begin + i] * p.gemm.x.stride_row * element, row_bytes);
      of_expert.x.data = gathered.data();
      of_expert.x.stride_row = p.gemm.K;
    }
    of_expert.weight.data =
        static_cast<const char*>(p.gemm.weight.data) + e * p.stride_expert * element;
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
