"""Main parameters: the slices that optimizers train, in full precision for mixed precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, shard_spec_of
from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.fp8.scaling import StoredWeight
from lightning_megatron.optimizer.eight_bit_weights import EightBitBuffer
from lightning_megatron.optimizer.flat_buffer import (
    FlatBuffer,
    MainSlice,
    UseOrder,
    counted_pieces,
    same_objects,
    slice_state,
)
from lightning_megatron.optimizer.parameter_gather import ParameterGather
from lightning_megatron.optimizer.sharding import (
    BufferPlanner,
    DistributedOptimizerConfig,
    ShardGranularity,
)
from lightning_megatron.optimizer.user_writes import ExposedGradients, UserWrites
from lightning_megatron.shapes import Float, Shaped

#: Attributes that every optimizer has, which hold groups, states and functions.
_OWN = frozenset({"param_groups", "state", "defaults"})


class MainParameters:
    """Registry of this rank's parameters and of the slices that its optimizers train.

    :meth:`attach` lays an optimizer's trainable parameters out in flat buffers, makes the model's
    parameters views of them, and puts this rank's main parameters into the optimizer's groups.
    Every rank's optimizer lists every parameter of its stage. A parameter without elements on this
    rank is listed as an empty tensor. A parameter with several names is registered under the first.

    Args:
        named_parameters: Parameters of this rank by name; the names must not depend on the layout.
        chunk_of: Function that returns the chunk of this stage that contains a parameter; None for
            a parameter outside of the pipelined model.
        stacks: Names of parameters that one matrix product reads, from the first row to the last.
            They are adjacent in the buffer if they are trained in the same way.
        eight_bits: Names of the parameters of each weight that :meth:`attach` stores in 8 bits.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        config: DistributedOptimizerConfig | None = None,
        chunk_of: Callable[[str], int | None] = lambda name: 0,
        stacks: Iterable[tuple[str, ...]] = (),
        eight_bits: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self.mesh = mesh
        self.config = config or DistributedOptimizerConfig()
        self.planner = BufferPlanner(mesh, self.config, chunk_of, stacks)
        self.buffers: list[FlatBuffer] = []
        self.exposed_gradients = ExposedGradients(mesh)
        #: Pairs of a tied embedding's name and that of its copy on another stage; known once an
        #: optimizer is attached.
        self.ties: list[tuple[str, str]] | None = None
        #: Names of the parameters of each weight that is stored in 8 bits once it is trained.
        self.eight_bit_weights = tuple(eight_bits)
        self._names_by_id: dict[int, str] = {}
        for name, parameter in named_parameters.items():
            self._names_by_id.setdefault(id(parameter), name)
        self._parameters = {name: named_parameters[name] for name in self._names_by_id.values()}
        #: Order in which the forward pass reads the parameters.
        self.order = UseOrder(self._parameters)
        self.gather = ParameterGather(self.order, self.buffers)
        #: Tracking of user writes into the parameters.
        self.user_writes = UserWrites(self._parameters, self.buffers, self.wait)
        #: Main parameter of each trained parameter; an empty tensor if this rank has no part of it.
        self.main_parameters: dict[str, nn.Parameter] = {}
        #: Slices that this rank's optimizers train, by name.
        self.slices: dict[str, MainSlice] = {}
        self._main_ids: set[int] = set()
        # Gradients of the last norm, and the pieces that this rank counted of them.
        self._counted: tuple[Sequence[object], list[Tensor]] = (), []
        #: Parameters that several stages have; known together with the ties.
        self.on_several_stages: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """List the names of all parameters of this rank, in the order of the model."""
        return tuple(self._parameters)

    def holds(self, name: str) -> bool:
        """Return whether a name is in :attr:`names`, without building the tuple."""
        return name in self._parameters

    @property
    def trained(self) -> tuple[str, ...]:
        """List the parameters of this stage that some data-parallel rank's optimizer trains."""
        return tuple(self.main_parameters)

    def parameter(self, name: str) -> nn.Parameter:
        """Return a parameter of the model."""
        return self._parameters[name]

    def main(self, name: str) -> nn.Parameter:
        """Return a parameter's main parameter; it is empty if this rank has no part."""
        return self.main_parameters.get(name, self._parameters[name])

    def is_trainable(self, name: str) -> bool:
        """Return whether a parameter and its main parameter both require gradients."""
        return self._parameters[name].requires_grad and self.main_parameters[name].requires_grad

    def are_trainable(self, names: Iterable[str]) -> bool:
        """Return whether :meth:`is_trainable` is true of all these parameters."""
        return all(map(self.is_trainable, names))

    def spec(self, name: str) -> ShardSpec:
        """Return a parameter's shard spec; every tp rank has a parameter without one in full."""
        return shard_spec_of(self._parameters[name], self.mesh.tp.rank)

    def gradients(self, names: Collection[str] | None = None) -> list[Shaped[Tensor, "..."]]:
        """List the finished gradients of this rank's slices: of the named parameters, or of all.

        While gradients are shown as ``parameter.grad``, the result has the shown gradients instead,
        of which the slices are parts.
        """
        exposed = self.exposed_gradients
        finished = [
            entry.main.grad
            for entry in self._finished(names)
            if entry.main.grad is not None
            and not (exposed.is_on and entry.shown_dtype == entry.gradient.dtype)
        ]
        return exposed.gradients(names) + finished if exposed.is_on else finished

    def take_sums(self, optimizer: Optimizer) -> None:
        """Let an attached optimizer take gradients in the dtype of their sums, without copies."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entry = self.slices.get(self.name_of(parameter))
                if entry is not None:
                    # User code may still set gradients of the parameter's own dtype.
                    entry.main.grad_dtype = None

    def _finished(self, names: Collection[str] | None) -> list[MainSlice]:
        """List the slices of the named parameters, or of all, that have a finished gradient."""
        return [
            entry
            for name, entry in self.slices.items()
            if entry.main.grad is not None and (names is None or name in names)
        ]

    @torch.no_grad()
    def scale_gradients_(
        self, factor: float | Float[Tensor, ""], names: Collection[str] | None = None
    ) -> None:
        """Multiply the gradients of the named parameters, or of all, by a number in place."""
        gradients = self.gradients(names)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def counted_gradients(
        self, names: Collection[str] | None = None
    ) -> list[Shaped[Tensor, "..."]]:
        """List the gradient pieces that this rank counts in a norm, adjacent pieces joined.

        Replicated ranges, tied copies and padding rows do not count.
        """
        entries = self._finished(names)
        gradients = [entry.main.grad for entry in entries]
        counted, pieces = self._counted
        if not same_objects(gradients, counted):
            pieces = counted_pieces(entries, self.mesh)
            # Keeping other tensors than those of the flat buffers would keep their memory, too.
            if all(entry.main.grad is entry.gradient for entry in entries):
                self._counted = gradients, pieces
        return pieces

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter, or of the parameter with this main parameter."""
        return self._names_by_id[id(parameter)]

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """List the names of the parameters in each group of an optimizer, attached or not."""
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._names_by_id:
                    raise UnsupportedError(
                        f"an optimizer must hold the module's own parameters: group {index} of "
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the module. Its gradient would "
                        "not be averaged over the ranks. Build the optimizer in "
                        "configure_optimizers, from self.parameters()."
                    )
        return [list(map(self.name_of, group["params"])) for group in optimizer.param_groups]

    def needs_attach(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has a trainable parameter instead of its main parameter."""
        return any(
            parameter.requires_grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._main_ids
        )

    def find_ties(self) -> None:
        """Pair tied embeddings with their copies (collective over pp at the first call)."""
        if self.ties is None:
            stages = all_gather_objects(
                [(name, self.spec(name).tied_to) for name in self.names], self.mesh.pp_cpu
            )
            self.ties = resolve_ties(stages)
            self.on_several_stages = repeated_names(stages)

    def attach(self, optimizer: Optimizer) -> list[FlatBuffer]:
        """Make an optimizer train this rank's slices, in place, and return the new buffers.

        Parameters in ``param_groups`` are replaced by main parameters, and existing optimizer state
        is cut in the same way. Schedulers and the user's references keep working. Frozen parameters
        do not change; another call attaches parameters that are new or no longer frozen.

        Communication: one gather of names over pp at the first call; that of
            :meth:`EightBitBuffer.publish`.
        """
        self.find_ties()
        names = names_in(self.names_of(optimizer))
        new = [
            n
            for n in self.names
            if n in names and n not in self.main_parameters and self._parameters[n].requires_grad
        ]
        if not new:
            # A new group may contain parameters that were attached before.
            self._put_main_parameters_into(optimizer)
            return []
        check_on_one_stage(new, self.on_several_stages)
        granularity = self.planner.granularity_for(optimizer)
        created = []
        weights = [names for names in self.eight_bit_weights if set(names) <= set(new)]
        inside = names_in(weights)
        # A flat buffer has one dtype and device, and its buckets are reduced over one axis: experts
        # are replicated over fewer ranks than other parameters.
        members_by_key: dict[tuple[torch.dtype, torch.device, bool, bool], list[str]] = {}
        for name in new:
            parameter = self._parameters[name]
            is_expert = self.spec(name).is_expert
            key = parameter.dtype, parameter.device, is_expert, name in inside
            members_by_key.setdefault(key, []).append(name)
        for (dtype, _, is_expert, in_eight_bits), members in members_by_key.items():
            eight_bit_weights = (
                [names for names in weights if names[0] in members] if in_eight_bits else None
            )
            created.append(
                self._make_buffer(members, dtype, granularity, is_expert, eight_bit_weights)
            )
        # The buffers changed the memory of the parameters, not the objects. Groups and state still
        # refer to these objects, which the main parameters replace.
        self._put_main_parameters_into(optimizer)
        self.buffers += created
        if weights:
            self.wait()
            self._publish_eight_bits()
        return created

    @property
    def eight_bit_buffers(self) -> list[EightBitBuffer]:
        """Return the buffers that store their weights in 8 bits now."""
        buffers = (buffer for buffer in self.buffers if isinstance(buffer, EightBitBuffer))
        return [buffer for buffer in buffers if buffer.is_in_eight_bits]

    def stored_weight(self, weight: tuple[str, ...]) -> StoredWeight | None:
        """Return the 8-bit form of a weight; None if the weight is not stored in 8 bits now."""
        for buffer in self.eight_bit_buffers:
            if weight[0] in buffer.members:
                return buffer.stored_weight(weight)
        return None

    def _publish_eight_bits(self) -> None:
        for buffer in self.eight_bit_buffers:
            buffer.publish(self.mesh)

    def leave_eight_bits(self, *, gathers: bool) -> None:
        """Call :meth:`EightBitBuffer.leave_eight_bits` of every buffer with weights in 8 bits."""
        for buffer in self.eight_bit_buffers:
            buffer.leave_eight_bits(self.mesh, gathers=gathers)
            self.slices |= buffer.slices

    def publish(self, wait: bool = True, stored: bool = False) -> None:
        """Round main parameters into the model's parameters, and gather all ranks' parts.

        Args:
            wait: Whether all parameters are complete on return. Otherwise each module given to
                :meth:`ParameterGather.wait_before` waits for its parameters before its forward
                pass, and :meth:`wait` waits for all; with :attr:`ParameterGather.defers` the first
                of these waits starts the gathers.
            stored: Whether this rank's part of the model's parameters already equals the rounded
                main parameters.

        Communication: one all-gather over the data axis, or over that of experts, for each bucket
        in the order of use; before them those of :meth:`EightBitBuffer.store_main_parameters`.
        """
        for buffer in self.buffers:
            if not (stored and buffer.is_stored_by_update):
                buffer.store_main_parameters(self.mesh)
        if self.config.zero > 0:
            self.gather.start(self.mesh)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until all gathered parameters are complete.

        Communication: deferred gathers, as described for :attr:`ParameterGather.defers`.
        """
        self.gather.wait()

    def continue_from(self, previous: MainParameters) -> None:
        """Copy the main parameters of an earlier object that still round to the model's values.

        Communication: that of :meth:`EightBitBuffer.publish`.
        """
        with torch.no_grad():
            for name, current in self.slices.items():
                before = previous.slices.get(name)
                if (
                    before is None
                    or before.placement != current.placement
                    or before.main.dtype != current.main.dtype
                ):
                    continue
                half = self._parameters[name].dtype
                if torch.equal(before.main.to(current.main.device, half), current.main.to(half)):
                    current.main.copy_(before.main)
        self._publish_eight_bits()

    def memory(self) -> dict[str, int]:
        """Count the memory of this rank's parameters, gradients and main parameters (bytes)."""
        counted = {"parameters": 0, "gradients": 0, "main_parameters": 0}
        for buffer in self.buffers:
            counted["parameters"] += buffer.parameters.nbytes
            counted["gradients"] += buffer.gradients.nbytes
            counted["main_parameters"] += (
                0 if buffer.main_parameters is None else buffer.main_parameters.nbytes
            )
        counted["parameters"] += sum(
            self._parameters[name].nbytes for name in self.names if name not in self.main_parameters
        )
        return counted

    @property
    def still_holds(self) -> bool:
        """Return whether the model's parameters are still views of the buffers."""
        return all(buffer.still_holds for buffer in self.buffers)

    def _make_buffer(
        self,
        names: list[str],
        dtype: torch.dtype,
        granularity: ShardGranularity,
        is_expert: bool,
        weights: Sequence[tuple[str, ...]] | None,
    ) -> FlatBuffer:
        main_dtype = dtype
        gradient_dtype = dtype
        if self.config.main_dtype is not None and dtype in HALF_TYPES:
            main_dtype = self.config.main_dtype
            gradient_dtype = self.config.gradient_dtype or main_dtype
        tied = {name for pair in self.ties or () for name in pair}
        partial = {name for name in names if self.spec(name).partial and self.mesh.tp.size > 1}
        sizes = {name: self._parameters[name].numel() for name in names}
        sharding = self.planner.shard(sizes, granularity, is_expert, partial, tied)
        members = {name: self._parameters[name] for name in names}
        specs = {name: self.spec(name) for name in names}
        if weights is None:
            buffer = FlatBuffer(members, specs, sharding, main_dtype, gradient_dtype)
        else:
            buffer = EightBitBuffer(
                members, specs, sharding, main_dtype, gradient_dtype, weights, self.wait
            )
        for name in names:
            main_slice = buffer.slices.get(name)
            main = (
                nn.Parameter(buffer.gradients.new_empty(0, dtype=main_dtype))
                if main_slice is None
                else main_slice.main
            )
            self.main_parameters[name] = main
            self._names_by_id[id(main)] = name
            self._main_ids.add(id(main))
        self.slices |= buffer.slices
        return buffer

    def _put_main_parameters_into(self, optimizer: Optimizer) -> None:
        """Replace the parameters in an optimizer, and in those inside it, by main parameters."""
        for owner in optimizers_in(optimizer):
            replace_parameters(owner, self._main_of)
            for group in owner.param_groups:
                group["params"][:] = map(self._main_of, group["params"])
            states: dict[nn.Parameter, Any] = owner.state  # type: ignore[assignment]
            for parameter in [p for p in states if self._main_of(p) is not p]:
                state = states.pop(parameter)
                name = self._names_by_id[id(parameter)]
                if name in self.slices:
                    main_slice = self.slices[name]
                    states[main_slice.main] = slice_state(main_slice, parameter, state)

    def _main_of(self, parameter: nn.Parameter) -> nn.Parameter:
        name = self._names_by_id.get(id(parameter))
        return parameter if name is None else self.main(name)


def names_in(optimizer_names: Iterable[Iterable[str]]) -> set[str]:
    """Return the union of the names in all groups of an optimizer."""
    return set().union(*optimizer_names)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """List an optimizer and those in its attributes, such as the one that a Lookahead wraps."""
    found = [optimizer]
    for owner in found:
        for value in vars(owner).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            known = set(map(id, found))
            found += [
                part for part in inner if isinstance(part, Optimizer) and id(part) not in known
            ]
    return found


def replace_parameters(
    optimizer: Optimizer, main_of: Callable[[nn.Parameter], nn.Parameter]
) -> None:
    """Replace the parameters in an optimizer's attributes, except in groups and states."""
    for name, value in list(vars(optimizer).items()):
        if name not in _OWN and isinstance(value, (nn.Parameter, list, tuple, set, dict)):
            setattr(optimizer, name, _replaced(value, main_of))


def _replaced(value: Any, main_of: Callable[[nn.Parameter], nn.Parameter]) -> Any:
    """Return a value with other parameters; lists and dictionaries change in place."""
    if isinstance(value, nn.Parameter):
        return main_of(value)
    if isinstance(value, dict):
        pairs = [(_replaced(key, main_of), _replaced(v, main_of)) for key, v in value.items()]
        value.clear()
        value.update(pairs)
    elif type(value) is list:
        value[:] = [_replaced(part, main_of) for part in value]
    elif type(value) in (tuple, set):
        return type(value)(_replaced(part, main_of) for part in value)
    return value


def resolve_ties(stages: Sequence[Sequence[tuple[str, str | None]]]) -> list[tuple[str, str]]:
    """Pair the full name of each tied copy's original with the copy, in the order of the stages.

    Every stage lists its names, each with that of its original in the same model, or None.
    """
    originals = {name for stage in stages for name, tied_to in stage if tied_to is None}
    pairs = []
    for stage in stages:
        for copy, tied_to in stage:
            if tied_to is None:
                continue
            original = original_name(copy, tied_to, originals)
            if original is None:
                raise UnsupportedError(
                    f"a tied parameter must have its original on another stage: {copy!r} is a copy "
                    f"of {tied_to!r}, which no stage holds. Its gradient would be incomplete. "
                    "Build all stages from the same model."
                )
            pairs.append((original, copy))
    return pairs


def repeated_names(stages: Sequence[Sequence[tuple[str, str | None]]]) -> frozenset[str]:
    """Return the names of the parameters that several stages have, such as those of a teacher."""
    counts = Counter(name for stage in stages for name, tied_to in stage if tied_to is None)
    return frozenset(name for name, count in counts.items() if count > 1)


def check_on_one_stage(trained: Sequence[str], repeated: Collection[str]) -> None:
    """Refuse to train parameters that several stages have."""
    names = [name for name in trained if name in repeated]
    if names:
        raise UnsupportedError(
            "a parameter that several pipeline stages have cannot be trained: "
            f"{', '.join(map(repr, names[:5]))} {'are' if len(names) > 1 else 'is'} outside of the "
            "model that is cut into stages. The gradients would differ from stage to stage. Keep "
            "such parameters frozen during the whole fit, move them into that model, or use pp=1."
        )


def original_name(copy: str, tied_to: str, names: Collection[str]) -> str | None:
    """Return the full name of a tied copy's original; None if there is none.

    Args:
        copy: Full name of the copy, such as ``model.head.weight``.
        tied_to: Name of the original within the same model, such as ``embedding.word.weight``.
    """
    parts = copy.split(".")
    for length in range(len(parts) - 1, -1, -1):
        candidate = ".".join([*parts[:length], tied_to])
        if candidate in names:
            return candidate
    return None
