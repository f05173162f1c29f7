#pragma once
#include <cstddef>
#include <cstdint>

/// The few declarations of cuBLASLt (12 and 13) that linear uses, so that building needs no cuBLAS.
/// Names and values: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
namespace ridgeline::cublaslt {

using Status = int;  // 0: success
using Handle = void*;
using Desc = void*;
using Layout = void*;
using Preference = void*;

enum DataType : int { kReal32F = 0, kReal16F = 2, kReal16BF = 14 };
enum ComputeType : int { kCompute32F = 68 };
enum Operation : std::int32_t { kOpN = 0, kOpT = 1 };
enum DescAttribute : int { kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8 };
enum Epilogue : std::uint32_t {
  kEpilogueDefault = 1,
  kEpilogueRelu = 2,   // of what is there ...
  kEpilogueBias = 4,   // ... of these, ...
  kEpilogueGelu = 32,  // ... by tanh
};
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

enum AlgoAttribute : int { kTileId = 1 };
enum TileId : std::uint32_t {
  kTile128x64 = 18,
  kTile128x128 = 20,
  kTile192x64 = 208,
  kTile256x64 = 21,
  kTile320x64 = 247,
  kTile384x64 = 263,
  kTile448x64 = 272,
  kTile512x64 = 25,
  kTile512x72 = 580,
  kTile168x128 = 197,
  kTile176x128 = 201,
};

struct Algo {
  std::uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

/// The functions, by the names the library exports them under.
struct Api {
  Status (*cublasLtCreate)(Handle*);
  Status (*cublasLtMatmulDescCreate)(Desc*, ComputeType, DataType);
  Status (*cublasLtMatmulDescDestroy)(Desc);
  Status (*cublasLtMatmulDescSetAttribute)(Desc, DescAttribute, const void*, std::size_t);
  Status (*cublasLtMatrixLayoutCreate)(Layout*, DataType, std::uint64_t, std::uint64_t,
                                       std::int64_t);
  Status (*cublasLtMatrixLayoutDestroy)(Layout);
  Status (*cublasLtMatmulPreferenceCreate)(Preference*);
  Status (*cublasLtMatmulPreferenceDestroy)(Preference);
  Status (*cublasLtMatmulPreferenceSetAttribute)(Preference, PreferenceAttribute, const void*,
                                                 std::size_t);
  Status (*cublasLtMatmulAlgoGetHeuristic)(Handle, Desc, Layout, Layout, Layout, Layout, Preference,
                                           int, HeuristicResult*, int*);
  Status (*cublasLtMatmulAlgoConfigGetAttribute)(const Algo*, AlgoAttribute, void*, std::size_t,
                                                 std::size_t*);
  Status (*cublasLtMatmul)(Handle, Desc, const void*, const void*, Layout, const void*, Layout,
                           const void*, const void*, Layout, void*, Layout, const Algo*, void*,
                           std::size_t, void*);
};

}  // namespace ridgeline::cublaslt
