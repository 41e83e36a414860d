"""Strings that give the layers of each virtual stage, such as ``Et*3|(tt|)*29L``."""

from __future__ import annotations

import re

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import shown

_REPEAT = re.compile(r"\*([0-9]{1,6})(?![0-9])")
#: Longest string after repetition; no pipeline has as many layers and stages (symbols).
_MAX_SYMBOLS = 1_000_000
_EXAMPLE = "Use for example 'Ett|ttt|tL'."


def read_stage_string(text: str) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage that a string describes.

    ``E`` is the embedding, ``t`` a Transformer layer and ``L`` the head with the loss. ``|`` begins
    the next virtual stage. ``*n`` repeats the symbol or the parentheses before it n times. Commas
    and spaces are ignored.

    Args:
        text: String in this notation.

    Raises:
        ParallelPlanError: For an unknown symbol, unbalanced brackets, too many symbols, an
            embedding that is not first and single, or a head that is not last and single.
        UnsupportedError: For ``m``, a layer of multi-token prediction.

    Source: the notation of Megatron-Core's ``--pipeline-model-parallel-layout``.
    """
    signs = _expanded(text)
    _require_end(text, signs, "E", "the embedding", "first", signs.startswith("E"))
    _require_end(text, signs, "L", "the head with the loss", "last", signs.endswith("L"))
    return tuple(stage.count("t") for stage in signs.split("|"))


def _expanded(text: str) -> str:
    """Return a string without repetitions, brackets and ignored symbols."""
    # The last element belongs to the innermost bracket that is open.
    parts = [""]
    position = 0
    while position < len(text):
        sign = text[position]
        position += 1
        if sign in ", ":
            continue
        if sign == "(":
            parts.append("")
            continue
        if sign == ")" and len(parts) > 1:
            item = parts.pop()
        elif sign in "EtL|":
            item = sign
        else:
            raise _refusal(text, sign, position)
        times = _REPEAT.match(text, position)
        number = 1
        if times is not None:
            position = times.end()
            number = int(times[1])
        if len(parts[-1]) + len(item) * number > _MAX_SYMBOLS:
            raise ParallelPlanError(
                f"stage_layers must describe at most {_MAX_SYMBOLS} layers and stages: "
                f"{shown(text)} repeats its parts more often. Use smaller numbers after '*'."
            )
        parts[-1] += item * number
    if len(parts) > 1:
        raise ParallelPlanError(
            f"stage_layers must close every bracket: {shown(text)} leaves {len(parts) - 1} open. "
            "Brackets enclose repeated parts. Add ')*' and a number for each."
        )
    return parts[0]


def _refusal(text: str, sign: str, position: int) -> ParallelPlanError | UnsupportedError:
    where = f"{shown(text)} has {sign!r} at position {position}"
    if sign == "m":
        return UnsupportedError(
            f"stage_layers cannot have layers of multi-token prediction: {where}. No model of this "
            "version has such layers. Leave 'm' out."
        )
    if sign == ")":
        return ParallelPlanError(
            f"stage_layers must open every bracket that it closes: {where}. Brackets enclose "
            "repeated parts. Add '(' before it, or leave it out."
        )
    if sign == "*":
        return ParallelPlanError(
            f"stage_layers must have '*' between a repeated part and a number: {where}. Use 't', "
            "'|' or ')' before it, and a number of at most six digits after it."
        )
    return ParallelPlanError(
        f"stage_layers must consist of known symbols: {where}. Use 'E' (embedding), 't' "
        "(layer), 'L' (head with the loss), '|' (next virtual stage), brackets and '*'."
    )


def _require_end(text: str, signs: str, sign: str, part: str, place: str, is_there: bool) -> None:
    number = signs.count(sign)
    if number == 1 and is_there:
        return
    occurrence = f"{number} times" if number != 1 else f"elsewhere, in {shown(signs)}"
    raise ParallelPlanError(
        f"stage_layers must have '{sign}' once and {place}, because a model has {part} {place}: "
        f"{shown(text)} has it {occurrence}. {_EXAMPLE}"
    )
