#include "kernels/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/routing.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace ridgeline::cpu {
namespace {

/// The sum of exp(logit - largest) over `count` experts of `order`, in double.
double sum_of_exponentials(const float* logits, const std::int32_t* order, std::int32_t count) {
  double sum = 0.0;
  for (std::int32_t i = 0; i < count; ++i)
    sum += std::exp(double{logits[order[i]]} - logits[order[0]]);
  return sum;
}

/// Writes a token's weights, and its experts to where their places will be.
void choose_experts(const RouteParams& p, std::int64_t token, const float* logits,
                    std::vector<std::int32_t>& order) {
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + p.order.per_token, order.end(),
                    [&](std::int32_t a, std::int32_t b) {
                      const std::uint32_t key_a = routing_key(logits[a]);
                      const std::uint32_t key_b = routing_key(logits[b]);
                      return key_a > key_b || (key_a == key_b && a < b);
                    });
  const double sum =
      sum_of_exponentials(logits, order.data(), p.normalized ? p.order.per_token : p.order.experts);
  const double largest = logits[order[0]];
  for (std::int32_t j = 0; j < p.order.per_token; ++j) {
    const std::int64_t at = token * p.order.per_token + j;
    p.weights[at] = static_cast<float>(std::exp(logits[order[j]] - largest) / sum);
    p.order.places[at] = order[j];
  }
}

/// Counts the rows of each expert, then gives each choice, whose expert stands in its place, the
/// next one of that expert; what is `experts` or more is nobody's.
void place_choices(const ExpertOrder& order) {
  const std::int64_t choices = std::int64_t{order.tokens} * order.per_token;
  std::fill_n(order.offsets, order.experts + 1, 0);
  for (std::int64_t i = 0; i < choices; ++i)
    if (order.places[i] < order.experts) ++order.offsets[order.places[i] + 1];
  std::partial_sum(order.offsets, order.offsets + order.experts + 1, order.offsets);
  std::vector<std::int32_t> next(order.offsets, order.offsets + order.experts + 1);
  for (std::int64_t i = 0; i < choices; ++i) {
    const std::int32_t place = next[order.places[i]]++;
    order.rows[place] = static_cast<std::int32_t>(i / order.per_token);
    order.places[i] = place;
  }
}

/// Writes the experts to where their places will be.
template <class T>
void copy_choices(const OrderParams& p) {
  const ExpertOrder& order = p.order;
  for (std::int64_t token = 0; token < order.tokens; ++token) {
    const T* own = static_cast<const T*>(p.chosen) + token * p.stride_token;
    for (std::int32_t j = 0; j < order.per_token; ++j) {
      const T expert = own[j * p.stride_choice];
      const bool known = expert >= 0 && expert < order.experts;
      order.places[token * order.per_token + j] =
          known ? static_cast<std::int32_t>(expert) : order.experts;
    }
  }
}

template <class T>
void combine_token(const CombineParams& p, std::int64_t token, float* sums, float* buffer) {
  T* y = static_cast<T*>(p.y) + token * p.width;
  float* out = begin_row(y, sums);
  std::fill_n(out, p.width, 0.0f);
  for (std::int32_t j = 0; j < p.per_token; ++j) {
    const std::int64_t at = token * p.per_token + j;
    const T* row = static_cast<const T*>(p.x) + p.places[at] * p.stride_x_row;
    const float* x = as_floats(row, p.width, buffer);
    const float weight = p.weights[at];
#pragma omp simd
    for (std::int64_t i = 0; i < p.width; ++i) out[i] = __builtin_fmaf(weight, x[i], out[i]);
  }
  finish_row(out, p.width, y);
}

}  // namespace

void route_experts(const RouteParams& params) {
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const std::int64_t cost = std::int64_t{params.order.experts} * 8;
    parallel_ranges(params.order.tokens, cost, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> buffer(static_cast<std::size_t>(params.order.experts));
      std::vector<std::int32_t> order(buffer.size());
      for (std::int64_t token = begin; token < end; ++token) {
        const T* row = static_cast<const T*>(params.logits) + token * params.stride_logits;
        choose_experts(params, token, as_floats(row, params.order.experts, buffer.data()), order);
      }
    });
  });
  place_choices(params.order);
}

void order_experts(const OrderParams& params) {
  if (params.dtype == DType::kInt64) copy_choices<std::int64_t>(params);
  else copy_choices<std::int32_t>(params);
  place_choices(params.order);
}

void combine_experts(const CombineParams& params) {
  const std::int64_t choices = std::int64_t{params.tokens} * params.per_token;
  for (std::int64_t i = 0; i < choices; ++i)
    check(params.places[i] >= 0 && params.places[i] < params.rows,
          "places: expected values in [0, ", params.rows, "), got ", params.places[i], " at ", i);
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const std::int64_t cost = params.width * params.per_token;
    parallel_ranges(params.tokens, cost, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> sums(static_cast<std::size_t>(params.width)), buffer(sums.size());
      for (std::int64_t token = begin; token < end; ++token)
        combine_token<T>(params, token, sums.data(), buffer.data());
    });
  });
}

}  // namespace ridgeline::cpu
