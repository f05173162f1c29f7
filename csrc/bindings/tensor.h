#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/types.h"

/// The vocabulary of adapters: an adapter checks, allocates, fills Params and calls. Messages name
/// the tensor and print expected and actual.
namespace ridgeline::bindings {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline torch::headeronly::ScalarType scalar_type_of(DType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case DType::kFloat32: return ScalarType::Float;
    case DType::kFloat16: return ScalarType::Half;
    case DType::kBFloat16: return ScalarType::BFloat16;
    case DType::kFloat8E4M3: return ScalarType::Float8_e4m3fn;
    case DType::kInt8: return ScalarType::Char;
    case DType::kUInt8: return ScalarType::Byte;
    case DType::kInt32: return ScalarType::Int;
    case DType::kInt64: return ScalarType::Long;
    case DType::kBool: return ScalarType::Bool;
  }
  return ScalarType::Undefined;
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::Byte: return DType::kUInt8;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::Long: return DType::kInt64;
    case ScalarType::Bool: return DType::kBool;
    default:
      check(false, name, ": expected a dtype of float32, float16, bfloat16, float8_e4m3fn, int8, ",
            "uint8, int32, int64 or bool, got ", torch::headeronly::toString(tensor.scalar_type()));
  }
  return DType::kFloat32;
}

/// The name of any dtype, also of those that no op takes.
inline std::string dtype_text(const Tensor& tensor) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i)
    if (scalar_type_of(static_cast<DType>(i)) == tensor.scalar_type())
      return name_of(static_cast<DType>(i));
  return torch::headeronly::toString(tensor.scalar_type());
}

template <class Sizes>
std::string to_text(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const auto size : sizes) {
    text << separator << size;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

constexpr std::int64_t kAny = -1;  // any size, in Expect::shape

/// What an adapter expects of one tensor, as a chain of checks:
///   Expect(weight, "weight").on_device_of(x, "x").dtype(DType::kBFloat16).shape({cols});
class Expect {
 public:
  Expect(const Tensor& tensor, const char* name) : tensor_(tensor), name_(name) {
    check(tensor.defined(), name, ": expected a tensor, got None");
  }

  const Expect& dim(std::int64_t expected) const {
    check(tensor_.dim() == expected, name_, ": expected ", expected, " dimensions, got shape ",
          to_text(tensor_.sizes()));
    return *this;
  }

  const Expect& min_dim(std::int64_t expected) const {
    check(tensor_.dim() >= expected, name_, ": expected at least ", expected,
          " dimensions, got shape ", to_text(tensor_.sizes()));
    return *this;
  }

  /// kAny in `expected` stands for any size.
  const Expect& shape(std::initializer_list<std::int64_t> expected) const {
    bool same = tensor_.dim() == static_cast<std::int64_t>(expected.size());
    std::int64_t i = 0;
    for (const std::int64_t size : expected) {
      same = same && (size == kAny || tensor_.size(i) == size);
      ++i;
    }
    check(same, name_, ": expected shape ", to_text(expected), ", got ", to_text(tensor_.sizes()));
    return *this;
  }

  const Expect& same_shape(const Tensor& other, const char* other_name) const {
    bool same = tensor_.dim() == other.dim();
    for (std::int64_t i = 0; same && i < other.dim(); ++i) same = tensor_.size(i) == other.size(i);
    check(same, name_, ": expected the shape of ", other_name, ", ", to_text(other.sizes()),
          ", got ", to_text(tensor_.sizes()));
    return *this;
  }

  const Expect& dtype(std::initializer_list<DType> expected) const {
    for (const DType candidate : expected)
      if (scalar_type_of(candidate) == tensor_.scalar_type()) return *this;
    std::ostringstream list;
    const char* separator = "";
    for (const DType candidate : expected) {
      list << separator << name_of(candidate);
      separator = " or ";
    }
    check(false, name_, ": expected dtype ", list.str(), ", got ", dtype_text(tensor_));
    return *this;
  }

  const Expect& dtype(DType expected) const { return dtype({expected}); }

  const Expect& float_dtype() const {
    return dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  }

  /// On the same device as `other`, by type and by index.
  const Expect& on_device_of(const Tensor& other, const char* other_name) const {
    const bool same = tensor_.is_cuda() == other.is_cuda() &&
                      tensor_.get_device_index() == other.get_device_index();
    check(same, name_, ": expected on the device of ", other_name, ", ", device_text(other),
          ", got ", device_text(tensor_));
    return *this;
  }

  const Expect& contiguous() const {
    check(tensor_.is_contiguous(), name_, ": expected a contiguous tensor, got shape ",
          to_text(tensor_.sizes()), " with strides ", to_text(tensor_.strides()));
    return *this;
  }

  const Expect& last_dim_contiguous() const {
    const std::int64_t last = tensor_.dim() - 1;
    check(last < 0 || tensor_.size(last) <= 1 || tensor_.stride(last) == 1, name_,
          ": expected the last dimension contiguous, got strides ", to_text(tensor_.strides()));
    return *this;
  }

  /// Of a tensor that is written: no element is another one too, as where it was expanded.
  const Expect& written() const {
    for (std::int64_t i = 0; i < tensor_.dim() && tensor_.numel() > 0; ++i)
      check(tensor_.size(i) <= 1 || tensor_.stride(i) != 0, name_, ": expected to be written, ",
            "so no expanded dimension, got shape ", to_text(tensor_.sizes()), " with strides ",
            to_text(tensor_.strides()));
    return *this;
  }

  /// The address and every stride but the last are multiples of `bytes`.
  const Expect& aligned(std::int64_t bytes) const {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor_.data_ptr());
    check(address % static_cast<std::uintptr_t>(bytes) == 0, name_, ": expected data aligned to ",
          bytes, " bytes, got an address with remainder ", address % bytes);
    const auto element = static_cast<std::int64_t>(tensor_.element_size());
    for (std::int64_t i = 0; i + 1 < tensor_.dim(); ++i)
      check(tensor_.size(i) <= 1 || tensor_.stride(i) * element % bytes == 0, name_,
            ": expected strides that are multiples of ", bytes, " bytes, got strides ",
            to_text(tensor_.strides()), " of ", element, "-byte elements");
    return *this;
  }

 private:
  static std::string device_text(const Tensor& tensor) {
    if (tensor.is_cpu()) return "cpu";
    return (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
  }

  const Tensor& tensor_;
  const char* name_;
};

/// [..., cols] seen as rows of one stride.
struct Rows {
  std::int64_t count;   // product of all dimensions but the last
  std::int64_t cols;
  std::int64_t stride;  // elements between rows
};

/// An error if the last dimension is not contiguous or the others cannot be walked with one stride.
inline Rows rows_of(const Tensor& tensor, const char* name) {
  Expect(tensor, name).min_dim(1).last_dim_contiguous();
  const std::int64_t last = tensor.dim() - 1;
  Rows rows{.count = 1, .cols = tensor.size(last), .stride = tensor.size(last)};
  bool found = false;
  for (std::int64_t i = last - 1; i >= 0; --i) {
    const std::int64_t size = tensor.size(i);
    if (size != 1 && rows.count != 0) {
      if (!found) rows.stride = tensor.stride(i);
      check(size == 0 || !found || tensor.stride(i) == rows.stride * rows.count, name,
            ": expected rows at one stride, got shape ", to_text(tensor.sizes()),
            " with strides ", to_text(tensor.strides()));
      found = true;
    }
    rows.count *= size;
  }
  return rows;
}

/// A new contiguous tensor on the device of `like`.
inline Tensor empty_on_device_of(const Tensor& like, const std::vector<std::int64_t>& sizes,
                                 torch::headeronly::ScalarType dtype) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype)),
      like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
      like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_on_device_of(const Tensor& like, const std::vector<std::int64_t>& sizes,
                                 DType dtype) {
  return empty_on_device_of(like, sizes, scalar_type_of(dtype));
}

inline std::vector<std::int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

/// A new contiguous tensor of the same shape and dtype, on the same device.
inline Tensor empty_contiguous_like(const Tensor& tensor) {
  return empty_on_device_of(tensor, sizes_of(tensor), tensor.scalar_type());
}

inline const void* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->data_ptr() : nullptr;
}

}  // namespace ridgeline::bindings
