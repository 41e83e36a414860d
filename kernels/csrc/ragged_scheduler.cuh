// A persistent tile scheduler for groups whose sizes are known to the device only.
//
// CUTLASS' own group scheduler walks every group's shape for every tile and ignores the swizzle when shapes are on the
// device. This one finds a tile's group by a search of a whole warp in prefix sums that the argument builder made.
#pragma once
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "tile_walk.h"

namespace lm_kernels {

// Problem shapes on the device, and the order of their tiles.
struct RaggedProblemShape : cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>> {
  const int* cluster_ends = nullptr;   // clusters of tiles in the groups up to and with each
  bool raster_along_n = false;
  int raster_band = 0;
};

template <class ProblemShape, int Stages, class TileShape, class ClusterShape>
class RaggedTileScheduler
    : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Group<ProblemShape, Stages> {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Group<ProblemShape, Stages>;
  static constexpr int kWarpSize = 32;
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static constexpr int kRows = cute::size<0>(TileShape{}) * kClusterM;
  static constexpr int kColumns = cute::size<1>(TileShape{}) * kClusterN;
  int next_ = 0, step_ = 0, group_ = 0;

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;
  using typename Base::Params;
  using typename Base::SchedulerResponse;

  RaggedTileScheduler() = default;

  // The grid is (x, kClusterN) with x a multiple of kClusterM: always the base class' grid along M.
  CUTLASS_DEVICE RaggedTileScheduler(Params const& params, SchedulerResponse* response) {
    this->scheduler_params = params;
    this->response_ptr_ = response;
    next_ = int(blockIdx.x) / kClusterM;
    step_ = int(gridDim.x) / kClusterM;
  }

  // Clusters are located in rising order, so the search goes on where the last one ended.
  CUTLASS_DEVICE WorkTileInfo locate(int cluster) {
    ProblemShape const& shapes = this->scheduler_params.problem_shapes_;
    const int lane = cutlass::canonical_lane_idx(), num_groups = shapes.groups();
    for (; group_ < num_groups; group_ += kWarpSize) {
      const int end = shapes.cluster_ends[group_ + lane < num_groups ? group_ + lane : num_groups - 1];
      const unsigned found = __ballot_sync(0xffffffffu, cluster < end);
      if (found) {
        group_ += __ffs(found) - 1;
        break;
      }
    }
    if (group_ >= num_groups) return WorkTileInfo::invalid_work_tile();
    const int in_group = cluster - (group_ ? shapes.cluster_ends[group_ - 1] : 0);
    auto shape = shapes.get_problem_shape(group_);
    const int num_m = (cute::get<0>(shape) + kRows - 1) / kRows;
    const int num_n = (cute::get<1>(shape) + kColumns - 1) / kColumns;
    const TileCoord at = walk_tiles(in_group, num_m, num_n, shapes.raster_along_n, shapes.raster_band);
    return {at.m * kClusterM + int(blockIdx.x) % kClusterM, at.n * kClusterN + int(blockIdx.y), group_, 1};
  }

  // The first read of anything that the argument builder wrote. Under programmatic launch the kernel waits for it here;
  // otherwise the wait returns at once.
  template <class Cluster>
  CUTLASS_DEVICE auto initial_work_tile_info(Cluster) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    return locate(next_);
  }

  template <class Pipeline, class State>
  CUTLASS_DEVICE auto advance_to_next_work(Pipeline& pipeline, State state, uint32_t count = 1) {
    next_ += step_ * int(count);
    auto tile = locate(next_);
    pipeline.producer_acquire(state);
    if (cute::elect_one_sync()) {
      this->response_ptr_[state.index()] = tile;
      cutlass::arch::fence_view_async_shared();
      pipeline.producer_commit(state);
    }
    return cute::make_tuple(tile, true);
  }
};

}  // namespace lm_kernels

// The grouped kernel layers of CUTLASS pick this scheduler by the type of the problem shape.
namespace cutlass::gemm::kernel::detail {
template <class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<GroupScheduler, arch::Sm90, TileShape, ClusterShape, Stages,
                             lm_kernels::RaggedProblemShape> {
  using Scheduler =
      lm_kernels::RaggedTileScheduler<lm_kernels::RaggedProblemShape, Stages, TileShape, ClusterShape>;
};
}  // namespace cutlass::gemm::kernel::detail
