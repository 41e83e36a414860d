// A tensor map (TMA descriptor) of a bf16 array, encoded on the host. CuTe's own makes maps of matrices only.
#pragma once
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"

namespace lm_kernels {

// One dimension: how many elements it has, how far apart they lie (elements), and how many of them a box takes.
struct MapDim {
  int64_t size, stride;
  int box;
};

// The first dimension is contiguous, and a box of it is what is swizzled: 64 or 128 bytes.
template <int kDims>
bool encode_map(cute::TmaDescriptor* map, void const* start, MapDim const (&dims)[kDims]) {
  static_assert(2 <= kDims && kDims <= 5);
  cuuint64_t sizes[kDims], strides[kDims];
  cuuint32_t boxes[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) {
    sizes[i] = cuuint64_t(dims[i].size), boxes[i] = cuuint32_t(dims[i].box), steps[i] = 1;
    if (i > 0) strides[i - 1] = cuuint64_t(dims[i].stride) * 2;
  }
  const CUtensorMapSwizzle swizzle = dims[0].box == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
             map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kDims, const_cast<void*>(start), sizes, strides, boxes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace lm_kernels
