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

        spec = self.of_call((id(module), module.training), call, args, kwargs)
        if any(
            isinstance(value, FakeTensor)
            for part in module.modules()
            for value in vars(part).values()
        ):
            # The module has stored a tensor of this call, on whose shape later calls may depend.
            self._cache.clear()
        return spec

    def of_call(
        self, name: Any, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> OutputSpec:
        """Return the specification of the outputs of a function, which ``name`` stands for.

        Raises:
            RuntimeError: If a shape depends on values, or the function fails.
        """
        leaves, structure = flatten((args, kwargs))
        parts = [_key_of(leaf) for leaf in leaves]
        key = None if any(part is None for part in parts) else (name, structure, tuple(parts))
        if key is not None and key in self._cache:
            return self._cache[key]
        self._mode = self._mode or FakeTensorMode(allow_non_fake_inputs=True)
        draws = _Draws()
        with torch.no_grad(), self._mode, draws:
            taken = [_without_values(leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(taken, structure)
            outputs: tuple[list[Any], pytree.TreeSpec] = flatten(function(*args, **kwargs))
        inputs, result = outputs
        problem = _problem_of(inputs) or _problem_of_change(taken, structure, (args, kwargs))
        # Tensors are new here, so a version above 0 shows a write.
        written = [
            number
            for number, leaf in enumerate(taken)
            if isinstance(leaf, FakeTensor) and leaf._version
        ]
        spec = OutputSpec(tuple(inputs), result, draws.has_drawn, problem, tuple(written))
        if key is not None:
            self._cache[key] = spec
        return spec


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


class _Draws(TorchDispatchMode):
    """Dispatch mode that records whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.has_drawn = self.has_drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


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
