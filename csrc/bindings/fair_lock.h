#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace ridgeline {

/// A reentrant lock for loops: who waits for it comes before who has just released it. A thread
/// that releases a plain lock and takes it again at once, as the loop of steps does, nearly always
/// gets it before those that wait: they start only at its end. To Python each side of a `with` is
/// one call, so that no interrupt falls between taking the lock and knowing that it is taken.
class FairLock {
 public:
  void enter() {
    const auto self = std::this_thread::get_id();
    std::unique_lock guard(mutex_);
    if (owner_ == self) {
      ++depth_;
      return;
    }
    // What a signal or a finalizer runs while this thread waits comes before what it interrupts.
    const auto outer = std::ranges::find(waiting_, self, &Place::thread);
    const std::uint64_t ticket = next_ticket_++;
    waiting_.insert(outer, {.ticket = ticket, .thread = self});
    const auto is_next = [&] { return depth_ == 0 && waiting_.front().ticket == ticket; };
    while (!is_next()) {
      PyThreadState* const state = PyEval_SaveThread();
      changed_.wait_for(guard, kLookForInterrupts, is_next);
      guard.unlock();
      PyEval_RestoreThread(state);  // in no destructor: at the end of Python it unwinds the thread
      const bool interrupted = PyErr_CheckSignals() != 0;
      guard.lock();
      if (interrupted) {
        waiting_.erase(std::ranges::find(waiting_, ticket, &Place::ticket));
        changed_.notify_all();
        throw pybind11::error_already_set();
      }
    }
    waiting_.pop_front();
    owner_ = self;
    depth_ = 1;
  }

  void exit() {
    const std::lock_guard guard(mutex_);
    if (owner_ != std::this_thread::get_id())
      throw std::runtime_error("FairLock: released by a thread that does not hold it");
    if (--depth_ > 0) return;
    owner_ = {};
    changed_.notify_all();
  }

  std::size_t waiting() const {
    const std::lock_guard guard(mutex_);
    return waiting_.size();
  }

 private:
  struct Place {
    std::uint64_t ticket;
    std::thread::id thread;
  };
  static constexpr std::chrono::milliseconds kLookForInterrupts{50};

  mutable std::mutex mutex_;  // held for a few instructions, and never while the GIL is awaited
  std::condition_variable changed_;
  std::deque<Place> waiting_;  // first come, first served
  std::uint64_t next_ticket_ = 0;
  std::thread::id owner_;
  int depth_ = 0;
};

}  // namespace ridgeline
