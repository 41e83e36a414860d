"""Base class of models with numbered layers, and the process groups of their LightningModules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.transport.dispatchers import check_equal_counts
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.weight_casts import WeightCasts
from lightning_megatron.layers.offload import HostOffload
from lightning_megatron.layers.parameters.gradient_slot import neighbours_as_one, stacked_view
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.layers.parameters.parameter_stack import ParameterStack
from lightning_megatron.layers.recomputed_block import recompute_parts
from lightning_megatron.models.config_checks import ModelConfig
from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.models.stage import PipelinedModule, pipelined_modules
from lightning_megatron.plan.recomputation import Parts, Recomputation, Recompute
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of one layer besides the hidden states.

    ``rotary`` are cosines and sines, None without rotary embedding; no span means rows of one
    document.
    """

    rotary: tuple[Float[Tensor, "..."], Float[Tensor, "..."]] | None
    span: AttentionSpan | None


def either_input(
    rule: str,
    tokens: Int[Tensor, "batch seq"] | None,
    vectors: Float[Tensor, "batch seq hidden"] | None,
) -> Shaped[Tensor, "batch seq ..."]:
    """Return the tokens, or the vectors that replace their embeddings; refuse neither or both."""
    given = vectors if tokens is None else tokens
    if given is None or (tokens is not None and vectors is not None):
        raise UnsupportedError(
            f"{rule}, because both describe the same input: "
            f"{'neither' if given is None else 'both'} were given. Pass one of them."
        )
    return given


#: Name of the word embedding, which a tied head shares.
WORD_EMBEDDING = "embedding.word.weight"


class LayeredModule(PipelinedModule):
    """Model with numbered layers. Each rank has its shards of the layers of its stages.

    The model is built on the meta device and then initialised one tensor at a time on the mesh's
    device, so that no rank ever holds the full model. Inside ``torch.device("meta")`` it stays on
    the meta device until ``layers.parameters.init.initialize_`` fills it. Layers are named by their
    index in the whole model.

    Args:
        mesh: The groups of this rank; None means a single process with the whole model.
        seed: Seed of the initial weights, equal on all ranks; None means ``torch.initial_seed()``.
    """

    #: Layers of this rank by their index in the whole model.
    layers: nn.ModuleDict
    #: Norm of the last layer's output on the last stage; None if layers end with norms.
    final_norm: nn.Module | None

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh | None = None, seed: int | None = None
    ) -> None:
        seed = torch.initial_seed() if seed is None else seed
        super().__init__(mesh or single_mesh(seed))
        config.check_layout(self.mesh.layout, self.mesh.sequence_parallel)
        self.config = config
        self._recompute = Recomputation(("none",))
        #: Whether forward passes compare the token counts of ranks that share experts. Code that
        #: has already compared them for a whole step sets it to False.
        self.compares_counts = True
        #: Scales of earlier steps for 8-bit products with the delayed recipe; otherwise None.
        self.delayed_scales: DelayedScales | None = None
        #: 8-bit weights that microbatches share; None unless this package computes in 8 bits.
        self.weight_casts: WeightCasts | None = None
        #: Runner of the chunks that replays CUDA graphs; None runs them directly. Its ``run`` takes
        #: the model and the first four arguments of :meth:`run_chunk`.
        self.runner: Any = None
        #: List to which a call appends the input of each layer and the output of the last norm;
        #: None collects nothing.
        self.hidden_states: list[Tensor] | None = None
        self._owns_mesh = mesh is None
        self._num_calls = 0
        self._dtype = torch.get_default_dtype()
        #: Number of layers of each virtual stage.
        self.partition = config.partition(self.mesh.layout, self.mesh.loss_chunk)
        stages = self.partition.by_stage(self.mesh.layout.placement)
        #: Indices of the layers of each chunk of this rank in the whole model.
        self.layers_of_chunk = stages[self.mesh.pp.rank]
        with torch.device("meta"):
            self._build()
        #: This rank's mixture-of-experts layers, by their index in the whole model.
        self.mixtures = {
            int(name.partition(".")[0]): module
            for name, module in self.layers.named_modules()
            if isinstance(module, MixtureOfExperts)
        }
        self.recompute = "none"
        if not torch.empty(0).is_meta:
            initialize_(self, self.mesh.device, seed)

    @property
    def recompute(self) -> Recomputation:
        """Activations that the backward pass recomputes.

        Assigning the name of a part selects this part in all layers.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, value: Recompute | Recomputation) -> None:
        settings = Recomputation.of(value)
        chosen: dict[int, Parts] = {}
        firsts = set[int]()
        for layers in self.layers_of_chunk:
            parts = [settings.parts_of(place, len(layers)) for place in range(len(layers))]
            of_chunk = dict(zip(layers, parts, strict=True))
            firsts.update([index for index in layers if of_chunk[index]][:1])
            chosen |= of_chunk
        offload = HostOffload(frozenset(firsts)) if settings.offload else None
        for index, recomputed in chosen.items():
            recompute_parts(self.layers[str(index)], recomputed, offload if recomputed else None)
        self._recompute = settings

    @cached_property
    def has_shared_experts(self) -> bool:
        """Whether this rank's experts receive tokens of other data-parallel ranks.

        The result is the same on all pipeline stages.
        """
        # Ranks of one tp group have the same tokens. The cached result stays valid, because the
        # layout of a module never changes.
        coordinates = map(self.mesh.layout.coordinates, self.mesh.experts_cpu.ranks)
        data_ranks = {
            (rank_coordinates["dp"], rank_coordinates["cp"]) for rank_coordinates in coordinates
        }
        return self.config.experts is not None and len(data_ranks) > 1

    def _check_tokens(self, num_tokens: int) -> None:
        """Raise if token counts differ between ranks that gather tokens from each other."""
        is_needed = any(
            layer.transport_choice.dispatcher.needs_equal_counts for layer in self.mixtures.values()
        )
        if is_needed and self.has_shared_experts and self.compares_counts:
            check_equal_counts(num_tokens, self.mesh)

    def _build(self) -> None:
        raise NotImplementedError

    def run_chunk(
        self,
        chunk: int,
        hidden: Float[Tensor, "seq_local batch hidden"] | None,
        call: Any,
        layers: Mapping[int, LayerInputs],
        is_varying: bool = False,
    ) -> Any:
        """Run a chunk by the runner, if there is one; otherwise :meth:`run_layers`.

        ``hidden`` is None on the first virtual stage; the last one returns the result of the model.
        If ``is_varying``, the shapes differ in each call, so that a runner has no use.
        """
        if self.runner is None or self.hidden_states is not None or is_varying:
            return self.run_layers(hidden, call, layers, self.is_last_stage(chunk))
        return self.runner.run(self, chunk, hidden, call, layers)

    def run_layers(
        self,
        hidden: Float[Tensor, "seq_local batch hidden"] | None,
        call: Any,
        layers: Mapping[int, LayerInputs],
        has_head: bool,
    ) -> Any:
        """Run the embedding if ``hidden`` is None, some layers, and the head if it follows them."""
        if hidden is None:
            hidden = self.embed(call)
        for index, given in layers.items():
            self._collect(hidden)
            hidden = self.layers[str(index)](hidden, given.rotary, given.span)
        if not has_head:
            return hidden
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        self._collect(hidden)
        return self._finish(hidden, call)

    def embed(self, call: Any) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the input of the first layer."""
        raise NotImplementedError

    def _finish(self, hidden: Tensor, call: Any) -> Any:
        """Return the result of the model, given the output of the last norm."""
        raise NotImplementedError

    def _collect(self, hidden: Tensor) -> None:
        if self.hidden_states is not None:
            self.hidden_states.append(hidden)

    def boundary(
        self,
        tokens: Int[Tensor, "batch seq"] | Float[Tensor, "batch seq hidden"],
        parts: int | None = None,
    ) -> tuple[torch.Size, torch.dtype]:
        """Return the shape ``(seq_local, batch, hidden)`` and dtype that cross stage boundaries.

        ``tokens`` are those of whole rows; ``parts`` ranks divide each row, None means all of cp.
        """
        num_sequences, seq_length = tokens.shape[:2]
        shards = self.mesh.tp.size if self.mesh.sequence_parallel else 1
        shards *= self.mesh.cp.size if parts is None else parts
        return torch.Size(
            (seq_length // shards, num_sequences, self.config.hidden_size)
        ), self.dtype

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayeredModule:
        super()._apply(fn, recurse)
        # A stage without layers and without a head has no parameter from which to read the dtype.
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of parameters and activations."""
        first = next(self.parameters(), None)
        return self._dtype if first is None else first.dtype

    def absent(
        self, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> Shaped[Tensor, "..."]:
        """Return a placeholder for a result that another stage computes, with a name for errors."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        return RemoteTensor.of(like, self, f"{name} of an earlier call of the model")

    @override
    def chunk_of(self, name: str) -> int | None:
        kind, _, rest = name.partition(".")
        if kind == "layers":
            index = int(rest.partition(".")[0])
            return next(
                chunk for chunk, layers in enumerate(self.layers_of_chunk) if index in layers
            )
        # If chunks lie in a V, the first stage has the embedding and the head, and the tied head
        # reads the embedding's weight.
        if name == WORD_EMBEDDING and self.is_first_stage() and self.is_last_stage():
            return None
        return 0 if kind == "embedding" else self.num_chunks - 1

    def _advance_own_streams(self, device: torch.device) -> None:
        # Without a strategy no other code advances the random streams, and every step would use the
        # same dropout masks. The device is set again because the user may have moved the model.
        if self._owns_mesh and self.training:
            self.mesh.random.device = device
            self.mesh.random.begin_microbatch(self._num_calls, 0)
            self._num_calls += 1


def layered_modules(root: nn.Module) -> list[LayeredModule]:
    """Return the models of this package inside a module."""
    return [model for _, model in pipelined_modules(root) if isinstance(model, LayeredModule)]


def single_mesh(seed: int) -> ParallelMesh:
    """Return the mesh of a single process on the default device, or the CPU instead of meta."""
    ambient = torch.empty(0).device
    return ParallelMesh.single("cpu" if ambient.type == "meta" else ambient, seed=seed)


def advance_streams(module: Any, model: LayeredModule) -> None:
    """Advance the random streams of a model to a training batch, unless MegatronStrategy does so.

    Dropout masks are those of MegatronStrategy, if its ranks take the samples of a batch in turn.
    """
    if module.device_mesh is None:
        # MegatronStrategy advances the random streams itself.
        model.mesh.random.device = module.device
        trainer = module.trainer
        rank = trainer.global_rank
        samples = rank, trainer.world_size, 0
        model.mesh.random.begin_microbatch(trainer.fit_loop.total_batch_idx, rank, samples)


def neighbours_in(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, ...]]:
    """Yield the parameters of a model that must be neighbours in flat buffers.

    Args:
        names: Names of the parameters by identity.
    """
    for part in model.modules():
        stack: tuple[Tensor, ...] = ()
        if isinstance(part, ParameterStack):
            stack = part.parts
        elif isinstance(part, GroupedMLP) and part.has_biases:
            # Biases between the weights of experts would separate rows of these weights.
            stack = (*part.biases(part.first_name), *part.biases("down"))
        if stack:
            yield tuple(names[id(parameter)] for parameter in stack)


def join_frozen(models: Iterable[nn.Module]) -> None:
    """Move frozen parameters that a layer reads as one tensor side by side in memory.

    Flat buffers hold trained ones so. A conversion separates those that are frozen, which every
    pass would otherwise copy, and keep until its backward pass.
    """
    for part in (part for model in models for part in model.modules()):
        groups: Sequence[Sequence[Tensor]] = ()
        if isinstance(part, ParameterStack):
            groups = [part.parts]
        elif isinstance(part, GroupedMLP):
            groups = part.matrices()
        for group in groups:
            is_apart = stacked_view(group) is None and neighbours_as_one(group) is None
            if is_apart and not any(parameter.requires_grad for parameter in group):
                whole = torch.cat([parameter.detach() for parameter in group])
                rows = [len(parameter) for parameter in group]
                for parameter, joined in zip(group, whole.split(rows), strict=True):
                    parameter.data = joined
