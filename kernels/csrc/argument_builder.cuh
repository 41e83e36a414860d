// The kernel that turns the ends of groups, which only the device knows, into the arguments of the GEMM behind it.
#pragma once
#include "gemm_types.cuh"

namespace lm_kernels {

// One entry a group each, on the device, carved from the workspace.
template <class Gemm>
struct GroupArguments {
  cute::Shape<int, int, int>* shapes;
  const bf16** a;
  const bf16** b;
  typename Gemm::ElementD** d;   // C, where it is read, is D
  typename Gemm::StrideA* stride_a;
  typename Gemm::StrideB* stride_b;
  typename Gemm::StrideD* stride_d;
  int* cluster_ends;
  GroupOffset* offsets;

  static_assert(sizeof(*shapes) + sizeof(*a) + sizeof(*b) + sizeof(*d) + sizeof(*stride_a) + sizeof(*stride_b) +
                    sizeof(*stride_d) + sizeof(*cluster_ends) + sizeof(*offsets) <= kBytesPerGroup);

  // Return the first byte behind the arrays.
  char* carve(void* workspace, int num_groups) {
    char* next = static_cast<char*>(workspace);
    auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
      const size_t lines = (sizeof(*array) * num_groups + kWorkspaceAlignment - 1) / kWorkspaceAlignment;
      next += lines * kWorkspaceAlignment;
    };
    take(shapes); take(a); take(b); take(d);
    take(stride_a); take(stride_b); take(stride_d);
    take(cluster_ends); take(offsets);
    return next;
  }
};

constexpr int kBuilderThreads = 256;
constexpr int kWarpSize = 32;

// Return the first row of group g.
__device__ inline int start_of(const Problem& problem, int g) {
  return g || problem.is_continued ? problem.group_ends[g - 1] : 0;
}

// Write zeros where a group has no rows: no tile stores there. (A tile with K = 0 would store accumulators that were
// never set.)
template <class Element>
__device__ void zero_empty_groups(const Problem& problem, Element* d, int block, int num_blocks) {
  const int64_t size = int64_t(problem.n) * problem.k, num_vectors = size * sizeof(Element) / sizeof(uint4);
  for (int g = 0; g < problem.num_groups; ++g) {
    if (problem.group_ends[g] > start_of(problem, g)) continue;
    uint4* vectors = reinterpret_cast<uint4*>(d + g * problem.weight_step);
    for (int64_t i = int64_t(block) * kBuilderThreads + threadIdx.x; i < num_vectors;
         i += int64_t(num_blocks) * kBuilderThreads)
      vectors[i] = uint4{0, 0, 0, 0};
  }
}

// Describe group g, which owns `rows` rows from `start`. Returns its number of clusters of tiles.
template <class Gemm>
__device__ int describe_group(int g, int start, int rows, const Problem& problem, const GroupArguments<Gemm>& out) {
  constexpr Kind kKind = Gemm::kKind;
  constexpr int kRows = cute::size<0>(typename Gemm::TileShape{}) * cute::size<0>(typename Gemm::ClusterShape{});
  constexpr int kColumns = cute::size<1>(typename Gemm::TileShape{}) * cute::size<1>(typename Gemm::ClusterShape{});
  const int n = problem.n, k = problem.k;
  const int64_t weight = g * problem.weight_step, row = start;
  auto a = static_cast<const bf16*>(problem.a);
  auto b = static_cast<const bf16*>(problem.b);
  auto d = static_cast<typename Gemm::ElementD*>(problem.d);
  int gemm_m, gemm_n, gemm_k;
  if constexpr (is_forward(kKind)) {
    gemm_m = rows, gemm_n = n, gemm_k = k;
    out.a[g] = a + row * k, cute::get<0>(out.stride_a[g]) = k;
    out.b[g] = b + weight, cute::get<0>(out.stride_b[g]) = k;
    out.d[g] = d + row * n, cute::get<0>(out.stride_d[g]) = n;
    out.offsets[g] = {start, int(weight / k), 0};
  } else if constexpr (kKind == Kind::kDataGrad) {
    gemm_m = rows, gemm_n = k, gemm_k = n;
    out.a[g] = a + row * n, cute::get<0>(out.stride_a[g]) = n;
    out.b[g] = b + weight, cute::get<1>(out.stride_b[g]) = k;
    out.d[g] = d + row * k, cute::get<0>(out.stride_d[g]) = k;
    out.offsets[g] = {start, 0, int(weight / k)};
  } else {
    gemm_m = rows ? n : 0, gemm_n = k, gemm_k = rows;   // an empty group has no tile
    out.a[g] = a + row * n, cute::get<1>(out.stride_a[g]) = n;
    out.b[g] = b + row * k, cute::get<1>(out.stride_b[g]) = k;
    out.d[g] = d + weight, cute::get<0>(out.stride_d[g]) = k;
  }
  out.shapes[g] = cute::make_shape(gemm_m, gemm_n, gemm_k);
  return ((gemm_m + kRows - 1) / kRows) * ((gemm_n + kColumns - 1) / kColumns);
}

// Block 0 writes the arguments of all groups; further blocks, where there are any, zero what belongs to empty groups.
template <class Gemm>
__global__ void __launch_bounds__(kBuilderThreads) build_arguments(Problem problem, GroupArguments<Gemm> out) {
  // The GEMM may start at once: its scheduler waits for this grid before it reads what is written here.
  asm volatile("griddepcontrol.launch_dependents;");
  if (blockIdx.x > 0) {
    if constexpr (is_weight_grad(Gemm::kKind))
      zero_empty_groups(problem, static_cast<typename Gemm::ElementD*>(problem.d), int(blockIdx.x) - 1,
                        int(gridDim.x) - 1);
    return;
  }
  __shared__ int num_clusters[kMaxGroups];
  for (int g = threadIdx.x; g < problem.num_groups; g += kBuilderThreads) {
    const int start = start_of(problem, g);
    num_clusters[g] = describe_group<Gemm>(g, start, max(0, problem.group_ends[g] - start), problem, out);
  }
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  int before = 0;
  for (int base = 0; base < problem.num_groups; base += kWarpSize) {
    const int g = base + int(threadIdx.x);
    int sum = g < problem.num_groups ? num_clusters[g] : 0;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (int(threadIdx.x) >= distance) sum += other;
    }
    if (g < problem.num_groups) out.cluster_ends[g] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, kWarpSize - 1);
  }
}

}  // namespace lm_kernels
