#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "common/dispatch.h"
#include "common/math.h"
#include "device/reduce.cuh"
#include "device/vec.cuh"

/// One block a row: a thread's share of the row behind one interface, so that a kernel that passes
/// over the row several times is written once, whatever the row's width:
///   Row row(x, cols); row.load(x); row.visit([&](int i, int column, auto& piece) { … });
/// A piece is a Vec of Row::kWidth elements; each visit goes over the same pieces, counted by i.
namespace ridgeline::device {

/// The share in registers: the row is read once, all loads in flight together. Pieces are dealt out
/// from the 128-byte line that the row begins in, so that a warp's accesses cover whole lines
/// wherever the row begins.
/// Requires: rows aligned to 16 bytes, cols a multiple of kWidth.
template <class T, int kVecs>
class HeldRow {
 public:
  static constexpr bool kHeld = true;
  static constexpr int kWidth = Vec<T>::kSize;
  static constexpr int kPieces = kVecs;
  static constexpr int kMaxThreads = kVecs * 64;
  static constexpr int kMinBlocks = kVecs <= 4 ? 3 : 1;  // 85 and 128 registers: no spill

  /// Deals the pieces out for a row at `row`; loads nothing.
  __device__ HeldRow(const T* row, int cols)
      : cols_(cols), skipped_(reinterpret_cast<std::uintptr_t>(row) % 128 / sizeof(Vec<T>)) {}

  __device__ void load(const T* data) {
    visit([&](int, int column, Vec<T>& piece) { piece = device::load(data + column); });
  }

  /// Becomes the sum with `addend`, rounded to T, which is also written over the addend.
  __device__ void add_into(T* addend) {
    HeldRow other = *this;
    other.load(addend);
    visit([&](int i, int column, Vec<T>& piece) {
      add(piece, other.vecs_[i]);
      store(addend + column, piece);
    });
  }

  template <class Fn>
  __device__ void visit(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = (static_cast<int>(i * blockDim.x + threadIdx.x) - skipped_) * kWidth;
      if (static_cast<unsigned>(column) < static_cast<unsigned>(cols_)) fn(i, column, vecs_[i]);
    }
  }

  __device__ const Vec<T>& piece(int i) const { return vecs_[i]; }

 private:
  Vec<T> vecs_[kVecs];
  int cols_;
  int skipped_;  // pieces between the line's begin and the row's
};

/// The share left in memory and read again by each visit, through L2: for rows wider than the
/// registers, and with kVecWidth 1 for rows of any width and alignment.
template <class T, int kVecWidth>
class StreamedRow {
 public:
  static constexpr bool kHeld = false;
  static constexpr int kWidth = kVecWidth;
  static constexpr int kPieces = 0;
  static constexpr int kMaxThreads = 512;
  static constexpr int kMinBlocks = 1;

  __device__ StreamedRow(const T*, int cols) : row_(nullptr), cols_(cols) {}

  __device__ void load(const T* data) { row_ = data; }

  /// Each thread reads back only what it wrote itself.
  __device__ void add_into(T* addend) {
    visit([&](int, int column, Vec<T, kWidth>& piece) {
      add(piece, load_vec<kWidth>(addend + column));
      store(addend + column, piece);
    });
    row_ = addend;
  }

  template <class Fn>
  __device__ void visit(Fn&& fn) {
    const unsigned step = blockDim.x * kWidth;
#pragma unroll 4
    for (unsigned column = threadIdx.x * kWidth; column < static_cast<unsigned>(cols_);
         column += step) {
      Vec<T, kWidth> piece = load_vec<kWidth>(row_ + column);
      fn(0, static_cast<int>(column), piece);
    }
  }

 private:
  const T* row_;
  int cols_;
};

/// The thread's part of the sum of fn(x) over a row: pieces are summed on their own first, which
/// shortens the chains of additions and their rounding errors.
template <class Row, class Fn>
__device__ float sum_share(Row& row, Fn fn) {
  float total = 0.0f;
  row.visit([&](int, int, const auto& piece) {
    float sum = 0.0f;
    for (const float value : floats(piece).data) sum += fn(value);
    total += sum;
  });
  return total;
}

/// How a row of T is shared out, decided on the host.
struct RowLayout {
  int cols;
  bool vectors;  // every row is aligned to 16 bytes and a whole number of them long
  bool lines;    // every row begins at a 128-byte line
};

/// Calls fn(Type<Row>{}, threads). kStreamVectors: rows wider than registers are streamed 16 bytes
/// at a time instead of element by element.
template <class T, bool kStreamVectors, class Fn>
void dispatch_row(const RowLayout& layout, Fn&& fn) {
  constexpr int kWidth = Vec<T>::kSize;
  // 128 threads of four pieces each: H200, rmsnorm of bf16 8192 x 4096: 33.9 us; 256 of two: 37.6.
  constexpr int kFew = 4, kMany = 8;
  const auto threads_for = [&](int pieces, int each) {
    return std::max(kWarpSize, round_up(ceil_div(pieces, each), kWarpSize));
  };
  const int pieces = ceil_div(layout.cols, kWidth) + (layout.lines ? 0 : 128 / 16 - 1);
  if (layout.vectors && pieces <= kFew * HeldRow<T, kFew>::kMaxThreads)
    return fn(Type<HeldRow<T, kFew>>{}, threads_for(pieces, kFew));
  if (layout.vectors && pieces <= kMany * HeldRow<T, kMany>::kMaxThreads)
    return fn(Type<HeldRow<T, kMany>>{}, threads_for(pieces, kMany));
  if constexpr (kStreamVectors) {
    if (layout.vectors)
      return fn(Type<StreamedRow<T, kWidth>>{}, StreamedRow<T, kWidth>::kMaxThreads);
  }
  const int threads = std::clamp(layout.cols, kWarpSize, StreamedRow<T, 1>::kMaxThreads);
  fn(Type<StreamedRow<T, 1>>{}, round_up(threads, kWarpSize));
}

/// Whether all the pointers and all the row strides (in bytes) are multiples of `bytes`.
inline bool all_aligned(std::int64_t bytes, std::initializer_list<const void*> pointers,
                        std::initializer_list<std::int64_t> strides) {
  std::uint64_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<std::uintptr_t>(pointer);
  for (const std::int64_t stride : strides) bits |= static_cast<std::uint64_t>(stride);
  return bits % static_cast<std::uint64_t>(bytes) == 0;
}

}  // namespace ridgeline::device
