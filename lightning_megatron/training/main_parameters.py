"""Main parameters: the slices that optimizers train, in full precision for mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, shard_spec_of
from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.plan.buckets import BufferPlan, Piece, plan_by_elements, plan_by_parameters
from lightning_megatron.training.counted_gradients import CountedGradients
from lightning_megatron.training.flat_buffer import FlatBuffer, MainSlice, cut_state
from lightning_megatron.training.lent_gradients import LentGradients
from lightning_megatron.training.optimizer_kind import Unit, check_unit, smallest_unit
from lightning_megatron.training.parameter_gather import ParameterGather
from lightning_megatron.training.shared_gradients import resolve_ties
from lightning_megatron.training.written import WrittenParameters

#: Groups of buckets in addition to the chunks of a pipeline stage.
LATE = -2
OUTSIDE = -1


@dataclass(frozen=True)
class Division:
    """Dtypes and partitioning of the trained parameters.

    Args:
        main_dtype: Dtype of the main parameters of half-precision parameters; None trains the
            parameters themselves.
        gradient_dtype: Dtype of the accumulated gradients of such parameters; None means
            ``main_dtype``.
        zero: ZeRO stage: 1 gives every data-parallel rank a part of the main parameters, 0 all of
            them.
        slices: Granularity of a part: ``elements``, whole ``parameters``, or ``auto`` by what the
            optimizer supports.
        bucket_size: Approximate size of one gradient message (elements).
        moments_dtype: Dtype of Adam's moments if the fused kernel updates them.
    """

    main_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    zero: int = 1
    slices: Literal["auto", "elements", "parameters"] = "auto"
    bucket_size: int = 40_000_000
    moments_dtype: torch.dtype = torch.float32


class MainParameters:
    """Registry of this rank's parameters and of the slices that its optimizers train.

    :meth:`attach` lays an optimizer's trainable parameters out in flat buffers, makes the model's
    parameters views of them, and puts this rank's main parameters into the optimizer's groups.
    Every rank's optimizer lists every parameter of its stage. A parameter without elements on this
    rank is listed as an empty tensor. A parameter with several names is kept once, under the first.

    Args:
        named_parameters: Parameters of this rank by name; the names must not depend on the layout.
        mesh: Process groups of this rank.
        division: Dtypes and partitioning.
        chunk_of: Function that returns the chunk of this stage that contains a parameter; None for
            one outside the pipelined model.
        stacks: Names of parameters that one matrix product reads, from the first row to the last;
            they are laid out next to each other if they are trained in the same way.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        mesh: ParallelMesh,
        division: Division | None = None,
        chunk_of: Callable[[str], int | None] = lambda name: 0,
        stacks: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self.mesh = mesh
        self.division = division or Division()
        self.buffers: list[FlatBuffer] = []
        self.gather = ParameterGather()
        self.lent = LentGradients(mesh)
        #: Pairs of a tied embedding's name and that of its copy on another stage; known once an
        #: optimizer is attached.
        self.ties: list[tuple[str, str]] | None = None
        #: Tied parameters whose bucket holds nothing else, so that both stages cut it in the same
        #: way.
        self.ties_alone: set[str] = set()
        self._chunk_of = chunk_of
        self._stack_of = {
            name: (number, stack) for number, stack in enumerate(stacks) for name in stack
        }
        self._parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named_parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self._parameters[name] = parameter
        #: Tracking of user writes into the parameters.
        self.written = WrittenParameters(self._parameters, self.buffers, self.wait)
        self._mains: dict[str, nn.Parameter] = {}
        self._slices: dict[str, MainSlice] = {}
        self._main_ids: set[int] = set()
        self._counted = CountedGradients()
        self._names_by_id = {id(parameter): name for name, parameter in self._parameters.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """List the names of this rank's parameters, frozen ones included, in the order of the
        model.
        """
        return tuple(self._parameters)

    def holds(self, name: str) -> bool:
        """Return whether a name is in :attr:`names`, without building the tuple."""
        return name in self._parameters

    @property
    def slices(self) -> Mapping[str, MainSlice]:
        """Return the slices that this rank's optimizers train, by name."""
        return self._slices

    @property
    def trained(self) -> tuple[str, ...]:
        """List the parameters of this stage that some data-parallel rank's optimizer trains."""
        return tuple(self._mains)

    @property
    def mains(self) -> Mapping[str, nn.Parameter]:
        """Return each trained parameter's main parameter by name; empty if not on this rank."""
        return self._mains

    def parameter(self, name: str) -> nn.Parameter:
        """Return the model's own parameter."""
        return self._parameters[name]

    def main(self, name: str) -> nn.Parameter:
        """Return a parameter's main parameter; it is empty if this rank has no part."""
        return self._mains.get(name, self._parameters[name])

    def is_trainable(self, name: str) -> bool:
        """Return whether a parameter and its main parameter both require gradients."""
        return self._parameters[name].requires_grad and self._mains[name].requires_grad

    def are_trainable(self, names: Iterable[str]) -> bool:
        """Return whether :meth:`is_trainable` is true of all these parameters."""
        parameters, mains = self._parameters, self._mains
        return all(parameters[name].requires_grad and mains[name].requires_grad for name in names)

    def spec(self, name: str, tp_rank: int | None = None) -> ShardSpec:
        """Return a parameter's shard spec; without one, it is whole on every rank of tp."""
        return shard_spec_of(
            self._parameters[name], self.mesh.tp.rank if tp_rank is None else tp_rank
        )

    def gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """List the finished gradients of this rank's slices: of the named parameters, or of all.

        While gradients are shown as ``parameter.grad``, the shown gradients are listed in place of
        the slices, which are parts of them.
        """
        own = [
            one
            for name, one in self._slices.items()
            if one.main.grad is not None and (names is None or name in names)
        ]
        if not self.lent.is_on:
            return [one.main.grad for one in own if one.main.grad is not None]
        apart = [
            one.main.grad
            for one in own
            if one.main.grad is not None and one.main.dtype != one.gradient.dtype
        ]
        return self.lent.gradients(names) + apart

    def counted_gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """List the gradient pieces that this rank counts in a norm, adjacent pieces joined.

        Replicated ranges, tied copies and padding rows do not count.

        Args:
            names: Names of the parameters to count; None means all.
        """
        is_first = {is_expert: self.mesh.copies(is_expert).is_first for is_expert in (False, True)}
        return self._counted.of(self._slices, is_first, names)

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """List the names of the parameters in each of an optimizer's groups, before or after
        :meth:`attach`.
        """
        name_of = self._names_by_id.__getitem__
        return [list(map(name_of, map(id, group["params"]))) for group in optimizer.param_groups]

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether every parameter of an optimizer is registered here."""
        return all(
            id(p) in self._names_by_id for group in optimizer.param_groups for p in group["params"]
        )

    def waits_for_attach(self, optimizer: Optimizer) -> bool:
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

    def attach(self, optimizer: Optimizer) -> list[FlatBuffer]:
        """Make an optimizer train this rank's slices, in place.

        Parameters in ``param_groups`` are replaced by main parameters, and existing optimizer state
        is cut in the same way. Schedulers and the user's references keep working. Frozen parameters
        do not change; another call attaches parameters that are new or no longer frozen.

        Args:
            optimizer: Optimizer over the model's parameters.

        Returns:
            The buffers that were made.

        Raises:
            UnsupportedError: If the optimizer holds a parameter that is not one of these, or looks
                at whole parameters where ranks hold parts of them.

        Communication: one gather of names over pp at the first call.
        """
        self._check_known(optimizer)
        self.find_ties()
        names = names_in(self.names_of(optimizer))
        new = [
            n
            for n in self.names
            if n in names and n not in self._mains and self._parameters[n].requires_grad
        ]
        if not new:
            self._exchange(optimizer)
            return []
        unit = self._unit_of(optimizer)
        made = []
        alike: dict[tuple[torch.dtype, torch.device, bool], list[str]] = {}
        for name in new:
            parameter = self._parameters[name]
            alike.setdefault(
                (parameter.dtype, parameter.device, self.spec(name).is_expert), []
            ).append(name)
        for (dtype, _, is_expert), members in alike.items():
            made.append(self._make_buffer(members, dtype, unit, self.mesh.copies(is_expert)))
        self._exchange(optimizer)
        self.buffers += made
        return made

    def publish(self, wait: bool = True, stored: bool = False) -> None:
        """Round main parameters into the model's parameters, and gather all ranks' parts.

        Args:
            wait: Whether all parameters are complete on return. Otherwise each module given to
                :meth:`ParameterGather.wait_before` waits for its own before its forward pass, and
                :meth:`wait` waits for all.
            stored: Whether this rank's part of the model's parameters already equals the rounded
                main parameters.

        Communication: one all-gather over the data axis, or over that of experts, for each bucket
        in the order of use.
        """
        for buffer in () if stored else self.buffers:
            buffer.store_mains()
        self.gather.start(self.buffers, self.mesh)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until all gathered parameters are complete."""
        self.gather.wait()

    def continue_from(self, previous: MainParameters) -> None:
        """Adopt earlier main parameters whose rounded values the model still has."""
        with torch.no_grad():
            for name, one in self._slices.items():
                before = previous.slices.get(name)
                if (
                    before is None
                    or before.placement != one.placement
                    or before.main.dtype != one.main.dtype
                ):
                    continue
                half = self._parameters[name].dtype
                if torch.equal(before.main.to(one.main.device, half), one.main.to(half)):
                    one.main.copy_(before.main)

    def memory(self) -> dict[str, int]:
        """Count the memory of ``parameters``, ``gradients`` and ``mains`` on this rank (bytes)."""
        counted = {"parameters": 0, "gradients": 0, "mains": 0}
        for buffer in self.buffers:
            counted["parameters"] += buffer.parameters.nbytes
            counted["gradients"] += buffer.gradients.nbytes
            counted["mains"] += 0 if buffer.mains is None else buffer.mains.nbytes
        counted["parameters"] += sum(
            self._parameters[name].nbytes for name in self.names if name not in self._mains
        )
        return counted

    @property
    def still_holds(self) -> bool:
        """Return whether the model's parameters are still views of the buffers."""
        return all(buffer.still_holds for buffer in self.buffers)

    def _check_known(self, optimizer: Optimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._names_by_id:
                    raise UnsupportedError(
                        f"an optimizer must hold the module's own parameters: group {index} of "
                        f"{type(optimizer).__name__} holds one of shape {tuple(parameter.shape)} "
                        "that the module does not have now. Its gradient would not be averaged "
                        "over the ranks. Build the optimizer in configure_optimizers, from "
                        "self.parameters()."
                    )

    def _unit_of(self, optimizer: Optimizer) -> Unit:
        if self.mesh.data.size == 1 and self.mesh.model.size == 1:
            return "model"
        unit = smallest_unit(optimizer)
        check_unit(optimizer, unit, cut=self.mesh.model.size > 1)
        if self.division.zero == 0 or unit == "model":
            return "model"
        if self.division.slices == "elements" and unit != "elements":
            raise UnsupportedError(
                "optimizer_slices 'elements' needs an optimizer that treats every element alike: "
                f"{type(optimizer).__name__} looks at whole parameters. Parts of them would be "
                "trained otherwise. Use optimizer_slices='auto' or 'parameters', or zero=0."
            )
        return unit if self.division.slices == "auto" else self.division.slices

    def _make_buffer(
        self, names: list[str], dtype: torch.dtype, unit: Unit, axis: MeshAxis
    ) -> FlatBuffer:
        has_mains = self.division.main_dtype is not None and dtype in HALF_TYPES
        main_dtype = self.division.main_dtype if has_mains and self.division.main_dtype else dtype
        gradient_dtype = (self.division.gradient_dtype or main_dtype) if has_mains else dtype
        plan = self._plan(names, unit, axis.size)
        part = axis.rank if plan.num_parts > 1 else 0
        members = {name: self._parameters[name] for name in names}
        specs = {name: self.spec(name) for name in names}
        buffer = FlatBuffer(members, specs, plan, part, main_dtype, gradient_dtype)
        for name in names:
            one = buffer.slices.get(name)
            main = (
                nn.Parameter(buffer.parameters.new_empty(0, dtype=main_dtype))
                if one is None
                else one.main
            )
            self._mains[name] = main
            self._names_by_id[id(main)] = name
            self._main_ids.add(id(main))
        self._slices |= buffer.slices
        return buffer

    def _plan(self, names: list[str], unit: Unit, num_copies: int) -> BufferPlan:
        late = {name for name in names if self.spec(name).partial and self.mesh.tp.size > 1}
        tied = {name for pair in self.ties or () for name in pair}
        if unit == "elements":
            self.ties_alone |= tied
        else:
            # The stages cut the two copies differently, so whole gradients are added first.
            late |= tied
        pieces = []
        for name in self._with_neighbours(names):
            group = LATE if name in late else self._group_of(name)
            stack, _ = self._stack_of.get(name, (None, ()))
            numel = self._parameters[name].numel()
            pieces.append(Piece(name, numel, group, name in self.ties_alone, stack))
        pieces.sort(key=lambda piece: piece.group)
        num_parts = 1 if unit == "model" else num_copies
        if unit == "parameters":
            return plan_by_parameters(pieces, num_parts)
        return plan_by_elements(pieces, num_parts, self.division.bucket_size)

    def _with_neighbours(self, names: Sequence[str]) -> list[str]:
        """Order names so that the members of a stack are next to each other.

        Buffers are laid out from the last name to the first, so the last row of a stack comes
        first.
        """
        ordered: dict[str, None] = {}
        present = set(names)
        for name in names:
            _, stack = self._stack_of.get(name, (0, (name,)))
            ordered |= dict.fromkeys(one for one in reversed(stack) if one in present)
        return list(ordered)

    def _group_of(self, name: str) -> int:
        """Return a parameter's bucket group; gradients of one group are complete together."""
        if self.mesh.pp.size == 1:
            return 0
        chunk = self._chunk_of(name)
        return OUTSIDE if chunk is None else chunk

    def _exchange(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                name = self._names_by_id[id(parameter)]
                main = self.main(name)
                if main is parameter:
                    continue
                group["params"][position] = main
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    if name in self._slices:
                        optimizer.state[main] = cut_state(self._slices[name], parameter, state)


def names_in(optimizer_names: Iterable[Iterable[str]]) -> set[str]:
    """Return the union of the names in all groups of an optimizer."""
    return set().union(*optimizer_names)
