#pragma once
#include "kernels/gemm_sm90_expand_values.cuh"

/// The way of the expanding kernel's sums to y where there is more to do.
namespace ridgeline::gemm_expand {

/// Gives back the stages of the residual. All threads wait: behind the return of some the compiler
/// takes the ring for theirs, and moves it to uniform registers ahead of each product. H200, int4,
/// 4096 rows of 4096 x 28672, us, such a wait and so: 128 x 128 tiles 1624 and 1479.
template <class Tile>
__device__ __forceinline__ void release_residual(const Launch& launch, Shared<Tile>& shared,
                                                 Ring<Tile::kStages> ring, const Consumer& me) {
  me.meet();  // the warpgroup has read its stages
  for (int i = 0; i < residual_stages<Tile>(launch.gemm); ++i, ring.next()) {
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[ring.stage]);
  }
}

/// What is finished of a warpgroup's sums, kAtOnce rows of x at a time: of each band, or of the
/// gates; with one band gates and up rows are in different warpgroups, which finish half of the
/// rows each. Where these are odd, the second has nothing of its own at the end.
template <class Tile>
struct Finished {
  static constexpr int kPerBand = Tile::kRows / kAtOnce, kMost = Tile::kBands * kPerBand;
  bool gated, trades;
  int count;

  __host__ __device__ constexpr explicit Finished(Activation activation)
      : gated(is_gated(activation)),
        trades(gated && Tile::kBands == 1),
        count(trades ? ceil_div(kPerBand, 2) : gated ? kPerBand : kMost) {}

  __device__ __forceinline__ int band(int i) const { return gated ? 0 : i / kPerBand; }
  /// Whether there is an `i`-th of this warpgroup.
  __device__ __forceinline__ bool has(int i, const Consumer& me) const {
    return kPerBand % 2 == 0 || !trades || me.warpgroup * count + i < kPerBand;
  }
  /// The up rows that are traded for the `i`-th gates.
  __host__ __device__ constexpr int up(int i) const {
    return kPerBand % 2 == 0 || count + i < kPerBand ? count + i : kPerBand - 1;
  }
  /// First of its rows in the tile.
  __device__ __forceinline__ int row(int i, const Consumer& me) const {
    const int index = trades ? me.warpgroup * count + i : i % kPerBand;
    return (kPerBand % 2 == 0 ? index : min(index, kPerBand - 1)) * kAtOnce;
  }
  __device__ __forceinline__ int column(const Launch& launch, int n, int i,
                                        const Consumer& me) const {
    const int half = trades ? 0 : half_of<Tile>(me.warpgroup, band(i));
    return weight_row<Tile>(launch, n, half) + first_in_half<Tile>(me.warpgroup);
  }
  /// Which of the stages behind the tile's last has its residual.
  __device__ __forceinline__ int stage(int i, const Consumer& me) const {
    return trades ? 0 : band(i) * 2 + me.warpgroup;
  }
};

/// Two sixteens of rows, as stmatrix takes them.
using Packed = std::uint32_t[2][4];

template <class T>
__device__ __forceinline__ void pack(Packed& packed, const Values& values) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // weight rows half j % 2 of piece j / 2
    const float(&of)[4] = values[j / 2];
    packed[j / 4][j % 4] = gemm_sm90::pack<T>(of[j % 2 * 2], of[j % 2 * 2 + 1]);
  }
}

/// Into a box, transposed.
template <class Tile>
__device__ __forceinline__ void put_box(Shared<Tile>& shared, int box, const Packed& packed,
                                        const Consumer& me) {
  auto& out = shared.out[me.warpgroup][box];
  const int matrix = me.lane / 8, chunk = me.warp * 2 + matrix % 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int m = (2 * j + matrix / 2) * 8 + me.lane % 8;
    ptx::stmatrix_transposed(&out[m][(chunk ^ (m % 8)) * 8], packed[j]);
  }
}

/// The way of a tile to y that is known ahead: all of it is made, so that no value waits for a
/// meeting, then stored.
template <class Tile, class Way>
__device__ __forceinline__ void store_known(const Launch& launch, Shared<Tile>& shared,
                                            const Ring<Tile::kStages>& behind, const Place& place,
                                            const Sums<Tile>& sums,
                                            const RowFactors<Tile>& factors, const Consumer& me) {
  using T = typename Tile::T;
  using All = Finished<Tile>;
  const GemmParams& p = launch.gemm;
  Ring<Tile::kStages> ring = behind;
  constexpr Activation kActivation = Way::activation({});
  constexpr bool kTrades = is_gated(kActivation) && Tile::kBands == 1;
  constexpr bool kShort = std::is_same_v<T, __nv_bfloat16>;
  constexpr bool kHalves = kShort && kActivation == Activation::kGelu;
  constexpr bool kShortGates = kShort && kActivation == Activation::kSiluMul;
  constexpr All all(kActivation);
  const std::int64_t first = std::int64_t{place.m} * Tile::kRows;
  Packed packed[all.count];
  if (me.thread == 0) ptx::wait_stores_read<0>();
  if constexpr (kTrades) {
    const auto finish = [&]<int kCount>(Int<kCount>, int i) {
      Values gates[kCount], ups[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        take<Tile>(gates[j], p, sums, factors, 0, i + j, first, me);
        take<Tile>(ups[j], p, sums, factors, 0, all.up(i + j), first, me);
      }
      trade<Tile>(gates, ups, shared, me);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        gate<T, kShortGates>(kActivation, gates[j], ups[j]);
        pack<T>(packed[i + j], gates[j]);
      }
    };
    constexpr int kPairs = all.count / 2;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) finish(Int<2>{}, 2 * i);
    if constexpr (all.count % 2 == 1) finish(Int<1>{}, 2 * kPairs);
  } else {
#pragma unroll
    for (int i = 0; i < all.count; ++i) {
      if (Way::has_residual(p) && i % All::kPerBand == 0) {
        ring.skip(i == 0 ? me.warpgroup : kConsumers);  // to the band's
        ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
      }
      Values values;
      take<Tile, kHalves>(values, p, sums, factors, all.band(i), i % All::kPerBand, first, me);
      if constexpr (kHalves) {
        replace(values, device::gelu_of_half);
      } else if constexpr (is_gated(kActivation)) {
        Values ups;
        take<Tile>(ups, p, sums, factors, Tile::kBands - 1, i, first, me);
        gate<T, kShortGates>(kActivation, values, ups);
      } else {
        gemm_detail::activate<T>(kActivation, values);
      }
      if (Way::has_residual(p)) add_copied<Tile>(values, shared, ring.stage, all.row(i, me), me);
      pack<T>(packed[i], values);
    }
  }
  me.meet();  // the boxes of the tile before have been read, and what was traded
  constexpr int kTogether = kBoxes / 2;
  const auto for_each_box = [&](int first_box, auto&& fn) {
#pragma unroll
    for (int i = first_box; i < first_box + kTogether; ++i)
      if (i < all.count) fn(i);
  };
#pragma unroll
  for (int i = 0; i < all.count; i += kTogether) {
    if (i >= kBoxes) {
      if (me.thread == 0) ptx::wait_stores_read<1>();
      me.meet();  // the boxes' last stores have been read
    }
    for_each_box(i, [&](int at) { put_box<Tile>(shared, at % kBoxes, packed[at], me); });
    ptx::fence_async_shared();
    me.meet();  // the boxes are whole
    if (me.thread == 0) {
      for_each_box(i, [&](int at) {
        if (all.has(at, me))
          ptx::store_matrix(&launch.y, shared.out[me.warpgroup][at % kBoxes],
                            all.column(launch, place.n, at, me),
                            place.m * Tile::kRows + all.row(at, me));
      });
      ptx::commit_stores();
    }
  }
  if (Way::has_residual(p)) release_residual<Tile>(launch, shared, behind, me);
}

/// Any other way.
template <class Tile>
__device__ __forceinline__ void store_any(const Launch& launch, Shared<Tile>& shared,
                                          Ring<Tile::kStages> ring, const Place& place,
                                          const Sums<Tile>& sums, const RowFactors<Tile>& factors,
                                          const Consumer& me) {
  using T = typename Tile::T;
  using All = Finished<Tile>;
  const GemmParams& p = launch.gemm;
  const std::int64_t first = std::int64_t{place.m} * Tile::kRows;
  // Not known to the compiler to be one for all tiles: it kept what depends on it in registers.
  const auto activation = Tile::kInt4 ? p.activation
                                      : static_cast<Activation>(
                                            ptx::opaque(static_cast<int>(p.activation)));
  const All all(activation);
  if (me.thread == 0) ptx::wait_stores_read<0>();
  me.meet();  // the boxes of the tile before have been read
#pragma unroll 1
  for (int i = 0; i < all.count; ++i) {
    const int row = all.row(i, me), column = all.column(launch, place.n, i, me);
    if (me.thread == 0) ptx::wait_stores_read<1>();  // the next meeting tells the others
    Values values[1];
    take<Tile>(values[0], p, sums, factors, all.band(i), i % All::kPerBand, first, me);
    if (all.gated) {
      Values ups[1];
      take<Tile>(ups[0], p, sums, factors, Tile::kBands - 1, all.trades ? all.up(i) : i, first, me);
      if (all.trades) trade<Tile>(values, ups, shared, me);
      gate<T>(activation, values[0], ups[0]);
    } else {
      gemm_detail::activate<T>(activation, values[0]);
    }
    if (p.residual && launch.copies_residual) {
      auto at = ring;
      at.skip(all.stage(i, me));
      ptx::mbarrier_wait(&shared.full[at.stage], at.parity);
      add_copied<Tile>(values[0], shared, at.stage, row, me);
    } else if (p.residual) {
      add_from_memory<T>(values[0], p, first + row, column, me);
    }
    Packed packed;
    pack<T>(packed, values[0]);
    // Where values are traded there are half as many boxes, but two meetings more.
    const int box = i % (all.trades ? kBoxes / 2 : kBoxes);
    put_box<Tile>(shared, box, packed, me);
    ptx::fence_async_shared();
    me.meet();  // the box is whole
    if (me.thread != 0 || !all.has(i, me)) continue;
    ptx::store_matrix(&launch.y, shared.out[me.warpgroup][box], column,
                      place.m * Tile::kRows + row);
    ptx::commit_stores();
  }
  if (launch.copies_residual) release_residual<Tile>(launch, shared, ring, me);
}

/// Any way, those that are known among them.
template <class Tile>
__device__ __forceinline__ void store_beside(const Launch& launch, Shared<Tile>& shared,
                                             const Ring<Tile::kStages>& ring, const Place& place,
                                             const Sums<Tile>& sums,
                                             const RowFactors<Tile>& factors, const Consumer& me) {
  using enum Activation;
  const GemmParams& p = launch.gemm;
  const auto known = [&]<Activation kActivation, bool kResidual = false>() {
    store_known<Tile, KnownWay<kActivation, kResidual>>(launch, shared, ring, place, sums, factors,
                                                        me);
  };
  if (p.activation == kNone && launch.copies_residual) {
    known.template operator()<kNone, true>();
  } else if (p.activation == kSiluMul && !p.residual) {
    known.template operator()<kSiluMul>();
  } else if (p.activation == kGelu && !p.residual) {
    known.template operator()<kGelu>();
  } else {
    store_any<Tile>(launch, shared, ring, place, sums, factors, me);
  }
}

}  // namespace ridgeline::gemm_expand
