// A mainloop for SwiGLU: a tile's columns are the gates of some features, then the ups of the same.
//
// So a thread has gate and up of a feature among its accumulators. The weights stay as they are: their tensor map has
// dimensions (k, feature, gate or up, group), and a tile is one box of it. Features past the last are loaded as zeros.
#pragma once
#include "grouped_gemm.h"
#include "shared_tensor_maps.cuh"
#include "tensor_map.cuh"

namespace lm_kernels {

template <class Base_>
struct PairedMainloop : SharedTensorMaps<Base_> {
  using Base = SharedTensorMaps<Base_>;
  using typename Base::TileShape;
  static constexpr int kFeatures = cute::size<1>(TileShape{}) / 2, kTileK = cute::size<2>(TileShape{});
  static_assert(cute::size<0>(typename Base::ClusterShape{}) == 1, "a CTA loads the whole of its tile of weights");

  struct Arguments : Base::Arguments {
    cute::TmaDescriptor weights{};
  };
  struct Params : Base::Params {
    cute::TmaDescriptor weights{};
  };

  // Return whether the map could be made.
  static bool encode(Problem const& problem, Arguments* args) {
    const int64_t features = problem.n / 2, k = problem.k;
    return encode_map(&args->weights, problem.b, {{k, 1, kTileK}, {features, k, kFeatures}, {2, features * k, 2},
                                                  {problem.num_groups, problem.weight_step, 1}});
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shapes, Arguments const& args, void* workspace) {
    return {Base::to_underlying_arguments(shapes, args, workspace), args.weights};
  }

  template <class Shape>
  CUTLASS_DEVICE auto load_init(Shape const& shape, Params const& params) const {
    return views(shape, params, GroupOffset{0, 0, 0}, 0);
  }

  template <class Tensors, class Shape>
  CUTLASS_DEVICE Tensors tensors_perform_update(Tensors const&, Params const& params, Shape shape, int32_t group) {
    return views(shape, params, params.offsets[group], group);
  }

  template <class SharedStorage>
  CUTLASS_DEVICE auto tensormaps_init(Params const& params, SharedStorage&, int32_t, int32_t) const {
    cute::TmaDescriptor const* a = params.tma_load_a.get_tma_descriptor();
    cute::TmaDescriptor const* b = &params.weights;
    if (cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(a);
      cute::prefetch_tma_descriptor(b);
    }
    return cute::make_tuple(a, b);
  }

 private:
  // Of B's coordinates only those where a tile starts count: one instruction loads it.
  template <class Shape>
  CUTLASS_DEVICE static auto views(Shape const& shape, Params const& params, GroupOffset at, int group) {
    using namespace cute;
    const int num_n = (get<1>(shape) + 2 * kFeatures - 1) / (2 * kFeatures);
    const int num_k = (get<2>(shape) + kTileK - 1) / kTileK;
    auto layout = make_layout(make_shape(Int<2 * kFeatures>{}, Int<kTileK>{}, num_n, num_k, 1),
                              make_stride(E<1>{}, E<0>{}, Int<kFeatures>{} * E<1>{}, Int<kTileK>{} * E<0>{}, _0{}));
    return make_tuple(get<0>(Base::views(shape, params, at)),
                      make_tensor(make_inttuple_iter(make_tuple(0, 0, 0, group)), layout));
  }
};

}  // namespace lm_kernels
