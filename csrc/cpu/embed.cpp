#include <algorithm>
#include <type_traits>

#include "common/dispatch.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "kernels/embed.h"

namespace ridgeline::cpu {
namespace {

/// Value i of int32 or int64 values, in [low, high).
std::int64_t checked_at(const void* values, DType dtype, std::int64_t i, const char* name,
                        std::int64_t low, std::int64_t high) {
  const std::int64_t value = dtype == DType::kInt64 ? static_cast<const std::int64_t*>(values)[i]
                                                    : static_cast<const std::int32_t*>(values)[i];
  check(value >= low && value < high, name, ": expected values in [", low, ", ", high, "), got ",
        value, " at ", i);
  return value;
}

/// The rows that a token reads: of the table, and of the one by position.
struct TokenRows {
  std::int64_t row, position;

  TokenRows(const EmbedParams& p, std::int64_t token) : position(0) {
    row = checked_at(p.ids, p.index_dtype, token, "ids", -p.last_count, p.rows);
    if (row < 0)
      row = checked_at(p.last_tokens, DType::kInt32, -1 - row, "last_tokens", 0, p.rows);
    if (p.positions != nullptr)
      position = checked_at(p.positions, p.index_dtype, token, "positions", 0, p.position_rows);
  }
};

template <class T>
void embed_token(const EmbedParams& p, std::int64_t token) {
  const TokenRows at(p, token);
  const T* row = static_cast<const T*>(p.weight) + at.row * p.stride;
  T* out = static_cast<T*>(p.out) + token * p.width;
  std::copy(row, row + p.width, out);
  if constexpr (!std::is_same_v<T, std::int32_t>) {
    if (p.scale != 1.0f)
      for (std::int64_t i = 0; i < p.width; ++i)
        out[i] = static_cast<T>(static_cast<float>(out[i]) * p.scale);
    if (p.positions == nullptr) return;
    const T* other = static_cast<const T*>(p.position_weight) + at.position * p.position_stride;
    for (std::int64_t i = 0; i < p.width; ++i)
      out[i] = static_cast<T>(static_cast<float>(out[i]) + static_cast<float>(other[i]));
  }
}

}  // namespace

void embed(const EmbedParams& params) {
  for (std::int64_t token = 0; token < params.tokens; ++token) TokenRows(params, token);
  const auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for_each(params.tokens, params.width,
                      [&](std::int64_t token) { embed_token<T>(params, token); });
  };
  if (params.dtype == DType::kInt32) return run(Type<std::int32_t>{});
  dispatch_float(params.dtype, run);
}

}  // namespace ridgeline::cpu
