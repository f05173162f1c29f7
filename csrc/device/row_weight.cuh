#pragma once
#include "device/row.cuh"

namespace ridgeline::device {

/// The pieces of a weight vector that stand beside a row's pieces, of the row's type or fp32.
/// With kAhead, weights of the row's type are kept in registers beside a short share, read ahead;
/// others are read when they are used, from L1 or L2.
template <class T, class Row, bool kAhead>
class RowWeight {
 public:
  // Beside eight pieces they would take the registers that a second block on the SM needs.
  static constexpr bool kKept = kAhead && Row::kHeld && Row::kPieces <= 4;

  /// `data` null stands for zeros.
  __device__ RowWeight(const Row& row, const void* data, bool is_float)
      : held_(row), data_(data), is_float_(is_float) {}

  /// Reads what is kept.
  __device__ void load() {
    if constexpr (kKept)
      if (data_ != nullptr && !is_float_) held_.load(static_cast<const T*>(data_));
  }

  __device__ Vec<float, Row::kWidth> at(int i, int column) const {
    if (data_ == nullptr) return {};
    if (is_float_) return load_vec<Row::kWidth>(static_cast<const float*>(data_) + column);
    if constexpr (kKept) return floats(held_.piece(i));
    return floats(load_vec<Row::kWidth>(static_cast<const T*>(data_) + column));
  }

 private:
  Row held_;
  const void* data_;
  bool is_float_;
};

}  // namespace ridgeline::device
