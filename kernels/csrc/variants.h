// The variants that the rule in lightning_megatron/plan/grouped_gemm.py can name, and no others. One list a source file:
// V(name, type), the name being kind_schedule_tile_cluster.
#pragma once
#include "grouped_gemm.h"

#ifndef LM_FORWARD_VARIANTS   // another architecture has lists of its own
#define LM_FORWARD_VARIANTS(V) \
  V(forward_cooperative_128x256_1x1, GroupedGemm<Kind::kForward, Cooperative, 128, 256, 1, 1>) \
  V(forward_pingpong_128x192_1x2, GroupedGemm<Kind::kForward, Pingpong, 128, 192, 1, 2>) \
  V(forward_pingpong_128x128_1x2, GroupedGemm<Kind::kForward, Pingpong, 128, 128, 1, 2>)

#define LM_FORWARD_SWIGLU_VARIANTS(V) \
  V(forward_swiglu_pingpong_128x192_1x1, GroupedGemm<Kind::kForwardSwiglu, Pingpong, 128, 192, 1, 1>) \
  V(forward_swiglu_pingpong_128x128_1x2, GroupedGemm<Kind::kForwardSwiglu, Pingpong, 128, 128, 1, 2>)

#define LM_DATA_GRAD_VARIANTS(V) \
  V(data_grad_cooperative_128x256_1x1, GroupedGemm<Kind::kDataGrad, Cooperative, 128, 256, 1, 1>) \
  V(data_grad_pingpong_128x192_1x2, GroupedGemm<Kind::kDataGrad, Pingpong, 128, 192, 1, 2>) \
  V(data_grad_pingpong_128x128_1x2, GroupedGemm<Kind::kDataGrad, Pingpong, 128, 128, 1, 2>)

#define LM_WEIGHT_GRAD_BF16_VARIANTS(V) \
  V(weight_grad_bf16_cooperative_128x256_1x1, GroupedGemm<Kind::kWeightGradBf16, Cooperative, 128, 256, 1, 1>) \
  V(weight_grad_bf16_pingpong_128x192_1x2, GroupedGemm<Kind::kWeightGradBf16, Pingpong, 128, 192, 1, 2>) \
  V(weight_grad_bf16_pingpong_128x128_1x2, GroupedGemm<Kind::kWeightGradBf16, Pingpong, 128, 128, 1, 2>)

#define LM_WEIGHT_GRAD_FP32_VARIANTS(V) \
  V(weight_grad_fp32_pingpong_128x192_1x2, GroupedGemm<Kind::kWeightGradFp32, Pingpong, 128, 192, 1, 2>) \
  V(weight_grad_fp32_pingpong_128x128_1x2, GroupedGemm<Kind::kWeightGradFp32, Pingpong, 128, 128, 1, 2>)

// reduce: TMA reduce-add; read: C is loaded and added.
#define LM_WEIGHT_GRAD_ADD_VARIANTS(V) \
  V(weight_grad_add_reduce_pingpong_128x192_1x2, \
    GroupedGemm<Kind::kWeightGradAdd, Pingpong, 128, 192, 1, 2, Store::kReduceAdd>) \
  V(weight_grad_add_reduce_pingpong_128x128_1x2, \
    GroupedGemm<Kind::kWeightGradAdd, Pingpong, 128, 128, 1, 2, Store::kReduceAdd>) \
  V(weight_grad_add_read_pingpong_128x128_1x2, \
    GroupedGemm<Kind::kWeightGradAdd, Pingpong, 128, 128, 1, 2, Store::kReadC>)
#endif

namespace lm_kernels {
#define LM_DECLARE_VARIANT(name, ...) Status name(const Problem&, const LaunchOptions&);
LM_FORWARD_VARIANTS(LM_DECLARE_VARIANT)
LM_FORWARD_SWIGLU_VARIANTS(LM_DECLARE_VARIANT)
LM_DATA_GRAD_VARIANTS(LM_DECLARE_VARIANT)
LM_WEIGHT_GRAD_BF16_VARIANTS(LM_DECLARE_VARIANT)
LM_WEIGHT_GRAD_FP32_VARIANTS(LM_DECLARE_VARIANT)
LM_WEIGHT_GRAD_ADD_VARIANTS(LM_DECLARE_VARIANT)
#undef LM_DECLARE_VARIANT
}  // namespace lm_kernels
