#pragma once
#include "device/activation.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "kernels/gemm_grouped_sm90_multiply.cuh"

/// The way of the sums to y.
namespace ridgeline::gemm_grouped {

/// The thread's two weight rows: where they are, and their factors.
template <class T>
struct RowFactors {
  float scale[2] = {1.0f, 1.0f}, bias[2] = {-0.0f, -0.0f};

  __device__ __forceinline__ void load(const GemmParams& p, int expert, const int (&n)[2]) {
    const bool scales = p.weight.scales_products();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (n[r] >= p.N) continue;
      const std::int64_t at = std::int64_t{expert} * p.N + n[r];
      if (scales)
        scale[r] = static_cast<const float*>(
            p.weight.scales)[p.weight.scale_layout == ScaleLayout::kRow ? at : expert];
      if (p.bias) bias[r] = device::to_float(static_cast<const T*>(p.bias)[at]);
    }
  }

  __device__ __forceinline__ void take(const Column& first, const Column& second) {
    scale[0] = first.scale, bias[0] = first.bias;
    scale[1] = second.scale, bias[1] = second.bias;
  }

  /// Of a sum, times the scale of its row of x.
  template <class Tile>
  __device__ __forceinline__ float of(int r, float sum) const {
    if constexpr (Tile::kFormat == WeightFormat::kFp8) sum = __fmul_rn(sum, scale[r]);
    if constexpr (Tile::kUnit != 1.0f) sum = __fmul_rn(sum, Tile::kUnit);
    return __fadd_rn(sum, bias[r]);
  }
};

/// Of the thread's weight rows.
template <class Tile>
__device__ __forceinline__ void load_factors(RowFactors<typename Tile::T>& factors,
                                             const GemmParams& p, const Item& item,
                                             const Consumer& me) {
  int n[2];
  find_rows<Tile>(n, p, item, me);
  factors.load(p, item.expert, n);
}

/// The pair of residuals in a register is added in float32, ahead of the one rounding.
template <class T>
__device__ __forceinline__ std::uint32_t pack_sum(float2 pair, std::uint32_t residual) {
  const auto of = device::as_pair<T>(residual);
  return pack<T>(__fadd_rn(pair.x, device::to_float(of.x)),
                 __fadd_rn(pair.y, device::to_float(of.y)));
}

/// Eight of them, of any alignment.
template <class T>
__device__ __forceinline__ void copy_residuals(T* to, const T* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % kVector == 0) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) to[i] = from[i];
  }
}

/// Rows of y from shared memory, kVectors of 16 bytes each. All of a thread's loads go ahead of its
/// stores: one after the other they took half of the time that a piece did (H200).
template <int kVectors, int kRows, class T>
__device__ __forceinline__ void copy_out(T* y, std::int64_t stride, int rows,
                                         const T (&out)[kRows][kOutColumns], int thread) {
  constexpr int kStep = kWarpgroup / kVectors, kCount = kRows / kStep;
  const int v = thread % kVectors, first = thread / kVectors;
  uint4 vectors[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int m = first + i * kStep;
    vectors[i] = *reinterpret_cast<const uint4*>(&out[m][(v ^ (m % 8)) * 8]);
  }
  y += first * stride + v * 8;
#pragma unroll
  for (int i = 0; i < kCount; ++i, y += kStep * stride)
    if (first + i * kStep < rows) *reinterpret_cast<uint4*>(y) = vectors[i];
}

/// Rows of y from one piece of the sums, through shared memory: 64 columns, or 32 of gates
/// times their up rows.
template <class Tile, int kEights>
__device__ __forceinline__ void store_piece(const Launch& launch, Shared<Tile>& shared,
                                            const Item& item, int piece,
                                            const float (&sums)[kEights][4], const float* x_scale,
                                            const RowFactors<typename Tile::T>& factors,
                                            const Consumer& me) {
  using T = typename Tile::T;
  const GemmParams& p = launch.grouped.gemm;
  const bool gated = is_gated(p.activation);
  auto& out = shared.out[me.warpgroup];
  const int matrix = me.lane / 8;
  me.meet();  // the rows before are read; scales of x are there
  const auto values = [&](int r, int i) {  // of eight rows of x
    float2 pair{sums[i][2 * r], sums[i][2 * r + 1]};
    if constexpr (Tile::kScalesRows) {
      const float2 scales = *reinterpret_cast<const float2*>(
          &x_scale[piece * Tile::kPiece + i * 8 + me.in_quad * 2]);
      pair.x = __fmul_rn(pair.x, scales.x), pair.y = __fmul_rn(pair.y, scales.y);
    }
    return float2{factors.template of<Tile>(r, pair.x),
                  factors.template of<Tile>(r, pair.y)};
  };
  const int vectors = gated ? 4 : 8, out_cols = p.out_cols(), v = me.thread % vectors;
  const int first = (item.column * Tile::kConsumers + me.warpgroup) * vectors * 8;
  const int n = first + v * 8, rows = min(item.rows - piece * Tile::kPiece, kEights * 8);
  const std::int64_t row0 = std::int64_t{item.row0} + piece * Tile::kPiece;
  const bool adds = Tile::kFormat == WeightFormat::kDense && p.residual != nullptr;
  if (adds) {  // to where the sums will lie; not gated
    const T* from = static_cast<const T*>(p.residual) + row0 * p.stride_residual + n;
    for (int m = me.thread / vectors; m < rows && n < out_cols; m += kWarpgroup / vectors)
      copy_residuals(&out[m][(v ^ (m % 8)) * 8], from + m * p.stride_residual);
    me.meet();  // the residuals are there
  }
  if (gated) {
#pragma unroll
    for (int i = 0; i < kEights; i += 4) {
      std::uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 gate = values(0, i + j), up = values(1, i + j);
        packed[j] = pack<T>(__fmul_rn(device::silu<true>(gate.x), up.x),
                            __fmul_rn(device::silu<true>(gate.y), up.y));
      }
      const int m = (i + matrix) * 8 + me.lane % 8;
      ptx::stmatrix_transposed(&out[m][(me.warp ^ (m % 8)) * 8], packed);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEights; i += 2) {
      const int m = (i + matrix / 2) * 8 + me.lane % 8;
      T* at = &out[m][((me.warp * 2 + matrix % 2) ^ (m % 8)) * 8];
      std::uint32_t packed[4], residual[4];
      if (adds) ptx::ldmatrix_transposed(residual, at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // weight rows half j % 2 of eight i + j / 2
        const float2 pair = values(j % 2, i + j / 2);
        packed[j] = adds ? pack_sum<T>(pair, residual[j]) : pack<T>(pair.x, pair.y);
      }
      ptx::stmatrix_transposed(at, packed);
    }
  }
  me.meet();  // the piece is whole
  if (n >= out_cols) return;
  T* y = static_cast<T*>(p.y) + row0 * out_cols + first;
  if (gated) {
    copy_out<4>(y, out_cols, rows, out, me.thread);
  } else {
    copy_out<8>(y, out_cols, rows, out, me.thread);
  }
}

template <class Tile>
__device__ __forceinline__ void store_tile(const Launch& launch, Shared<Tile>& shared,
                                           const Item& item, const Sums<Tile>& sums,
                                           const float* x_scale,
                                           const RowFactors<typename Tile::T>& factors,
                                           const Consumer& me) {
  constexpr int kPieces = ceil_div(Tile::kRows, Tile::kPiece);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    if (piece * Tile::kPiece < item.rows)
      store_piece<Tile>(launch, shared, item, piece, sums[piece], x_scale, factors, me);
}

/// A thread's places in the boxes of its warpgroup and in y, worked out once a tile: a box took 145
/// instructions with them, and takes 75. With a barrier a box for two a tile's way to y took 4440
/// clocks and takes 3020 (H200, lab, fp8 by fp8, 768 x 2048). Rows of gated outputs are half as
/// long as a box, two lie side by side. Eight rows of eight columns are in different banks; what a
/// thread has further on in a box is kHalf bytes on.
template <class Tile, bool kGated>
struct Boxes {
  using T = typename Tile::T;
  static constexpr int kRows = kGated ? 2 * kBoxLines : kBoxLines;
  static constexpr int kRowVectors = kGated ? 4 : 8;
  static constexpr int kStep = kWarpgroup / kRowVectors;  // rows between those of a thread
  static constexpr int kCount = kRows / kStep;            // of them in a box
  static constexpr int kHalf = kBoxLines / 2 * kRowBytes;

  char *fragment[2], *rows[2];  // of the next box and the one after
  std::int64_t first, column;   // the thread's first row of y and column
  T* y;                         // there, and as the thread stores
  int count;                    // of the tile's rows from the first on

  __device__ __forceinline__ Boxes(const GemmParams& p, Shared<Tile>& shared, const Item& item,
                                   const Consumer& me, int band, int turn) {
    const auto place = [](unsigned row, unsigned vector) {
      const unsigned line = kGated ? row / 2 : row;
      return line * kRowBytes + ((kGated ? row % 2 * 4 + vector : vector) ^ line % 8) * kVector;
    };
    const unsigned thread = me.thread, lane = me.lane, warp = me.warp, matrix = lane / 8;
    const unsigned of_fragment = kGated ? place(lane, warp)
                                        : place(matrix / 2 * 8 + lane % 8, warp * 2 + matrix % 2);
    const unsigned row = thread / kRowVectors, vector = thread % kRowVectors;
    const unsigned of_rows = place(row, vector);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* box = reinterpret_cast<char*>(shared.out[me.warpgroup][(turn + i) % 2 * kBoxLines]);
      fragment[i] = box + of_fragment;
      rows[i] = box + of_rows;
    }
    first = item.row0 + static_cast<int>(row);
    const int group = (item.column * Tile::kBands + band) * Tile::kConsumers + me.warpgroup;
    column = (group * kRowVectors + vector) * 8;
    y = static_cast<T*>(p.y) + first * p.out_cols() + column;
    count = column < p.out_cols() ? item.rows - static_cast<int>(row) : 0;
  }
};

/// Sums of a tile of many rows to y through boxes of 64 columns, or of 32 of gates times their up
/// rows. The loads of a box go ahead of the work on the next, its stores behind. Of two boxes by
/// turns one is written while slower warps read the other: a barrier a box. `turn`: that of the
/// next.
template <class Tile, bool kGated>
__device__ __forceinline__ void store_boxes(const Launch& launch, Shared<Tile>& shared,
                                            const Item& item, const Sums<Tile>& sums,
                                            const float* x_scale,
                                            const RowFactors<typename Tile::T>& factors,
                                            const Consumer& me, int band, int& turn) {
  using T = typename Tile::T;
  using Boxes = Boxes<Tile, kGated>;
  constexpr int kCount = Boxes::kCount, kEights = Tile::kPiece / 8;
  static_assert(Tile::kLines == 2 * kBoxLines);
  const GemmParams& p = launch.grouped.gemm;
  const bool adds = !kGated && Tile::kFormat == WeightFormat::kDense && p.residual != nullptr;
  Boxes boxes(p, shared, item, me, band, turn);
  uint4 held[kCount];
  const auto store_held = [&](int box) {
#pragma unroll
    for (int i = 0; i < kCount; ++i, boxes.y += std::int64_t{p.out_cols()} * Boxes::kStep)
      if (box * Boxes::kRows + i * Boxes::kStep < boxes.count)
        *reinterpret_cast<uint4*>(boxes.y) = held[i];
  };
#pragma unroll
  for (int b = 0; b < ceil_div(Tile::kRows, Boxes::kRows); ++b) {
    const int first = b * Boxes::kRows;
    if (b > 0 && first >= item.rows) continue;
    const auto values = [&](int r, int i) {  // of eight rows of x
      const int at = first / 8 + i;
      const float(&of)[4] = sums[at / kEights][at % kEights];
      float2 pair{of[2 * r], of[2 * r + 1]};
      if constexpr (Tile::kScalesRows) {
        const float2 scales =
            *reinterpret_cast<const float2*>(&x_scale[first + i * 8 + me.in_quad * 2]);
        pair.x = __fmul_rn(pair.x, scales.x), pair.y = __fmul_rn(pair.y, scales.y);
      }
      return float2{factors.template of<Tile>(r, pair.x), factors.template of<Tile>(r, pair.y)};
    };
    if (adds) {  // residuals, to where the sums will lie
      const T* from = static_cast<const T*>(p.residual) +
                      (boxes.first + first) * p.stride_residual + boxes.column;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (first + i * Boxes::kStep < boxes.count)
          copy_residuals(reinterpret_cast<T*>(boxes.rows[b % 2] + i * Boxes::kHalf),
                         from + i * Boxes::kStep * p.stride_residual);
      me.meet();  // they are there
    }
    std::uint32_t packed[kCount][4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      std::uint32_t residual[4];
      if (adds) ptx::ldmatrix_transposed(residual, boxes.fragment[b % 2] + i * Boxes::kHalf);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kGated) {
          const float2 gate = values(0, i * 4 + j), up = values(1, i * 4 + j);
          packed[i][j] = pack<T>(__fmul_rn(device::silu<true>(gate.x), up.x),
                                 __fmul_rn(device::silu<true>(gate.y), up.y));
        } else {  // weight rows half j % 2 of eight i * 2 + j / 2
          const float2 pair = values(j % 2, i * 2 + j / 2);
          packed[i][j] = adds ? pack_sum<T>(pair, residual[j]) : pack<T>(pair.x, pair.y);
        }
      }
    }
    if (b > 0) store_held(b - 1);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::stmatrix_transposed(boxes.fragment[b % 2] + i * Boxes::kHalf, packed[i]);
    me.meet();  // the box is whole, and that before it read
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      held[i] = *reinterpret_cast<const uint4*>(boxes.rows[b % 2] + i * Boxes::kHalf);
  }
  const int stored = ceil_div(item.rows, Boxes::kRows);
  store_held(stored - 1);
  turn = (turn + stored) % 2;
}

/// Rows of y that belong to no expert.
template <class Tile>
__device__ __forceinline__ void clear_rows(const Launch& launch, Shared<Tile>& shared) {
  const GemmParams& p = launch.grouped.gemm;
  const std::int64_t first = tables_of(launch, shared).offsets[launch.grouped.experts];
  const auto fill = [&](auto* to, int per_row, auto value) {
    for (std::int64_t i = first * per_row + std::int64_t{blockIdx.x} * Tile::kMultipliers +
                          threadIdx.x;
         i < p.M * per_row; i += std::int64_t{gridDim.x} * Tile::kMultipliers)
      to[i] = value;
  };
  constexpr int kElements = kVector / (Tile::kWay.codes ? 1 : sizeof(typename Tile::T));
  fill(static_cast<uint4*>(p.y), p.out_cols() / kElements, uint4{});
  if constexpr (Tile::kWay.codes) fill(p.y_scale, p.out_cols() / kScaleBlock, 1.0f);
}

}  // namespace ridgeline::gemm_grouped
