// Two changes to the epilogue that CUTLASS builds, for weight gradients that are added to fp32 memory.
//
// WithReduceAdd: the store adds by TMA (cp.reduce.async.bulk .add) instead of reading C, adding and storing. Each element
// is added to once by one CTA, so the sum does not depend on timing.
// WithStagesC: more loads of C in flight.
#pragma once
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"

namespace lm_kernels {
// CUTLASS has this copy for a descriptor in the kernel's parameters only; grouped kernels keep descriptors in memory.
struct TmaReduceAdd : cute::SM90_TMA_REDUCE_ADD {};
struct TmaReduceAddFromPointer : cute::SM90_TMA_REDUCE_ADD {};
}  // namespace lm_kernels

namespace cute {

template <class NumBits>
struct Copy_Traits<lm_kernels::TmaReduceAddFromPointer, NumBits> {
  using ThrID = Layout<_1>;
  using SrcLayout = Layout<Shape<_1, NumBits>>;
  using DstLayout = SrcLayout;
  using RefLayout = SrcLayout;
  TmaDescriptor const* descriptor;

  template <class TS, class SLayout, class TD, class DLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(Copy_Traits const& traits, Tensor<TS, SLayout> const& src,
                                                     Tensor<TD, DLayout>& dst) {
    void const* const descriptor = traits.descriptor;
    void const* const from = raw_pointer_cast(src.data());
    auto coord = dst.data().coord_;
    return detail::explode_tuple(detail::CallCOPY<SM90_TMA_REDUCE_ADD>{}, make_tuple(descriptor, from), seq<0, 1>{},
                                 coord, tuple_seq<decltype(coord)>{});
  }
};

template <class NumBits, class AuxParams_>
struct Copy_Traits<lm_kernels::TmaReduceAdd, NumBits, AuxParams_> {
  using ThrID = Layout<_1>;
  using SrcLayout = Layout<Shape<_1, NumBits>>;
  using DstLayout = SrcLayout;
  using RefLayout = SrcLayout;
  using AuxParams = AuxParams_;
  TmaDescriptor tma_desc_;
  AuxParams aux_params_;

  CUTE_HOST_DEVICE constexpr TmaDescriptor const* get_tma_descriptor() const { return &tma_desc_; }

  template <class GShape>
  CUTE_HOST_DEVICE constexpr auto get_tma_tensor(GShape const& shape) const {
    return make_coord_tensor(make_layout(shape, aux_params_.g_stride_));
  }

  CUTE_HOST_DEVICE constexpr Copy_Traits<lm_kernels::TmaReduceAddFromPointer, NumBits> with(
      TmaDescriptor const* descriptor) const {
    return {descriptor};
  }
};

}  // namespace cute

namespace lm_kernels {

// The builder's epilogue with its store to global memory replaced.
template <class Epilogue> struct WithReduceAdd;
template <class Policy, class CtaTile, class EpilogueTile, class C, class StrideC, class D, class StrideD, class Fusion,
          class LoadC, class SmemLayoutC, class ReadC, class StoreD, class SmemLayoutD, class WriteD, class CopyAtomC,
          class RegisterCopy>
struct WithReduceAdd<cutlass::epilogue::collective::CollectiveEpilogue<
    Policy, CtaTile, EpilogueTile, C, StrideC, D, StrideD, Fusion, LoadC, SmemLayoutC, ReadC, StoreD, SmemLayoutD,
    WriteD, CopyAtomC, RegisterCopy>> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      Policy, CtaTile, EpilogueTile, C, StrideC, D, StrideD, Fusion, LoadC, SmemLayoutC, ReadC, TmaReduceAdd,
      SmemLayoutD, WriteD, CopyAtomC, RegisterCopy>;
};

// The builder's epilogue with another number of stages for C. With the builder's four about one load of C is in flight.
template <class Epilogue, int StagesC> struct WithStagesC;
template <int OldStagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore, int NumWarpGroups,
          class... Rest, int StagesC>
struct WithStagesC<cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90PtrArrayTmaWarpSpecialized<OldStagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore,
                                                      NumWarpGroups>, Rest...>, StagesC> {
  using type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90PtrArrayTmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore,
                                                        NumWarpGroups>, Rest...>;
};

}  // namespace lm_kernels
