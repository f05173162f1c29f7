// Predicted times beside a count of keys and pairs one by one.
#include <algorithm>

#include "engine/step_cost.h"
#include "engine/time_scale.h"
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

void the_time_scale_is_the_median_of_a_sizes_latest_steps() {
  TimeScale scale;
  expect_equal(scale.of(64), 1.0);
  scale.add(64, 40);
  expect_equal(scale.of(64), 1.0);  // one step waited for something else
  for (int i = 0; i < 8; ++i) scale.add(64, 1.5);
  expect_equal(scale.of(64), 1.5);
  expect_equal(scale.of(128), 1.5);  // no step of it yet
  for (int i = 0; i < 8; ++i) scale.add(128, 2);
  expect_equal(scale.of(64), 1.5);
  expect_equal(scale.of(128), 2.0);
  expect_equal(scale.of(0), 2.0);  // as the last step
  for (int i = 0; i < 256; ++i) scale.add(128, 3);
  expect_equal(scale.of(64), 3.0);  // no step of it lately
  scale.add(64, 1.5);
  expect_equal(scale.of(64), 3.0);  // begins anew
  for (int i = 0; i < 8; ++i) scale.add(64, 1e9);
  expect_equal(scale.of(64), 100.0);
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"attention", attention_counts_what_each_position_sees},
      {"a step", a_step_reads_or_multiplies_and_attends},
      {"time scale", the_time_scale_is_the_median_of_a_sizes_latest_steps},
  });
}
