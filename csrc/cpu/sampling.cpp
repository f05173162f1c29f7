#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/philox.h"
#include "common/sampling.h"
#include "cpu/half.h"
#include "cpu/parallel.h"
#include "kernels/sampling.h"

namespace ridgeline::cpu {
namespace {

void check_row_values(const SampleParams& params) {
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const float temperature = params.temperature[row], top_p = params.top_p[row];
    const float min_p = params.min_p[row];
    check(std::isfinite(temperature) && temperature >= 0.0f,
          "temperature: expected finite values of at least 0, got ", temperature, " at ", row);
    check(params.top_k[row] >= -1, "top_k: expected values of at least -1, got ",
          params.top_k[row], " at ", row);
    check(top_p > 0.0f && top_p <= 1.0f, "top_p: expected values in (0, 1], got ", top_p, " at ",
          row);
    check(min_p >= 0.0f && min_p <= 1.0f, "min_p: expected values in [0, 1], got ", min_p, " at ",
          row);
    check(params.positions[row] >= 0, "positions: expected values of at least 0, got ",
          params.positions[row], " at ", row);
    if (params.penalties != nullptr)
      check(params.penalties[3 * row] > 0.0f, "penalties: expected repetition above 0, got ",
            params.penalties[3 * row], " at ", row);
  }
}

/// The row's logits after penalties, bias and mask.
template <class T>
std::vector<float> effective_logits(const SampleParams& params, std::int64_t row) {
  const T* logits = static_cast<const T*>(params.logits) + row * params.stride_logits;
  std::vector<float> x(static_cast<std::size_t>(params.vocab));
  for (int id = 0; id < params.vocab; ++id) x[id] = static_cast<float>(logits[id]);
  if (params.penalties != nullptr) {
    const float* penalty = params.penalties + 3 * row;
    const std::int32_t* counts = params.token_counts + row * params.stride_counts;
    for (int id = 0; id < params.vocab; ++id)
      x[id] = penalised_logit(x[id], counts[id], penalty[0], penalty[1], penalty[2]);
  }
  if (params.bias != nullptr) {
    const float* bias = params.bias + row * params.stride_bias;
    for (int id = 0; id < params.vocab; ++id) x[id] += bias[id];
  }
  if (params.mask != nullptr) {
    const bool* mask = params.mask + row * params.stride_mask;
    for (int id = 0; id < params.vocab; ++id) x[id] = mask[id] ? x[id] : kNegativeInfinity;
  }
  for (float& value : x) value = clean_logit(value);
  return x;
}

/// The largest value v such that the tokens of at least v hold `target` of mass; what min_p drops
/// has no mass. -inf if all together do not hold it.
float mass_threshold(const std::vector<float>& x, const std::vector<std::uint64_t>& mass,
                     float at_least, std::uint64_t target) {
  std::vector<int> order;
  for (int id = 0; id < static_cast<int>(x.size()); ++id)
    if (x[id] >= at_least && mass[id] > 0) order.push_back(id);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
  std::uint64_t sum = 0;
  for (const int id : order)
    if ((sum += mass[id]) >= target) return x[id];
  return kNegativeInfinity;
}

float count_threshold(std::vector<float> x, std::int32_t count) {
  std::nth_element(x.begin(), x.begin() + (count - 1), x.end(), std::greater<>());
  return x[static_cast<std::size_t>(count - 1)];
}

template <class T>
std::int32_t sample_row(const SampleParams& params, std::int64_t row) {
  const std::vector<float> x = effective_logits<T>(params, row);
  const auto top = std::max_element(x.begin(), x.end());
  const auto greedy = static_cast<std::int32_t>(top - x.begin());
  const float temperature = params.temperature[row];
  if (*top == kNegativeInfinity) return -1;
  if (temperature < kGreedyBelow) return greedy;

  const float scale = mass_scale(temperature);
  const std::uint64_t least = least_mass(params.min_p[row]);
  std::vector<std::uint64_t> mass(x.size());
  for (std::size_t id = 0; id < x.size(); ++id) {
    const std::uint64_t full = mass_of(x[id], *top, scale);
    mass[id] = full >= least ? full : 0;
  }
  float at_least = kNegativeInfinity;
  const std::int32_t top_k = params.top_k[row];
  if (top_k > 0 && top_k < params.vocab) at_least = count_threshold(x, top_k);
  const auto kept_mass = [&] {
    std::uint64_t sum = 0;
    for (std::size_t id = 0; id < x.size(); ++id) sum += x[id] >= at_least ? mass[id] : 0;
    return sum;
  };
  if (params.top_p[row] < 1.0f) {
    const std::uint64_t target = scale_random(fraction_bits(params.top_p[row]), kept_mass());
    at_least = mass_threshold(x, mass, at_least, std::max<std::uint64_t>(target, 1));
  }

  const std::uint64_t random = random_bits(static_cast<std::uint64_t>(params.seeds[row]),
                                           static_cast<std::uint32_t>(params.positions[row]));
  const std::uint64_t target = scale_random(random, kept_mass());
  std::uint64_t sum = 0;
  for (std::size_t id = 0; id < x.size(); ++id) {
    sum += x[id] >= at_least ? mass[id] : 0;
    if (sum > target) return static_cast<std::int32_t>(id);
  }
  return greedy;
}

template <class T>
void logprobs_row(const LogprobsParams& params, std::int64_t row) {
  const T* logits = static_cast<const T*>(params.logits) + row * params.stride_logits;
  std::vector<float> x(static_cast<std::size_t>(params.vocab));
  for (int id = 0; id < params.vocab; ++id) x[id] = clean_logit(static_cast<float>(logits[id]));
  const float largest = *std::max_element(x.begin(), x.end());
  double sum = 0.0;
  for (const float value : x) sum += value == largest ? 1.0 : std::exp(double{value} - largest);
  const double log_sum = largest + std::log(sum);

  std::vector<std::int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + params.count, order.end(),
                    [&](std::int32_t a, std::int32_t b) {
                      return x[a] > x[b] || (x[a] == x[b] && a < b);
                    });
  float* logprobs = params.logprobs + row * (1 + params.count);
  std::int32_t* ids = params.ids + row * (1 + params.count);
  const auto put = [&](int place, std::int32_t id) {
    ids[place] = id;
    logprobs[place] = static_cast<float>(x[id] - log_sum);
  };
  put(0, params.tokens[row]);
  for (int i = 0; i < params.count; ++i) put(1 + i, order[i]);
}

}  // namespace

void sample(const SampleParams& params) {
  check_row_values(params);
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for_each(params.rows, 16 * std::int64_t{params.vocab}, [&](std::int64_t row) {
      params.tokens[row] = sample_row<T>(params, row);
      if (params.last_tokens != nullptr) params.last_tokens[row] = params.tokens[row];
    });
  });
}

void top_logprobs(const LogprobsParams& params) {
  for (std::int64_t row = 0; row < params.rows; ++row)
    check(params.tokens[row] >= 0 && params.tokens[row] < params.vocab,
          "tokens: expected values in [0, ", params.vocab, "), got ", params.tokens[row], " at ",
          row);
  dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for_each(params.rows, 16 * std::int64_t{params.vocab},
                      [&](std::int64_t row) { logprobs_row<T>(params, row); });
  });
}

}  // namespace ridgeline::cpu
