#pragma once
#include "common/types.h"

namespace ridgeline {

constexpr std::int32_t kMaxRoutedTokens = 1 << 28;
constexpr std::int32_t kMaxRoutedExperts = 1023;
constexpr std::int32_t kMaxPerToken = 32;  // that a token chooses; any number may be given
constexpr std::int32_t kMaxOrderedChoices = 1 << 28;

/// Choices in the order of their experts, as grouped_gemm() takes their rows; those of an expert in
/// the order of tokens, and of a token's choices. Behind the last expert's come the rows of choices
/// that are nobody's.
struct ExpertOrder {
  std::int32_t tokens;     // 0 is legal
  std::int32_t experts;    // 1 to kMaxRoutedExperts
  std::int32_t per_token;  // 0 is legal
  std::int32_t* offsets;   // [experts + 1]: where the rows of each expert begin
  std::int32_t* rows;      // [tokens * per_token]: the token of each row
  std::int32_t* places;    // [tokens, per_token]: the row of each choice
  void* workspace;         // *_workspace_bytes(), any contents; CUDA alone
};

/// The experts of each token, and their order. A token chooses its per_token largest logits, of
/// which NaN is the largest and of equal ones the lowest expert's comes first; its weights are
/// their softmax or, unless normalized, what they have of the softmax over all experts.
///
/// Roofline: reads the logits once and writes 12 bytes a choice: kilobytes, so that the launches,
/// and the steps of a choice one after the other, are the time.
struct RouteParams {
  DType dtype;                 // of logits
  bool normalized;
  const void* logits;          // [tokens, experts]
  std::int64_t stride_logits;  // elements between rows
  float* weights;              // [tokens, per_token], in falling order of the logits
  ExpertOrder order;           // up to kMaxRoutedTokens; per_token: 1 to min(experts, kMaxPerToken)
};

/// The order of choices that are given. Those outside [0, experts) are nobody's; an expert may be a
/// token's more than once.
///
/// Roofline: reads the choices once and writes 8 bytes for each: the launches are the time.
struct OrderParams {
  DType dtype;                 // of chosen: kInt32 or kInt64
  const void* chosen;          // [tokens, per_token]
  std::int64_t stride_token;   // elements, as is the next
  std::int64_t stride_choice;  // of one token
  ExpertOrder order;           // up to kMaxOrderedChoices
};

/// What the experts make of a token's rows, together: y[t] = sum over j, in order, of
/// weights[t, j] * x[places[t, j]], in fp32 with fused multiply-adds, rounded once.
///
/// A place outside x is an error on the CPU and reads row 0 on CUDA.
///
/// Roofline: reads tokens * per_token rows and writes one a token: bandwidth at many tokens, at few
/// the latency of a place and the row it names.
struct CombineParams {
  DType dtype;                 // of x and y
  std::int32_t tokens;         // 0 is legal
  std::int32_t per_token;      // 0 is legal: y is zeros
  std::int64_t width;          // elements of a row; 0 is legal
  const void* x;               // [rows, width]
  std::int64_t rows;           // not 0 where there is a choice
  std::int64_t stride_x_row;   // elements
  const std::int32_t* places;  // [tokens, per_token]
  const float* weights;        // [tokens, per_token]
  void* y;                     // [tokens, width] contiguous
};

std::size_t route_experts_workspace_bytes(const RouteParams& params);
std::size_t order_experts_workspace_bytes(const OrderParams& params);

/// Enqueues one kernel, or two for more than 64 tokens; allocates nothing.
void route_experts(const RouteParams& params, Stream stream);

/// Enqueues one kernel, or two for more than 2048 choices; allocates nothing.
void order_experts(const OrderParams& params, Stream stream);

/// Enqueues one kernel; allocates nothing. Any width; multiples of 16 bytes on rows aligned to 16
/// bytes are fast.
void combine_experts(const CombineParams& params, Stream stream);

namespace cpu {
void route_experts(const RouteParams& params);
void order_experts(const OrderParams& params);
void combine_experts(const CombineParams& params);
}  // namespace cpu

}  // namespace ridgeline
