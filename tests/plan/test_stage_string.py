"""Strings of stages have the meaning of Megatron-Core, and invalid strings are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan import read_stage_string


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("EtL", (1,)),
        ("Ett|tt|ttL", (2, 2, 2)),
        ("Et*3|(tt|)*29t|L", (3, *[2] * 29, 1, 0)),
        ("E|(t|)*3,t|L", (0, 1, 1, 1, 1, 0)),
        ("E,t*2 | t (t|t)*2 L", (2, 2, 2, 1)),
        ("(Et|tL)", (1, 1)),
        ("E((t|)*2t)*2L", (1, 1, 2, 1, 1)),
        ("Et|*2tL", (1, 0, 1)),
    ],
)
def test_strings_give_the_layers_of_virtual_stages(text: str, counts: tuple[int, ...]) -> None:
    assert read_stage_string(text) == counts


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_every_list_of_numbers_has_a_string(counts: list[int]) -> None:
    written = "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"
    assert read_stage_string(written) == tuple(counts)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "Et|txL",
            ParallelPlanError,
            "stage_layers must consist of known symbols: 'Et|txL' has 'x' at position 5. Use 'E' (embedding), "
            "'t' (layer), 'L' (head with the loss), '|' (next virtual stage), brackets and '*'.",
        ),
        (
            "Et*3|tt,m|L",
            UnsupportedError,
            "stage_layers cannot have layers of multi-token prediction: 'Et*3|tt,m|L' has 'm' at position 9. No model "
            "of this version has such layers. Leave 'm' out.",
        ),
        (
            "Et|t",
            ParallelPlanError,
            "stage_layers must have 'L' once and last, because a model has the head with the loss last: 'Et|t' has it "
            "0 times. Use for example 'Ett|ttt|tL'.",
        ),
        ("t|tL", ParallelPlanError, "must have 'E' once and first, because a model has the embedding first: 't|tL'"),
        ("(Et|)*2L", ParallelPlanError, "'(Et|)*2L' has it 2 times"),
        ("tE|tL", ParallelPlanError, "'tE|tL' has it elsewhere, in 'tE|tL'"),
        ("Et|Lt", ParallelPlanError, "must have 'L' once and last"),
        ("", ParallelPlanError, "must have 'E' once and first"),
        ("E(t|tL", ParallelPlanError, "must close every bracket: 'E(t|tL' leaves 1 open"),
        ("Et)|tL", ParallelPlanError, "must open every bracket that it closes: 'Et)|tL' has ')' at position 3"),
        ("E*t|tL", ParallelPlanError, "must have '*' between a repeated part and a number"),
        ("Et*1234567|tL", ParallelPlanError, "a number of at most six digits after it"),
        ("E((t*999)*999)*999L", ParallelPlanError, "must describe at most 1000000 layers and stages"),
    ],
)  # fmt: skip
def test_strings_without_a_meaning_are_refused(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        read_stage_string(text)


@given(st.text("EtLm|()*, 0123", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        counts = read_stage_string(text)
    except (ParallelPlanError, UnsupportedError):
        return
    assert all(count >= 0 for count in counts)
