#pragma once
#include <string>

#include "kernels/gemm_grouped_config.h"

namespace ridgeline::gemm_grouped {

/// The choice in words, as gemm_config_text.h has it of other products.
inline std::string to_text(const Choice& choice) {
  constexpr const char* kNames[] = {"tile", "strips", "digits", "few", "terms", "some", "many"};
  constexpr const char* kX[] = {"in_place", "gathered", "with_sums", "in_terms", "meanwhile"};
  constexpr const char* kAs[] = {"differences", "nibbles", "scaled", "any"};
  std::string text = std::string(kNames[static_cast<int>(choice.path)]) +
                     " tile_rows=" + std::to_string(choice.tile_rows) +
                     " most_rows=" + std::to_string(choice.most_rows) +
                     " tile_cols=" + std::to_string(choice.tile_cols) +
                     " x=" + kX[static_cast<int>(choice.x)] +
                     " expands_x=" + std::to_string(choice.expands_x) +
                     " ordered=" + std::to_string(choice.ordered) +
                     " claimed=" + std::to_string(choice.claimed) +
                     " scales_groups=" + std::to_string(choice.scales_groups);
  if (choice.as) text.append(" as=").append(kAs[static_cast<int>(*choice.as)]);
  if (choice.span_cols > 0) text += " span_cols=" + std::to_string(choice.span_cols);
  return text;
}

}  // namespace ridgeline::gemm_grouped
