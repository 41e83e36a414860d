#include "launch.cuh"
#include "variants.h"

LM_FORWARD_SWIGLU_VARIANTS(LM_DEFINE_VARIANT)
