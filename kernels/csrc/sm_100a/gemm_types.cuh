// The CUTLASS types of one variant for sm_100a, with CUTLASS' own scheduler of groups: a tile is shared by two SMs.
#pragma once
#include "../gemm_types.cuh"

namespace lm_kernels {

template <Kind kKind_, int kTileM, int kTileN>
struct GroupedGemmSm100 {
  static constexpr Kind kKind = kKind_;
  static constexpr bool kReadsC = kKind == Kind::kWeightGradAdd, kSharedMaps = false, kSwiglu = false;

  using ElementD = cute::conditional_t<is_fp32(kKind), float, bf16>;
  using ElementC = cute::conditional_t<kReadsC, float, void>;
  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::_64>;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  static constexpr int kAlignInput = kAlignment / int(sizeof(bf16));
  static constexpr int kAlignOutput = kAlignment / int(sizeof(ElementD));

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, ElementC, RowMajor*, kAlignOutput, ElementD,
      RowMajor*, kAlignOutput, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm,
      cutlass::epilogue::fusion::LinearCombination<ElementD, float, ElementC, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, bf16, typename Operands<kKind>::LayoutA*, kAlignInput, bf16,
      typename Operands<kKind>::LayoutB*, kAlignInput, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmSm100>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<RaggedProblemShape, Mainloop, Epilogue>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;

  template <class FusionArguments>
  static void set_alpha(FusionArguments& arguments, float alpha) {
    arguments.alpha = alpha, arguments.beta = kReadsC ? 1.f : 0.f;
  }

  // No programmatic launch: CUTLASS' scheduler reads the shapes of groups at once, its own waits being left out.
  struct Adapter : cutlass::gemm::device::GemmUniversalAdapter<Kernel> {
    cutlass::Status run(cudaStream_t stream, cutlass::CudaHostAdapter* host, bool) {
      return cutlass::gemm::device::GemmUniversalAdapter<Kernel>::run(stream, host, false);
    }
  };
};

}  // namespace lm_kernels
