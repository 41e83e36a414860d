"""Inference of the output shapes and dtypes of functions and modules, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Maximum number of values that a run guesses; a loop until a condition may never end.
_MAX_GUESSES = 10_000
#: Types whose values can be part of a cache key.
_HASHABLE_TYPES = (
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.Size,
    type(None),
    type(Ellipsis),
)


@dataclass(frozen=True, eq=False)
class OutputSpec:
    """Description of the result of a function without the values of its tensors.

    Args:
        leaves: Leaves of the result; tensors have a shape, a dtype and a device, but no values.
        is_random: Whether the function draws random numbers.
        problem: Side effect of the function that other stages cannot reproduce, with a remedy;
            empty without such an effect.
        written: Indices of the argument leaves into which the function writes in place.
    """

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    is_random: bool
    problem: str = ""
    written: tuple[int, ...] = ()


class ShapeInference:
    """Inference of the outputs of functions and modules from shapes, with a cache."""

    def __init__(self) -> None:
        self._mode: FakeTensorMode | None = None
        self._cache: dict[Any, OutputSpec] = {}
        #: Indices of the argument leaves into which a block writes in place, by block index.
        self.written: dict[int, tuple[int, ...]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeInference:
        """Return an empty cache, because cached outputs belong to the modules that were called."""
        return ShapeInference()

    def clear(self) -> None:
        """Clear the cache, because modules have changed."""
        self._cache.clear()

    def of_module(
        self, module: nn.Module, device: torch.device, args: Any, kwargs: Any
    ) -> OutputSpec:
        """Return the specification of the outputs of a meta module, as if it were on a device.

        Raises:
            RuntimeError: If a shape depends on values, or the module fails.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            # Tensors on other devices keep their values, because the values of a buffer may
            # determine shapes.
            empty = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                for name, tensor in tensors.items()
                if tensor.is_meta
            }
            return functional_call(module, empty, args, kwargs)

        spec = self.of_call((id(module), module.training), call, args, kwargs, guesses=True)
        if any(
            isinstance(value, FakeTensor)
            for part in module.modules()
            for value in vars(part).values()
        ):
            # The module has stored a tensor of this call, on whose shape later calls may depend.
            self._cache.clear()
        return spec

    def of_call(
        self,
        name: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        guesses: bool = False,
    ) -> OutputSpec:
        """Return the specification of the outputs of a function, which ``name`` stands for.

        Args:
            guesses: Whether the function may read values on which its outputs' shapes do not
                depend.

        Raises:
            RuntimeError: If a shape depends on values, or the function fails.
        """
        leaves, structure = flatten((args, kwargs))
        parts = [_key_of(leaf) for leaf in leaves]
        key = None if any(part is None for part in parts) else (name, structure, tuple(parts))
        if key is not None and key in self._cache:
            return self._cache[key]
        self._mode = self._mode or FakeTensorMode(allow_non_fake_inputs=True)
        watch = _Watch(guess=False if guesses else None)
        spec = self._run(watch, function, leaves, structure)
        if watch.num_guesses:
            other = self._run(_Watch(guess=True), function, leaves, structure)
            if _comparable(spec) != _comparable(other):
                raise RuntimeError("code whose results have shapes that depend on values")
        if key is not None:
            self._cache[key] = spec
        return spec

    def _run(
        self,
        watch: _Watch,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
    ) -> OutputSpec:
        assert self._mode is not None, "the caller creates it"
        with torch.no_grad(), self._mode, watch:
            taken = [_without_values(leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(taken, structure)
            try:
                inputs, result = flatten(function(*args, **kwargs))
            except Exception as error:
                if watch.num_guesses:
                    raise RuntimeError(f"{error!r} for values that were guessed") from error
                raise
        problem = _problem_of(inputs) or _problem_of_change(taken, structure, (args, kwargs))
        # Tensors are new here, so a version above 0 shows a write.
        written = [
            number
            for number, leaf in enumerate(taken)
            if isinstance(leaf, FakeTensor) and leaf._version
        ]
        return OutputSpec(tuple(inputs), result, watch.has_drawn, problem, tuple(written))


def _comparable(spec: OutputSpec) -> tuple[object, ...]:
    """Return what two runs with different guesses must agree on."""
    leaves = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in spec.leaves
    ]
    return leaves, spec.structure, spec.problem, spec.written


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the tree structure of a value; dataclasses count as containers."""
    leaves, structure = pytree.tree_flatten(value)
    kinds = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    if not kinds:
        return leaves, structure
    for kind in kinds:
        pytree.register_pytree_node(kind, _items_of, partial(_with_items, kind))
    return flatten(value)


def _items_of(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(field.name for field in fields(value))
    return [getattr(value, name) for name in names], names


def _with_items(kind: type, items: Iterable[Any], names: tuple[str, ...]) -> Any:
    result: Any = object.__new__(kind)
    for name, item in zip(names, items, strict=True):
        # `object.__setattr__` also works for frozen dataclasses.
        object.__setattr__(result, name, item)
    return result


def _problem_of_change(taken: Sequence[Any], structure: pytree.TreeSpec, value: Any) -> str:
    leaves, now = flatten(value)
    if now == structure and all(
        after is before for after, before in zip(leaves, taken, strict=True)
    ):
        return ""
    return (
        "changes a list, dictionary or dataclass among its arguments. Return the new values instead"
    )


def _problem_of(leaves: Sequence[Any]) -> str:
    for leaf in leaves:
        held = (
            getattr(leaf, "__dict__", {}).values() if not isinstance(leaf, (Tensor, type)) else ()
        )
        if any(isinstance(value, Tensor) for value in held):
            return (
                f"returns a {type(leaf).__name__} that holds tensors. Return a tuple, dictionary "
                "or dataclass instead"
            )
    return ""


class _Watch(TorchDispatchMode):
    """Dispatch mode that records whether random numbers are drawn, and guesses values.

    Mixtures written by hand choose the rows of each expert by values: all rows or none, according
    to the guess, and a number or a condition is 1 or 0. What both guesses agree on does not depend
    on these values. With None as the guess, torch refuses to read values.
    """

    def __init__(self, *, guess: bool | None) -> None:
        super().__init__()
        self.guess = guess
        self.has_drawn = False
        self.num_guesses = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.has_drawn = self.has_drawn or torch.Tag.nondeterministic_seeded in func.tags
        if self.guess is not None and args and isinstance(args[0], FakeTensor):
            if func is torch.ops.aten._local_scalar_dense.default:
                self._count()
                if args[0].dtype == torch.bool:
                    return self.guess
                return float(self.guess) if args[0].is_floating_point() else int(self.guess)
            if func is torch.ops.aten.nonzero.default:
                return self._chosen(args[0])
            if func is torch.ops.aten.index.Tensor:
                numbers = [part for index in args[1] for part in self._numbers(index)]
                return func(args[0], numbers)
        return func(*args, **(kwargs or {}))

    def _count(self) -> None:
        self.num_guesses += 1
        if self.num_guesses > _MAX_GUESSES:
            raise RuntimeError("code that reads values again and again")

    def _chosen(self, mask: Tensor) -> Tensor:
        self._count()
        count = mask.numel() if self.guess else 0
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def _numbers(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return the indices that an index stands for, which may be a mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return self._chosen(index).unbind(-1)


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    if type(leaf) is Tensor and leaf.numel() == 1 and leaf.device.type == "cpu":
        # Scalars on the CPU often determine sizes and indices, so they keep their values.
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    if isinstance(leaf, slice):
        bounds = leaf.start, leaf.stop, leaf.step
        is_plain = all(isinstance(bound, (int, type(None))) for bound in bounds)
        return ("slice", bounds) if is_plain else None
    return (type(leaf), leaf) if isinstance(leaf, _HASHABLE_TYPES) else None
