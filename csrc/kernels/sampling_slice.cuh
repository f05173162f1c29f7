#pragma once
#include <type_traits>

#include "common/sampling.h"
#include "device/threshold.cuh"
#include "device/vec.cuh"
#include "kernels/sampling.h"

namespace ridgeline {

constexpr int kSliceIds = 4 * 4 * device::kWarpSize;  // a warp's ids come in multiples of this

/// Ids that each warp takes where a row is split over `blocks` blocks.
constexpr int ids_of_warp(int vocab, int blocks) {
  const int step = blocks * device::kSampleWarps * kSliceIds;
  return (vocab + step - 1) / step * kSliceIds;
}

/// Logits of any dtype, adjusted by penalties, bias or mask: one kernel for all three dtypes, which
/// reads the logits one by one, as it reads what adjusts them.
struct AdjustedLogit {};

/// The logits of a row that one block looks after: its warps take as many neighbouring ids each, a
/// lane four neighbours at a time. The first ones of each warp stay in shared memory, the others
/// are read again when they are needed again. T: their dtype, or AdjustedLogit.
template <class T>
struct LogitSlice {
  using Four = device::Vec<float, 4>;
  static constexpr bool kAdjusted = std::is_same_v<T, AdjustedLogit>;
  static constexpr int kPieceIds = 4 * device::kWarpSize;
  // Loads in flight. Adjusted rows read up to four arrays, so one of each is enough.
  static constexpr int kPieces = kAdjusted ? 1 : 4;
  static constexpr int kStepIds = kPieces * kPieceIds;

  const SampleParams& params;
  std::int64_t row;
  int first;         // id
  int warp_ids;      // ids of each warp
  int resident_ids;  // of them in shared memory
  float* values;     // [warp][resident_ids]

  __device__ const T* logits() const {
    static_assert(!kAdjusted);
    return static_cast<const T*>(params.logits) + row * params.stride_logits;
  }

  __device__ float logit(int id) const {
    if constexpr (kAdjusted) {
      const std::int64_t at = row * params.stride_logits + id;
      const void* data = params.logits;
      if (params.dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
      if (params.dtype == DType::kFloat16)
        return device::to_float(static_cast<const __half*>(data)[at]);
      return device::to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    } else {
      return device::to_float(logits()[id]);
    }
  }

  /// The logit after penalties, bias and mask.
  __device__ float adjusted(float x, int id) const {
    if (params.penalties != nullptr) {
      const float* penalty = params.penalties + 3 * row;
      const std::int32_t count = params.token_counts[row * params.stride_counts + id];
      x = penalised_logit(x, count, penalty[0], penalty[1], penalty[2]);
    }
    if (params.bias != nullptr) x += params.bias[row * params.stride_bias + id];
    if (params.mask != nullptr && !params.mask[row * params.stride_mask + id])
      x = kNegativeInfinity;
    return x;
  }

  /// The adjusted logit, NaN as -inf; -inf past the end of the row.
  __device__ float at(int id) const {
    if (id >= params.vocab) return kNegativeInfinity;
    return clean_logit(kAdjusted ? adjusted(logit(id), id) : logit(id));
  }

  /// The logits of a step that starts at this lane's `id`. `aligned`: for loads of four.
  __device__ __forceinline__ void read(bool aligned, int id, Four (&x)[kPieces]) const {
    if constexpr (!kAdjusted) {
      if (aligned && id - id % kPieceIds + kStepIds <= params.vocab) {
        device::Vec<T, 4> pieces[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          pieces[i] = device::load_vec<4>(logits() + id + i * kPieceIds);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          x[i] = device::floats(pieces[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) x[i].data[j] = clean_logit(x[i].data[j]);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i].data[j] = at(id + i * kPieceIds + j);
  }

  /// Calls fn(four logits, id of the first) for each four of this thread. The first time, it also
  /// fills shared memory.
  template <bool kFirst = false, class Fn>
  __device__ __forceinline__ void for_each(Fn&& fn) const {
    const int lane = threadIdx.x % device::kWarpSize, warp = threadIdx.x / device::kWarpSize;
    bool aligned = false;
    if constexpr (!kAdjusted)
      aligned = reinterpret_cast<std::uintptr_t>(logits()) % (4 * sizeof(T)) == 0;
    const int begin = first + warp * warp_ids + 4 * lane;
    float* own = values + warp * resident_ids + 4 * lane;
#pragma unroll 1
    for (int start = 0; start < warp_ids; start += kStepIds) {
      Four x[kPieces];
      const bool is_resident = start < resident_ids;
      if (kFirst || !is_resident) read(aligned, begin + start, x);
      if (is_resident) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          float* at = own + start + i * kPieceIds;
          if (kFirst) {
            device::store(at, x[i]);
          } else {
            x[i] = device::load_vec<4>(at);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) fn(x[i], begin + start + i * kPieceIds);
    }
  }
};

}  // namespace ridgeline
