"""A list of blocks of any model, whose stages are on several ranks while the model's own code calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.sequence_shard import whole_of
from lightning_megatron.models.result_form import ResultForm, shapes_of
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone


class StagedBlocks(PipelinedModule):
    """Stand in the place of a torch.nn.ModuleList or torch.nn.Sequential, and hold only this rank's blocks of it.

    The code around it runs on every stage, as it was written. A block of an earlier stage gives what the received
    hidden is, the last one of a stage ends the run. What was computed on another stage and does not travel is NaN here,
    so that a model that passes more than the hidden from block to block cannot give a wrong number unseen.

    Blocks are named by their index, as before.

    Args:
        name: Name of the list, for errors.
        source: The list; the blocks of other stages lose their values.
        layers: The blocks of each chunk of this stage, by index.
        mesh: The groups of this rank.
        ends: Modules beside the list that this stage alone holds, and whether with all that is in them.
    """

    def __init__(
        self,
        name: str,
        source: nn.ModuleList | nn.Sequential,
        layers: Sequence[range],
        mesh: ParallelMesh,
        ends: Sequence[tuple[nn.Module, bool]] = (),
    ) -> None:
        super().__init__(mesh)
        self.name, self.layers, self.calls_in_turn = name, tuple(layers), isinstance(source, nn.Sequential)
        # Not registered: neither are parameters of this list.
        self.ends, self.elsewhere = tuple(ends), dict[int, nn.Module]()
        self._forms: dict[Any, Any] = {}
        for index, block in enumerate(source):
            if any(index in chunk for chunk in layers):
                self.add_module(str(index), block)
            else:
                self.elsewhere[index] = block.to("meta")
        self.train(source.training)

    def __len__(self) -> int:
        """Count the blocks of all stages."""
        return len(self._modules) + len(self.elsewhere)

    def __iter__(self) -> Iterator[Turn]:
        """List the blocks of all stages."""
        return (Turn(self, index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        """Return a block, or a list of them."""
        return list(self)[index]

    def block(self, index: int) -> nn.Module:
        """Return a block; one of another stage has no values."""
        found = self._modules.get(str(index), self.elsewhere.get(index))
        assert found is not None, "an index of the list"
        return found

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StagedBlocks:
        for block in self.elsewhere.values():
            _follow(block, fn)
        self._forms.clear()
        super()._apply(fn, recurse)
        return self

    @override
    def chunk_of(self, name: str) -> int | None:
        index = int(name.partition(".")[0])
        return next(chunk for chunk, layers in enumerate(self.layers) if index in layers)

    @override
    def stage_parameters(self) -> Iterator[nn.Parameter]:
        yield from self.parameters()
        for end, is_whole in self.ends:
            yield from end.parameters(recurse=is_whole)

    def forward(self, hidden: Any) -> Any:
        """Run all blocks in turn, where the list was a torch.nn.Sequential."""
        if not self.calls_in_turn:
            raise NotImplementedError("a torch.nn.ModuleList cannot be called.")
        for block in self:
            hidden = block(hidden)
        return hidden

    def current(self) -> StageCursor:
        """Return what is to be run.

        Raises:
            UnsupportedError: If nothing is, because the model is called outside of a step.
        """
        self.check_callable_whole()
        assert self.cursor is not None, "lists are cut only where there are several stages"
        return self.cursor

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block if it is one of the current chunk.

        Raises:
            UnsupportedError: If it is not its turn, or the hidden changes its shape.
            StageDone: After the last block of a stage that is not the last, and when probed.
        """
        cursor, hidden = self.current(), _hidden_in(self.name, args, kwargs)
        if cursor.probe:
            cursor.boundary, cursor.dtype = hidden.shape, hidden.dtype
            raise StageDone
        if index == 0:
            cursor.boundary, cursor.dtype = hidden.shape, hidden.dtype
        if index != cursor.turn:
            raise UnsupportedError(
                f"the blocks of {self.name!r} must be called once each, in order, where pp is above 1: {index} was "
                f"called where it was the turn of {cursor.turn}. Call the model once in a step, without skipping "
                "blocks, or use pp=1."
            )
        cursor.turn += 1
        layers = self.layers[cursor.chunk]
        if index < layers.start:
            received = cursor.hidden if index == layers.start - 1 else None
            return self._form(index, args, kwargs)(received, self.mesh.device)
        output = self._run(index, args, kwargs)
        if index == layers[-1] and not self.is_last_stage(cursor.chunk):
            self._leave(cursor, output, index)
        return output

    def _run(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training:
            return self.block(index)(*args, **kwargs)
        # What blocks draw must not repeat on every stage, nor differ over tp.
        self.mesh.random.seek(1 + index)
        with self.mesh.random.fork("replicated"):
            return self.block(index)(*args, **kwargs)

    def _leave(self, cursor: StageCursor, output: Any, index: int) -> None:
        hidden = whole_of(_first_tensor(self.name, output))
        if (hidden.shape, hidden.dtype) != (cursor.boundary, cursor.dtype):
            raise UnsupportedError(
                f"the blocks of {self.name!r} must keep the shape of the hidden, because the next stage has to know it "
                f"before: {tuple(cursor.boundary or ())} in {cursor.dtype} went in, block {index} gave "
                f"{tuple(hidden.shape)} in {hidden.dtype}. Use pp=1."
            )
        cursor.output = hidden
        raise StageDone

    def _form(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResultForm:
        block = self.block(index)
        key = (type(block), shapes_of((args, kwargs)))
        if key not in self._forms:
            self._forms[key] = ResultForm(f"{self.name}.{index}", self._without_values(index), args, kwargs)
        found: ResultForm = self._forms[key]
        return found

    def _without_values(self, index: int) -> nn.Module:
        # A block that another chunk of this rank holds is cut, and communicates; all blocks are of one form.
        return self.elsewhere.get(index, next(iter(self.elsewhere.values())))


class Turn:
    """Stand for one block of a list while code iterates over it.

    Args:
        blocks: The list.
        index: Which one.
    """

    def __init__(self, blocks: StagedBlocks, index: int) -> None:
        self._blocks, self._index = blocks, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block where it is this stage's."""
        return self._blocks.call(self._index, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._blocks.block(self._index), name)


class Elsewhere(nn.Module):
    """Stand for a module beside the blocks whose parameters another stage holds.

    Before the blocks it gives what has the right shape, full of NaN; after them it is not reached.

    Args:
        name: Name of the module, for errors.
        source: The module; it loses its values.
        blocks: The list.
        is_before: Whether it is to be called before the blocks.
    """

    def __init__(self, name: str, source: nn.Module, blocks: StagedBlocks, is_before: bool) -> None:
        super().__init__()
        self.name, self.is_before = name, is_before
        # Not registered: they are not parts of this module.
        self._others: tuple[nn.Module, StagedBlocks] = (source.to("meta"), blocks)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Elsewhere:
        _follow(self._others[0], fn)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_others" not in self.__dict__:
                raise
            return getattr(self._others[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN in the shapes of the module's results.

        Raises:
            UnsupportedError: If it is called on the other side of the blocks than it was taken for.
        """
        source, blocks = self._others
        if blocks.current().turn == 0 and self.is_before:
            return ResultForm(self.name, source, args, kwargs)(None, blocks.mesh.device)
        side, here = ("before", "first") if not self.is_before else ("after", "last")
        raise UnsupportedError(
            f"{self.name!r} is called {side} the blocks {blocks.name!r}, but another stage holds it, because of where "
            f"it was defined. Use the pipeline_plan {{{blocks.name!r}: 'blocks', {self.name!r}: {here!r}}}."
        )


def _follow(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Give a module without values the types that a conversion gives to others, and leave it where it is."""
    module._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype))


def _hidden_in(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    return _tensor(name, args[0] if args else next(iter(kwargs.values()), None))


def _first_tensor(name: str, output: Any) -> Tensor:
    return _tensor(name, next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None))


def _tensor(name: str, found: Any) -> Tensor:
    if isinstance(found, Tensor) and found.is_floating_point():
        return found
    raise UnsupportedError(
        f"the first argument of the blocks of {name!r}, and the first tensor that they return, must be the hidden: "
        f"{type(found).__name__} is there. It is what travels between stages. Use pp=1."
    )
