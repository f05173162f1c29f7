#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/dispatch.h"
#include "common/math.h"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/compute_here.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

/// One block a row, or one cluster: a thread's share of the row behind one interface, so that a
/// kernel that passes over the row several times is written once, whatever the row's width:
///   Row row(x, cols); row.load(x); row.visit([&](int i, int column, auto& piece) { … });
/// A piece is a Vec of Row::kWidth elements; each visit goes over the same pieces, counted by i.
namespace ridgeline::device {

/// The share in registers: the row is read once, all loads in flight together. Pieces are dealt out
/// from the 128-byte line that the row begins in, so that a warp's accesses cover whole lines
/// wherever the row begins.
/// Requires: rows aligned to 16 bytes, cols a multiple of kWidth. kFull: rows that begin at such a
/// line and are just as long as all the threads' pieces, so that none is asked whether it is inside
/// (H200, bf16 layernorm with GELU: 8192 x 4096 37.5 us and 36.2 full, 8192 x 8192 71.9 and 68.5).
/// kShared: the blocks of a cluster, of any size, share the row. kStacked: a block may have several
/// rows, beside each other in y.
template <class T, int kVecs, bool kFull_ = false, bool kShared_ = false, bool kStacked_ = false>
class HeldRow {
 public:
  static constexpr bool kHeld = true;
  static constexpr bool kFull = kFull_;
  static constexpr bool kShared = kShared_;
  static constexpr bool kStacked = kStacked_;
  static constexpr int kWidth = Vec<T>::kSize;
  static constexpr int kPieces = kVecs;
  static constexpr int kMaxThreads = kVecs == 2 ? 512 : 1024;
  static constexpr int kMinBlocks = 1024 / kMaxThreads;  // 64 registers: no spill

  /// Deals the pieces out for a row at `row`; loads nothing.
  __device__ HeldRow(const T* row, int cols)
      : cols_(cols), first_(static_cast<int>(threadIdx.x)) {
    if constexpr (kShared) first_ += ptx::cluster_rank() * kVecs * static_cast<int>(blockDim.x);
    if constexpr (!kFull) first_ -= reinterpret_cast<std::uintptr_t>(row) % 128 / sizeof(Vec<T>);
  }

  __device__ void load(const T* data) {
    visit_padded([&](int, int column, Vec<T>& piece, bool inside) {
      piece = {};
      if (inside) piece = device::load(data + column);
    });
  }

  /// Becomes the sum with `addend`, rounded to T, which is also written over the addend.
  __device__ void add_into(T* addend) {
    HeldRow other = *this;
    other.load(addend);
    visit_padded([&](int i, int column, Vec<T>& piece, bool inside) {
      add(piece, other.vecs_[i]);
      store_inside(addend + column, piece, inside);
    });
  }

  template <class Fn>
  __device__ void visit(Fn&& fn) {
    visit_padded([&](int i, int column, Vec<T>& piece, bool inside) {
      if (inside) fn(i, column, piece);
    });
  }

  /// Also calls fn, told so by its last argument, for the thread's pieces outside of the row; they
  /// are zeros and stand at column 0. No branch parts the pieces, so that what fn loads for one is
  /// on its way while another is computed (H200, bf16 layernorm 8192 x 4096: 37.6 us with branches,
  /// 35.2).
  template <class Fn>
  __device__ void visit_padded(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int column = (first_ + i * static_cast<int>(blockDim.x)) * kWidth;
      const bool inside =
          kFull || static_cast<unsigned>(column) < static_cast<unsigned>(cols_);
      fn(i, inside ? column : 0, vecs_[i], inside);
    }
  }

  __device__ const Vec<T>& piece(int i) const { return vecs_[i]; }

 private:
  Vec<T> vecs_[kVecs];
  int cols_;
  int first_;  // the thread's first piece, counted from the row's begin
};

/// The share left in memory and read again by each visit, through L2: for rows wider than the
/// registers, and with kVecWidth 1 for rows of any width and alignment.
template <class T, int kVecWidth>
class StreamedRow {
 public:
  static constexpr bool kHeld = false;
  static constexpr bool kFull = false;
  static constexpr bool kShared = false;
  static constexpr bool kStacked = false;
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

  __device__ const T* data() const { return row_; }

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

  template <class Fn>
  __device__ void visit_padded(Fn&& fn) {
    visit([&](int i, int column, auto& piece) { fn(i, column, piece, true); });
  }

 private:
  const T* row_;
  int cols_;
};

/// Writes a piece if it is `inside`. Else the compiler moves the whole computation of the piece
/// into the branch, and the pieces wait for their loads one after the other. Codes are taken in
/// pairs, as they are converted: words of them would be put together byte by byte (H200, bf16
/// rmsnorm 8192 x 4096 to e4m3 by group: 29.5 us, in pairs 27.0).
template <class T, int kCount>
__device__ __forceinline__ void store_inside(T* p, Vec<T, kCount> piece, bool inside) {
  using Part = std::conditional_t<sizeof(T) == 1, std::uint16_t, std::uint32_t>;
  if constexpr (sizeof(piece) % sizeof(Part) == 0) {
    auto* parts = reinterpret_cast<Part*>(piece.data);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof(piece) / sizeof(Part)); ++j)
      ptx::compute_here(parts[j]);
  }
  if (inside) store(p, piece);
}

/// Lets L2 fetch the row that a block some way ahead will read, so that memory is busy while this
/// block computes. `x` is the matrix, `index` this thread's row. 4 MB ahead, H200, bf16 layernorm
/// with GELU: 8192 x 4096 36.5 us and 35.9 with it, 8192 x 8192 70.6 and 68.3, rmsnorm with a
/// residual 134.6 and 130.4; 1 MB more or less does not matter, 15 MB lose as much as they gain.
template <class Row, class T>
__device__ void prefetch_ahead(const void* x, std::int64_t stride, std::int64_t index,
                               std::int64_t rows, int cols) {
  if constexpr (Row::kPieces >= 4) {
    const unsigned bytes = static_cast<unsigned>(cols) * sizeof(T);
    const std::int64_t ahead = index + (4u << 20) / bytes;
    if (threadIdx.x == 0 && ahead < rows)
      ptx::prefetch_l2(static_cast<const T*>(x) + ahead * stride, bytes);
  }
}

/// Up to a row an SM latency is what costs, not registers.
constexpr int kFewRows = 132;

/// Has L2 fetch one of a few rows while the kernel ahead still runs. That kernel may be writing it:
/// L2 has one copy, so what is loaded after the wait is what it wrote. `row` is this block's, of T.
/// H200, bf16, chained: 64 x 8192 rmsnorm with a residual 2.45 us and 2.14 with it, to e4m3 2.60
/// and 2.27, 64 x 4096 1.95 and 1.63; of rows that L2 has already 1.83 and 1.85, and in 32 blocks
/// 1.34 and 1.38, so those do not ask.
template <class Row, class T>
__device__ void prefetch_early(const T* row, int cols) {
  constexpr int kLeastBlocks = 64;
  if constexpr (Row::kPieces == 2) {
    if (gridDim.x >= kLeastBlocks && threadIdx.x == 0 && ptx::cluster_rank() == 0)
      ptx::prefetch_l2(row, static_cast<unsigned>(cols) * sizeof(T));
  }
}

/// So few rows that become codes are a product's, whose blocks have an SM each. H200, chained, us,
/// 64 rows, let on behind the wait and so: fp8 by fp8 4096 x 4096 8.6 and 7.8, 4096 x 28672 34.3 and
/// 32.2, int8 of these 8.6 and 8.0, 33.3 and 32.6; 32 rows of 8192 x 8192 19.7 and 18.5.
constexpr int kFewCodes = 64;

/// Where the next kernel of the chain may start. Its blocks should spread over all SMs: those that
/// start before this kernel's predecessor has left pile up on some (H200, bf16, chained, started
/// before and after the wait: 64 x 8192 layernorm with GELU 3.07 us and 2.40, softmax 2.70
/// and 2.19, with a residual 3.18 and 2.49; one row the same). Few blocks leave room for all of
/// them, and the earlier they start the earlier they read weights; many blocks leave none before
/// they end. Where blocks of the next one do not stack there is `room_for_all`.
__device__ __forceinline__ bool leaves_uneven_room() { return gridDim.x > 16 && gridDim.x <= 512; }

__device__ __forceinline__ void start_dependents(bool room_for_all = false) {
  if (room_for_all || !leaves_uneven_room()) ptx::launch_dependents();
}
__device__ __forceinline__ void wait_then_start_dependents() {
  ptx::wait_for_dependencies();
  if (leaves_uneven_room()) ptx::launch_dependents();
}

/// This thread's row.
template <class Row>
__device__ __forceinline__ std::int64_t row_index() {
  if constexpr (Row::kStacked)
    return std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  else
    return Row::kShared ? ptx::cluster_index() : blockIdx.x;
}

/// How many rows of `threads` threads a block has where they may be stacked: blocks of one warp
/// leave half of an SM's warps unused.
template <class Row>
int rows_together(std::int64_t rows, int threads) {
  constexpr int kBlockThreads = 128;
  const int together = Row::kStacked ? std::max(1, kBlockThreads / threads) : 1;
  return rows % together == 0 ? together : 1;
}

/// A shared row is at most so many times as long as one block of it could hold.
constexpr int kMostShares = 2;

/// How a row of T is shared out, decided on the host.
struct RowLayout {
  std::int64_t rows;
  int cols;
  bool vectors;  // every row is aligned to 16 bytes and a whole number of them long
  bool lines;    // every row begins at a 128-byte line
  bool full = false;     // a HeldRow of kFull may be used, ...
  bool stacked = false;  // ... but rows of one warp are stacked instead
  int most_blocks = 1;   // of a cluster that may share a row
};

/// How many blocks of a cluster share each of a few rows of `pieces`, two pieces a thread: as many
/// as leave half of the SMs free and two warps busy, and two at least for more than 256 threads
/// (H200, bf16 rmsnorm 1 x 8192: 1.41 us in one block, 1.21 in two, 1.12 in four; with a residual
/// 64 x 8192: 2.52 in one, 2.46 in two; 32 x 4096: 1.19 in one, 1.20 in two, 1.37 in four).
inline int blocks_sharing(const RowLayout& layout, int pieces) {
  int blocks = 1;
  while (2 * blocks <= layout.most_blocks &&
         (pieces > 512 * blocks || (layout.rows * blocks <= 32 && pieces >= 256 * blocks)))
    blocks *= 2;
  return blocks;
}

/// Calls fn(Type<Row>{}, threads). kStreamVectors: rows wider than registers are streamed 16 bytes
/// at a time instead of element by element. kFewShares: each of a few rows goes to twice the
/// threads, of fn(Type<Row>{}, threads, blocks) where kShared. kFullRows: rows that allow it are
/// held as full ones; both but for float32, to spare compile time. kStacked: those that are not
/// full may be stacked.
template <class T, bool kStreamVectors, bool kFewShares = false, bool kFullRows = false,
          bool kShared = false, bool kStacked = false, class Fn>
void dispatch_row(const RowLayout& layout, Fn&& fn) {
  constexpr int kWidth = Vec<T>::kSize;
  // 128 threads of four pieces each: H200, rmsnorm of bf16 8192 x 4096: 33.9 us; 256 of two: 37.6.
  constexpr int kFew = 2, kMany = 4;
  const auto threads_for = [&](int pieces, int each) {
    return std::max(kWarpSize, round_up(ceil_div(pieces, each), kWarpSize));
  };
  const int pieces = ceil_div(layout.cols, kWidth) + (layout.lines ? 0 : 128 / 16 - 1);
  constexpr bool kNarrow = sizeof(T) < sizeof(float);
  if constexpr (kFewShares && kNarrow) {
    using Row = HeldRow<T, kFew, false, kShared>;
    const int blocks = blocks_sharing(layout, pieces);
    const int most = kFew * Row::kMaxThreads * std::min(blocks, kMostShares);
    if (layout.rows <= kFewRows && layout.vectors && pieces <= most) {
      const int threads = threads_for(pieces, kFew * blocks);
      if constexpr (kShared) return fn(Type<Row>{}, threads, blocks);
      else return fn(Type<Row>{}, threads);
    }
  }
  const bool held = layout.vectors && pieces <= kMany * HeldRow<T, kMany>::kMaxThreads;
  if constexpr (kFullRows && kNarrow) {
    const bool stacked = layout.stacked && pieces <= kMany * kWarpSize;
    const bool full = layout.full && layout.lines && layout.cols > 0 && !stacked &&
                      layout.cols % (kMany * kWarpSize * kWidth) == 0;
    if (held && full) return fn(Type<HeldRow<T, kMany, true>>{}, pieces / kMany);
  }
  if (held)
    return fn(Type<HeldRow<T, kMany, false, false, kStacked>>{}, threads_for(pieces, kMany));
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
