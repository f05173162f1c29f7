#pragma once
#include "common/types.h"

namespace ridgeline {

constexpr std::int64_t kMaxVocabulary = 1 << 20;

/// One token a row:
///   x = logits, penalised; plus bias; -inf where the mask is false or x is NaN
///   temperature below 1e-5: the largest x, of equal ones the lowest id
///   otherwise, of exp((x - max x) / temperature), keep what min_p keeps, of that the top_k largest
///   (with all that equal the last one), of that the fewest largest that hold top_p of its mass
///   (again with equals), and draw: the first id at which the running mass passes random * mass.
/// A row of -inf gives -1, no token. Masses are integers (common/sampling.h), so the result does not
/// depend on how the work is split, on the rows beside it or on the device.
///
/// Roofline: reads the logits once, writes nothing to speak of: the cold read of rows * vocab
/// logits is the floor.
struct SampleParams {
  DType dtype;                     // of logits
  std::int64_t rows;               // 0 is legal
  std::int32_t vocab;              // 1 to kMaxVocabulary
  const void* logits;              // [rows, vocab]
  std::int64_t stride_logits;      // elements between rows, as below
  const float* temperature;        // [rows], as the next five
  const std::int32_t* top_k;       // 0 or less: off
  const float* top_p;              // 1 or more: off
  const float* min_p;              // 0: off
  const std::int64_t* seeds;
  const std::int32_t* positions;
  const float* penalties;          // [rows, 3]: repetition, presence, frequency; or null
  const std::int32_t* token_counts;  // [rows, vocab]: 2 * count in the output + (in the prompt)
  std::int64_t stride_counts;
  const float* bias;               // [rows, vocab], or null
  std::int64_t stride_bias;
  const bool* mask;                // [rows, vocab], false: excluded; or null
  std::int64_t stride_mask;
  std::int32_t* tokens;            // [rows]
  std::int32_t* last_tokens;       // the same once more, or null
};

/// Log-probabilities of a token and of the `count` most likely tokens of each row, from the logits
/// as they are: log_softmax. Of equal logits the lowest id comes first; NaN counts as -inf.
///
/// Roofline: reads the logits once.
struct LogprobsParams {
  DType dtype;                 // of logits
  std::int64_t rows;           // 0 is legal
  std::int32_t vocab;
  std::int32_t count;          // 0 to vocab
  const void* logits;          // [rows, vocab]
  std::int64_t stride_logits;
  const std::int32_t* tokens;  // [rows]
  float* logprobs;             // [rows, 1 + count]: of the token, then in falling order
  std::int32_t* ids;           // [rows, 1 + count]
};

/// Each enqueues one kernel; allocates nothing.
void sample(const SampleParams& params, Stream stream);
void top_logprobs(const LogprobsParams& params, Stream stream);

namespace cpu {
void sample(const SampleParams& params);
void top_logprobs(const LogprobsParams& params);
}  // namespace cpu

}  // namespace ridgeline
