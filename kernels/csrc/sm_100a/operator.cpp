// The operator over the variants for sm_100a.
#include "variants.h"
#include "../operator.cpp"
