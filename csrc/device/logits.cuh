#pragma once
#include <cstdint>

#include "common/sampling.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"

/// Logits as keys, and how a block of kLogitThreads threads walks a row and finds the few largest.
namespace ridgeline::device {

constexpr int kLogitThreads = 1024;  // one block a row: as many loads in flight as an SM takes
constexpr int kLogitWarps = kLogitThreads / kWarpSize;
constexpr int kMaxCandidates = 4096;

/// Adds on 64-bit integers, and picks the largest: no order of the lanes changes the result.
struct SumU64 {
  __device__ static std::uint64_t identity() { return 0; }
  __device__ static std::uint64_t combine(std::uint64_t a, std::uint64_t b) { return a + b; }
};
struct MaxU64 {
  __device__ static std::uint64_t identity() { return 0; }
  __device__ static std::uint64_t combine(std::uint64_t a, std::uint64_t b) {
    return a > b ? a : b;
  }
};

/// Orders (logit, id) pairs: the larger logit, of equal ones the lower id. Zero is below every
/// pair.
__device__ __forceinline__ std::uint64_t pair_key(float value, int id) {
  return (std::uint64_t{ordered_key(value)} << 32) | ~static_cast<std::uint32_t>(id);
}
__device__ __forceinline__ int id_of_pair(std::uint64_t key) {
  return static_cast<int>(~static_cast<std::uint32_t>(key));
}
__device__ __forceinline__ float value_of_pair(std::uint64_t key) {
  return from_ordered_key(static_cast<std::uint32_t>(key >> 32));
}

/// Ids that a warp takes at a time, next to each other: kPieces loads of 16 bytes a lane.
template <class T, int kPieces>
constexpr int kLogitStep = kWarpSize * kPieces * Vec<T>::kSize;

/// Calls fn(value, id) for each logit of a row, with value -inf for ids past the end. A warp takes
/// kLogitStep neighbouring ids a step, a thread meets its ids in rising order.
template <int kPieces, class T, class Fn>
__device__ __forceinline__ void for_each_logit(const T* row, int count, Fn&& fn) {
  constexpr int kSize = Vec<T>::kSize, kStep = kLogitStep<T, kPieces>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  for (int start = warp * kStep; start < count; start += kLogitWarps * kStep) {
    const bool whole = aligned && start + kStep <= count;
    Vec<T> pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int id = start + (i * kWarpSize + lane) * kSize;
      if (whole) {
        pieces[i] = load(row + id);
      } else {
#pragma unroll
        for (int j = 0; j < kSize; ++j)
          pieces[i].data[j] = id + j < count ? row[id + j] : from_float<T>(kNegativeInfinity);
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        fn(to_float(pieces[i].data[j]), start + (i * kWarpSize + lane) * kSize + j);
  }
}

/// A value that at least `wanted` logits of the row reach, little below the wanted-th largest: that
/// many threads have a maximum of at least it. Requires: all threads of the block call it; wanted
/// is at most their number; largest is the row's.
__device__ __forceinline__ float bound_of_largest(float thread_max, float largest, int wanted) {
  constexpr int kHalvings = 16;  // of 2^32 keys: within 1/128 of an octave
  const std::uint32_t own = ordered_key(thread_max);
  std::uint32_t low = ordered_key(kNegativeInfinity), high = ordered_key(largest) + 1;
  for (int i = 0; i < kHalvings; ++i) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (__syncthreads_count(own >= middle) >= wanted) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return from_ordered_key(low);
}

/// The logits of a row that reach a bound, in no particular order; more than fit are counted only.
struct Candidates {
  float value[kMaxCandidates];
  int id[kMaxCandidates];
  int count;

  __device__ void add(float x, int token) {
    const int place = atomicAdd(&count, 1);
    if (place >= kMaxCandidates) return;
    value[place] = x;
    id[place] = token;
  }

  __device__ bool complete() const { return count <= kMaxCandidates; }
};

}  // namespace ridgeline::device
