#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "common/launch_trace.h"
#include "device/launch.cuh"

namespace ridgeline::device {
namespace {

/// The kernel's name with its template arguments, as C++ writes it.
std::string name_of_kernel(const void* kernel) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess || mangled == nullptr) return "unknown";
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr), std::free);
  return name ? name.get() : mangled;
}

}  // namespace

/// The record: op, kernel, grid, block, shared bytes, registers and local bytes a thread, blocks
/// that an SM holds, compute version of the code, chained or not.
bool record_launch(const void* kernel, const cudaLaunchConfig_t& config, const char* op) {
  if (!launch_trace::is_open()) return false;
  cudaFuncAttributes attributes{};
  int blocks = 0;
  const int threads = static_cast<int>(config.blockDim.x * config.blockDim.y * config.blockDim.z);
  const bool read =
      cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads,
                                                    config.dynamicSmemBytes) == cudaSuccess;
  std::string& text = *launch_trace::open;
  text.append("launch\t").append(op).append("\t").append(name_of_kernel(kernel));
  const auto add = [&](std::size_t value) { text.append("\t").append(std::to_string(value)); };
  add(config.gridDim.x), add(config.gridDim.y), add(config.gridDim.z), add(threads);
  add(config.dynamicSmemBytes + attributes.sharedSizeBytes);
  add(read ? attributes.numRegs : 0), add(attributes.localSizeBytes), add(blocks);
  add(attributes.binaryVersion), add(config.numAttrs > 0);
  text += "\n";
  return true;
}

}  // namespace ridgeline::device
