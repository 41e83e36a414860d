"""Pairs of a chosen and a rejected answer in files of JSON lines or Parquet, checked row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.data.conversations import Conversation, messages_of, side_of, tools_of
from lightning_megatron.data.row_files import REMEDY, read_rows
from lightning_megatron.errors import CorruptDataError


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations of one prompt.

    Args:
        chosen: Conversation with the preferred answer.
        rejected: Conversation with the other one; the prompt is the same.
    """

    chosen: Conversation
    rejected: Conversation

    @property
    def place(self) -> str:
        """Return file and row, for errors."""
        return self.chosen.place


def read_pairs(path: Path) -> Iterator[PreferencePair]:
    """Yield the preference pairs of a file in their order.

    Args:
        path: File of JSON lines (also ``.gz``) or Parquet.

    Raises:
        CorruptDataError: If a row is no pair; the message names file and row.
        MissingExtraError: If pyarrow is needed and not installed.
    """
    for row in read_rows(path):
        yield _pair(row.fields(), row.place)


def _pair(row: Mapping[str, Any], place: str) -> PreferencePair:
    if not {"chosen", "rejected"}.issubset(row):
        raise CorruptDataError(
            f"{place} must have chosen and rejected, and may have prompt: its fields are "
            f"{sorted(row)}. {REMEDY}"
        )
    tools = tools_of(row, place)
    sides = {}
    if "prompt" in row:
        given = side_of(row["prompt"], "user", f"{place}: prompt")
        for name in ("chosen", "rejected"):
            sides[name] = (*given, *side_of(row[name], "assistant", f"{place}: {name}"))
        num_given = len(given)
    else:
        for name in ("chosen", "rejected"):
            if isinstance(row[name], str):
                raise CorruptDataError(
                    f"{place}: {name} is a text, so that prompt must be there too: without it, "
                    f"chosen and rejected are lists of messages that begin alike. {REMEDY}"
                )
            sides[name] = messages_of(row[name], f"{place}: {name}")
        num_given = _num_common(sides["chosen"], sides["rejected"])
        if not num_given:
            raise CorruptDataError(
                f"{place}: chosen and rejected must answer the same prompt: their first messages "
                f"differ. {REMEDY}"
            )
    if sides["chosen"] == sides["rejected"]:
        raise CorruptDataError(
            f"{place}: chosen and rejected must differ: they are equal, so that the row prefers "
            f"nothing. {REMEDY}"
        )
    for name, messages in sides.items():
        if not any(message["role"] == "assistant" for message in messages[num_given:]):
            raise CorruptDataError(
                f"{place}: {name} has no message of the role assistant after the prompt. {REMEDY}"
            )
    chosen, rejected = (Conversation(one, num_given, tools, place) for one in sides.values())
    return PreferencePair(chosen, rejected)


def _num_common(first: tuple[Any, ...], second: tuple[Any, ...]) -> int:
    """Return how many messages two conversations have in common at their beginning."""
    same = [one == other for one, other in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)
