#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "bindings/backend.h"

namespace ridgeline::bindings {

/// Makes the device of `anchor` current and gives the stream that PyTorch works on there.
class Cuda {
 public:
  static constexpr bool kIsCuda = true;

  Cuda(const Tensor& anchor, const char* name) : guard_(device_of(anchor, name)) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(anchor.get_device_index(), &stream));
    stream_ = static_cast<Stream>(stream);
  }

  Stream stream() const { return stream_; }

 private:
  static std::int32_t device_of(const Tensor& anchor, const char* name) {
    Expect(anchor, name);
    check(anchor.is_cuda(), name, ": expected a CUDA tensor beside the other CUDA tensors");
    return anchor.get_device_index();
  }

  torch::stable::accelerator::DeviceGuard guard_;
  Stream stream_ = nullptr;
};

}  // namespace ridgeline::bindings
