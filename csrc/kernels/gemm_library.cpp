#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "common/launch_trace.h"
#include "common/math.h"
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_cublaslt.h"
#include "kernels/gemm_launch.cuh"

namespace ridgeline::gemm_detail {
namespace {

using namespace cublaslt;

/// The functions of the cuBLASLt that PyTorch has loaded, or of one that the loader finds; nothing
/// if there is none or it lacks one of them.
std::optional<Api> open_api() {
  void* library = nullptr;
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW})
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
      if (library == nullptr) library = dlopen(name, flags);
  if (library == nullptr) return std::nullopt;
  Api api{};
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    complete = complete && function != nullptr;
  };
  find(api.cublasLtCreate, "cublasLtCreate");
  find(api.cublasLtMatmulDescCreate, "cublasLtMatmulDescCreate");
  find(api.cublasLtMatmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(api.cublasLtMatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(api.cublasLtMatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(api.cublasLtMatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(api.cublasLtMatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(api.cublasLtMatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(api.cublasLtMatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(api.cublasLtMatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(api.cublasLtMatmulAlgoConfigGetAttribute, "cublasLtMatmulAlgoConfigGetAttribute");
  find(api.cublasLtMatmul, "cublasLtMatmul");
  return complete ? std::optional<Api>(api) : std::nullopt;
}

const std::optional<Api>& api() {
  static const std::optional<Api> opened = open_api();
  return opened;
}

void library_check(Status status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("cuBLASLt: ") + what + " failed, status " +
                             std::to_string(status));
}

/// Up to this K tiles of 128 x 128 are Hopper's fastest where they are two waves; the heuristic has
/// them behind larger ones. H200, bf16 with bias, M x N x K, its first choice and they: 8192 x 4096
/// x 1280 133.8 us and 121.6, x 1024 106.6 and 94.7, 8192 x 3072 x 768 63.9 and 56.8, 1024 x 4096 x
/// 1024 15.1 and 14.2, 8192 x 1024 x 1024 27.9 and 27.8, with a residual 30.4 and 33.5; 8192 x 1024
/// x 4096 90.0 and 94.0. The bits were the same. Nothing is known of float32.
constexpr std::int64_t kShortK = 1280;
constexpr float kLeastWaves = 1.5f;
constexpr int kCandidates = 8;

/// Of many rows up to this K, tiles of 168 x 128 or 176 x 128 (N x M) where these give nearly all
/// SMs work in each wave: one warpgroup stores a tile while the other multiplies. H200, bf16, 47
/// products by turns, M x N x K: the 21 that this takes need 0.92 to 0.98 of the first choice's
/// time (8192 x 28672 x 4096 0.953, 8192 x 6144 x 4096 0.942), the others up to 1.08 (4096 x 4096 x
/// 14336 1.03). With a residual 11 take 0.90 to 0.99 (8192 x 8192 x 8192 0.926), but beside a bias
/// 1.04 to 1.13. Llama-3.1-8B, the latter tile alone, by turns: 64 prompts of 512 tokens 732 and
/// 718 ms, one of 4096 98.5 and 96.2; both tiles, a run of its own: 704 and 93.5.
constexpr std::int64_t kManyRows = 1024, kMediumK = 8192;
constexpr double kLeastFilled = 0.95;
constexpr std::int64_t kLeastWholeWaves = 4;

/// The first choice of some hundred rows by many columns may be tiles of many weight rows by few of
/// x, which take up to 1.9 times as long as the first of the others: of the candidates that have
/// more of x. H200, bf16, M x N x K, us: 416 and 448 x 18944 x 3584 174, 174 and 93, 94; 448 x 28672
/// x 4096 291 and 164; 320 x 18944 x 3584 90 and 71; 448 x 13824 x 5120 124 and 99; 72 x 57344 x
/// 8192 252 and 224. Nothing is known of float32.
constexpr bool is_tall(std::uint32_t tile) {
  return tile == kTile384x64 || tile == kTile512x64 || tile == kTile512x72;
}
constexpr bool is_narrow(std::uint32_t tile) {
  return is_tall(tile) || tile == kTile128x64 || tile == kTile192x64 || tile == kTile256x64 ||
         tile == kTile320x64 || tile == kTile448x64;
}

/// Flags, of which none at all is `kEpilogueDefault`.
std::uint32_t epilogue_of(const GemmParams& p, bool finishes) {
  std::uint32_t flags = p.bias ? kEpilogueBias : 0;
  if (finishes && p.activation == Activation::kRelu) flags |= kEpilogueRelu;
  if (finishes && p.activation == Activation::kGeluTanh) flags |= kEpilogueGelu;
  return flags == 0 ? kEpilogueDefault : flags;
}

/// One call's descriptors, destroyed with it. Row-major y = x W^T is column-major y^T = W x^T.
class Problem {
 public:
  Problem(const GemmParams& p, std::uint32_t epilogue, bool adds_residual)
      : is_half(p.dtype != DType::kFloat32),
        has_short_k(p.K <= kShortK && is_half && !adds_residual),
        has_many_rows(p.M >= kManyRows && p.K > kShortK && p.K <= kMediumK && is_half &&
                      !(adds_residual && p.bias)),
        M(p.M),
        N(p.N),
        api_(*api()) {
    const DataType type = p.dtype == DType::kFloat32   ? kReal32F
                          : p.dtype == DType::kFloat16 ? kReal16F
                                                       : kReal16BF;
    library_check(api_.cublasLtMatmulDescCreate(&desc, kCompute32F, kReal32F),
                  "cublasLtMatmulDescCreate");
    set(kTransA, kOpT);
    set(kTransB, kOpN);
    set(kEpilogue, epilogue);
    if (p.bias) set(kBiasPointer, p.bias);
    create(weight, type, p.K, p.N, p.weight.stride_row);
    create(x, type, p.K, p.M, p.M > 1 ? p.x.stride_row : p.K);
    create(residual, type, p.N, p.M, adds_residual && p.M > 1 ? p.stride_residual : p.N);
    create(product, type, p.N, p.M, p.N);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    for (const Layout layout : {weight, x, residual, product})
      api_.cublasLtMatrixLayoutDestroy(layout);
    api_.cublasLtMatmulDescDestroy(desc);
  }

  const bool is_half, has_short_k, has_many_rows;
  const std::int64_t M, N;
  Desc desc = nullptr;
  Layout weight = nullptr, x = nullptr, residual = nullptr, product = nullptr;

 private:
  template <class Value>
  void set(DescAttribute attribute, Value value) {
    library_check(api_.cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value),
                  "a matmul attribute");
  }
  void create(Layout& layout, DataType type, std::int64_t rows, std::int64_t columns,
              std::int64_t stride) {
    library_check(
        api_.cublasLtMatrixLayoutCreate(&layout, type, rows, columns, std::max(stride, rows)),
        "cublasLtMatrixLayoutCreate");
  }

  const Api& api_;
};

/// What an algorithm was chosen for: device, shape, strides, alignment of the addresses, epilogue.
using Key = std::array<std::int64_t, 14>;

/// The largest power of two up to 256 that divides the address.
std::int64_t alignment_of(const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address) | 256u;
  return static_cast<std::int64_t>(value & (~value + 1));
}

/// A handle a device and an algorithm a shape, each made once; any thread.
class Library {
 public:
  Handle handle(int device) {
    const std::lock_guard lock(mutex_);
    Handle& handle = handles_[device];
    if (handle == nullptr) library_check(api()->cublasLtCreate(&handle), "cublasLtCreate");
    return handle;
  }

  /// No algorithm if the heuristic has none.
  std::optional<Algo> algo(Handle handle, const Problem& problem, const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = algos_.find(key);
    if (found != algos_.end()) return found->second;
    return algos_[key] = ask(handle, problem, key);
  }

 private:
  static std::optional<Algo> ask(Handle handle, const Problem& problem, const Key& key) {
    Preference preference = nullptr;
    library_check(api()->cublasLtMatmulPreferenceCreate(&preference),
                  "cublasLtMatmulPreferenceCreate");
    const auto set = [&](PreferenceAttribute attribute, auto value) {
      library_check(
          api()->cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
          "a matmul preference");
    };
    set(kMaxWorkspaceBytes, kLibraryWorkspace);
    set(kMinAlignmentA, static_cast<std::uint32_t>(key[9]));
    set(kMinAlignmentB, static_cast<std::uint32_t>(key[10]));
    set(kMinAlignmentC, static_cast<std::uint32_t>(key[11]));
    set(kMinAlignmentD, static_cast<std::uint32_t>(key[12]));
    std::array<HeuristicResult, kCandidates> results{};
    const auto candidates = [&](int asked) {
      int count = 0;
      const Status status = api()->cublasLtMatmulAlgoGetHeuristic(
          handle, problem.desc, problem.weight, problem.x, problem.residual, problem.product,
          preference, asked, results.data(), &count);
      return std::span(results.data(), status == 0 ? count : 0);
    };
    const bool sm90a = device::runs_sm90a();
    const bool chooses = sm90a && (problem.has_short_k || problem.has_many_rows);
    auto found = candidates(chooses ? kCandidates : 1);
    const bool tall = sm90a && problem.is_half && !found.empty() && is_tall(tile_of(found[0]));
    if (tall)
      if (const auto all = candidates(kCandidates); !all.empty()) found = all;
    api()->cublasLtMatmulPreferenceDestroy(preference);
    if (found.empty() || found[0].state != 0) return std::nullopt;
    const auto preferred = [&](const HeuristicResult& result) {
      return result.state != 0 ? 0
             : tall            ? !is_narrow(tile_of(result))
                               : rank(problem, result);
    };
    const auto best = std::max_element(  // the first of several
        found.begin(), found.end(),
        [&](const auto& a, const auto& b) { return preferred(a) < preferred(b); });
    return (preferred(*best) > 0 ? *best : found[0]).algo;
  }

  /// 0: not known.
  static std::uint32_t tile_of(const HeuristicResult& result) {
    std::uint32_t tile = 0;
    std::size_t written = 0;
    const Status status = api()->cublasLtMatmulAlgoConfigGetAttribute(&result.algo, kTileId, &tile,
                                                                      sizeof tile, &written);
    return status == 0 ? tile : 0;
  }

  /// How much an algorithm is preferred to the first; 0: not.
  static double rank(const Problem& problem, const HeuristicResult& result) {
    const std::uint32_t tile = tile_of(result);
    if (problem.has_short_k) return tile == kTile128x128 && result.waves >= kLeastWaves;
    if (!problem.has_many_rows) return 0;
    const double filled = tile == kTile168x128   ? filled_by(problem, 168)
                          : tile == kTile176x128 ? filled_by(problem, 176)
                                                 : 0;
    return filled >= kLeastFilled ? filled : 0;
  }

  /// The share of the SMs, in all waves of tiles of `rows` x 128, that have work.
  static double filled_by(const Problem& problem, std::int64_t rows) {
    constexpr std::int64_t kColumns = 128;
    const std::int64_t sms = device::multiprocessors();
    const std::int64_t waves =
        ceil_div(ceil_div(problem.N, rows) * ceil_div(problem.M, kColumns), sms);
    if (waves < kLeastWholeWaves) return 0;
    return static_cast<double>(problem.M * problem.N) /
           static_cast<double>(waves * sms * rows * kColumns);
  }

  std::mutex mutex_;  // guards both maps
  std::map<int, Handle> handles_;
  std::map<Key, std::optional<Algo>> algos_;
};

Library& library() {
  static Library* const instance = new Library;  // outlives the CUDA context's teardown
  return *instance;
}

}  // namespace

bool library_available() {
  return api().has_value();
}

bool launch_library(const GemmParams& p, bool finishes, void* product, void* workspace,
                    Stream stream) {
  const bool adds_residual = finishes && p.residual != nullptr;
  const std::uint32_t epilogue = epilogue_of(p, finishes);
  const void* residual = adds_residual ? p.residual : product;
  int device = 0;
  device::cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  const Problem problem(p, epilogue, adds_residual);
  const Key key{device,
                static_cast<std::int64_t>(p.dtype),
                p.M,
                p.N,
                p.K,
                p.x.stride_row,
                p.weight.stride_row,
                adds_residual ? p.stride_residual : 0,
                p.bias != nullptr ? alignment_of(p.bias) : 0,
                alignment_of(p.weight.data),
                alignment_of(p.x.data),
                alignment_of(residual),
                alignment_of(product),
                epilogue};
  const Handle handle = library().handle(device);
  const std::optional<Algo> algo = library().algo(handle, problem, key);
  if (!algo) return false;
  if (launch_trace::is_open()) return true;
  const float one = 1.0f, beta = adds_residual ? 1.0f : 0.0f;
  library_check(
      api()->cublasLtMatmul(handle, problem.desc, &one, p.weight.data, problem.weight, p.x.data,
                            problem.x, &beta, residual, problem.residual, product, problem.product,
                            &*algo, workspace, kLibraryWorkspace, stream),
      "cublasLtMatmul");
  return true;
}

}  // namespace ridgeline::gemm_detail
