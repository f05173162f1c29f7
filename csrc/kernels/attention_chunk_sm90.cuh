#pragma once
#include <climits>

#include "kernels/attention_sm90.cuh"

/// Chunks of a prompt before many keys: packed tiles, each before one segment of the keys; their
/// order, and where partial rows lie.
namespace ridgeline::attention_sm90 {

/// The queries of a few tokens in all heads that read one KV head, so that few tokens fill a tile:
/// 32 of a model with four such heads. A tile is often half empty, so that warpgroups run as they
/// can. H200, 112 tokens before 32k keys: 149 us with turns, 137 so; 240 tokens 271 and 258.
template <class T, int kSize, int kSlots>
struct PackedTile : Tile<T, kSize, 2, config::kChunkRows, 2, kSlots> {
  static constexpr bool kTurns = false;
  static constexpr int kPackedRows = config::kChunkRows;
};

// ---- Segments -----------------------------------------------------------------------------------

constexpr int kSegmentEnd = 3;    // what a segment's partial rows cost, in tiles of keys
constexpr int kSegmentTiles = 4;  // of keys, at least
constexpr int kSms = 132;         // for any GPU, so that bits are the same

/// What a warp knows of 32 sequences: lane i has one, and how the keys that its queries see are
/// cut. That is a function of the sequence alone: no neighbour changes a row's bits.
struct Looked {
  config::Sequence sequence;
  int first, end;        // tiles of keys
  int length, segments;  // tiles of a segment; 0: the kernel of chunks has no rows of the sequence
  int tiles;             // of rows, in each KV head

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  __device__ __forceinline__ void look(const AttentionParams& p, int batch) {
    constexpr int kKeys = config::kChunkRows;
    segments = length = 0;
    bool has = false;
    int span = 0;
    if (batch + lane() < p.batch) {
      sequence = config::sequence_of(p, batch + lane());
      has = sequence.q_len > 0 && !config::is_split(p, sequence.q_len);
      tiles = ceil_div(sequence.q_len, config::kChunkRows / (p.heads / p.kv_heads));
      first = config::visible_keys(p, sequence, 0).begin / kKeys;
      end = ceil_div(config::visible_keys(p, sequence, sequence.q_len - 1).end, kKeys);
      end = max(end, first + 1);
      span = end - first;
    }
    if (has) length = span;
    const bool may = has && span >= 2 * kSegmentTiles - 1;  // be two segments or more
    for (unsigned all = __ballot_sync(0xffffffffu, may); all != 0; all &= all - 1) {
      const int owner = __ffs(static_cast<int>(all)) - 1;
      const int best = best_length(p, device::from_lane(span, owner),
                                   device::from_lane(tiles, owner) * p.kv_heads);
      if (lane() == owner) length = best;
    }
    if (has) segments = ceil_div(span, length);
  }

  /// The tiles of a segment with which a GPU ends soonest that has only `pairs` tiles of rows,
  /// each before `span` tiles of keys. Lane i reckons with i + 1 segments.
  __device__ __forceinline__ static int best_length(const AttentionParams& p, int span, int pairs) {
    const int count = lane() + 1, length = ceil_div(span, count);
    const int steps = ceil_div(pairs * count, kSms) * (length + (count > 1 ? kSegmentEnd : 0));
    const bool may = count == 1 || (count <= config::kChunkSegments && length >= kSegmentTiles);
    const int least = -device::warp_max(may ? -steps : -INT_MAX);
    const unsigned all = __ballot_sync(0xffffffffu, may && steps == least);
    return device::from_lane(length, __ffs(static_cast<int>(all)) - 1);
  }
};

/// The results of segments: sums divided by their row's total, and apart lse.
struct Partials {
  const AttentionParams& p;

  __device__ __forceinline__ std::int64_t step() const { return config::all_queries(p) * p.heads; }
  __device__ __forceinline__ std::int64_t index(int batch, std::int64_t token, int head,
                                                int segment) const {
    const std::int64_t row = p.cu_q != nullptr ? token : std::int64_t{batch} * p.max_q + token;
    return segment * step() + row * p.heads + head;
  }
  __device__ __forceinline__ float* sums(std::int64_t index) const {
    return static_cast<float*>(p.workspace) + index * p.head_dim;
  }
  __device__ __forceinline__ float* lse(std::int64_t index) const {
    return sums(config::kChunkSegments * step()) + index;
  }
};

// ---- Order --------------------------------------------------------------------------------------

/// The order of the works, as one warp walks it: of 32 sequences, the one whose works are longest
/// comes first. Neighbours are the tiles of rows before one segment of keys.
template <Packed Tile>
struct Order<Tile> {
  const Launch& launch;
  Looked looked;
  int first_batch = 0;       // of those looked at
  int left;                  // the length of this lane's works, if they are not begun; or 0
  int owner = 0, count = 0;  // the lane whose works are handed out, and their number
  int before = 0;            // works before these

  __device__ explicit Order(const Launch& launch) : launch(launch) { look(); }

  __device__ static int lane() { return Looked::lane(); }

  __device__ __forceinline__ void look() {
    looked.look(launch.attention, first_batch);
    left = looked.length;
  }

  /// Goes to the next sequence; false: there is none.
  __device__ __forceinline__ bool advance() {
    const AttentionParams& p = launch.attention;
    before += count;
    count = 0;
    int longest;
    while ((longest = device::warp_max(left)) == 0) {
      if ((first_batch += device::kWarpSize) >= p.batch) return false;
      look();
    }
    owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, left == longest))) - 1;
    count = device::from_lane(looked.tiles * looked.segments * p.kv_heads, owner);
    if (lane() == owner) left = 0;
    return true;
  }

  __device__ __forceinline__ void write(int index, PackedWork& work) const {
    const AttentionParams& p = launch.attention;
    const config::Sequence s = config::sequence_of(p, first_batch + lane());  // spares registers
    const int pair = index / looked.tiles, first_query = index % looked.tiles * launch.tokens;
    const int last_query = min(first_query + launch.tokens, s.q_len) - 1;
    const int segment = pair / p.kv_heads, begin = looked.first + segment * looked.length;
    const int end = min(begin + looked.length, looked.end);
    const int seen = config::visible_keys(p, s, first_query).begin / Tile::kKeys;
    const int seen_end = ceil_div(config::visible_keys(p, s, last_query).end, Tile::kKeys);
    const bool sees = max(begin, seen) < min(end, seen_end);  // else one hidden tile
    work.sequence = s;
    work.batch = first_batch + lane();
    work.kv_head = pair % p.kv_heads;
    work.first_query = first_query;
    work.first_tile = sees ? max(begin, seen) : begin;
    work.last_tile = sees ? min(end, seen_end) : begin + 1;
    work.exists = true;
    work.group = launch.group;
    work.rows = launch.tokens * launch.group;
    work.segment = segment;
    work.segments = looked.segments;
  }

  /// Writes work number `index` to `work`; from call to call indices grow. True in the lane that
  /// did.
  __device__ __forceinline__ bool find(int index, PackedWork& work) {
    while (index >= before + count)
      if (!advance()) {
        if (lane() == 0) work.exists = false;
        return lane() == 0;
      }
    if (lane() == owner) write(index - before, work);
    return lane() == owner;
  }
};

}  // namespace ridgeline::attention_sm90
