#include "../launch.cuh"
#include "gemm_types.cuh"
#include "variants.h"

LM_DATA_GRAD_VARIANTS(LM_DEFINE_VARIANT)
