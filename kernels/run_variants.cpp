// Runs every variant once or twice on small exact numbers and compares with the host: a program for compute-sanitizer.
//
//   nvcc -I kernels/csrc kernels/run_variants.cpp -x none liblm_kernels.so -o run_variants
//   compute-sanitizer --tool racecheck ./run_variants
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#include "variants.h"

using namespace lm_kernels;

namespace {

// Groups of which the first, one inside and the last are empty, and rows of no group.
const std::vector<int> kEnds{0, 70, 200, 200, 271, 330, 330};
constexpr int kRows = 350, kN = 144, kK = 200, kGap = 2 * kK, kSms = 8;
const int kGroups = int(kEnds.size());
constexpr int64_t kStep = int64_t(kN) * kK + kGap;

uint16_t to_bf16(float value) {   // of numbers that fit
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

std::vector<float> small_numbers(size_t size, unsigned seed) {
  std::vector<float> found(size);
  for (float& value : found) {
    seed = seed * 1664525u + 1013904223u;
    value = float(int(seed >> 24) % 3 - 1);
  }
  return found;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  printf("CUDA: %s\n", cudaGetErrorString(error));
  exit(2);
}

template <class T>
T* on_device(const std::vector<T>& values) {
  T* found;
  check(cudaMalloc(&found, values.size() * sizeof(T)));
  check(cudaMemcpy(found, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return found;
}

std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> found;
  for (float value : values) found.push_back(to_bf16(value));
  return found;
}

struct Numbers {
  std::vector<float> x = small_numbers(kRows * kK, 1), dy = small_numbers(kRows * kN, 2),
                     w = small_numbers(kGroups * kStep, 3);
};

// What d holds afterwards, from what it held before. The first weight is that of group `first`.
std::vector<float> expected(Kind kind, const Numbers& of, std::vector<float> d, int first = 0) {
  for (int g = first; g < kGroups; ++g) {
    const int start = g ? kEnds[g - 1] : 0;
    const int64_t at = (g - first) * kStep;
    const float* w = of.w.data() + at;
    if (is_weight_grad(kind)) {
      for (int n = 0; n < kN; ++n)
        for (int k = 0; k < kK; ++k) {
          float sum = kind == Kind::kWeightGradAdd ? d[at + n * kK + k] : 0.f;
          for (int r = start; r < kEnds[g]; ++r) sum += of.dy[r * kN + n] * of.x[r * kK + k];
          d[at + n * kK + k] = sum;
        }
      continue;
    }
    for (int r = start; r < kEnds[g]; ++r) {
      if (kind == Kind::kForward)
        for (int n = 0; n < kN; ++n) {
          float sum = 0;
          for (int k = 0; k < kK; ++k) sum += of.x[r * kK + k] * w[n * kK + k];
          d[r * kN + n] = sum;
        }
      else
        for (int k = 0; k < kK; ++k) {
          float sum = 0;
          for (int n = 0; n < kN; ++n) sum += of.dy[r * kN + n] * w[n * kK + k];
          d[r * kK + k] = sum;
        }
    }
  }
  return d;
}

int run(const char* name, Kind kind, Launch launch, int first) {
  const Numbers of;
  const bool fp32 = is_fp32(kind);
  const size_t size = is_weight_grad(kind) ? kGroups * kStep : size_t(kRows) * (kind == Kind::kForward ? kN : kK);
  const std::vector<float> before = small_numbers(size, 4);
  const std::vector<float> wanted = expected(kind, of, before, first);
  uint16_t *x = on_device(rounded(of.x)), *dy = on_device(rounded(of.dy)), *w = on_device(rounded(of.w));
  int* ends = on_device(kEnds);
  uint8_t* workspace = on_device(std::vector<uint8_t>(kGroups * kBytesPerGroup + 9 * kWorkspaceAlignment + kSms * 1024));
  const size_t workspace_bytes = kGroups * kBytesPerGroup + 9 * kWorkspaceAlignment + kSms * 1024;
  void* d = fp32 ? (void*)on_device(before) : (void*)on_device(rounded(before));
  const void* a = kind == Kind::kForward ? x : dy;
  const void* b = is_weight_grad(kind) ? x : w;
  int num_wrong = 0;
  for (bool along_n : {false, true}) {
    if (along_n && kind == Kind::kWeightGradAdd) continue;   // it would add twice
    Problem problem{kGroups - first, ends + first, kRows, kN, kK, kStep, a, b, d};
    problem.is_continued = first > 0;
    const Status status = launch(problem, {along_n, along_n ? 2 : 0, kSms, workspace, workspace_bytes, nullptr, 1.f});
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
    if (status != Status::kOk) ++num_wrong;
    std::vector<float> found(size);
    std::vector<uint16_t> half(size);
    check(cudaMemcpy(fp32 ? (void*)found.data() : (void*)half.data(), d, size * (fp32 ? 4 : 2), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < size; ++i) {
      const float value = fp32 ? found[i] : from_bf16(half[i]);
      num_wrong += value != (fp32 ? wanted[i] : from_bf16(to_bf16(wanted[i])));
    }
  }
  for (void* memory : {(void*)x, (void*)dy, (void*)w, (void*)ends, (void*)workspace, d}) check(cudaFree(memory));
  printf("%-50s from group %d: %s (%d wrong)\n", name, first, num_wrong ? "FAILED" : "ok", num_wrong);
  fflush(stdout);
  return num_wrong != 0;
}

// Group 2 has rows, and groups without rows behind and, as the last, at the end.
int run_from_both(const char* name, Kind kind, Launch launch) {
  return run(name, kind, launch, 0) + run(name, kind, launch, 2);
}

// SwiGLU behind the product, which is exact; with the product kept and not.
int run_swiglu(const char* name, Launch launch) {
  const Numbers of;
  const int features = kN / 2;
  const std::vector<float> before = small_numbers(size_t(kRows) * kN, 4);
  const std::vector<float> product = expected(Kind::kForward, of, before);
  std::vector<float> probabilities;
  for (int r = 0; r < kRows; ++r) probabilities.push_back(float(1 + r % 8) / 8.f);
  uint16_t *x = on_device(rounded(of.x)), *w = on_device(rounded(of.w));
  float* p = on_device(probabilities);
  int* ends = on_device(kEnds);
  const size_t workspace_bytes = kGroups * kBytesPerGroup + 9 * kWorkspaceAlignment + kSms * 1024;
  uint8_t* workspace = on_device(std::vector<uint8_t>(workspace_bytes));
  int num_wrong = 0;
  for (bool keeps : {false, true}) {
    uint16_t *kept = on_device(rounded(before)), *d = on_device(rounded(std::vector<float>(kRows * features, 5.f)));
    const Problem problem{kGroups, ends, kRows, kN, kK, kStep, x, w, d, p, keeps ? kept : nullptr};
    const Status status = launch(problem, {keeps, keeps ? 2 : 0, kSms, workspace, workspace_bytes, nullptr, 1.f});
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
    if (status != Status::kOk) ++num_wrong;
    std::vector<uint16_t> found(size_t(kRows) * kN), result(size_t(kRows) * features);
    check(cudaMemcpy(found.data(), kept, found.size() * 2, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(result.data(), d, result.size() * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < found.size(); ++i)
      num_wrong += from_bf16(found[i]) != from_bf16(to_bf16(keeps ? product[i] : before[i]));
    for (int r = 0; r < kRows; ++r)
      for (int f = 0; f < features; ++f) {
        const float gate = product[r * kN + f], up = product[r * kN + features + f];
        const float wanted = r < kEnds.back() ? gate / (1.f + std::exp(-gate)) * up * probabilities[r] : 5.f;
        num_wrong += !(std::fabs(from_bf16(result[r * features + f]) - wanted) <= 5e-3f * std::fabs(wanted) + 1e-30f);
      }
    check(cudaFree(kept));
    check(cudaFree(d));
  }
  for (void* memory : {(void*)x, (void*)w, (void*)p, (void*)ends, (void*)workspace}) check(cudaFree(memory));
  printf("%-50s %s (%d wrong)\n", name, num_wrong ? "FAILED" : "ok", num_wrong);
  fflush(stdout);
  return num_wrong != 0;
}

}  // namespace

#define LM_RUN(kind, name) \
  if (argc < 2 || strstr(#name, argv[1])) num_failed += run_from_both(#name, Kind::kind, lm_kernels::name);
#define LM_RUN_FORWARD(name, ...) LM_RUN(kForward, name)
#define LM_RUN_DATA_GRAD(name, ...) LM_RUN(kDataGrad, name)
#define LM_RUN_BF16(name, ...) LM_RUN(kWeightGradBf16, name)
#define LM_RUN_FP32(name, ...) LM_RUN(kWeightGradFp32, name)
#define LM_RUN_ADD(name, ...) LM_RUN(kWeightGradAdd, name)

#define LM_RUN_SWIGLU(name, ...) \
  if (argc < 2 || strstr(#name, argv[1])) num_failed += run_swiglu(#name, lm_kernels::name);

int main(int argc, char** argv) {
  int num_failed = 0;
  LM_FORWARD_VARIANTS(LM_RUN_FORWARD)
  LM_FORWARD_SWIGLU_VARIANTS(LM_RUN_SWIGLU)
  LM_DATA_GRAD_VARIANTS(LM_RUN_DATA_GRAD)
  LM_WEIGHT_GRAD_BF16_VARIANTS(LM_RUN_BF16)
  LM_WEIGHT_GRAD_FP32_VARIANTS(LM_RUN_FP32)
  LM_WEIGHT_GRAD_ADD_VARIANTS(LM_RUN_ADD)
  printf("%d variants failed\n", num_failed);
  return num_failed != 0;
}
