#pragma once
#include <string>

#include "bindings/tensor.h"
#include "common/types.h"

/// Every adapter is a template over the backend it serves and is registered once for each:
///   const Backend on(x, "x");
///   if constexpr (Backend::kIsCuda) rmsnorm(params, on.stream()); else cpu::rmsnorm(params);
namespace ridgeline::bindings {

struct Cpu {
  static constexpr bool kIsCuda = false;

  Cpu(const Tensor& anchor, const char* name) {
    Expect(anchor, name);
    check(anchor.is_cpu(), name, ": expected a CPU tensor beside the other CPU tensors");
  }
};

/// Of an op's `approximate` argument: exact GELU ("none"), or the tanh approximation ("tanh").
inline bool gelu_is_exact(const std::string& approximate) {
  check(approximate == "none" || approximate == "tanh",
        "approximate: expected 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none";
}

}  // namespace ridgeline::bindings
