#include "kernels/kv_cache.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/math.h"
#include "device/divisor.cuh"
#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/kv_vector.cuh"

namespace ridgeline {
namespace {

using namespace kv_vector;

// ---- Constants --------------------------------------------------------------------------------

constexpr int kThreads = 128;  // one token of 48 heads takes three SMs, 64 tokens take all

/// Neighbouring heads share a lane's angles where all SMs have enough of them: 4096 tokens of 48
/// heads of 128 31.8 us and 28.3 so, 8192 61.1 and 53.2; by twos 54.7, by eights 55.4 (bf16, H200).
constexpr int kHeadsTogether = 4;
constexpr std::int32_t kManyVectors = 1 << 16;

/// Instructions bound it: 4096 tokens of 48 heads of 128 took 42.3 us dividing by numbers that only
/// the host knows and rotating element by element, 35.6 without divisions, 31.1 rotating words; one
/// token 1.70, 1.50 and 1.20 (bf16, H200).
struct KvWriteLaunch {
  KvWriteParams params;
  std::int32_t lane_bits;         // 2^lane_bits lanes a head vector
  std::int32_t heads;             // groups of them a token, of q, k and v together
  std::int32_t vectors;           // tokens * heads, or so many groups
  device::Divisor per_token;      // by heads
  device::Divisor per_block;      // by the cache's block size
};

// ---- Phases -----------------------------------------------------------------------------------

/// From L2: L1 may hold what was there before the kernels ahead had ended.
__device__ __forceinline__ std::int64_t index_at(const void* indices, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? __ldcg(static_cast<const std::int64_t*>(indices) + i)
                                : __ldcg(static_cast<const std::int32_t*>(indices) + i);
}

// ---- Kernel -----------------------------------------------------------------------------------

/// Grid: enough blocks for a group of lanes to each kHeads head vectors of q, k or v. A lane owns
/// pairs of pieces that rotate together, so nothing is exchanged but the largest magnitude of a
/// vector that is quantised. No shared memory.
template <class T, int kVec, int kHeads>
__global__ void __launch_bounds__(kThreads)
    kv_write_kernel(const __grid_constant__ KvWriteLaunch launch) {
  const KvWriteParams& params = launch.params;
  const int lanes = 1 << launch.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::uint32_t wanted =
      blockIdx.x * (kThreads >> launch.lane_bits) + (threadIdx.x >> launch.lane_bits);
  // The others still join their warp's reductions.
  const bool present = wanted < static_cast<std::uint32_t>(launch.vectors);
  const int vector = present ? static_cast<int>(wanted) : 0;
  const std::int64_t token = launch.per_token.divide(vector);
  int head = (vector - static_cast<int>(token) * launch.heads) * kHeads;
  const bool is_q = head < params.q.heads;
  if (!is_q) head -= params.q.heads;
  const bool is_v = !is_q && head >= params.k.heads;
  if (is_v) head -= params.k.heads;
  const HeadsView& view = is_q ? params.q : is_v ? params.v : params.k;
  const bool in_place = is_q || params.slots == nullptr;
  // In place, what is behind the rotated part stays as it is.
  const int head_dim = in_place ? params.rotary_dim : params.head_dim;

  const bool rotates = params.rotary_dim > 0 && !is_v && present;
  Angles<kVec> angles[kUnits<kVec>];
  const auto load_angles = [&](std::int64_t position) {
    if (position < 0 || position >= params.max_position) position = 0;
    const std::int64_t row = position * params.stride_cos_sin;
    const int half = params.rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i) {
      const int index = lane + i * lanes;
      if (index * kVec >= half) continue;
      if (params.table_dtype == params.dtype)
        angles[i].load(static_cast<const T*>(params.cos_sin) + row, index, half);
      else
        angles[i].load(static_cast<const float*>(params.cos_sin) + row, index, half);
    }
  };

  ptx::launch_dependents();
  // The position is most likely written already; then the row of the table is on its way early.
  const bool guesses = rotates && params.table_ready;
  std::int64_t guess = 0;
  if (guesses) load_angles(guess = index_at(params.positions, params.index_dtype, token));
  ptx::wait_for_dependencies();

  // Ahead of the stores, behind which the compiler leaves it: they might write it.
  const std::int64_t slot =
      present && !in_place ? index_at(params.slots, params.index_dtype, token) : -1;
  T* source = static_cast<T*>(view.data) + token * view.stride_token + head * view.stride_head;
  Unit<T, kVec> units[kHeads][kUnits<kVec>];
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
#pragma unroll
    for (int i = 0; i < kUnits<kVec>; ++i) {
      units[h][i] = Unit<T, kVec>(params, lane + i * lanes);
      if (present) units[h][i].load(source + h * view.stride_head, head_dim);
    }
  if (rotates) {
    const std::int64_t position = index_at(params.positions, params.index_dtype, token);
    if (!guesses || position != guess) load_angles(position);
#pragma unroll
    for (auto& of_head : units)
#pragma unroll
      for (int i = 0; i < kUnits<kVec>; ++i)
        if (of_head[i].rotated) of_head[i].rotate(angles[i], params.interleaved);
  }
  if (in_place && present) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < kUnits<kVec>; ++i)
        units[h][i].store(source + h * view.stride_head, head_dim);
  }
  if (params.slots == nullptr) return;
  const bool active = slot >= 0 && slot < params.num_slots;
  const CacheView& cache = is_v ? params.v_cache : params.k_cache;
  const int within = active ? static_cast<int>(slot) : 0;
  const int block = launch.per_block.divide(within);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const CachePlace at(cache, block, within - block * params.block_size, head + h);
    store_to_cache<T, kVec>(units[h], cache, at, params.cache_dtype, head_dim, lanes, lane, active);
  }
}

// ---- Launch -----------------------------------------------------------------------------------

bool multiple_of(std::int64_t divisor, std::initializer_list<std::int64_t> values) {
  return std::ranges::all_of(values, [&](auto value) { return value % divisor == 0; });
}

std::int64_t address(const void* p) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p));
}

/// Whether pieces of `elements` elements are aligned everywhere.
bool takes_pieces(const KvWriteParams& p, int elements) {
  const auto bytes = static_cast<std::int64_t>(elements * size_of(p.dtype));
  const auto heads_fit = [&](const HeadsView& view) {
    return view.heads == 0 || (multiple_of(bytes, {address(view.data)}) &&
                               multiple_of(elements, {view.stride_token, view.stride_head}));
  };
  const auto cache_fits = [&](const CacheView& view) {
    return p.slots == nullptr ||
           (multiple_of(static_cast<std::int64_t>(elements * size_of(p.cache_dtype)),
                        {address(view.data)}) &&
            multiple_of(elements, {view.stride_block, view.stride_slot, view.stride_head}));
  };
  const bool table_fits = p.rotary_dim == 0 || (multiple_of(16, {address(p.cos_sin)}) &&
                                                multiple_of(elements, {p.stride_cos_sin}));
  return multiple_of(elements, {p.head_dim, p.rotary_dim / 2}) && heads_fit(p.q) &&
         heads_fit(p.k) && heads_fit(p.v) && cache_fits(p.k_cache) && cache_fits(p.v_cache) &&
         table_fits;
}

bool has_many_together(const KvWriteParams& p) {
  const std::int64_t heads = p.q.heads + p.k.heads + p.v.heads;
  return p.tokens * heads >= kManyVectors &&
         multiple_of(kHeadsTogether, {p.q.heads, p.k.heads, p.v.heads});
}

template <class T, int kVec, int kHeads = 1>
void launch_write(const KvWriteParams& params, Stream stream) {
  const int covered = params.slots == nullptr ? params.rotary_dim : params.head_dim;
  const int units = ceil_div(ceil_div(covered, kVec), 2);
  int lane_bits = 0;
  while (1 << lane_bits < std::min(units, device::kWarpSize)) ++lane_bits;
  const int heads = (params.q.heads + params.k.heads + params.v.heads) / kHeads;
  if (heads == 0 || units == 0) return;
  const std::int32_t vectors = checked_int32(params.tokens * heads, "tokens * heads");
  const auto block_size = static_cast<std::uint32_t>(std::max(params.block_size, 1));
  const KvWriteLaunch launch{params, lane_bits, heads, vectors, device::Divisor::of(heads),
                             device::Divisor::of(block_size)};
  const std::int64_t blocks = ceil_div(std::int64_t{vectors}, std::int64_t{kThreads >> lane_bits});
  device::launch_chained<kv_write_kernel<T, kVec, kHeads>>(
      dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, launch, "write_kv");
}

}  // namespace

void write_kv(const KvWriteParams& params, Stream stream) {
  if (params.tokens == 0) return;
  checked_int32(params.num_slots, "slots of the cache");
  device::dispatch_float(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kVec = device::Vec<T>::kSize;
    if (takes_pieces(params, kVec)) {
      if (has_many_together(params)) return launch_write<T, kVec, kHeadsTogether>(params, stream);
      launch_write<T, kVec>(params, stream);
    } else {
      launch_write<T, 1>(params, stream);
    }
  });
}

}  // namespace ridgeline
