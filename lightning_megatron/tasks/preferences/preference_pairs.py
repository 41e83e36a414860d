"""Reading and validation of preference pairs in the rows of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.building_blocks import REMEDY, FileRow
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.tasks.chat import Conversation, messages_of, side_of, tools_of


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations of one prompt."""

    chosen: Conversation
    rejected: Conversation


def pair_of(row: FileRow) -> PreferencePair:
    """Return the preference pair of a row."""
    return _pair(row.fields(), row.place)


def _pair(row: Mapping[str, Any], place: str) -> PreferencePair:
    if not {"chosen", "rejected"}.issubset(row):
        raise CorruptDataError(
            f"{place} must have chosen and rejected, and may have prompt: its fields are "
            f"{sorted(row)}. {REMEDY}"
        )
    tools = tools_of(row, place)
    sides = {}
    if "prompt" in row:
        prompt = side_of(row["prompt"], "user", f"{place}: prompt")
        for name in ("chosen", "rejected"):
            sides[name] = (*prompt, *side_of(row[name], "assistant", f"{place}: {name}"))
        num_prompt_messages = len(prompt)
    else:
        for name in ("chosen", "rejected"):
            if isinstance(row[name], str):
                raise CorruptDataError(
                    f"{place}: {name} must be a list of messages if the row has no prompt: it is a "
                    "text. Without prompt, chosen and rejected begin with the messages of the "
                    f"prompt. {REMEDY}"
                )
            sides[name] = messages_of(row[name], f"{place}: {name}")
        num_prompt_messages = _num_common(sides["chosen"], sides["rejected"])
        if not num_prompt_messages:
            raise CorruptDataError(
                f"{place}: chosen and rejected must begin with the same prompt: their first "
                f"messages differ. {REMEDY}"
            )
    if sides["chosen"] == sides["rejected"]:
        raise CorruptDataError(
            f"{place}: chosen and rejected must differ, because equal answers express no "
            f"preference: they are equal. {REMEDY}"
        )
    for name, messages in sides.items():
        if not any(message["role"] == "assistant" for message in messages[num_prompt_messages:]):
            raise CorruptDataError(
                f"{place}: {name} has no message of the role assistant after the prompt. {REMEDY}"
            )
    chosen, rejected = (
        Conversation(messages, num_prompt_messages, tools, place) for messages in sides.values()
    )
    return PreferencePair(chosen, rejected)


def _num_common(first: tuple[Any, ...], second: tuple[Any, ...]) -> int:
    """Return the number of messages with which both conversations begin."""
    same = [left == right for left, right in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)
