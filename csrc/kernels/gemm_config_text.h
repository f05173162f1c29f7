#pragma once
#include <string>

#include "kernels/gemm_config.h"

namespace ridgeline::gemm_config {

/// The choice in words, apart from gemm_config.h: kernel files include that one, and no strings.
inline std::string to_text(const Config& config) {
  constexpr const char* kNames[] = {"strips", "digits", "cluster", "stream", "tile",
                                    "expand", "expand_to_fp8", "fp8", "library", "simple",
                                    "grouped", "turns", "once", "held"};
  return std::string(kNames[static_cast<int>(config.path)]) +
         " segments=" + std::to_string(config.segments) +
         " split=" + std::to_string(config.split) +
         " tile_rows=" + std::to_string(config.tile_rows) +
         " tile_cols=" + std::to_string(config.tile_cols) +
         " fused=" + std::to_string(config.fused) +
         " folds_norm=" + std::to_string(config.folds_norm) +
         " tail=" + std::to_string(config.tail) +
         " tails=" + std::to_string(config.tails) + " even=" + std::to_string(config.even) +
         " splits_x=" + std::to_string(config.splits_x) +
         " shares_stages=" + std::to_string(config.shares_stages) +
         " rest=" + std::to_string(config.rest.cols) +
         " rest_tile_cols=" + std::to_string(config.rest.tile_cols) +
         " rest_segments=" + std::to_string(config.rest.segments);
}

}  // namespace ridgeline::gemm_config
