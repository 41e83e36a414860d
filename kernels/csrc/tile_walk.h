// The order of the tiles of one group. Plain C++, so that a host compiler can test it.
#pragma once
#ifdef __CUDACC__
#define LM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LM_HOST_DEVICE inline
#endif

namespace lm_kernels {

struct TileCoord { int m, n; };

// Return the index-th cluster of a group of num_m x num_n clusters. A band of the fast direction (0: all of it) is walked
// for every position of the slow one before the next band starts, so that a wave of CTAs covers a compact block, whose
// operands stay in L2.
LM_HOST_DEVICE TileCoord walk_tiles(int index, int num_m, int num_n, bool along_n, int band) {
  const int fast = along_n ? num_n : num_m, slow = along_n ? num_m : num_n;
  const int width = (band <= 0 || band > fast) ? fast : band;
  const int band_index = index / (width * slow), in_band = index - band_index * width * slow;
  const int start = band_index * width;
  const int own_width = fast - start < width ? fast - start : width;
  const int slow_pos = in_band / own_width, fast_pos = start + in_band - slow_pos * own_width;
  return along_n ? TileCoord{slow_pos, fast_pos} : TileCoord{fast_pos, slow_pos};
}

}  // namespace lm_kernels
