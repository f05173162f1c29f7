#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "common/math.h"
#include "kernels/gemm.h"

/// Which kernel multiplies, and how K and the grid are cut: pure functions of the shape.
namespace ridgeline::gemm_config {

constexpr int kBlockCols = 64;      // columns of K a pipeline stage holds
constexpr int kStripRows = 16;      // weight rows a warp multiplies at a time: two n8 operands
constexpr int kMaxSegments = 8;     // warps a block of the few-row kernel has
constexpr int kStreamRows = 16;     // the few-row kernel's most rows: one m16 operand
constexpr int kFewRows = 64;        // up to here own kernels beat the library's
constexpr int kTileCols = 128;      // weight rows a block of the tile kernel owns
constexpr int kWarpsWanted = 1500;  // 11 an SM of 132: with 8 KB each in flight, the bus is full
constexpr int kBlocksWanted =
    132;  // fewer tiles than this leave SMs idle: K is split over the grid

enum class Path : std::uint8_t {
  kStream,   // up to 16 rows: each warp streams a strip of the weight
  kTile,     // shared-memory tiles
  kLibrary,  // cuBLASLt
  kSimple,   // any alignment, and float32 without the library
};

struct Shape {
  std::int64_t M;
  std::int32_t N;
  std::int32_t K;
  DType dtype;
  WeightFormat format;
  Activation activation;
  bool weight_aligned;  // 16-byte loads of weight rows are possible
  bool library;         // cuBLASLt can be opened
  bool batch_invariant;
};

struct Config {
  Path path;
  std::int32_t segments;   // K is cut into this many; their sums are added in order
  bool split;              // each segment has its own block, and a second kernel adds
  std::int32_t tile_rows;  // of the tile kernel
  bool fused;              // the epilogue is in the product's kernel

  std::string to_text() const {
    constexpr const char* kNames[] = {"stream", "tile", "library", "simple"};
    return std::string(kNames[static_cast<int>(path)]) + " segments=" + std::to_string(segments) +
           " split=" + std::to_string(split) + " tile_rows=" + std::to_string(tile_rows) +
           " fused=" + std::to_string(fused);
  }
};

/// Gate and up strips pair up only where the halves of the weight are whole strips.
constexpr bool can_fuse(const Shape& shape) {
  return !is_gated(shape.activation) || shape.N / 2 % kStripRows == 0;
}

/// Cuts of K: enough warps to fill the bus at few rows. The same for every M, so that a row's sum
/// has one order. A block of the few-row kernel holds gate and up strips: then at most half.
constexpr std::int32_t segments_of(const Shape& shape) {
  const std::int64_t strips = ceil_div(shape.N, kStripRows);
  const std::int32_t most = is_gated(shape.activation) ? kMaxSegments / 2 : kMaxSegments;
  const std::int32_t blocks = ceil_div(shape.K, kBlockCols);
  std::int32_t segments = 1;
  while (segments < most && segments * 2 <= blocks && strips * segments < kWarpsWanted)
    segments *= 2;
  return segments;
}

constexpr Path path_of(const Shape& shape) {
  const bool dense = shape.format == WeightFormat::kDense;
  const bool may_call = dense && shape.library && !shape.batch_invariant;
  const bool full = shape.dtype == DType::kFloat32;
  if (full || !shape.weight_aligned) return may_call ? Path::kLibrary : Path::kSimple;
  if (shape.M <= kStreamRows) return Path::kStream;
  return may_call && shape.M > kFewRows ? Path::kLibrary : Path::kTile;
}

constexpr Config choose(const Shape& shape) {
  Config config{
      .path = path_of(shape), .segments = 1, .split = false, .tile_rows = 0, .fused = true};
  if (config.path == Path::kStream || config.path == Path::kTile) {
    config.segments = segments_of(shape);
    config.fused = can_fuse(shape);
  }
  if (config.path == Path::kTile) {
    config.tile_rows = shape.M <= 64 ? 64 : 128;
    const std::int64_t tiles =
        ceil_div<std::int64_t>(shape.M, config.tile_rows) * ceil_div(shape.N, kTileCols);
    config.split = config.segments > 1 && tiles < kBlocksWanted;
    config.fused = config.fused && !config.split;
  }
  if (config.path == Path::kSimple) config.fused = !is_gated(shape.activation);
  return config;
}

/// Bytes of the float32 sums that a second kernel finishes.
constexpr std::size_t partial_bytes(const Shape& shape, const Config& config) {
  if (config.fused || config.path == Path::kLibrary) return 0;
  return static_cast<std::size_t>(config.split ? config.segments : 1) * shape.M * shape.N *
         sizeof(float);
}

}  // namespace ridgeline::gemm_config
