#include "../launch.cuh"
#include "gemm_types.cuh"
#include "variants.h"

LM_WEIGHT_GRAD_FP32_VARIANTS(LM_DEFINE_VARIANT)
