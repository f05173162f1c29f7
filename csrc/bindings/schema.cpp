#include <string>

#include "bindings/tensor.h"
#include "build_info.h"

/// Every schema of the library, once. Optional tensors are absent features; sizes come from tensors.
STABLE_TORCH_LIBRARY(ridgeline, m) {
  m.def("build_id() -> str");

  m.def("rmsnorm(Tensor x, Tensor weight, float eps, float offset, bool weights_ready) -> Tensor");
}

namespace {
std::string build_id() { return ridgeline::kBuildId; }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ridgeline, CompositeExplicitAutograd, m) {
  m.impl("build_id", TORCH_BOX(&build_id));
}
