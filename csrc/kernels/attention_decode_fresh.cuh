#pragma once
#include "common/rotation.h"
#include "device/vec.cuh"
#include "kernels/attention_decode_sm90.cuh"

/// The last key of a sequence and its value, as the projection leaves them: one warp rotates it and
/// the queries, and those that multiply put it into the tile that came without it. All else that a
/// block reads is written long before the kernels ahead end, and comes meanwhile.
namespace ridgeline::attention_decode {

/// Rows of one KV head that the warp brings: queries, key, value. A lane has two pieces of 8
/// columns that rotate together, of kTogether rows apart.
template <class Tile>
struct FreshRows {
  using T = typename Tile::T;
  using Piece = device::Vec<T, 8>;
  static constexpr int kHalf = Tile::kSize / 2, kPieces = kHalf / 8;
  static constexpr int kTogether = device::kWarpSize / kPieces;
  static constexpr int kPasses = ceil_div(Tile::kRows + 2, kTogether);

  const Launch& launch;
  const Work work;
  const AttentionParams& p = launch.attention;
  const FreshKey& fresh = launch.fresh;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int column = lane % kPieces * 8, first_row = lane / kPieces;
  device::Vec<float, 8> cosines, sines;

  __device__ __forceinline__ bool is_key(int row) const { return row == work.rows; }
  __device__ __forceinline__ bool is_value(int row) const { return row == work.rows + 1; }

  __device__ __forceinline__ void load_angles() {
    std::int64_t position = ptx::load_from_l2(fresh.position);
    if (position < 0 || position >= fresh.max_position) position = 0;
    const float* at = fresh.cos_sin + position * fresh.stride_cos_sin + column;
    cosines = device::load_vec<8>(at);
    sines = device::load_vec<8>(at + kHalf);
  }

  __device__ __forceinline__ const T* row_at(int row) const {
    const auto* k = static_cast<const T*>(fresh.k) + work.kv_head * fresh.stride_k_head;
    const auto* v = static_cast<const T*>(fresh.v) + work.kv_head * fresh.stride_v_head;
    if (is_key(row)) return k;
    if (is_value(row)) return v;
    return reinterpret_cast<const T*>(query_at(launch, work, row));
  }

  __device__ __forceinline__ void rotate(Piece& a, Piece& b) const {
    const device::Vec<float, 8> x = device::floats(a), y = device::floats(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      a.data[j] = device::from_float<T>(
          rotated_first(x.data[j], y.data[j], cosines.data[j], sines.data[j]));
      b.data[j] = device::from_float<T>(
          rotated_second(x.data[j], y.data[j], cosines.data[j], sines.data[j]));
    }
  }

  /// Where the key, or its value, lies in the cache; null: nowhere.
  __device__ __forceinline__ T* slot_at(int slot, bool value) const {
    if (slot < 0 || slot >= p.num_blocks * p.block_size) return nullptr;
    const int block = launch.block_size.divide(slot), offset = slot - block * p.block_size;
    // The cache is written nowhere else in this kernel.
    auto* cache = static_cast<T*>(const_cast<void*>(value ? p.v : p.k));
    return cache + block * (value ? p.stride_v_batch : p.stride_k_batch) +
           offset * (value ? p.stride_v_row : p.stride_k_row) +
           work.kv_head * (value ? p.stride_v_head : p.stride_k_head);
  }

  /// The rows, rotated, to shared memory; key and value to the cache, by one block of a KV head.
  __device__ __forceinline__ void bring(Shared<Tile>& shared, bool writes) {
    const int slot = writes ? ptx::load_from_l2(fresh.slot) : -1;
    load_angles();
    constexpr int kChunks = Tile::kSize / 8;
    for (int i = work.rows * kChunks + lane; i < Tile::kRows * kChunks; i += device::kWarpSize)
      *reinterpret_cast<uint4*>(&shared.queries[0][i / kChunks][i % kChunks * 8]) = uint4{};
    ptx::wait_for_dependencies();
    Piece pieces[kPasses][2];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first_row + i * kTogether;
      if (row > work.rows + 1) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(row_at(row) + column + h * kHalf));
        pieces[i][h] = reinterpret_cast<const Piece&>(raw);
      }
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first_row + i * kTogether;
      if (row > work.rows + 1) continue;
      if (!is_value(row)) rotate(pieces[i][0], pieces[i][1]);
      const bool is_query = row < work.rows;
      T* cache = is_query ? nullptr : slot_at(slot, is_value(row));
      auto* to = reinterpret_cast<T*>(is_query ? shared.queries[0][row]
                                               : shared.fresh[is_value(row)]) + column;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        device::store(to + h * kHalf, pieces[i][h]);
        if (cache != nullptr) device::store(cache + column + h * kHalf, pieces[i][h]);
      }
    }
    ptx::mbarrier_arrive(&shared.fetched[0]);
  }
};

/// Puts the fresh key into its tile: the warp that scores it; and each warp its columns of the
/// value.
template <class Tile>
struct LacksFresh {
  Shared<Tile>& shared;
  int key;  // -1: nothing lacks
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;

  /// Chunk `chunk` of 16 bytes of the key, or of the value.
  __device__ __forceinline__ void put(int stage, int row, int chunk, bool value) const {
    *reinterpret_cast<uint4*>(shared.stages[stage] + swizzled<Tile>(row, chunk)) =
        *reinterpret_cast<const uint4*>(&shared.fresh[value][chunk * 8]);
  }

  __device__ __forceinline__ void add_key(int stage, int n) const {
    if constexpr (Tile::kQuantised) return;
    const int row = key - n;
    if (key < 0 || row >= Tile::kKeys || row / kStep % kWarps != warp) return;
    if (lane < Tile::kRowBytes / 16) put(stage, row, lane, false);
    __syncwarp();  // the key is there
  }

  __device__ __forceinline__ void add_value(int stage, int n) const {
    constexpr int kChunks = Tile::kRowBytes / 16 / kWarps;
    if constexpr (Tile::kQuantised) return;
    const int row = key - n;
    if (key < 0 || row >= Tile::kKeys) return;
    if (lane < kChunks) put(stage, row, warp * kChunks + lane, true);
    __syncwarp();  // its columns are there
  }
};

}  // namespace ridgeline::attention_decode
