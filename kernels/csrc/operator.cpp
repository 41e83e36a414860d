// The operators lm_kernels::grouped_gemm and grouped_swiglu: they check what they are given and launch one variant.
//
// Only torch's stable ABI is used, so one library serves every torch from 2.10 on, and any Python. Outputs and workspace
// are the caller's. What the ends of groups are is not checked: they are on the device. A launch may compute the groups
// from first_group on: weights of several stacks then take one launch each, over the same ends and rows.
#include <climits>
#include <cstdint>
#include <optional>
#include <string>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include "variants.h"

// Weak: torch for CPUs has no such symbol, and the library is to load there as well.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using lm_kernels::Kind;
using lm_kernels::Status;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Variant {
  const char* name;
  Kind kind;
  lm_kernels::Launch launch;
};

#define LM_ROW(kind, name) {#name, kind, lm_kernels::name},
#define LM_FORWARD_ROW(name, ...) LM_ROW(Kind::kForward, name)
#define LM_FORWARD_SWIGLU_ROW(name, ...) LM_ROW(Kind::kForwardSwiglu, name)
#define LM_DATA_GRAD_ROW(name, ...) LM_ROW(Kind::kDataGrad, name)
#define LM_WEIGHT_GRAD_BF16_ROW(name, ...) LM_ROW(Kind::kWeightGradBf16, name)
#define LM_WEIGHT_GRAD_FP32_ROW(name, ...) LM_ROW(Kind::kWeightGradFp32, name)
#define LM_WEIGHT_GRAD_ADD_ROW(name, ...) LM_ROW(Kind::kWeightGradAdd, name)
constexpr Variant kVariants[] = {
    LM_FORWARD_VARIANTS(LM_FORWARD_ROW)
    LM_FORWARD_SWIGLU_VARIANTS(LM_FORWARD_SWIGLU_ROW)
    LM_DATA_GRAD_VARIANTS(LM_DATA_GRAD_ROW)
    LM_WEIGHT_GRAD_BF16_VARIANTS(LM_WEIGHT_GRAD_BF16_ROW)
    LM_WEIGHT_GRAD_FP32_VARIANTS(LM_WEIGHT_GRAD_FP32_ROW)
    LM_WEIGHT_GRAD_ADD_VARIANTS(LM_WEIGHT_GRAD_ADD_ROW)
};

#define LM_CHECK(condition, ...) STD_TORCH_CHECK(condition, "lm_kernels: ", __VA_ARGS__)

const Variant& find_variant(const std::string& name, bool is_swiglu) {
  for (const Variant& variant : kVariants)
    if (name == variant.name) {
      LM_CHECK(is_swiglu == (variant.kind == Kind::kForwardSwiglu), name, " is a variant of the other operator");
      return variant;
    }
  LM_CHECK(false, "this library has no variant ", name, ". Build it again: lightning-megatron kernels build");
  return kVariants[0];
}

void check_kind(const char* name, const Tensor& tensor, ScalarType dtype, int dim, int device) {
  LM_CHECK(tensor.is_cuda() && tensor.get_device() == device, name, " must be on the GPU of a");
  LM_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype for this variant");
  LM_CHECK(tensor.dim() == dim, name, " must have ", dim, " dimensions: it has ", tensor.dim());
}

void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, int dim, int device) {
  check_kind(name, tensor, dtype, dim, device);
  LM_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

// Return the distance of the weights in a stack, in elements; each of them has no gaps. Operands are loaded as one
// matrix, so they must lie at a distance of whole rows; results are stored to any aligned place.
int64_t checked_weight_step(const char* name, const Tensor& weights, bool is_result) {
  const int64_t groups = weights.size(0), n = weights.size(1), k = weights.size(2);
  LM_CHECK(weights.stride(2) == 1 && weights.stride(1) == k, name, " must have weights without gaps in them");
  if (groups == 1) return n * k;
  const int64_t step = weights.stride(0), unit = is_result ? 8 : k;
  LM_CHECK(step >= n * k && step % unit == 0 && (groups - 1) * (step / k) + n <= INT_MAX, name,
           " must have weights at a distance of a multiple of ", unit, " elements: it is ", step);
  return step;
}

void check_aligned(const char* name, const Tensor& tensor, int bytes = lm_kernels::kAlignment) {
  LM_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0, name, " must start at a multiple of ", bytes,
           " bytes, which is what TMA wants");
}

void check_shape(const char* name, const Tensor& tensor, int64_t size0, int64_t size1) {
  LM_CHECK(tensor.size(0) == size0 && tensor.size(1) == size1, name, " must have shape (", size0, ", ", size1,
           "): it has (", tensor.size(0), ", ", tensor.size(1), ")");
}

void check_shape(const char* name, const Tensor& tensor, int64_t size0, int64_t size1, int64_t size2) {
  LM_CHECK(tensor.size(0) == size0 && tensor.size(1) == size1 && tensor.size(2) == size2, name, " must have shape (",
           size0, ", ", size1, ", ", size2, "): it has (", tensor.size(0), ", ", tensor.size(1), ", ", tensor.size(2),
           ")");
}

// Return the sizes of the problem after the checks of dtypes and shapes.
lm_kernels::Problem checked_problem(Kind kind, const Tensor& d, const Tensor& a, const Tensor& b,
                                    const Tensor& group_ends, int64_t first_group) {
  LM_CHECK(a.is_cuda(), "a must be on a GPU");
  const int device = a.get_device();
  const bool weight_grad = lm_kernels::is_weight_grad(kind);
  check_tensor("a", a, ScalarType::BFloat16, 2, device);
  const ScalarType dtype_d = lm_kernels::is_fp32(kind) ? ScalarType::Float : ScalarType::BFloat16;
  check_kind("b", b, ScalarType::BFloat16, weight_grad ? 2 : 3, device);
  check_kind("d", d, dtype_d, weight_grad ? 3 : 2, device);
  LM_CHECK((weight_grad ? b : d).is_contiguous(), weight_grad ? "b" : "d", " must be contiguous");
  check_tensor("group_ends", group_ends, ScalarType::Int, 1, device);
  LM_CHECK(first_group >= 0 && first_group <= group_ends.size(0), "first_group must be one of ", group_ends.size(0),
           " groups: it is ", first_group);
  const int64_t groups = group_ends.size(0) - first_group, rows = a.size(0);
  const int64_t n = weight_grad ? a.size(1) : b.size(1), k = weight_grad ? b.size(1) : b.size(2);
  if (weight_grad) {
    check_shape("b", b, rows, k);
    check_shape("d", d, groups, n, k);
  } else {
    check_shape("b", b, groups, n, k);
    const bool forward = lm_kernels::is_forward(kind);
    check_shape("a", a, rows, forward ? k : n);
    check_shape("d", d, rows, kind == Kind::kForwardSwiglu ? n / 2 : forward ? n : k);
  }
  LM_CHECK(groups <= lm_kernels::kMaxGroups, "there may be ", lm_kernels::kMaxGroups, " groups: there are ", groups);
  LM_CHECK(rows <= INT_MAX && groups * n <= INT_MAX && k <= INT_MAX, "sizes must fit 32 bits: rows ", rows,
           ", groups x n ", groups * n, ", k ", k);
  LM_CHECK(n > 0 && k > 0 && n % 8 == 0 && k % 8 == 0, "n (", n, ") and k (", k,
           ") must be multiples of 8, because TMA loads rows of whole 16 bytes");
  check_aligned("a", a);
  check_aligned("b", b);
  check_aligned("d", d);
  const int64_t weight_step =
      groups == 0 ? 0 : checked_weight_step(weight_grad ? "d" : "b", weight_grad ? d : b, weight_grad);
  lm_kernels::Problem problem{int(groups), static_cast<const int*>(group_ends.data_ptr()) + first_group, int(rows),
                              int(n), int(k), weight_step, a.data_ptr(), b.data_ptr(), d.data_ptr()};
  problem.is_continued = first_group > 0;
  return problem;
}

const char* reason(Status status) {
  switch (status) {
    case Status::kOk: return "none";
    case Status::kWorkspaceTooSmall: return "the workspace is too small; plan.grouped_gemm.workspace_bytes says its size";
    case Status::kNotImplementable: return "CUTLASS cannot do these sizes";
    case Status::kInitializeFailed: return "the kernel was not set up; is this an sm_90 GPU?";
    case Status::kLaunchFailed: return "the launch failed";
  }
  return "unknown";
}

void launch(const Variant& chosen, const lm_kernels::Problem& problem, int device, const Tensor& workspace,
            bool raster_along_n, int64_t raster_band, int64_t num_sms, double alpha) {
  check_tensor("workspace", workspace, ScalarType::Byte, 1, device);
  check_aligned("workspace", workspace, lm_kernels::kWorkspaceAlignment);
  LM_CHECK(raster_band >= 0 && raster_band <= INT_MAX, "raster_band must not be negative: ", raster_band);
  LM_CHECK(num_sms > 0 && num_sms <= INT_MAX, "num_sms must be positive: ", num_sms);
  if (problem.num_groups == 0 || (problem.num_rows == 0 && !lm_kernels::is_weight_grad(chosen.kind))) return;
  LM_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch is built without CUDA");
  torch::stable::accelerator::DeviceGuard guard(device);
  // The guard does nothing if the device is current already, as GPU 0 is in a new thread. But the driver encodes tensor
  // maps only in threads with a context: cudaSetDevice makes that of the device current.
  const cudaError_t error = cudaSetDevice(device);
  LM_CHECK(error == cudaSuccess, "GPU ", device, " cannot be used: ", cudaGetErrorString(error));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const Status status =
      chosen.launch(problem, {raster_along_n, int(raster_band), int(num_sms), workspace.data_ptr(),
                              size_t(workspace.numel()), static_cast<cudaStream_t>(stream), float(alpha)});
  LM_CHECK(status == Status::kOk, chosen.name, ": ", reason(status));
}

void grouped_gemm(Tensor d, const Tensor& a, const Tensor& b, const Tensor& group_ends, Tensor workspace,
                  std::string variant, bool raster_along_n, int64_t raster_band, int64_t num_sms, double alpha,
                  int64_t first_group) {
  const Variant& chosen = find_variant(variant, false);
  const lm_kernels::Problem problem = checked_problem(chosen.kind, d, a, b, group_ends, first_group);
  LM_CHECK(alpha == 1 || lm_kernels::is_fp32(chosen.kind), "only fp32 weight gradients are multiplied by alpha: ",
           variant, " is none, and alpha is ", alpha);
  launch(chosen, problem, a.get_device(), workspace, raster_along_n, raster_band, num_sms, alpha);
}

void grouped_swiglu(Tensor d, std::optional<Tensor> kept, const Tensor& a, const Tensor& b,
                    const Tensor& probabilities, const Tensor& group_ends, Tensor workspace, std::string variant,
                    bool raster_along_n, int64_t raster_band, int64_t num_sms, int64_t first_group) {
  const Variant& chosen = find_variant(variant, true);
  lm_kernels::Problem problem = checked_problem(chosen.kind, d, a, b, group_ends, first_group);
  LM_CHECK(problem.n % 16 == 0, "n (", problem.n, ") must be a multiple of 16, for gates and ups of whole 16 bytes");
  const int device = a.get_device();
  check_tensor("probabilities", probabilities, ScalarType::Float, 1, device);
  LM_CHECK(probabilities.size(0) == problem.num_rows, "probabilities must be one for each of ", problem.num_rows,
           " rows: there are ", probabilities.size(0));
  problem.probabilities = static_cast<const float*>(probabilities.data_ptr());
  if (kept.has_value()) {
    check_tensor("kept", *kept, ScalarType::BFloat16, 2, device);
    check_shape("kept", *kept, problem.num_rows, problem.n);
    check_aligned("kept", *kept);
    problem.kept = kept->data_ptr();
  }
  launch(chosen, problem, device, workspace, raster_along_n, raster_band, num_sms, 1);
}

}  // namespace

STABLE_TORCH_LIBRARY(lm_kernels, m) {
  m.def(
      "grouped_gemm(Tensor(a!) d, Tensor a, Tensor b, Tensor group_ends, Tensor(b!) workspace, str variant, "
      "bool raster_along_n, int raster_band, int num_sms, float alpha=1.0, int first_group=0) -> ()");
  m.def(
      "grouped_swiglu(Tensor(a!) d, Tensor(b!)? kept, Tensor a, Tensor b, Tensor probabilities, Tensor group_ends, "
      "Tensor(c!) workspace, str variant, bool raster_along_n, int raster_band, int num_sms, int first_group=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lm_kernels, CUDA, m) {
  m.impl("grouped_gemm", TORCH_BOX(&grouped_gemm));
  m.impl("grouped_swiglu", TORCH_BOX(&grouped_swiglu));
}
