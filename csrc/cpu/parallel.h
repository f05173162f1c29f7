#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

namespace ridgeline::cpu {

using RangeFn = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = void (*)(std::int64_t begin, std::int64_t end, std::int64_t grain, RangeFn fn,
                             void* context);

/// Installs the thread pool that CPU ops run on. The bindings install torch's, so that
/// torch.set_num_threads() holds here too; without one, everything runs in the calling thread.
/// Requires: called before any op runs.
void set_parallel_for(ParallelFor pool);
ParallelFor installed_parallel_for();

/// The smallest number of elementary operations worth a thread of its own.
constexpr std::int64_t kOperationsPerTask = 16384;

/// Calls fn(begin, end) over disjoint ranges that cover [0, count), in parallel. `cost` is the
/// number of elementary operations of one item. The first exception thrown is thrown again here.
template <class Fn>
void parallel_ranges(std::int64_t count, std::int64_t cost, Fn&& fn) {
  if (count <= 0) return;
  const std::int64_t grain =
      std::max<std::int64_t>(1, kOperationsPerTask / std::max<std::int64_t>(1, cost));
  if (count <= grain || installed_parallel_for() == nullptr) return fn(std::int64_t{0}, count);

  struct Context {
    std::remove_reference_t<Fn>& fn;
    std::mutex mutex;
    std::exception_ptr error;
  } context{fn, {}, nullptr};
  const RangeFn run = [](std::int64_t begin, std::int64_t end, void* opaque) {
    auto& shared = *static_cast<Context*>(opaque);
    try {
      shared.fn(begin, end);
    } catch (...) {
      const std::lock_guard lock(shared.mutex);
      if (!shared.error) shared.error = std::current_exception();
    }
  };
  installed_parallel_for()(0, count, grain, run, &context);
  if (context.error) std::rethrow_exception(context.error);
}

/// Calls fn(i) for each i of [0, count), in parallel.
template <class Fn>
void parallel_for_each(std::int64_t count, std::int64_t cost, Fn&& fn) {
  parallel_ranges(count, cost, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) fn(i);
  });
}

}  // namespace ridgeline::cpu
