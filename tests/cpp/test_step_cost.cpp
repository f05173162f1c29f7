// Predicted times beside a count of keys and pairs one by one.
#include <algorithm>

#include "engine/step_cost.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::expect_equal;

void attention_counts_what_each_position_sees() {
  for (const std::int64_t window : {0, 1, 3, 8})
    for (std::int64_t start = 0; start < 12; ++start)
      for (std::int64_t end = start + 1; end < 16; ++end) {
        std::int64_t pairs = 0, first = end;
        for (std::int64_t p = start; p < end; ++p) {
          const std::int64_t sees = window > 0 ? std::min(p + 1, window) : p + 1;
          pairs += sees;
          first = std::min(first, p + 1 - sees);
        }
        const StepCost cost{.attention = {{.window = window, .key_us = 100, .pair_us = 1}}};
        const AttentionTime time = cost.attention_time(start, end);
        expect_equal(time.compute, static_cast<double>(pairs));
        expect_equal(time.read, 100.0 * static_cast<double>(end - first));
        expect_equal(time.bound, std::max(time.read, time.compute));
      }
}

void a_step_reads_or_multiplies_and_attends() {
  const StepCost cost{.fixed_us = 50, .token_us = 2, .row_us = 3};
  expect_equal(cost.step_us(4, 4, 7), 57.0);
  expect_equal(cost.step_us(40, 4, 7), 99.0);
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"attention", attention_counts_what_each_position_sees},
      {"a step", a_step_reads_or_multiplies_and_attends},
  });
}
