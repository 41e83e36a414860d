"""What models of numbered layers have in common: how they are built, cut into stages, and draw random numbers."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.experts.dispatch import check_equal_counts
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.models.absent import AbsentTensor
from lightning_megatron.models.stage import PipelinedModule
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout


class LayeredConfig(Protocol):
    """Name what is asked of the settings of a model of numbered layers."""

    @property
    def hidden_size(self) -> int:
        """Return the size D of the residual stream (elements)."""

    @property
    def num_layers(self) -> int:
        """Count the layers."""

    @property
    def experts(self) -> ExpertsConfig | None:
        """Return the mixture of experts of all or some layers; None if there is none."""

    def check_layout(
        self, layout: ParallelLayout, sequence_parallel: bool = False, seq_length: int | None = None
    ) -> None:
        """Refuse a layout that cannot hold the model."""

    def stage_layers(self, layout: ParallelLayout) -> tuple[tuple[range, ...], ...]:
        """Return ``layers[stage][chunk]``, the global indices of the layers that each virtual stage holds."""


class LayeredModule(PipelinedModule):
    """Hold this rank's shards of this rank's layers, named by their index in the whole model.

    Built on the meta device, then initialised one tensor at a time on the mesh's device, so no rank ever holds the full
    model; under an ambient meta device it stays there, and ``layers.init.initialize_`` fills it later.

    Args:
        config: Shape of the model.
        mesh: The groups of this rank; None means one process that holds everything.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.

    Raises:
        ParallelPlanError: If the layout cannot hold the model.
    """

    def __init__(self, config: LayeredConfig, mesh: ParallelMesh | None = None, seed: int | None = None) -> None:
        seed = torch.initial_seed() if seed is None else seed
        super().__init__(mesh or single_mesh(seed))
        config.check_layout(self.mesh.layout, self.mesh.sequence_parallel)
        self.config = config
        self._recompute: Recompute = "none"
        self._owns_mesh, self._num_calls = mesh is None, 0
        self._dtype = torch.get_default_dtype()
        self._layers_of_chunk = config.stage_layers(self.mesh.layout)[self.mesh.pp.rank]
        with torch.device("meta"):
            self._build()
        self._mixtures = self._find_mixtures()
        if not torch.empty(0).is_meta:
            initialize_(self, self.mesh.device, seed)

    @property
    def recompute(self) -> Recompute:
        """Say which activations the backward pass computes again."""
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute) -> None:
        self._recompute = value
        for layer in self._mixtures.values():
            layer.recomputes_experts = value == "experts"

    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """Return the layers of experts of this rank by their index in the whole model."""
        return dict(self._mixtures)

    def _find_mixtures(self) -> dict[int, MixtureOfExperts]:
        found = {}
        for name, part in self.named_modules():
            if isinstance(part, MixtureOfExperts):
                found[int(name.removeprefix("layers.").partition(".")[0])] = part
        return found

    @cached_property
    def has_shared_experts(self) -> bool:
        """Tell whether tokens of other data come to experts of this rank, on all stages alike."""
        # Ranks of one tp group have the same sequences. A later run of this module has the same layout.
        data_ranks = {self.mesh.layout.coordinates(rank)["dp"] for rank in self.mesh.experts_cpu.ranks}
        return self.config.experts is not None and len(data_ranks) > 1

    def _check_tokens(self, num_tokens: int) -> None:
        """Refuse microbatches of different sizes where ranks gather each other's tokens."""
        is_needed = any(layer.choice.dispatcher.needs_equal_counts for layer in self._mixtures.values())
        if is_needed and self.has_shared_experts:
            check_equal_counts(num_tokens, self.mesh)

    def _build(self) -> None:
        raise NotImplementedError

    def boundary(self, tokens: Tensor) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of the hidden between stages.

        Shapes: tokens ``(B, S)``, or embeddings ``(B, S, D)``; the hidden is ``(S, B, D)``, or ``(S/tp, B, D)`` under
        sequence parallelism.
        """
        num_sequences, seq_length = tokens.shape[:2]
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        return torch.Size((seq_length // shards, num_sequences, self.config.hidden_size)), self.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of parameters and activations."""
        first = next(self.parameters(), None)
        return self._dtype if first is None else first.dtype

    def absent(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        """Return a tensor without values for a result that another stage computes.

        Args:
            shape: Its shape.
            dtype: Its type.
            name: What it is, for errors.
        """
        form = torch.empty(shape, dtype=dtype, device="meta")
        return AbsentTensor.of(form, self, f"{name} of an earlier call of the model")

    @override
    def chunk_of(self, name: str) -> int | None:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            index = int(rest.partition(".")[0])
            return next(chunk for chunk, layers in enumerate(self._layers_of_chunk) if index in layers)
        return 0 if kind == "embedding" else self.num_chunks - 1

    def _advance_own_streams(self, device: torch.device) -> None:
        # Without a strategy nobody else moves the random streams on, and every step would drop the same elements. The
        # user may also have moved the model since it was built.
        if self._owns_mesh and self.training:
            self.mesh.random.device = device
            self.mesh.random.begin_microbatch(self._num_calls, 0)
            self._num_calls += 1


def dtype_of_products(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which matrices are multiplied."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def single_mesh(seed: int) -> ParallelMesh:
    """Return the mesh of one process on the ambient default device, or on the CPU where that is meta.

    Args:
        seed: Seed of the random streams.
    """
    ambient = torch.empty(0).device
    return ParallelMesh.single("cpu" if ambient.type == "meta" else ambient, seed=seed)
