#include <string>

#include "common/launch_trace.h"
#include "common/math.h"
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_tile.cuh"
#include "kernels/attention_workspace.h"

namespace ridgeline {
namespace {

using namespace attention_tile;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * device::kWarpSize;
constexpr int kMaxDim = 256;
constexpr int kPerLane = kMaxDim / device::kWarpSize;  // columns a lane keeps in registers

// ---- Shared memory ------------------------------------------------------------------------------

struct Shared {
  float sums[kWarps][kMaxDim];
  float largest[kWarps];
  float total[kWarps];
};

// ---- Phases -------------------------------------------------------------------------------------

/// One element of a cache row as the model means it.
__device__ __forceinline__ float load_element(const char* row, int column, DType dtype,
                                              float scale) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(row)[column];
  return device::dequantise(static_cast<std::uint8_t>(row[column]), dtype, scale);
}

/// A cache row and its scale.
struct Row {
  const char* data;
  float scale;

  __device__ __forceinline__ Row(const Keys& keys, const Slot& slot)
      : data(keys.data + slot.batch * keys.stride_batch + slot.row * keys.stride_row), scale(1.0f) {
    if (keys.scale)
      scale = device::to_float(
          keys.scale[slot.batch * keys.stride_scale_batch + slot.row * keys.stride_scale_row]);
  }
};

/// What one warp has gathered over its keys: lane i holds columns i, i + 32, ...
struct Gathered {
  float largest = device::kMinusInfinity;  // in natural units
  float total = 0.0f;
  float sums[kPerLane] = {};

  __device__ __forceinline__ void add(float score, const AttentionParams& p, const Row& value) {
    const float new_largest = fmaxf(largest, score);
    const float base = device::exponent_base(new_largest);
    const float keep = expf(largest - base), weight = expf(score - base);
    largest = new_largest;
    total = total * keep + weight;
    const int lane = threadIdx.x % device::kWarpSize;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int column = lane + i * device::kWarpSize;
      if (column >= p.head_dim) break;
      sums[i] = sums[i] * keep + weight * load_element(value.data, column, p.kv_dtype, value.scale);
    }
  }
};

__device__ __forceinline__ float dot(const float (&q)[kPerLane], const AttentionParams& p,
                                     const Row& key) {
  const int lane = threadIdx.x % device::kWarpSize;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int column = lane + i * device::kWarpSize;
    if (column < p.head_dim) sum += q[i] * load_element(key.data, column, p.kv_dtype, key.scale);
  }
  return device::warp_reduce<device::Sum>(sum);
}

/// The warps' parts joined in their order, by all threads.
__device__ __forceinline__ void store_row(const AttentionParams& p, const Work& work,
                                          const Shared& shared) {
  const float sink = sink_of(p, work.head(work.first_row));
  float largest = sink * device::kLn2;
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w]);
  const float base = device::exponent_base(largest);
  float total = expf(sink * device::kLn2 - base), keep[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    keep[w] = expf(shared.largest[w] - base);
    total += shared.total[w] * keep[w];
  }
  float* out = static_cast<float*>(p.out) + out_offset(p, work, work.first_row);
  for (int column = threadIdx.x; column < p.head_dim; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.sums[w][column] * keep[w];
    out[column] = total == 0.0f ? 0.0f : sum / total;
  }
  if (threadIdx.x == 0) store_lse(p, work, work.first_row, base + logf(total));
}

// ---- Kernel -------------------------------------------------------------------------------------

/// Attention in fp32 on the CUDA cores: no tensor core takes fp32 without rounding it. Grid:
/// (sequence, query, head), and a sequence's share once more where rows may belong to none. A block
/// owns one row; warp w owns every fourth key and keeps its sums in registers.
__global__ void __launch_bounds__(kThreads)
    plain_kernel(const __grid_constant__ AttentionParams p) {
  __shared__ Shared shared;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int of_sequence = p.max_q * p.heads;
  Work work{.batch = static_cast<int>(blockIdx.x) / of_sequence, .group = p.heads / p.kv_heads};
  const int item = static_cast<int>(blockIdx.x) % of_sequence;
  if (work.batch == p.batch) return clear_unowned_rows<float>(p, item, of_sequence);
  const int query = item / p.heads, head = item % p.heads;
  work.sequence = config::sequence_of(p, work.batch);
  if (query >= work.sequence.q_len) return;
  work.kv_head = head / work.group;
  work.first_row = query * work.group + head % work.group;

  const int bytes = p.k_scale ? 1 : 4;
  const Keys keys = cache_of<Part::kKeys>(p, work.kv_head, bytes);
  const Keys values = cache_of<Part::kValues>(p, work.kv_head, bytes);
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  const float* from = static_cast<const float*>(p.q) + work.batch * p.stride_q_batch +
                      (work.sequence.q_begin + query) * p.stride_q_row + head * p.stride_q_head;
  float q[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int column = lane + i * device::kWarpSize;
    q[i] = column < p.head_dim ? from[column] : 0.0f;
  }

  Gathered gathered;
  const config::KeyRange visible = config::visible_keys(p, work.sequence, query);
  for (int n = visible.begin + warp; n < visible.end; n += kWarps) {
    const Slot slot = slot_of(p, work, n);
    float score = dot(q, p, Row(keys, slot)) * p.scale;
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    gathered.add(score, p, Row(values, slot));
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    shared.sums[warp][lane + i * device::kWarpSize] = gathered.sums[i];
  if (lane == 0) {
    shared.largest[warp] = gathered.largest;
    shared.total[warp] = gathered.total;
  }
  __syncthreads();  // the warps' parts are there
  store_row(p, work, shared);
}

}  // namespace

// ---- Launch -------------------------------------------------------------------------------------

namespace attention_launch {

void plain(const AttentionParams& p, Stream stream) {
  if (p.max_q == 0) return;
  const std::int64_t sequences = std::int64_t{p.batch} + (p.cu_q != nullptr ? 1 : 0);
  const std::int64_t blocks = sequences * p.max_q * p.heads;
  device::launch_chained<plain_kernel>(dim3(checked_int32(blocks, "attention: blocks")),
                                       dim3(kThreads), 0, stream, p, "attention");
}

}  // namespace attention_launch

namespace {

/// Tells why the faster kernel is not taken. Without a Hopper GPU there is none.
template <class Text>
void note_general(const char* what, Text&& why) {
  if (device::runs_sm90a())
    launch_trace::note_slower([&] { return std::string(what) + ": " + why(); });
}

/// Sequences of few queries, and the rows of none.
void few_queries(const AttentionParams& p, Stream stream) {
  AttentionParams rest = p;
  if (!p.batch_invariant && p.batch > 0 && (p.leaves_shared || config::has_packed_rows(p))) {
    const char* obstacle = attention_launch::rows_obstacle(p);
    if (obstacle == nullptr) {
      launch_trace::note_choice([&] {
        return (config::packs_all(p)
                    ? "all sequences"
                    : "sequences of more than " + std::to_string(config::kMmaRows) + " rows") +
               ": splits of " + std::to_string(config::kRowSplitKeys) +
               " keys or more on wgmma" +
               (config::joins_clusters(p, device::multiprocessors())
                    ? ", joined in clusters of " +
                          std::to_string(config::max_row_splits(p.head_dim, p.max_k))
                    : "");
      });
      attention_launch::rows_sm90(p, stream);
      if (config::packs_all(p)) return;
      rest.max_q = config::lesser(p.max_q, config::kMmaRows / (p.heads / p.kv_heads));
      rest.leaves_longer = true;
    } else {
      note_general("several queries a sequence", [&] { return obstacle; });
    }
  }
  if (attention_launch::covers_decode_sm90(rest)) {
    attention_launch::decode_sm90(rest, stream);
  } else {
    const auto why = [&]() -> std::string {
      if (config::has_decode_tile(rest)) return "rows of k, v or their scales are unaligned";
      if (p.k_scale == nullptr) return "more rows than one MMA takes";
      return "no tile of head size " + std::to_string(p.head_dim) + " for 8-bit caches";
    };
    if (rest.max_q > 0) note_general("decode", why);
    attention_launch::split(rest, stream);
  }
}

/// The same, where all sequences begin with the same keys: these are read once.
void common_prefix(const AttentionParams& p, Stream stream) {
  launch_trace::note_choice([&] {
    return "the " + std::to_string(p.shared_keys) +
           " shared keys once for all sequences: splits of " +
           std::to_string(config::common_split_keys(p.shared_keys));
  });
  attention_launch::common_sm90(p, stream);
  AttentionParams rest = p;
  rest.leaves_shared = true;
  few_queries(rest, stream);
  attention_launch::join_common_sm90(p, stream);
}

/// Few queries in batch-invariant mode, each sequence's keys unsplit: the kernel of packed rows
/// then has the bits of the Hopper prefill kernel, which takes sequences of more queries, and one
/// that is alone: its heads have an SM each. H200, 32/8 heads of 128, us, by that kernel and by
/// this: 32 sequences of 300 keys 59 and 16, 128 of 300 223 and 48; one of 4k 54 and 65.
bool takes_unsplit(const AttentionParams& p) {
  return config::packs_unsplit(p) && attention_launch::rows_obstacle(p) == nullptr &&
         attention_launch::prefill_obstacle(p) == nullptr;
}

void unsplit(const AttentionParams& p, Stream stream) {
  const bool all_few = config::is_split(p.max_q, p.heads / p.kv_heads);
  launch_trace::note_choice([&] {
    return std::string(all_few ? "all sequences" : "sequences of few queries") +
           ": keys unsplit on wgmma";
  });
  attention_launch::rows_sm90(p, stream);
  if (all_few) return;
  AttentionParams rest = p;
  rest.leaves_few = true;
  attention_launch::prefill_sm90(rest, stream);
}

/// Many of them in e4m3 where the GPU multiplies it, others as bf16.
void quantised_queries(const AttentionParams& p, Stream stream) {
  const char* obstacle = config::is_split(p, p.max_q) ? "few queries a sequence"
                                                      : attention_launch::prefill_fp8_obstacle(p);
  if (obstacle != nullptr) {
    note_general("fp8 queries rounded to bf16", [&] { return obstacle; });
    return attention(attention_launch::expand_queries(p, false, stream), stream);
  }
  AttentionParams many = p;
  many.takes_few = config::expects_many(p);
  if (!many.takes_few) few_queries(attention_launch::expand_queries(p, true, stream), stream);
  if (p.batch > 0) attention_launch::prefill_fp8_sm90(many, stream);
}

/// Chunks before many keys, and beside them sequences of few queries: those of few rows by the
/// decode kernel, whose SMs chunks take as its blocks end; others are chunks.
void chunks(const AttentionParams& p, Stream stream) {
  launch_trace::note_choice([] {
    return "sequences of many queries: keys in up to " + std::to_string(config::kChunkSegments) +
           " segments";
  });
  AttentionParams few = p, many = p;
  few.max_q = config::lesser(p.max_q, config::kMmaRows / (p.heads / p.kv_heads));
  few.leaves_longer = true;
  few.precedes_chunks = p.counters != nullptr;  // else the kernel that joins splits comes between
  few.workspace = static_cast<char*>(p.workspace) + config::chunk_rows_bytes(p);
  const bool decodes = p.cu_q != nullptr && !config::expects_many(p) && few.max_q > 0 &&
                       attention_launch::covers_decode_sm90(few);
  many.takes_few = p.cu_q != nullptr && !decodes;
  many.takes_packed = true;
  many.follows_few = decodes && few.precedes_chunks;
  if (decodes) attention_launch::decode_sm90(few, stream);
  attention_launch::chunks_sm90(many, stream);
}

}  // namespace

void attention(const AttentionParams& p, Stream stream) {
  const bool packed = p.cu_q != nullptr;
  const std::int64_t rows = packed ? p.total_q : std::int64_t{p.batch} * p.max_q;
  if (rows == 0 || p.heads == 0) return;
  if (p.q_scale != nullptr) return quantised_queries(p, stream);
  if (p.dtype == DType::kFloat32) return attention_launch::plain(p, stream);
  if (config::reads_common(p) && attention_launch::rows_obstacle(p) == nullptr)
    return common_prefix(p, stream);
  if (p.shared_keys > 0)
    note_general("shared keys for each sequence anew", [] {
      return "read once are at least " + std::to_string(config::kCommonKeys) +
             ", of several sequences of few queries, in 16-bit caches of heads up to " +
             std::to_string(config::kCommonColumns) + ", without a window";
    });
  if (takes_unsplit(p)) return unsplit(p, stream);
  if (config::is_split(p, p.max_q)) return few_queries(p, stream);
  const char* obstacle = attention_launch::prefill_obstacle(p);
  if (obstacle == nullptr && p.batch > 0 && config::cuts_chunks(p)) return chunks(p, stream);
  AttentionParams many = p;
  many.takes_few = obstacle == nullptr && config::expects_many(p);
  if (packed && !many.takes_few) few_queries(p, stream);
  if (p.batch == 0) return;
  if (obstacle != nullptr) {
    note_general("prefill", [&] { return obstacle; });
    attention_launch::prefill(p, stream);
  } else {
    attention_launch::prefill_sm90(many, stream);
  }
}

}  // namespace ridgeline
