#include "../launch.cuh"
#include "gemm_types.cuh"
#include "variants.h"

LM_WEIGHT_GRAD_BF16_VARIANTS(LM_DEFINE_VARIANT)
