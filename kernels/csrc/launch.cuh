// Launch of one variant: the argument builder, then the GEMM, both without a read by the host or an allocation.
#pragma once
#include <type_traits>
#include "argument_builder.cuh"

namespace lm_kernels {

template <class Gemm>
typename Gemm::Mainloop::Arguments mainloop_arguments(const Problem& problem, const GroupArguments<Gemm>& groups) {
  if constexpr (Gemm::kSharedMaps) {
    constexpr bool kForward = is_forward(Gemm::kKind);
    const int n = problem.n, k = problem.k;
    const int stacked_n = int((problem.num_groups - 1) * (problem.weight_step / k)) + n;   // what lies between is in it
    typename Gemm::StrideA stride_a{};
    typename Gemm::StrideB stride_b{};
    cute::get<0>(stride_a) = kForward ? k : n;
    if constexpr (kForward) cute::get<0>(stride_b) = k;
    else cute::get<1>(stride_b) = k;
    return {problem.a, problem.num_rows,           kForward ? k : n,         stride_a,
            problem.b, kForward ? stacked_n : k,   kForward ? k : stacked_n, stride_b, groups.offsets};
  } else {
    return {groups.a, groups.stride_a, groups.b, groups.stride_b};
  }
}

template <class Gemm>
typename Gemm::Epilogue::Arguments epilogue_arguments(const Problem& problem, const GroupArguments<Gemm>& groups,
                                                      float alpha) {
  if constexpr (Gemm::kSwiglu) {
    return {problem.probabilities, groups.offsets, problem.kept != nullptr};
  } else {
    typename Gemm::Epilogue::Arguments args{};
    args.ptr_D = groups.d;
    args.dD = groups.stride_d;
    Gemm::set_alpha(args.thread, alpha);
    if constexpr (Gemm::kReadsC) {
      args.ptr_C = const_cast<typename Gemm::ElementC const**>(groups.d);
      args.dC = groups.stride_d;
    }
    return args;
  }
}

template <class Gemm>
Status launch(const Problem& problem, const LaunchOptions& options) {
  using Adapter = typename Gemm::Adapter;
  GroupArguments<Gemm> groups;
  char* gemm_workspace = groups.carve(options.workspace, problem.num_groups);

  typename Adapter::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  args.problem_shape.num_groups = problem.num_groups;
  args.problem_shape.problem_shapes = groups.shapes;
  args.problem_shape.cluster_ends = groups.cluster_ends;
  args.problem_shape.raster_along_n = options.raster_along_n;
  args.problem_shape.raster_band = options.raster_band;
  // The order of tiles is our scheduler's; CUTLASS' setting only shapes the grid, which that scheduler wants along M.
  args.scheduler.raster_order = cutlass::gemm::kernel::detail::RasterOrderOptions::AlongM;
  args.mainloop = mainloop_arguments<Gemm>(problem, groups);
  args.epilogue = epilogue_arguments<Gemm>(problem, groups, options.alpha);
  if constexpr (Gemm::kSwiglu) {
    if (!Gemm::Mainloop::encode(problem, &args.mainloop) || !Gemm::Epilogue::encode(problem, &args.epilogue))
      return Status::kNotImplementable;
  }
  args.hw_info.sm_count = options.num_sms;

  const size_t used = gemm_workspace - static_cast<char*>(options.workspace);
  if (used + Adapter::get_workspace_size(args) > options.workspace_bytes) return Status::kWorkspaceTooSmall;
  if (Adapter::can_implement(args) != cutlass::Status::kSuccess) return Status::kNotImplementable;
  Adapter gemm;
  if (gemm.initialize(args, gemm_workspace, options.stream) != cutlass::Status::kSuccess)
    return Status::kInitializeFailed;
  constexpr bool kZeroes = Gemm::kKind == Kind::kWeightGradBf16 || Gemm::kKind == Kind::kWeightGradFp32;
  const int num_blocks = kZeroes ? 1 + options.num_sms : 1;
  build_arguments<Gemm><<<num_blocks, kBuilderThreads, 0, options.stream>>>(problem, groups);
  // Programmatic launch: the GEMM's prologue runs beside the builder.
  return gemm.run(options.stream, nullptr, true) == cutlass::Status::kSuccess ? Status::kOk : Status::kLaunchFailed;
}

}  // namespace lm_kernels

// Define the entry of a variant of variants.h.
#define LM_DEFINE_VARIANT(name, ...) \
  lm_kernels::Status lm_kernels::name(const Problem& problem, const LaunchOptions& options) { \
    return launch<__VA_ARGS__>(problem, options); \
  }
