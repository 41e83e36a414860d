// The variants for sm_100a, in place of those of sm_90a. They were compiled and have never been run: no rule names them.
#pragma once
#define LM_FORWARD_VARIANTS(V) \
  V(forward_sm100a_256x256_2x1, GroupedGemmSm100<Kind::kForward, 256, 256>)

#define LM_FORWARD_SWIGLU_VARIANTS(V)   // none

#define LM_DATA_GRAD_VARIANTS(V) \
  V(data_grad_sm100a_256x256_2x1, GroupedGemmSm100<Kind::kDataGrad, 256, 256>)

#define LM_WEIGHT_GRAD_BF16_VARIANTS(V) \
  V(weight_grad_bf16_sm100a_256x128_2x1, GroupedGemmSm100<Kind::kWeightGradBf16, 256, 128>)

#define LM_WEIGHT_GRAD_FP32_VARIANTS(V) \
  V(weight_grad_fp32_sm100a_256x128_2x1, GroupedGemmSm100<Kind::kWeightGradFp32, 256, 128>)

#define LM_WEIGHT_GRAD_ADD_VARIANTS(V) \
  V(weight_grad_add_sm100a_256x128_2x1, GroupedGemmSm100<Kind::kWeightGradAdd, 256, 128>)

#include "../variants.h"   // declares them
