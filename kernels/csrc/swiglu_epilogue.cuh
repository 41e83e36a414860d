// The epilogue of SwiGLU: y = silu(gate) * up * probability of the row, and gate and up beside it where they are kept.
//
// Gate and up are rounded to bf16 before the activation, kept or not: y is what a product and an activation behind it
// give, and what the backward pass of that activation differentiates. One warp group at a time is here: it brings 64 rows
// of 32 features after another through shared memory to TMA.
//
// One tensor map serves all groups: a row has two coordinates, in a window of 64 rows and from a window's start. The
// window is laid so that it ends with the group, and TMA drops the rows behind it.
#pragma once
#include <cuda_bf16.h>
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/pipeline/pipeline.hpp"
#include "cute/tensor.hpp"
#include "grouped_gemm.h"
#include "shared_tensor_maps.cuh"
#include "tensor_map.cuh"

namespace lm_kernels {

template <class TileShape>
class SwigluEpilogue {
  static constexpr int kRows = 64, kBox = 32, kBytes = kRows * kBox * 2;
  static constexpr int kFeatures = cute::size<1>(TileShape{}) / 2, kSlabs = cute::size<0>(TileShape{}) / kRows;
  static constexpr int kStages = 2;   // boxes that are on their way to memory
  static_assert(kFeatures % kBox == 0);

 public:
  using DispatchPolicy = void;
  using ElementC = void;
  using ElementD = cutlass::bfloat16_t;
  using InternalStrideC = cute::Stride<int64_t, cute::_1, cute::_0>;
  using InternalStrideD = InternalStrideC;
  using StrideC = InternalStrideC*;
  using StrideD = InternalStrideD*;
  using GmemTiledCopyC = void;
  using GmemTiledCopyD = void;
  using ThreadEpilogueOp = cutlass::epilogue::thread::LinearCombination<ElementD, 1, float, float>;   // for its types
  using LoadPipeline = cutlass::PipelineTransactionAsync<0>;
  using LoadPipelineState = cutlass::PipelineState<0>;
  using StorePipeline = cutlass::PipelineTmaStore<0>;
  using StorePipelineState = cutlass::PipelineState<0>;
  using PipelineStorage = typename LoadPipeline::SharedStorage;
  static constexpr bool RequiresTransactionBytes = false;

  // The swizzle of 64 bytes repeats after 512 bytes.
  struct Box { alignas(1024) char gate[kBytes], up[kBytes], y[kBytes]; };
  struct TensorStorage { Box boxes[kStages]; };
  using SharedStorage = TensorStorage;
  struct TensorMapStorage {};

  struct Arguments {
    float const* probabilities;
    GroupOffset const* offsets;
    bool keeps;
    cute::TmaDescriptor kept{}, y{};
  };
  using Params = Arguments;

  // Return whether the maps could be made.
  static bool encode(Problem const& problem, Arguments* args) {
    const int64_t features = problem.n / 2, windows = int64_t(problem.num_rows) + kRows;
    auto rows_before = [](void* start, int64_t row) { return static_cast<ElementD*>(start) - kRows * row; };
    void* const kept = problem.kept ? problem.kept : problem.d;   // a map that is not used, but legal
    return encode_map(&args->y, rows_before(problem.d, features),
                      {{features, 1, kBox}, {kRows, features, kRows}, {windows, features, 1}}) &&
           encode_map(&args->kept, rows_before(kept, 2 * features),
                      {{features, 1, kBox}, {kRows, 2 * features, kRows}, {windows, 2 * features, 1}, {2, features, 2}});
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) { return args; }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&, int) { return 0; }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) { return true; }
  template <class Tile> CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Tile) { return 1; }
  template <class Tile> CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Tile) { return 1; }

  CUTLASS_DEVICE SwigluEpilogue(Params const& params, TensorStorage&) : params_(params) {}

  // Nothing is loaded, and no map changes from group to group.
  CUTLASS_DEVICE static constexpr bool is_producer_load_needed() { return false; }
  template <class... T> CUTLASS_DEVICE auto load_init(T&&...) const { return cute::make_tuple(nullptr); }
  template <class... T> CUTLASS_DEVICE auto load(LoadPipeline, LoadPipelineState state, T&&...) const { return state; }
  CUTLASS_DEVICE auto load_tail(LoadPipeline, LoadPipelineState state) const { return state; }
  template <class... T> CUTLASS_DEVICE auto store_init(T&&...) const { return cute::make_tuple(nullptr); }
  template <bool, class... T> CUTLASS_DEVICE void tensormaps_perform_update(T&&...) const {}
  template <bool, class... T> CUTLASS_DEVICE void tensormaps_cp_fence_release(T&&...) const {}
  template <bool, class... T> CUTLASS_DEVICE void tensormaps_fence_acquire(T&&...) const {}

  template <class Shape, class Coord, class Accumulators, class TiledMma, class... T>
  CUTLASS_DEVICE auto store(LoadPipeline, LoadPipelineState load_state, StorePipeline, StorePipelineState store_state,
                            Shape const& shape, TileShape, Coord const& coord, Accumulators const& accumulators,
                            TiledMma, int thread, TensorStorage& storage, T&&...) {
    const int first_row = cute::get<0>(coord) * cute::size<0>(TileShape{});
    const int first_feature = cute::get<1>(coord) * kFeatures, num_features = cute::get<1>(shape) / 2;
    const int start = params_.offsets[cute::get<3>(coord)].a_row;
    // A thread has two rows of every slab.
    const int row_in_slab = thread / 32 * 16 + thread % 32 / 4;
    float probability[kSlabs][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kSlabs; ++i) {
      const int row = first_row + i / 2 * kRows + row_in_slab + i % 2 * 8;
      probability[i / 2][i % 2] = row < cute::get<0>(shape) ? params_.probabilities[start + row] : 0.f;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int row = first_row + slab * kRows, num_rows = min(kRows, cute::get<0>(shape) - row);
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < kFeatures; column += kBox) {
        const int feature = first_feature + column;
        if (num_rows <= 0 || feature >= num_features) continue;   // the same for all threads
        Box& box = storage.boxes[stage_];
        stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
        if (thread == 0) cute::tma_store_wait<kStages - 1>();
        synchronize();
        write(box, accumulators, slab, column, probability[slab], thread);
        cute::tma_store_fence();
        synchronize();
        if (thread == 0) {
          const int window = start + row + num_rows;
          cute::SM90_TMA_STORE_3D::copy(&params_.y, box.y, feature, kRows - num_rows, window);
          if (params_.keeps) cute::SM90_TMA_STORE_4D::copy(&params_.kept, box.gate, feature, kRows - num_rows, window, 0);
          cute::tma_store_arrive();
        }
      }
    }
    return cute::make_tuple(load_state, store_state);
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline, LoadPipelineState load_state, StorePipeline,
                                 StorePipelineState store_state) const {
    cute::tma_store_wait<0>();   // the boxes may then be another warp group's, or no one's
    return cute::make_tuple(load_state, store_state);
  }

 private:
  CUTLASS_DEVICE static void synchronize() {
    cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup,
                                      cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  // Write what a thread has of 32 features in two rows, eight apart: 2 features of every 8.
  template <class Accumulators>
  CUTLASS_DEVICE void write(Box& box, Accumulators const& accumulators, int slab, int column,
                            float const (&probability)[2], int thread) const {
    // stmatrix wants of a lane the address of one row of one of four matrices of 8 x 8: two of rows, two of features.
    const int row = thread / 32 * 16 + thread % 16, odd_matrix = thread % 32 / 16;
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t gate[4], up[4], y[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int eight = column / 8 + 2 * pair + i / 2, half = i % 2;
        auto take = [&](int first_eight) {
          auto at = [&](int j) { return accumulators(cute::make_coord(j, half, first_eight + eight), slab, 0); };
          return __floats2bfloat162_rn(at(0), at(1));
        };
        const __nv_bfloat162 gates = take(0), ups = take(kFeatures / 8);
        const float2 g = __bfloat1622float2(gates), u = __bfloat1622float2(ups);
        const __nv_bfloat162 result = __floats2bfloat162_rn(__fdividef(g.x, 1.f + __expf(-g.x)) * u.x * probability[half],
                                                            __fdividef(g.y, 1.f + __expf(-g.y)) * u.y * probability[half]);
        gate[i] = reinterpret_cast<uint32_t const&>(gates);
        up[i] = reinterpret_cast<uint32_t const&>(ups);
        y[i] = reinterpret_cast<uint32_t const&>(result);
      }
      // Rows of 64 bytes; the swizzle moves their quarters.
      const int at = row * 64 + (((2 * pair + odd_matrix) ^ (row / 2 % 4)) * 16);
      auto put = [&](char* box, uint32_t const (&values)[4]) {
        cute::SM90_U32x4_STSM_N::copy(values[0], values[1], values[2], values[3],
                                      *reinterpret_cast<cute::uint128_t*>(box + at));
      };
      put(box.y, y);
      if (params_.keeps) put(box.gate, gate), put(box.up, up);
    }
  }

  Params const& params_;
  int stage_ = 0;
};

}  // namespace lm_kernels
