"""Tests of nested containers: paths of leaves, and types of rebuilt containers."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from lightning_megatron.nest import children, leaves, rebuild


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Sample:
    tokens: Any
    mask: Any = None
    size: int = field(init=False, default=7)


def doubled(node: Any) -> Any:
    return node * 2 if isinstance(node, int) else rebuild(node, doubled)


NEST = {"a": [1, (2, None)], 3: Pair(4, {"x": Sample(5, [6])}), "text": "abc"}


def test_leaves_come_in_order_with_their_paths():
    assert list(leaves(NEST, "batch")) == [
        ("batch['a'][0]", 1),
        ("batch['a'][1][0]", 2),
        ("batch['a'][1][1]", None),
        ("batch[3][0]", 4),
        ("batch[3][1]['x'].tokens", 5),
        ("batch[3][1]['x'].mask[0]", 6),
        ("batch[3][1]['x'].size", 7),
        ("batch['text']", "abc"),
    ]


def test_other_objects_are_leaves_and_empty_containers_have_none():
    for leaf in (None, 3, "abc", b"ab", {1, 2}, range(2), Sample, object()):
        assert children(leaf) is None
        assert list(leaves(leaf, "x")) == [("x", leaf)]
        assert rebuild(leaf, lambda value: pytest.fail("a leaf has no values")) is leaf
    for empty in ({}, [], (), OrderedDict()):
        assert children(empty) == []
        assert list(leaves(empty)) == []
        assert rebuild(empty, doubled) == empty


def test_a_nest_is_rebuilt_with_the_types_of_its_containers():
    rebuilt = doubled(NEST)
    pair = Pair(8, {"x": Sample(10, [12])})
    assert rebuilt == {"a": [2, (4, None)], 3: pair, "text": "abc"}
    assert type(rebuilt[3]) is Pair
    assert type(rebuilt[3].second["x"]) is Sample
    assert NEST["a"] == [1, (2, None)], "the nest itself is unchanged"
    assert doubled(defaultdict(list, a=1))["new"] == []
    for mapping in (OrderedDict([("b", 1), ("a", 2)]), UserDict(b=1, a=2)):
        assert type(doubled(mapping)) is type(mapping)
        assert list(doubled(mapping).items()) == [("b", 2), ("a", 4)]
    assert dict(doubled(MappingProxyType({"a": 1}))) == {"a": 2}
