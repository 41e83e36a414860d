#include "launch.cuh"
#include "variants.h"

LM_WEIGHT_GRAD_BF16_VARIANTS(LM_DEFINE_VARIANT)
