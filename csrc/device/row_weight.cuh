#pragma once
#include <type_traits>

#include "device/row.cuh"

namespace ridgeline::device {

/// The pieces of a weight vector that stand beside a row's pieces, of the row's type or, kFloat, of
/// fp32. With kAhead, weights of the row's type are kept in registers beside a held row, read
/// ahead; others are read when they are used, from L1 or L2.
template <class T, class Row, bool kFloat, bool kAhead>
class RowWeight {
 public:
  static constexpr bool kKept = kAhead && !kFloat && Row::kHeld;

  /// `data` null stands for zeros; beside a full row it is never null.
  __device__ RowWeight(const Row& row, const void* data)
      : held_(row), data_(static_cast<const Stored*>(data)) {}

  __device__ void load() {
    if constexpr (kKept)
      if (data_ != nullptr) held_.load(data_);
  }

  __device__ Vec<float, Row::kWidth> at(int i, int column) const {
    if (!Row::kFull && data_ == nullptr) return {};
    if constexpr (kKept) return floats(held_.piece(i));
    return floats(load_vec<Row::kWidth>(data_ + column));
  }

  /// One element of weights that are not null.
  __device__ float element(int column) const { return to_float(data_[column]); }

 private:
  using Stored = std::conditional_t<kFloat, float, T>;
  Row held_;
  const Stored* data_;
};

}  // namespace ridgeline::device
