// The CUTLASS types of one variant: pointer-array, TMA, warp-specialised, persistent, for sm_90a.
#pragma once
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "epilogue.cuh"
#include "grouped_gemm.h"
#include "paired_mainloop.cuh"
#include "ragged_scheduler.cuh"
#include "shared_tensor_maps.cuh"
#include "swiglu_epilogue.cuh"

namespace lm_kernels {

using bf16 = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

// Two consumer warp groups share a tile, or each has its own and one's epilogue hides behind the other's mainloop.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// How the result reaches memory: D = AB; D = AB + C with C read from D; or D += AB by TMA reduce-add.
enum class Store { kOverwrite, kReadC, kReduceAdd };

// As CUTLASS sees the passes: D[M, N] = A[M, K] B[K, N], B's layout named as that of its transpose.
template <Kind kKind>
struct Operands {   // weight gradients: M = n, N = k, K = the group's rows
  using LayoutA = ColumnMajor;
  using LayoutB = RowMajor;
};
template <>
struct Operands<Kind::kForward> {   // M = the group's rows, N = n, K = k
  using LayoutA = RowMajor;
  using LayoutB = ColumnMajor;
};
template <>
struct Operands<Kind::kForwardSwiglu> : Operands<Kind::kForward> {};
template <>
struct Operands<Kind::kDataGrad> {   // M = the group's rows, N = k, K = n
  using LayoutA = RowMajor;
  using LayoutB = RowMajor;
};

template <Kind kKind_, class Schedule, int kTileM, int kTileN, int kClusterM, int kClusterN,
          Store kStore = Store::kOverwrite>
struct GroupedGemm {
  static constexpr Kind kKind = kKind_;
  static constexpr bool kReadsC = kStore == Store::kReadC;
  static constexpr bool kSharedMaps = !is_weight_grad(kKind);   // ragged K would read the next group's rows
  static constexpr bool kSwiglu = kKind == Kind::kForwardSwiglu;
  static_assert((kKind == Kind::kWeightGradAdd) == (kStore != Store::kOverwrite));
  static_assert(!kSwiglu || cute::is_same_v<Schedule, Pingpong>, "the epilogue is for one warp group at a time");

  using ElementD = cute::conditional_t<is_fp32(kKind), float, bf16>;
  using ElementC = cute::conditional_t<kReadsC, float, void>;
  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::_64>;
  using ClusterShape = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  static constexpr int kAlignInput = kAlignment / int(sizeof(bf16));
  static constexpr int kAlignOutput = kAlignment / int(sizeof(ElementD));
  static constexpr int kStagesC = 8;

  // LinearCombination has a scalar for each group, which makes the epilogue's load warp take part without a C to load.
  using Plain = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::epilogue::thread::Identity, ElementD, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, ElementD, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>, cutlass::epilogue::fusion::Sm90AccFetch>;
  // A factor where there is one: bf16 results have none.
  using Product = cute::conditional_t<is_fp32(kKind), Scaled, Plain>;
  using AddC = cutlass::epilogue::fusion::LinearCombination<ElementD, float, ElementC, float>;

  template <class Fusion>
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, ElementC, RowMajor*, kAlignOutput, ElementD,
      RowMajor*, kAlignOutput, typename Schedule::Epilogue, Fusion>::CollectiveOp;

  template <Store store, bool swiglu>
  struct EpilogueOf { using type = BuiltEpilogue<Product>; };
  template <bool swiglu>
  struct EpilogueOf<Store::kReadC, swiglu> { using type = typename WithStagesC<BuiltEpilogue<AddC>, kStagesC>::type; };
  template <bool swiglu>
  struct EpilogueOf<Store::kReduceAdd, swiglu> { using type = typename WithReduceAdd<BuiltEpilogue<Product>>::type; };
  template <Store store>
  struct EpilogueOf<store, true> { using type = SwigluEpilogue<TileShape>; };
  using Epilogue = typename EpilogueOf<kStore, kSwiglu>::type;

  using BuiltMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, bf16, typename Operands<kKind>::LayoutA*, kAlignInput, bf16,
      typename Operands<kKind>::LayoutB*, kAlignInput, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Mainloop>::CollectiveOp;
  using Mainloop = cute::conditional_t<
      kSwiglu, PairedMainloop<BuiltMainloop>,
      cute::conditional_t<kSharedMaps, SharedTensorMaps<BuiltMainloop>, BuiltMainloop>>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<RaggedProblemShape, Mainloop, Epilogue>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;

  template <class FusionArguments>
  static void set_alpha(FusionArguments& arguments, float alpha) {
    if constexpr (kReadsC) arguments.alpha = alpha, arguments.beta = 1.f;
    else if constexpr (is_fp32(kKind)) arguments = {{{alpha}}, {}, {}};
  }
};

}  // namespace lm_kernels
