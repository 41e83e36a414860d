#include "../launch.cuh"
#include "gemm_types.cuh"
#include "variants.h"

LM_FORWARD_VARIANTS(LM_DEFINE_VARIANT)
