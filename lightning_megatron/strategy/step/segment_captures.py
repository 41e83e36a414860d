"""CUDA graphs of parts of a model during a fit, in mode ``segments``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lightning_megatron.graphs.agreement import is_true_anywhere
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.capture_tools import CaptureTools
from lightning_megatron.graphs.graph_keys import StepKind
from lightning_megatron.graphs.interception import interceptions_of
from lightning_megatron.graphs.report import GraphReport, runs_of
from lightning_megatron.graphs.runner import GraphRunner, SegmentSettings
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.optimization.training_state import TrainingState


class SegmentCaptures:
    """CUDA graphs of the parts of one model that can be captured.

    Communication: one all-reduce of a flag on the CPU over the pipeline stages.
    """

    def __init__(
        self,
        settings: CudaGraphs,
        model: LayeredModule,
        mesh: ParallelMesh,
        state: TrainingState,
        backend: CaptureBackend,
    ) -> None:
        self._model = model
        mixtures = model.mixtures().values()
        has_transport = settings.captures("experts") and any(
            layer.transport_choice.transport not in ("none", "all_to_all") for layer in mixtures
        )
        # Stages without experts must take part in the agreements of the other stages.
        self.communicates_across_data = is_true_anywhere(has_transport, mesh.pp_cpu)
        tools = CaptureTools(
            backend,
            state.effect_observers,
            mesh.random,
            state.reducer.weight_gradients,
        )
        self._segments = SegmentSettings(
            settings.scopes,
            list(_shared_buckets(state)),
            redraws=not model.recompute.is_off,
            wait_for=state.main.gather.wait_for,
            max_shapes=settings.most_shapes,
        )
        #: Runner of the model's chunks, which observes the actions of steps.
        self.runner = GraphRunner(tools, state.reducer, mesh.pp.rank, self._segments)
        self.runner.permit(None, False)
        model.runner = self.runner

    @property
    def is_joint(self) -> bool:
        """Return False, because each stage and data rank captures a graph when it needs one."""
        return False

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs that exist now."""
        return self.runner.num_graphs

    @property
    def failure(self) -> str | None:
        """Return the part that could not be captured and the reason; None without a failure."""
        return self.runner.failure

    @property
    def eager(self) -> Mapping[tuple[str, str], int]:
        """Return the number of eager runs of captured parts, by part and reason."""
        return self.runner.eager

    def begin(self, kind: StepKind) -> None:
        """Start to capture, at the next step of a kind, the graphs that its microbatches need."""
        self.runner.begin(kind)

    def permit(self, kind: StepKind, replays: bool) -> None:
        """Permit or forbid captures and replays in the next step, which has this kind."""
        self.runner.permit(kind, replays)
        # The ranks have agreed on equal shapes in this step, or the user guarantees them, so token
        # counts need no comparison.
        self._model.compares_counts = not (replays and self.communicates_across_data)

    def end_step(self) -> None:
        """Run other passes without graphs, and compare token counts again."""
        self.runner.permit(None, False)
        self._model.compares_counts = True

    def report(self) -> GraphReport:
        """Return a report of the captured parts."""
        captured: list[str] = []
        eager: dict[str, str] = {}
        for chunk in range(self._model.num_chunks):
            places = interceptions_of(self._model, chunk, self._segments.scopes)
            reasons = {place.name: place.reason for place in places if place.reason is not None}
            captured += runs_of([place.name for place in places], reasons)
            eager |= reasons
        return GraphReport("segments", tuple(captured), self.runner.counts, eager)

    def release(self) -> None:
        """Free all graphs, and capture no more until the next :meth:`begin`."""
        self.runner.release()

    def close(self) -> None:
        """Free all graphs, and restore eager execution of the model."""
        self.runner.release()
        self._model.runner = None


def _shared_buckets(state: TrainingState) -> Iterator[Sequence[nn.Parameter]]:
    """Yield the parameters of each bucket that several ranks reduce or gather."""
    for buffer in state.main.buffers:
        if state.mesh.replica_axis(buffer.sharding.is_expert).size > 1:
            for bucket in buffer.plan.buckets:
                yield [buffer.members[placed.name] for placed in bucket.placed]
