#pragma once
#include <tuple>

#include "bindings/backend.h"
#include "kernels/sampling.h"

namespace ridgeline::bindings {

/// The data of one value a row.
template <class T>
const T* row_values(const Tensor& values, const char* name, DType dtype, const Tensor& logits) {
  Expect(values, name)
      .on_device_of(logits, "logits")
      .dtype(dtype)
      .shape({logits.size(0)})
      .contiguous();
  return static_cast<const T*>(values.data_ptr());
}

/// The data of one value a logit, if given; sets the stride between rows.
template <class T>
const T* logit_values(const OptionalTensor& values, const char* name, DType dtype,
                      const Tensor& logits, std::int64_t& stride) {
  stride = 0;
  if (!values) return nullptr;
  Expect(*values, name)
      .on_device_of(logits, "logits")
      .dtype(dtype)
      .same_shape(logits, "logits")
      .last_dim_contiguous();
  stride = values->stride(0);
  return static_cast<const T*>(values->data_ptr());
}

inline void check_logits(const Tensor& logits) {
  Expect(logits, "logits").float_dtype().dim(2).last_dim_contiguous();
  check(logits.size(1) > 0 && logits.size(1) <= kMaxVocabulary,
        "logits: expected a vocabulary of 1 to ", kMaxVocabulary, ", got shape ",
        to_text(logits.sizes()));
}

template <class Backend>
Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
              const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
              const Tensor& positions, const OptionalTensor& penalties,
              const OptionalTensor& token_counts, const OptionalTensor& bias,
              const OptionalTensor& mask, const OptionalTensor& last_tokens) {
  const Backend on(logits, "logits");
  check_logits(logits);
  SampleParams params{};
  params.dtype = dtype_of(logits, "logits");
  params.rows = logits.size(0);
  params.vocab = checked_int32(logits.size(1), "logits: vocabulary");
  params.logits = logits.data_ptr();
  params.stride_logits = logits.stride(0);
  params.temperature = row_values<float>(temperature, "temperature", DType::kFloat32, logits);
  params.top_k = row_values<std::int32_t>(top_k, "top_k", DType::kInt32, logits);
  params.top_p = row_values<float>(top_p, "top_p", DType::kFloat32, logits);
  params.min_p = row_values<float>(min_p, "min_p", DType::kFloat32, logits);
  params.seeds = row_values<std::int64_t>(seeds, "seeds", DType::kInt64, logits);
  params.positions = row_values<std::int32_t>(positions, "positions", DType::kInt32, logits);
  check(penalties.has_value() == token_counts.has_value(),
        "penalties, token_counts: expected both or neither, got only ",
        penalties ? "penalties" : "token_counts");
  if (penalties) {
    Expect(*penalties, "penalties")
        .on_device_of(logits, "logits")
        .dtype(DType::kFloat32)
        .shape({logits.size(0), 3})
        .contiguous();
    params.penalties = static_cast<const float*>(penalties->data_ptr());
  }
  params.token_counts = logit_values<std::int32_t>(token_counts, "token_counts", DType::kInt32,
                                                   logits, params.stride_counts);
  params.bias = logit_values<float>(bias, "bias", DType::kFloat32, logits, params.stride_bias);
  params.mask = logit_values<bool>(mask, "mask", DType::kBool, logits, params.stride_mask);
  if (last_tokens) {
    row_values<std::int32_t>(*last_tokens, "last_tokens", DType::kInt32, logits);
    params.last_tokens = static_cast<std::int32_t*>(last_tokens->data_ptr());
  }
  const Tensor tokens = empty_on_device_of(logits, {params.rows}, DType::kInt32);
  params.tokens = static_cast<std::int32_t*>(tokens.data_ptr());
  if constexpr (Backend::kIsCuda) {
    ridgeline::sample(params, on.stream());
  } else {
    cpu::sample(params);
  }
  return tokens;
}

template <class Backend>
std::tuple<Tensor, Tensor> top_logprobs(const Tensor& logits, const Tensor& tokens,
                                        std::int64_t count) {
  const Backend on(logits, "logits");
  check_logits(logits);
  check(count >= 0 && count <= logits.size(1), "count: expected 0 to the vocabulary's ",
        logits.size(1), ", got ", count);
  const std::vector<std::int64_t> sizes{logits.size(0), 1 + count};
  const Tensor logprobs = empty_on_device_of(logits, sizes, DType::kFloat32);
  const Tensor ids = empty_on_device_of(logits, sizes, DType::kInt32);
  const LogprobsParams params{
      .dtype = dtype_of(logits, "logits"),
      .rows = logits.size(0),
      .vocab = checked_int32(logits.size(1), "logits: vocabulary"),
      .count = checked_int32(count, "count"),
      .logits = logits.data_ptr(),
      .stride_logits = logits.stride(0),
      .tokens = row_values<std::int32_t>(tokens, "tokens", DType::kInt32, logits),
      .logprobs = static_cast<float*>(logprobs.data_ptr()),
      .ids = static_cast<std::int32_t*>(ids.data_ptr())};
  if constexpr (Backend::kIsCuda) {
    ridgeline::top_logprobs(params, on.stream());
  } else {
    cpu::top_logprobs(params);
  }
  return {logprobs, ids};
}

template <class Backend>
void register_sampling(torch::stable::detail::StableLibrary& m) {
  m.impl("sample", TORCH_BOX(&sample<Backend>));
  m.impl("top_logprobs", TORCH_BOX(&top_logprobs<Backend>));
}

}  // namespace ridgeline::bindings
