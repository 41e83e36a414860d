// A mainloop whose operands have one tensor map (TMA descriptor) for all groups, for forward and data gradient.
//
// CUTLASS' pointer-array mainloop rewrites both descriptors whenever the group changes. Here the rows of all groups are
// one matrix and the weights, with what lies between them, another, so a group is an offset. The last rows of a tile may
// be the next group's: D's own descriptor, which does know the group, drops them. In the data gradient the reduced
// direction may cross what lies behind a weight when n % 64 != 0; those values meet zeros, so they must be finite.
#pragma once
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"

namespace lm_kernels {

// Where a group starts in the two matrices.
struct GroupOffset { int a_row, b_n, b_k; };

template <class Base>
struct SharedTensorMaps : Base {
  using typename Base::TileShape;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  // Base's own StrideA and StrideB stay what they are, pointers: the kernel layer knows by them that it is grouped.
  using ElementA = typename Base::InternalElementA;
  using ElementB = typename Base::InternalElementB;
  using MatrixStrideA = typename Base::InternalStrideA;
  using MatrixStrideB = typename Base::InternalStrideB;

  struct Arguments {
    void const* a;
    int a_m, a_k;
    MatrixStrideA stride_a;
    void const* b;
    int b_n, b_k;
    MatrixStrideB stride_b;
    GroupOffset const* offsets;
  };
  struct Params : Base::Params {
    GroupOffset const* offsets;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    using namespace cute;
    auto a = make_tensor(static_cast<ElementA const*>(args.a),
                         make_layout(make_shape(args.a_m, args.a_k, 1), args.stride_a));
    auto b = make_tensor(static_cast<ElementB const*>(args.b),
                         make_layout(make_shape(args.b_n, args.b_k, 1), args.stride_b));
    Params params{};
    params.tma_load_a = make_tma_copy(typename Base::GmemTiledCopyA{}, a, typename Base::SmemLayoutA{}(_, _, Int<0>{}),
                                      make_shape(shape<0>(TileShape{}), shape<2>(TileShape{})),
                                      size<1>(ClusterShape{}));
    params.tma_load_b = make_tma_copy(typename Base::GmemTiledCopyB{}, b, typename Base::SmemLayoutB{}(_, _, Int<0>{}),
                                      make_shape(shape<1>(TileShape{}), shape<2>(TileShape{})),
                                      size<0>(ClusterShape{}));
    params.tma_transaction_bytes = Base::TmaTransactionBytes;
    params.offsets = args.offsets;
    return params;
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&, int) { return 0; }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) { return true; }

  template <class Shape>
  CUTLASS_DEVICE auto load_init(Shape const& shape, Params const& params) const {
    return views(shape, params, GroupOffset{0, 0, 0});
  }

  template <class Tensors, class Shape>
  CUTLASS_DEVICE Tensors tensors_perform_update(Tensors const&, Params const& params, Shape shape, int32_t group) {
    return views(shape, params, params.offsets[group]);
  }

  template <class SharedStorage>
  CUTLASS_DEVICE auto tensormaps_init(Params const& params, SharedStorage&, int32_t, int32_t) const {
    cute::TmaDescriptor const* a = params.tma_load_a.get_tma_descriptor();
    cute::TmaDescriptor const* b = params.tma_load_b.get_tma_descriptor();
    if (cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(a);
      cute::prefetch_tma_descriptor(b);
    }
    return cute::make_tuple(a, b);
  }

  // Nothing changes from group to group.
  template <class... T> CUTLASS_DEVICE void tensormaps_perform_update(T&&...) const {}
  template <class... T> CUTLASS_DEVICE void tensormaps_cp_fence_release(T&&...) const {}
  template <class... T> CUTLASS_DEVICE void tensormaps_fence_acquire(T&&...) const {}

 protected:
  template <class Shape>
  CUTLASS_DEVICE static auto views(Shape const& shape, Params const& params, GroupOffset at) {
    using namespace cute;
    using X = Underscore;
    Tensor a = domain_offset(make_coord(at.a_row, 0, 0),
                             params.tma_load_a.get_tma_tensor(make_shape(get<0>(shape), get<2>(shape), 1)));
    Tensor b = domain_offset(make_coord(at.b_n, at.b_k, 0),
                             params.tma_load_b.get_tma_tensor(make_shape(get<1>(shape), get<2>(shape), 1)));
    return make_tuple(local_tile(a, TileShape{}, make_coord(_, _, _), Step<_1, X, _1>{}),
                      local_tile(b, TileShape{}, make_coord(_, _, _), Step<X, _1, _1>{}));
  }
};

}  // namespace lm_kernels
