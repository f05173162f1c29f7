#pragma once
#include <vector>

#include "cpu/gemm_lanes.h"
#include "kernels/attention_config.h"

/// Tiles of keys and values as fp32, and the small products over them.
namespace ridgeline::cpu {

inline float load_float(const void* data, DType dtype, std::int64_t i) {
  float value = 0.0f;
  dispatch_float(dtype, [&](auto type) {
    value = static_cast<float>(static_cast<const typename decltype(type)::type*>(data)[i]);
  });
  return value;
}

/// Transposes 8x8 values in three rounds: single values, pairs, and halves change places.
inline void transpose_square(FloatLanes (&m)[kLanes]) {
  FloatLanes singles[kLanes], pairs[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    singles[i] = __builtin_shufflevector(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    singles[i + 1] = __builtin_shufflevector(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      const FloatLanes low = singles[i + j], high = singles[i + 2 + j];
      pairs[i + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
      pairs[i + 2 * j + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    m[i] = __builtin_shufflevector(pairs[i], pairs[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + 4] = __builtin_shufflevector(pairs[i], pairs[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/// What one thread works in. Every product's rows are contiguous.
struct TileBuffers {
  TileBuffers(int rows, int head_dim)
      : q(rows * head_dim),
        o(rows * head_dim),
        s(rows * attention_config::kKeyTile),
        k(head_dim * attention_config::kKeyTile),
        v(attention_config::kKeyTile * head_dim),
        row(8 * head_dim) {}

  std::vector<float> q;    // [rows, head_dim]
  std::vector<float> o;    // [rows, head_dim]
  std::vector<float> s;    // [rows, keys]: scores, then weights
  std::vector<float> k;    // [head_dim, keys]: transposed, so that scores of 8 keys are one vector
  std::vector<float> v;    // [keys, head_dim]
  std::vector<float> row;  // 8 keys before they are transposed
};

/// Reads the tiles of one sequence and KV head, wherever its layout keeps them.
class KeyTiles {
 public:
  KeyTiles(const AttentionParams& p, const attention_config::Sequence& s, std::int32_t b,
           std::int32_t kv_head)
      : p_(p), begin_(s.k_begin), b_(b), head_(kv_head) {}

  /// Keys and values begin <= n < end of the tile at n0; zeros for the others, whose slots may hold
  /// anything.
  void load(std::int32_t n0, std::int32_t begin, std::int32_t end, TileBuffers& to) const {
    const int width = p_.head_dim;
    for (int n = 0; n < attention_config::kKeyTile; n += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const std::int32_t key = n0 + n + j;
        float* v = to.v.data() + (n + j) * width;
        if (key < begin || key >= end) {
          std::fill_n(to.row.data() + j * width, width, 0.0f);
          std::fill_n(v, width, 0.0f);
          continue;
        }
        const Slot at = slot(key);
        expand(p_.k, at.batch * p_.stride_k_batch + at.row * p_.stride_k_row +
                         head_ * p_.stride_k_head,
               p_.k_scale, at.batch * p_.stride_ks_batch + at.row * p_.stride_ks_row +
                               head_ * p_.stride_ks_head,
               to.row.data() + j * width);
        expand(p_.v, at.batch * p_.stride_v_batch + at.row * p_.stride_v_row +
                         head_ * p_.stride_v_head,
               p_.v_scale, at.batch * p_.stride_vs_batch + at.row * p_.stride_vs_row +
                               head_ * p_.stride_vs_head,
               v);
      }
      transpose(to.row.data(), to.k.data() + n);
    }
  }

 private:
  struct Slot {
    std::int64_t batch, row;
  };

  Slot slot(std::int32_t key) const {
    if (p_.block_tables == nullptr) return {b_, begin_ + key};
    return {p_.block_tables[b_ * p_.stride_table + key / p_.block_size], key % p_.block_size};
  }

  void expand(const void* from, std::int64_t offset, const void* scales, std::int64_t scale_offset,
              float* to) const {
    const int width = p_.head_dim;
    const float scale = scales == nullptr ? 1.0f
                                          : load_float(scales, DType::kBFloat16, scale_offset);
    if (p_.kv_dtype == DType::kFloat8E4M3) {
      const std::uint8_t* row = static_cast<const std::uint8_t*>(from) + offset;
#pragma omp simd
      for (int d = 0; d < width; ++d) to[d] = e4m3_to_float(row[d]) * scale;
    } else if (p_.kv_dtype == DType::kInt8) {
      const std::int8_t* row = static_cast<const std::int8_t*>(from) + offset;
#pragma omp simd
      for (int d = 0; d < width; ++d) to[d] = static_cast<float>(row[d]) * scale;
    } else {
      dispatch_float(p_.kv_dtype, [&](auto type) {
        const auto* row = static_cast<const typename decltype(type)::type*>(from) + offset;
#pragma omp simd
        for (int d = 0; d < width; ++d) to[d] = static_cast<float>(row[d]);
      });
    }
  }

  /// [8, head_dim] into columns of [head_dim, kKeyTile].
  void transpose(const float* rows, float* columns) const {
    const int width = p_.head_dim;
    for (int d = 0; d < width; d += kLanes) {
      FloatLanes square[kLanes];
      for (int j = 0; j < kLanes; ++j) square[j] = load_lanes(rows + j * width + d);
      transpose_square(square);
      for (int j = 0; j < kLanes; ++j)
        store_lanes(columns + (d + j) * attention_config::kKeyTile, square[j]);
    }
  }

  const AttentionParams& p_;
  const std::int64_t begin_, b_, head_;
};

/// Columns a row of each matrix has in memory.
struct Strides {
  int a, b, c;
};

/// kCount rows of c: each element sums over the depth in order, whatever rows it is computed with.
template <int kCount, int kVectors>
void product_block(const float* a, const float* b, float* c, int depth, Strides strides, bool add) {
  FloatLanes sums[kCount][kVectors];
  for (int r = 0; r < kCount; ++r)
    for (int i = 0; i < kVectors; ++i) sums[r][i] = FloatLanes{};
  for (int k = 0; k < depth; ++k)
    for (int i = 0; i < kVectors; ++i) {
      const FloatLanes column = load_lanes(b + k * strides.b + i * kLanes);
      for (int r = 0; r < kCount; ++r) sums[r][i] += column * a[r * strides.a + k];
    }
  for (int r = 0; r < kCount; ++r)
    for (int i = 0; i < kVectors; ++i) {
      float* to = c + r * strides.c + i * kLanes;
      store_lanes(to, add ? load_lanes(to) + sums[r][i] : sums[r][i]);
    }
}

/// c = a b, or c += a b: a [rows, depth], b [depth, strides.b], c [rows, strides.c]. Sums of 64
/// terms are taken apart and then added: a long sum in one chain loses bits.
inline void product(const float* a, const float* b, float* c, int rows, int depth, Strides strides,
                    bool add) {
  const auto columns = [&]<int kCount>(Int<kCount>, int r) {
    const float* from = a + r * strides.a;
    float* to = c + r * strides.c;
    for (int k = 0; k < depth; k += 64) {
      const int terms = std::min(depth - k, 64);
      const float* rows_of_b = b + k * strides.b;
      int j = 0;
      for (; j + 2 * kLanes <= strides.c; j += 2 * kLanes)
        product_block<kCount, 2>(from + k, rows_of_b + j, to + j, terms, strides, add || k > 0);
      if (j < strides.c)
        product_block<kCount, 1>(from + k, rows_of_b + j, to + j, terms, strides, add || k > 0);
    }
  };
  int r = 0;
  for (; r + 4 <= rows; r += 4) columns(Int<4>{}, r);
  for (; r < rows; ++r) columns(Int<1>{}, r);
}

}  // namespace ridgeline::cpu
