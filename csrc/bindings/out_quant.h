#pragma once
#include <string>

#include "bindings/backend.h"
#include "common/math.h"
#include "common/quant_scale.h"

namespace ridgeline::bindings {

/// A quantised output: its codes, and scales of a row each or of a group of columns each.
struct OutQuant {
  DType dtype;
  bool by_group;

  explicit OutQuant(const std::string& name)
      : dtype(name == "int8" ? DType::kInt8 : DType::kFloat8E4M3), by_group(name == "fp8_group") {
    check(name == "fp8" || name == "int8" || name == "fp8_group",
          "out_quant: expected None, 'fp8', 'int8' or 'fp8_group', got '", name, "'");
  }

  /// Scales for an output of `sizes`.
  std::vector<std::int64_t> scale_sizes(std::vector<std::int64_t> sizes) const {
    sizes.back() = by_group ? ceil_div<std::int64_t>(sizes.back(), kScaleGroup) : 1;
    return sizes;
  }
};

}  // namespace ridgeline::bindings
