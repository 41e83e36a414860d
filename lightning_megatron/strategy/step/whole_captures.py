"""CUDA graphs of whole steps during a run, in mode ``full``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.errors import RankMismatchError, SpeedWarning
from lightning_megatron.graphs.agreement import KeyAgreement, eager_warning, failure_of_any
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.graphs.graph_keys import StepKind
from lightning_megatron.graphs.report import GraphReport
from lightning_megatron.graphs.step_graph import StepGraphs
from lightning_megatron.graphs.update_graph import UpdateGraph
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule, layered_modules
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.step.whole_steps import WholeSteps


class WorldAgreement:
    """Agreement of all ranks on graphs of whole steps, which contain collectives of all ranks.

    Args:
        models: Models whose forward passes compare token counts, unless the ranks have agreed on
            equal shapes.
    """

    def __init__(
        self,
        settings: CudaGraphs,
        mesh: ParallelMesh,
        models: Sequence[LayeredModule],
        update: UpdateGraph[Any] | None = None,
    ) -> None:
        self._settings = settings
        self._update = update
        self._world = mesh.world_cpu
        self._keys = KeyAgreement(mesh.world_cpu)
        self._models = models
        #: Whether this rank may capture and replay.
        self.permits = True

    def is_same(self, key: Hashable) -> bool:
        """Return whether all ranks have the same key in this step, and all permit graphs.

        Communication: one all-reduce on the CPU over the world, unless ``fixed_shapes`` is set.
        """
        is_same = self._is_same(key)
        self.compare_counts(not is_same)
        return is_same

    def compare_counts(self, compares: bool) -> None:
        """Set whether forward passes compare the token counts of ranks that share experts."""
        for model in self._models:
            model.compares_counts = compares

    def _is_same(self, key: Hashable) -> bool:
        if not self._settings.fixed_shapes:
            return self._keys.agree([self.permits, key]) and self.permits
        if not self.permits and self._world.size > 1:
            raise RankMismatchError(
                "with fixed_shapes=True all ranks must replay every step: the set of trained "
                "parameters of this rank changed within an epoch, and the ranks do not compare "
                "their steps then. Freeze and unfreeze parameters at the start of an epoch, or use "
                "fixed_shapes=False."
            )
        return self.permits

    def failure_of_any(self, failure: str | None) -> str | None:
        """Return the warning that all ranks continue eagerly, or raise; None without a failure.

        Communication: one gather of objects on the CPU over the world.
        """
        reason = failure_of_any(failure, self._world)
        if reason is None:
            return None
        keeps_update = self._update is not None and not self._update.is_off
        return eager_warning(reason, self._settings.on_failure == "error", keeps_update)


class WholeCaptures:
    """Graphs of whole steps; each form of a step counts its eager steps separately."""

    def __init__(
        self,
        settings: CudaGraphs,
        module: LightningModule,
        state: TrainingState,
        mesh: ParallelMesh,
        backend: CaptureBackend,
        update: UpdateGraph[Any] | None = None,
    ) -> None:
        self._agreement = WorldAgreement(settings, mesh, layered_modules(module), update)
        if settings.fixed_shapes:
            settings = replace(settings, on_new_shape="error")
        self._graphs = StepGraphs(
            backend,
            state.effect_observers,
            mesh.random,
            settings,
            mesh.device,
            self._agreement,
            _warn,
        )
        #: The steps that these graphs run.
        self.steps = WholeSteps(module, mesh, state, self._graphs)

    @property
    def communicates_across_data(self) -> bool:
        """Return False, because :class:`WorldAgreement` compares the ranks before every step."""
        return False

    @property
    def is_joint(self) -> bool:
        """Return True, because all ranks agree on each capture and exchange failures in it."""
        return True

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs that exist now."""
        return self._graphs.num_graphs

    @property
    def failure(self) -> str | None:
        """Return None, because the ranks exchange failures during the capture itself."""
        return None

    @property
    def eager(self) -> Mapping[tuple[str, str], int]:
        """Return an empty mapping, because eager steps are logged when they run."""
        return {}

    def begin(self, kind: StepKind) -> None:
        """Do nothing, because each form of a step is captured after its own eager steps."""

    def permit(self, kind: StepKind, replays: bool) -> None:
        """Permit or forbid captures and replays in the next step."""
        self._agreement.permits = replays

    def end_step(self) -> None:
        """Let the next forward pass compare the token counts of the ranks again."""
        self._agreement.compare_counts(True)

    def report(self) -> GraphReport:
        """Return a report of the captured parts."""
        return GraphReport("full", ("whole steps up to the optimizer",), self._graphs.counts)

    def release(self) -> None:
        """Free all graphs; steps run eagerly again before the next captures."""
        self._graphs.release()

    def close(self) -> None:
        """Free all graphs, and run everything eagerly from now on."""
        self._graphs.release()
        self._graphs.is_off = True


def _warn(sentence: str) -> None:
    rank_zero_warn(sentence, category=SpeedWarning)
