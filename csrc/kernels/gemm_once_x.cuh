#pragma once
#include "device/digits.cuh"
#include "device/divisor.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/reduce.cuh"
#include "kernels/gemm_strip_sums.cuh"

/// x of the kernel that holds its weights in registers: a warp makes an operand of the columns that
/// it multiplies.
namespace ridgeline::gemm_once {

using namespace gemm_detail;
using gemm_config::kStripRows;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps = 16, kThreads = kWarps * 32;
constexpr int kCols = gemm_config::kOnceCols;  // of a warp
constexpr int kBlocks = kCols / 64;
constexpr int kSpanCols = 128, kSpans = kCols / kSpanCols;  // that share a unit, or a scale
constexpr int kPitch = 128 + 16;    // of a block's digits: blocks start in different banks
constexpr int kMagic = 0x4b400000;  // 1.5 * 2^23: an integer added to its bits is added
static_assert(kWarps * kCols == gemm_config::kOnceMostCols);

struct OnceParams {
  GemmParams gemm;
  gemm_strips::StripOrder order;
  device::Divisor group;   // int4: columns that share a scale
  std::int32_t prefetches;  // L2 is asked for the weight ahead of the wait
};

// ---- Shared memory ------------------------------------------------------------------------------

struct Shared {
  alignas(16) char x[kWarps][kBlocks * kPitch];
  float sums[kWarps][64];  // of the block's weight rows
  float squares[kWarps];   // of x, where it is normalized
};

// ---- Phases -------------------------------------------------------------------------------------

/// Eight columns a lane of x and of the norm's weight.
template <class T>
struct XOfLane {
  std::uint32_t pairs[4];
  gemm_strips::Normed<T, 4> norm;

  /// Asks for those from `column` on; e4m3 takes the first two words.
  template <bool kBytes>
  __device__ __forceinline__ void load(const GemmParams& p, int column) {
    uint4 raw{};
    if (column < p.K) {
      if constexpr (kBytes) {
        const auto* from = static_cast<const std::uint8_t*>(p.x.data) + column;
        const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(from));
        raw.x = codes.x, raw.y = codes.y;
      } else {
        raw = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x.data) + column));
      }
    }
    pairs[0] = raw.x, pairs[1] = raw.y, pairs[2] = raw.z, pairs[3] = raw.w;
  }

  /// Pairs of e4m3.
  template <class E>
  __device__ __forceinline__ void expand() {
    std::uint32_t low[2], high[2];
    device::convert_e4m3<E>(pairs[0], low);
    device::convert_e4m3<E>(pairs[1], high);
    pairs[0] = low[0], pairs[1] = low[1], pairs[2] = high[0], pairs[3] = high[1];
  }

  /// Meets the norm's weight, and leaves the sum of the slice's squares.
  __device__ __forceinline__ void normalize(const GemmParams& p, float& squares) {
    if (!p.x.norm_weight) return;
    const float sum = device::warp_reduce<device::Sum>(norm.weigh(pairs));
    if (threadIdx.x % 32 == 0) squares = sum;
  }
};

/// A slice as digits, in the order of the columns of an int4 block.
struct Digits {
  uint4 words[kBlocks];
  float sum[kSpans], unit[kSpans];  // of the integers, of one of them
  bool finite;                      // else those that are not count as zero

  /// From shared memory `at`: a lane's 8 columns are half of 16, its neighbour has the other.
  template <class T>
  __device__ __forceinline__ static Digits of(std::uint32_t (&pairs)[4], char* at, int lane) {
    constexpr int kLanes = kSpanCols / 8;
    Digits x;
    std::uint32_t largest = device::largest_magnitude(pairs);
    x.finite = !__any_sync(0xffffffffu, largest >= device::kNotFinite<T>);
    if (!x.finite) {
      device::drop_not_finite<T>(pairs);
      largest = device::largest_magnitude(pairs);
    }
    const auto scale = device::PowerUnit<14>::of(device::group_max(largest, kLanes), T{});
    const bool odd = lane % 2 == 1;
    const std::uint32_t first = device::shuffle_xor(odd ? pairs[0] : pairs[2], 1);
    const std::uint32_t second = device::shuffle_xor(odd ? pairs[1] : pairs[3], 1);
    const std::uint32_t near[2] = {odd ? first : pairs[0], odd ? second : pairs[1]};
    const std::uint32_t far[2] = {odd ? pairs[2] : first, odd ? pairs[3] : second};
    char* to = at + lane / 8 * kPitch + lane / 2 % 4 * 4 + (odd ? 32 : 0);
    int low = 0, high = 0;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float2 a = device::floats_of(device::as_pair<T>(near[t]));
      const float2 b = device::floats_of(device::as_pair<T>(far[t]));
      const uint2 digits = device::digits_of(a.x, b.x, a.y, b.y, scale.inverse);
      low = __dp4a(static_cast<int>(digits.x), 0x01010101, low);
      high = __dp4a(static_cast<int>(digits.y), 0x01010101, high);
      *reinterpret_cast<std::uint32_t*>(to + t * 16) = digits.x;
      *reinterpret_cast<std::uint32_t*>(to + 64 + t * 16) = digits.y;
    }
    const auto total = static_cast<float>(device::group_sum(high * 256 + low, kLanes));
    __syncwarp();  // the slice's digits are there
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      x.words[i] = *reinterpret_cast<const uint4*>(at + i * kPitch + lane / 4 % 2 * 64 +
                                                   lane % 4 * 16);
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      x.sum[i] = device::from_lane(total, i * kLanes);
      x.unit[i] = device::from_lane(scale.unit, i * kLanes);
    }
    return x;
  }
};

/// A slice as fp16 in shared memory, times a unit.
struct Halves {
  const char* from;
  float unit;

  __device__ __forceinline__ Halves(const std::uint32_t (&pairs)[4], float unit, char* at, int lane)
      : from(at + lane % 4 * 32), unit(unit) {
    *reinterpret_cast<uint4*>(at + lane * 16) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    __syncwarp();  // the slice's halves are there
  }

  /// Operands of steps 2 half and the next of block i.
  __device__ __forceinline__ uint4 read(int i, int half) const {
    return *reinterpret_cast<const uint4*>(from + i * 128 + half * 16);
  }
};

/// The pairs of T as fp16 in a power of two, which the columns of the slice share.
template <class T>
__device__ __forceinline__ float to_halves(std::uint32_t (&pairs)[4]) {
  const auto unit = device::PowerUnit<15>::of(
      device::warp_max(static_cast<int>(device::largest_magnitude(pairs))), T{});
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two = device::floats_of(device::as_pair<T>(pairs[j]));
    pairs[j] = device::as_bits(__floats2half2_rn(two.x * unit.inverse, two.y * unit.inverse));
  }
  return unit.unit;
}

}  // namespace ridgeline::gemm_once
