"""Segments run in order on values by name, open into their parts, and are split into pieces."""

from __future__ import annotations

import gc
import operator
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.segments import Segment, SegmentList, split


def one_more(x: Any) -> Any:
    return x + 1


def named(name: str, reads: str, writes: str, **options: Any) -> Segment:
    """Build a segment that adds its inputs and 1, from names without commas between them."""
    return Segment(name, lambda *x: sum(x) + 1, (*reads,), (*writes,), **options)


def moved(first: str = "") -> SegmentList:
    """Build a list with a transfer from ``b`` to ``d``, which the segment of this name starts."""
    return SegmentList(
        [
            named("a", "x", "a", scopes=("attention",)),
            named("b", "a", "b", scopes=("preprocess",), is_static=first != "b", starts_transfer=True),
            named("c", "a", "c", scopes=("preprocess",)),
            named("d", "b", "d", scopes=("preprocess",)),
            named("e", "cd", "x", scopes=("combine",)),
            named("f", "xa", "y", scopes=("mlp",)),
        ],
        ("x",),
        ("y",),
    )  # fmt: skip


def names_of(pieces: list[SegmentList]) -> list[str]:
    """Return the names of the segments of each piece; capital letters are static."""
    found = ["".join(segment.name for segment in piece) for piece in pieces]
    return [
        names.upper() if piece.is_static else names
        for names, piece in zip(found, pieces, strict=True)
    ]


def run_pieces(pieces: list[SegmentList], values: dict[str, Any]) -> dict[str, Any]:
    for piece in pieces:
        found = piece(tuple(values[name] for name in piece.inputs))
        values = values | dict(zip(piece.outputs, found, strict=True))
    return values


def test_values_go_from_segment_to_segment() -> None:
    segments = [
        Segment("both", lambda x: (x + 1, x * 2), ("x",), ("y", "z")),
        Segment("sum", operator.add, ("y", "z"), ("out",)),
    ]
    assert SegmentList(segments, ("x",), ("out", "z"))((5,)) == (16, 10)
    assert SegmentList([], ("x",), ("x",))((5,)) == (5,)


def test_a_value_that_nothing_reads_any_more_is_let_go() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        made = x + 1
        kept.append(weakref.ref(made))
        return made

    def look(x: Tensor) -> bool:
        gc.collect()
        return kept[0]() is None

    segments = [
        Segment("make", make, ("x",), ("y",)),
        Segment("use", torch.sum, ("y",), ("s",)),
        Segment("look", look, ("s",), ("is_gone",)),
    ]
    assert SegmentList(segments, ("x",), ("is_gone",))((torch.zeros(3),))[0]


def test_segments_that_read_what_is_not_there_are_refused() -> None:
    first = Segment("first", abs, ("y",), ("z",))
    with pytest.raises(ValueError, match=r"'first' reads \['y'\], but available are \['x'\]"):
        SegmentList([first], ("x",), ("z",))
    with pytest.raises(ValueError, match=r"no segment writes \['out'\]"):
        SegmentList([first], ("y",), ("out",))
    with pytest.raises(ValueError, match=r"each of its inputs \('y',\): 2 were given"):
        SegmentList([first], ("y",), ("z",))((1, 2))


def test_parts_take_the_place_of_their_segment_and_begin_first() -> None:
    events: list[str] = []
    inner = SegmentList(
        [
            Segment("one", one_more, ("hidden",), ("between",), scopes=("router",)),
            Segment("two", one_more, ("between",), ("hidden",), scopes=("experts",)),
        ],
        ("hidden",),
        ("hidden",),
        lambda: events.append("begin"),
    )
    whole = Segment("layer", lambda x: inner((x,))[0], ("before",), ("after",), parts=lambda: inner)
    outer = SegmentList([whole, named("last", "a", "b")], ("before", "a"), ("after", "b"))
    opened = outer.expand()
    assert [segment.name for segment in opened] == ["layer.one", "layer.two", "last"]
    assert [segment.reads for segment in opened] == [("before",), ("layer.between",), ("a",)]
    assert opened.segments[1].writes == ("after",)
    assert opened((1, 1)) == outer((1, 1)) == (3, 2)
    assert events == ["begin", "begin"]


def test_a_compiled_module_stays_whole_and_is_as_static_as_its_parts() -> None:
    module = nn.Linear(2, 2)
    parts = SegmentList(
        [named("p", "x", "q", scopes=("router",)), named("r", "q", "y", is_static=False)],
        ("x",),
        ("y",),
    )
    whole = Segment("m", one_more, ("x",), ("y",), modules=(module,), parts=lambda: parts)
    outer = SegmentList([whole], ("x",), ("y",))
    assert [one.name for one in outer.expand()] == ["m.p", "m.r"]
    module.compile(backend="eager")
    (kept,) = outer.expand()
    assert (kept.name, kept.is_static, kept.scopes) == ("m", False, ("router",))
    assert outer.expand().parameters == (module.weight, module.bias)
    (kept,) = SegmentList(
        [Segment("w", one_more, ("x",), ("y",), parts=lambda: parts, stays_whole=True)], ("x",), ("y",)
    ).expand()  # fmt: skip
    assert kept.name == "w"


def test_an_output_that_would_replace_an_input_too_early_is_refused() -> None:
    parts = SegmentList([named("p", "i", "o"), named("q", "i", "r")], ("i",), ("o",))
    whole = Segment("m", abs, ("x",), ("x",), parts=lambda: parts)
    with pytest.raises(ValueError, match=r"'q' of 'm' reads \['x'\].*Give the output another name"):
        SegmentList([whole], ("x",), ("x",)).expand()


@pytest.mark.parametrize(
    ("eager", "options", "pieces"),
    [
        ("", {}, ["ABCDEF"]),
        ("b", {}, ["A", "bcd", "EF"]),
        ("", {"cuts": ["a", "e"]}, ["A", "BCDE", "F"]),
        ("", {"cuts": ["b"]}, ["ABCD", "EF"]),
        ("b", {"cuts": ["c", "f"]}, ["A", "bcd", "EF"]),
        ("", {"scopes": ["attention"]}, ["A", "bcdef"]),
        ("", {"scopes": ["mlp", "combine"]}, ["abcd", "EF"]),
        ("", {"scopes": ["preprocess"]}, ["a", "BCD", "ef"]),
        ("b", {"scopes": []}, ["abcdef"]),
    ],
)
def test_static_runs_and_eager_pieces_follow_each_other(
    eager: str, options: dict[str, Any], pieces: list[str]
) -> None:
    whole = moved(eager)
    found = split(whole, **options)
    assert names_of(found) == pieces
    assert run_pieces(found, {"x": 2})["y"] == whole((2,))[0]


def test_a_piece_reads_what_came_before_and_writes_what_comes_after() -> None:
    first, second, third = split(moved("b"))
    assert (first.inputs, first.outputs) == (("x",), ("a",))
    assert (second.inputs, second.outputs) == (("a",), ("c", "d"))
    # The second `x` is no other piece's business.
    assert (third.inputs, third.outputs) == (("c", "d", "a"), ("y",))


def test_unknown_scopes_and_cuts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="one of embedding, attention.*all: 'attn'"):
        split(moved(), scopes=["attn", "mlp"])
    with pytest.raises(UnsupportedError, match=r"\['z'\] are not among \['a', 'b'"):
        split(moved(), cuts=["z", "a"])
