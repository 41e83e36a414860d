"""Nests: values in any combination of mappings, lists, tuples, named tuples and dataclasses.

The batches of users are such nests. Every other object is a leaf, such as a tensor, a number or a
string. torch's pytree is not used for batches: it takes a dataclass as a leaf unless its class is
registered for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the values directly in a container; None for a leaf.

    Args:
        node: Container or leaf.

    Returns:
        Pairs of the expression that follows the container's name, such as ``['labels']``, ``[0]``
        or ``.mask``, and the value.
    """
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if is_dataclass(node) and not isinstance(node, type):
        return [(f".{item.name}", getattr(node, item.name)) for item in fields(node)]
    return None


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest in the order of their containers.

    Args:
        node: Nest.
        path: Name of the nest, with which the paths begin.

    Yields:
        Path of the leaf, such as ``batch['labels'][0]``, and the leaf.
    """
    parts = children(node)
    if parts is None:
        yield path, node
        return
    for suffix, value in parts:
        yield from leaves(value, path + suffix)


def rebuild(node: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container of the same type with a function's results for its values.

    A function that calls :func:`rebuild` itself changes a whole nest.

    Args:
        node: Container. A leaf is returned unchanged.
        function: Function of a value that returns the new value. Fields of a dataclass that its
            constructor does not take are not changed.
    """
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, function)
    if isinstance(node, (list, tuple)):
        parts = [function(value) for value in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    if is_dataclass(node) and not isinstance(node, type):
        taken = [item.name for item in fields(node) if item.init]
        return replace(node, **{name: function(getattr(node, name)) for name in taken})
    return node


def _rebuild_mapping(node: Mapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    parts = {key: function(value) for key, value in node.items()}
    if type(node) is dict:
        return parts
    if not isinstance(node, MutableMapping):
        return type(node)(parts)  # type: ignore[call-arg]
    # The constructor of some mappings, such as defaultdict, takes more than the items.
    rebuilt = copy(node)
    for key, value in parts.items():
        rebuilt[key] = value
    return rebuilt
