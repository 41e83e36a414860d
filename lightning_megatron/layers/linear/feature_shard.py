"""Outputs of sharded linear layers that user code sees with all features.

Each rank of tp stores its part of one dimension: of the features, or of the heads that user code
makes of them. Functions that treat every feature or head separately run on the part. Before all
other functions the parts are gathered, so that every function has the result for all features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import copy_to_axis, gather_from_axis, split_to_axis
from lightning_megatron.layers.linear.shard_functions import (
    ADDRESSES,
    DIM_ARGUMENTS,
    ELEMENTWISE,
    IN_PLACE,
    INVARIANT,
    RESHAPES,
    SIZES,
    VIEWS,
    answer_by_shape,
    reshaped_sections,
)
from lightning_megatron.shapes import Shaped
from lightning_megatron.user_code import line_of_user


@dataclass(eq=False)
class ShardUse:
    """Use of the outputs of one layer by user code.

    Args:
        draws_on_parts: Whether random functions may draw for this rank's part alone. A trial of the
            step turns it on, which gives these functions a stream of random numbers on every rank.
        records: Whether to record what gathers the parts.
        gathers: Functions that needed all features, with the line of the user's code.
    """

    draws_on_parts: bool = False
    records: bool = False
    gathers: dict[str, str] = field(default_factory=dict)


class FeatureShard(Tensor):
    """Full activation of which this rank stores its part of one dimension.

    The shape is that of the full activation. The dimension consists of sections, such as queries,
    keys and values, and each rank has an equal part of every section.

    Communication: an all-gather over tp before functions that cannot run on a part.
    """

    axis: MeshAxis
    dim_cut: int
    sections: tuple[int, ...]
    use: ShardUse
    part: Tensor  #: This rank's part.
    full_shape: torch.Size  #: Shape of the full activation.

    @classmethod
    def of(
        cls,
        part: Shaped[Tensor, "..."],
        axis: MeshAxis,
        dim: int,
        sections: Sequence[int],
        use: ShardUse,
    ) -> FeatureShard:
        """Return the activation whose part on this rank is ``part``.

        Args:
            sections: Full sizes of the sections of the dimension (elements).
        """
        result = part.as_subclass(cls)
        result.part = part
        result.axis = axis
        result.dim_cut = dim
        result.sections = tuple(sections)
        result.use = use
        shape = list(part.shape)
        shape[dim] = sum(sections)
        result.full_shape = torch.Size(shape)
        return result

    def like(
        self, part: Shaped[Tensor, "..."], dim: int, sections: Sequence[int] | None = None
    ) -> FeatureShard:
        """Return another activation with parts on the same ranks."""
        return FeatureShard.of(part, self.axis, dim, sections or self.sections, self.use)

    @property
    def back(self) -> int:
        """Return the cut dimension, counted from the last one (-1)."""
        return self.dim_cut - len(self.full_shape)

    def gather_full(self) -> Shaped[Tensor, "..."]:
        """Gather the full activation; all ranks must use the result in the same way."""
        return gather_sections(self.part, self.axis, self.dim_cut, self.sections)

    def part_of(self, full: Shaped[Tensor, "..."], dim: int) -> Shaped[Tensor, "..."]:
        """Return this rank's part of another full tensor whose dimension is cut in the same way."""
        pieces = []
        for section in _shared(full, self.axis).split(self.sections, dim):
            size = section.shape[dim] // self.axis.size
            pieces.append(section.narrow(dim, self.axis.rank * size, size))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape only: showing values would need a collective call of all ranks."""
        return f"FeatureShard({tuple(self.full_shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, rule, is_final = _rule_of(func)
        call = _Call(func, name, args, kwargs or {})
        result = None if "out" in call.kwargs else rule(call)
        return result if is_final or result is not None else call.on_all_features()


class _Call(NamedTuple):
    """Call of a torch function with at least one shard among its arguments."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        """Return the arguments, in order."""
        return [*self.args, *self.kwargs.values()]

    @property
    def shard(self) -> FeatureShard:
        """Return the first shard among the arguments."""
        values = self.values
        leaves = values if FeatureShard in map(type, values) else pytree.tree_leaves(values)
        return next(leaf for leaf in leaves if isinstance(leaf, FeatureShard))

    @property
    def input(self) -> FeatureShard | None:
        """Return the first argument, if it is the only shard."""
        first, *others = self.values
        is_only = FeatureShard not in map(type, others)
        return first if is_only and isinstance(first, FeatureShard) else None

    @property
    def is_in_place(self) -> bool:
        """Return whether the function writes into its first argument."""
        # In-place functions end in one underscore, special methods in two.
        return self.name in IN_PLACE or self.name.endswith("_") != self.name.endswith("__")

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def run(self, first: Any) -> Any:
        """Call the function with another first argument."""
        return self.func(first, *self.args[1:], **self.kwargs)

    def on_all_features(self) -> Any:
        """Call the function on gathered tensors, and write back what it writes in place."""
        use = self.shard.use
        if use.records:
            use.gathers.setdefault(self.name, str(line_of_user()))
        args, kwargs = pytree.tree_map(gathered, (self.args, self.kwargs))
        result = self.func(*args, **kwargs)
        target = self.args[0] if self.args else None
        if not self.is_in_place or not isinstance(target, FeatureShard):
            return result
        if args[0].shape != target.full_shape:
            raise UnsupportedError(
                "the outputs of a linear layer that is sharded over tp cannot be given another "
                f"shape in place by {self.name}, because this rank has only a part of them: "
                f"{line_of_user()}. Compute a new tensor, or give the layer the kind "
                "'column_gather' in tensor_parallel_plan."
            )
        target.part.copy_(target.part_of(args[0], target.dim_cut))
        return target

    def run_on(self, values: Sequence[Any]) -> Any:
        """Call the function with other arguments, in the same order."""
        count = len(self.args)
        return self.func(*values[:count], **dict(zip(self.kwargs, values[count:], strict=True)))


def gather_sections(
    part: Shaped[Tensor, "..."], axis: MeshAxis, dim: int, sections: Sequence[int]
) -> Shaped[Tensor, "..."]:
    """Gather a dimension of sections, of which each rank has equal parts, one after the other."""
    full = gather_from_axis(part, axis, dim)
    if len(sections) == 1:
        return full
    by_rank = full.unflatten(dim, (axis.size, -1))
    parts = by_rank.split([size // axis.size for size in sections], dim + 1)
    return torch.cat([one.flatten(dim, dim + 1) for one in parts], dim)


def gathered(value: Any) -> Any:
    """Return the full tensor of a feature shard, and other values unchanged."""
    return value.gather_full() if isinstance(value, FeatureShard) else value


def take_part(
    value: Shaped[Tensor, "*batch in_features"], axis: MeshAxis
) -> Shaped[Tensor, "*batch in_local"]:
    """Return this rank's part of the features of a full activation.

    Communication: an all-gather over the axis backward, unless the activation has parts already.
    """
    if isinstance(value, FeatureShard):
        if value.back == -1 and len(value.sections) == 1:
            return value.part
        value = value.gather_full()
    return split_to_axis(value, axis, dim=-1)


@contextmanager
def functions_get_all_features() -> Iterator[None]:
    """Gather shards in the block before functions of ``torch.autograd.Function``.

    The memory of a shard is only a part, which such a function would compute on without a word.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*map(gathered, args), **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _shared(value: Any, axis: MeshAxis) -> Any:
    """Return a tensor that every rank uses for its part alone, so that gradients are summed."""
    is_trained = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
    return copy_to_axis(value, axis) if is_trained else value


def _aligned(values: Sequence[Any], shard: FeatureShard, back: int) -> list[Any] | None:
    """Return operands on this rank's part of the dimension ``back``; None if they are cut apart."""
    parts: list[Any] = []
    size = sum(shard.sections)
    for value in values:
        if isinstance(value, FeatureShard):
            if (value.back, value.sections) != (back, shard.sections):
                return None
            parts.append(value.part)
        elif not isinstance(value, Tensor):
            parts.append(value)
        elif value.dim() < -back or value.shape[back] == 1:
            parts.append(_shared(value, shard.axis))
        elif value.shape[back] == size:
            parts.append(shard.part_of(value, value.dim() + back))
        else:
            return None
    return parts


def _elementwise(call: _Call) -> Any:
    target = call.args[0] if call.args else None
    if call.is_in_place and not isinstance(target, FeatureShard):
        return None
    shard = call.shard
    parts = _aligned(call.values, shard, shard.back)
    result = None if parts is None else call.run_on(parts)
    if not isinstance(result, Tensor):
        return None
    return target if call.is_in_place else shard.like(result, result.dim() + shard.back)


def _dropout(call: _Call) -> Any:
    is_off = not call.argument(2, "training", True) or not call.argument(1, "p", 0.5)
    return _elementwise(call) if is_off or call.shard.use.draws_on_parts else None


def _attention(call: _Call) -> Any:
    """Run scaled_dot_product_attention on this rank's heads, which a later dimension follows."""
    shard = call.args[0] if call.args else None
    if not isinstance(shard, FeatureShard) or shard.back > -3 or len(shard.sections) > 1:
        return None
    if call.argument(4, "dropout_p", 0.0) and not shard.use.draws_on_parts:
        return None
    values = call.values
    if call.kwargs.get("enable_gqa"):
        # Keys have fewer heads than queries, and each rank has those of its queries.
        for index, value in enumerate(values):
            is_cut = isinstance(value, FeatureShard) and value.back == shard.back
            if is_cut and len(value.sections) == 1:
                values[index] = value.like(value.part, value.dim_cut, shard.sections)
    parts = _aligned(values, shard, shard.back)
    return None if parts is None else shard.like(call.run_on(parts), shard.dim_cut)


def _along_dims(call: _Call) -> Any:
    """Run a function along some dimensions, such as a softmax or a sum, on a part of another."""
    shard = call.input
    dims = call.argument(DIM_ARGUMENTS[call.name], "dim")
    # A truth value chooses the estimate of a variance.
    if shard is None or dims is None or isinstance(dims, Tensor | bool):
        return None
    num_dims = len(shard.full_shape)
    dims = {dim % num_dims for dim in (dims if isinstance(dims, Sequence) else (dims,))}
    if not dims or shard.dim_cut in dims:
        return None
    result = call.run(shard.part)
    removed = sum(dim < shard.dim_cut for dim in dims)

    def wrapped(value: Tensor) -> FeatureShard:
        is_smaller = value.dim() < num_dims
        return shard.like(value, shard.dim_cut - removed if is_smaller else shard.dim_cut)

    if isinstance(result, Tensor):
        return wrapped(result)
    return pytree.tree_map_only(Tensor, wrapped, result)


def _norm(call: _Call) -> Any:
    """Run a norm over the last dimensions on a part of an earlier one."""
    shard = call.input
    shape = call.argument(1, "normalized_shape")
    if shard is None or -shard.back <= len(shape):
        return None
    return _with_shared(call, shard)


def _linear(call: _Call) -> Any:
    shard = call.input
    return None if shard is None or shard.back == -1 else _with_shared(call, shard)


def _with_shared(call: _Call, shard: FeatureShard) -> FeatureShard:
    others = [_shared(value, shard.axis) for value in call.values[1:]]
    return shard.like(call.run_on([shard.part, *others]), shard.dim_cut)


def _product(call: _Call) -> Any:
    """Multiply matrices on a part of a batch dimension, or of the rows of the first one."""
    first, second = call.args[:2]
    shard = call.shard
    if call.input is first and shard.back == -2 and second.dim() == 2:
        return _with_shared(call, shard)
    if min(first.dim(), second.dim()) < 2 or shard.back > -3:
        return None
    return _elementwise(call)


def _einsum(call: _Call) -> Any:
    """Sum products of operands whose cut dimension has one letter, which the result has, too."""
    equation, *operands = call.args
    sides = equation.replace(" ", "").split("->") if isinstance(equation, str) else ()
    terms = sides[0].split(",") if sides else ()
    if len(sides) != 2 or "." in equation or len(terms) != len(operands):
        return None
    shard = call.shard
    letters = {
        term[operand.dim_cut]
        for term, operand in zip(terms, operands, strict=True)
        if isinstance(operand, FeatureShard)
    }
    letter = letters.pop()
    if letters or letter not in sides[1]:
        return None
    parts = []
    for term, operand in zip(terms, operands, strict=True):
        if isinstance(operand, FeatureShard):
            if operand.sections != shard.sections:
                return None
            parts.append(operand.part)
        elif letter in term and operand.shape[term.index(letter)] > 1:
            parts.append(shard.part_of(operand, term.index(letter)))
        else:
            parts.append(_shared(operand, shard.axis))
    return shard.like(call.func(equation, *parts), sides[1].index(letter))


def _triangle(call: _Call) -> Any:
    shard = call.input
    return None if shard is None or shard.back > -3 else _elementwise(call)


def _joined(call: _Call) -> Any:
    """Concatenate or stack along another dimension than the cut one."""
    shard = call.shard
    tensors = call.args[0] if call.args else ()
    num_dims = len(shard.full_shape)
    parts = _aligned(tensors, shard, shard.back)
    if parts is None or any(part.dim() != num_dims for part in parts):
        return None
    is_stack = call.name == "stack"
    dim = call.argument(1, "dim", 0) % (num_dims + is_stack)
    if not is_stack and dim == shard.dim_cut:
        return None
    is_before = is_stack and dim <= shard.dim_cut
    return shard.like(call.run(parts), shard.dim_cut + is_before)


@dataclass(frozen=True)
class _Cut:
    """Cut dimension of a view, and its sections, which begin at ``start`` in the full dimension."""

    dim: int
    start: int
    sections: tuple[int, ...]


class _Slice(NamedTuple):
    """A slice that can be a key."""

    start: int | None
    stop: int | None
    step: int | None


#: Types of arguments that are keys as they are.
_NUMBERS = frozenset({int, str})

#: Function, full shape, cut dimension, its sections, and other arguments of a call.
_Key = tuple[Callable[..., Any], tuple[int, ...], int, tuple[int, ...], Any]


def _view(call: _Call) -> Any:
    """Run a function that only moves, adds, removes or selects dimensions."""
    shard = call.input
    if shard is None or (key := _key(call, shard)) is None:
        return None
    if not _keeps_dims(call, shard) or (cuts := _cuts_of_views(key)) is None:
        return None
    if cuts[0].sections == shard.sections:
        result = call.run(shard.part)
        if isinstance(result, Tensor):
            return shard.like(result, cuts[0].dim)
        parts = result
    else:
        size = shard.axis.size
        sizes = [(cut.start // size, sum(cut.sections) // size) for cut in cuts]
        parts = [shard.part.narrow(shard.dim_cut, start, length) for start, length in sizes]
        result = parts[0] if call.name in ("narrow", "__getitem__") else parts
    full = [shard.like(part, cut.dim, cut.sections) for part, cut in zip(parts, cuts, strict=True)]
    return full[0] if isinstance(result, Tensor) else tuple(full)


# User code calls the same functions on the same sizes in every step.
@lru_cache(maxsize=1024)
def _cuts_of_views(key: _Key) -> tuple[_Cut, ...] | None:
    """Return the cut dimension of every view that a call gives; None if they are not cut alike.

    A tensor without memory, which has strides along the cut dimension alone, shows where this
    dimension and its elements are in the result.
    """
    func, shape, dim, sections, _ = key
    probe = torch.empty(shape[dim], device="meta").as_strided(
        shape, [int(number == dim) for number in range(len(shape))]
    )
    views = _run_again(key, probe)
    views = (views,) if isinstance(views, Tensor) else views
    cuts = [_cut_of(sections, view) for view in views]
    found = tuple(cut for cut in cuts if cut is not None)
    is_whole = all(cut.sections == sections for cut in found)
    others = {(*view.shape[:dim], *view.shape[dim + 1 :]) for view in views}
    is_split = others == {(*shape[:dim], *shape[dim + 1 :])}
    return found if len(found) == len(views) and (is_whole or is_split) else None


def _cut_of(sections: tuple[int, ...], view: Tensor) -> _Cut | None:
    """Return where a view of the probe has the cut dimension; None if not as whole sections."""
    sizes = zip(view.shape, view.stride(), strict=True)
    dims = [dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride]
    if len(dims) != 1 or view.stride(dims[0]) != 1:
        return None
    bounds = [0, *accumulate(sections)]
    start = int(view.storage_offset())
    stop = start + view.shape[dims[0]]
    if start not in bounds or stop not in bounds:
        return None
    return _Cut(dims[0], start, sections[bounds.index(start) : bounds.index(stop)])


def _key(call: _Call, shard: FeatureShard) -> _Key | None:
    """Return what decides the shapes of a call's results; None if tensors do, too."""
    others = call.args[1:]
    arguments: Any = (others, ())
    # Sizes and numbers of dimensions are keys as they are.
    if call.kwargs or not _NUMBERS.issuperset(map(type, others)):
        arguments = _frozen((others, tuple(call.kwargs.items())))
    if arguments is None:
        return None
    return call.func, shard.full_shape, shard.dim_cut, shard.sections, arguments


def _frozen(value: Any) -> Any:
    """Return an argument as a key; None if it is a tensor or has one."""
    if isinstance(value, slice):
        value = _Slice(value.start, value.stop, value.step)
    if isinstance(value, list | tuple):
        items = [("none",) if item is None else _frozen(item) for item in value]
        if any(item is None for item in items):
            return None
        return _Slice._make(items) if isinstance(value, _Slice) else tuple(items)
    return value if isinstance(value, int | float | str | type(Ellipsis)) else None


def _thawed(value: Any) -> Any:
    if value == ("none",):
        return None
    if isinstance(value, tuple):
        items = map(_thawed, value)
        return slice(*items) if isinstance(value, _Slice) else tuple(items)
    return value


def _run_again(key: _Key, first: Tensor) -> Any:
    """Run the call of a key on another tensor."""
    args, kwargs = _thawed(key[4])
    return key[0](first, *args, **dict(kwargs))


def _keeps_dims(call: _Call, shard: FeatureShard) -> bool:
    """Return whether a call gives views, and of a part with one element the same ones."""
    if call.name == "squeeze":
        return shard.part.shape[shard.dim_cut] > 1
    if call.name != "__getitem__":
        return True
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return all(type(one) in (int, slice, type(None), type(Ellipsis)) for one in index)


def _reshape(call: _Call) -> Any:
    shard = call.input
    if shard is None or (key := _key(call, shard)) is None:
        return None
    if (found := _reshaped(key, shard.axis.size)) is None:
        return None
    dim, sections, local = found
    part = shard.part.view(local) if call.name == "view" else shard.part.reshape(local)
    return shard.like(part, dim, sections)


@lru_cache(maxsize=1024)
def _shape_after(key: _Key) -> tuple[int, ...]:
    """Return the full shape after a call."""
    return tuple(_run_again(key, torch.empty(key[1], device="meta")).shape)


@lru_cache(maxsize=1024)
def _reshaped(key: _Key, num_ranks: int) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return the cut dimension, its sections and the local shape after a reshape."""
    _, shape, old_dim, old_sections, _ = key
    result = _shape_after(key)
    found = reshaped_sections(shape, old_dim, old_sections, result, num_ranks)
    if found is None:
        return None
    dim, sections = found
    return dim, sections, (*result[:dim], sum(sections) // num_ranks, *result[dim + 1 :])


def _expand(call: _Call) -> Any:
    shard = call.input
    if shard is None or (key := _key(call, shard)) is None:
        return None
    shape = list(_shape_after(key))
    dim = len(shape) + shard.back
    shape[dim] = shard.part.shape[shard.dim_cut]
    return shard.like(shard.part.expand(shape), dim)


def _repeat(call: _Call) -> Any:
    shard = call.input
    repeats = call.argument(1, "repeats")
    dim = call.argument(2, "dim")
    if shard is None or not isinstance(repeats, int) or dim is None:
        return None
    is_cut = dim % len(shard.full_shape) == shard.dim_cut
    sections = [size * repeats if is_cut else size for size in shard.sections]
    return shard.like(call.run(shard.part), shard.dim_cut, sections)


def _complex(call: _Call) -> Any:
    """Join or divide the two numbers of complex ones, which the last dimension has."""
    shard = call.input
    if shard is None or (shard.back == -1 and call.name == "view_as_complex"):
        return None
    return shard.like(call.run(shard.part), shard.dim_cut)


def _sizes(call: _Call) -> Any:
    return answer_by_shape(call.name, call.args[0].full_shape, call.args[1:], call.kwargs)


def _address(call: _Call) -> Any:
    raise UnsupportedError(
        f"{call.name} gives the memory of this rank's part of the outputs of a linear layer that "
        f"is sharded over tp: {line_of_user()}. A kernel of your own would compute on it as if it "
        "were all features.\nGive the layer the kind 'column_gather' in tensor_parallel_plan."
    )


def _invariant(call: _Call) -> Any:
    shard = call.args[0]
    result = call.run(shard.part)
    return shard if result is shard.part else result


_RULES: Mapping[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(DIM_ARGUMENTS, _along_dims),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _product),
    **dict.fromkeys(("cat", "concat", "stack"), _joined),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "einsum": _einsum,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "linear": _linear,
    "expand": _expand,
    "repeat_interleave": _repeat,
    **dict.fromkeys(SIZES, _sizes),
    **dict.fromkeys(ADDRESSES, _address),
}


# User code calls the same functions in every step.
@lru_cache(maxsize=1024)
def _rule_of(func: Callable[..., Any]) -> tuple[str, Callable[[_Call], Any], bool]:
    """Return the name of a function, its rule, and whether None may be its result.

    Without a result of a rule, a function gets all features.
    """
    is_property = func.__name__ == "__get__"
    name: str = getattr(func, "__self__", func).__name__ if is_property else func.__name__
    if name in INVARIANT or name == "__set__" or (is_property and name not in _RULES):
        return name, _invariant, True
    if name.endswith("_") and name[:-1] in ELEMENTWISE:
        return name, _elementwise, False
    return name, _RULES.get(name, lambda call: None), False
