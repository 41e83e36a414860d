// What the operator and the kernels share: no header of torch or CUTLASS, so that each compiles without the other's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>

namespace lm_kernels {

// With x[rows, k], w[groups, n, k], y[rows, n] and their gradients, each group g owning consecutive rows:
enum class Kind {
  kForward,          // y  = x w[g]^T          bf16
  kForwardSwiglu,    // y  = silu(h[:, :n/2]) h[:, n/2:] p of h = x w[g]^T, p[rows]   bf16
  kDataGrad,         // dx = dy w[g]           bf16
  kWeightGradBf16,   // dw[g] = dy^T x         bf16
  kWeightGradFp32,   // dw[g] = alpha dy^T x   fp32
  kWeightGradAdd,    // dw[g] += alpha dy^T x  fp32
};

constexpr bool is_forward(Kind kind) { return kind == Kind::kForward || kind == Kind::kForwardSwiglu; }
constexpr bool is_weight_grad(Kind kind) { return !is_forward(kind) && kind != Kind::kDataGrad; }
constexpr bool is_fp32(Kind kind) { return kind == Kind::kWeightGradFp32 || kind == Kind::kWeightGradAdd; }

constexpr int kMaxGroups = 1024;   // the argument builder keeps one counter a group in shared memory
constexpr int kAlignment = 16;     // bytes, of every address and of every row: what TMA can load

// The workspace. plan/grouped_gemm.py has the same numbers; launch() refuses one that is smaller than it needs.
constexpr int kWorkspaceAlignment = 128;   // bytes, what a tensor map in memory wants
constexpr int kBytesPerGroup = 96;         // the arguments of a group take no more

// a, b, d are x, w, y (forward), dy, w, dx (data gradient) or dy, x, dw (weight gradient), row-major without gaps but
// for those between the weights of groups.
struct Problem {
  int num_groups;
  const int* group_ends;   // on the device: the row after the last of each group, never falling
  int num_rows;            // of the buffers; rows from the last end on are neither used nor written
  int n, k;
  int64_t weight_step;     // elements from the weight of a group to the next one's
  const void* a;
  const void* b;
  void* d;
  const float* probabilities = nullptr;   // of SwiGLU
  void* kept = nullptr;                   // of SwiGLU: h, or null where it is not stored
  bool is_continued = false;              // the first group starts at the end before it, group_ends[-1], not at row 0
};

struct LaunchOptions {
  bool raster_along_n;     // neighbouring clusters of tiles are neighbours along N, not M
  int raster_band;         // clusters walked along that direction before the other advances; 0: all of them
  int num_sms;             // CTAs of the persistent grid: fewer leave SMs to communication
  void* workspace;         // one for each stream: it holds the arguments of the launch in flight
  size_t workspace_bytes;
  cudaStream_t stream;
  float alpha;             // fp32 weight gradients: what the products are multiplied by
};

enum class Status { kOk, kWorkspaceTooSmall, kNotImplementable, kInitializeFailed, kLaunchFailed };

using Launch = Status (*)(const Problem&, const LaunchOptions&);

}  // namespace lm_kernels
