"""Reading and validation of conversations in the rows of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.building_blocks import FileRow
from lightning_megatron.errors import CorruptDataError

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, ...]}'
#: Last sentence of an error about a row of a file.
REMEDY = "Repair the row, or remove it."

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages of one row of a file.

    Args:
        messages: Messages with ``role``, ``content`` and other fields that the template reads.
        num_prompt_messages: Number of leading messages that are the prompt. Answers among them have
            no labels.
        tools: Tools that the template describes to the model; None means no tools.
    """

    messages: tuple[Message, ...]
    num_prompt_messages: int
    tools: list[Any] | None
    place: str


def conversation_of(row: FileRow) -> Conversation:
    """Return the conversation of a row."""
    return _conversation(row.fields(), row.place)


def _conversation(fields: Mapping[str, Any], place: str) -> Conversation:
    has_pair = "prompt" in fields or "completion" in fields
    if ("messages" in fields) == has_pair or has_pair != {"prompt", "completion"}.issubset(fields):
        raise CorruptDataError(
            f"{place} must have either messages or both prompt and completion: its fields are "
            f"{sorted(fields)}. {REMEDY}"
        )
    tools = tools_of(fields, place)
    if not has_pair:
        messages = messages_of(fields["messages"], f"{place}: messages")
        num_prompt_messages = 0
    else:
        prompt = side_of(fields["prompt"], "user", f"{place}: prompt")
        answer = side_of(fields["completion"], "assistant", f"{place}: completion")
        messages = (*prompt, *answer)
        num_prompt_messages = len(prompt)
    if not any(message["role"] == "assistant" for message in messages[num_prompt_messages:]):
        raise CorruptDataError(
            f"{place} has no message of the role assistant, whose tokens would be the labels. "
            f"{REMEDY}"
        )
    return Conversation(messages, num_prompt_messages, tools, place)


def tools_of(row: Mapping[str, Any], place: str) -> list[Any] | None:
    """Return the tools of a row, which the chat template describes to the model; None for none."""
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise CorruptDataError(
            f"{place}: tools must be a list of descriptions: it is a {type(tools).__name__}. "
            f"{REMEDY}"
        )
    return tools


def side_of(value: Any, role: str, place: str) -> tuple[Message, ...]:
    """Return the messages of a prompt or an answer.

    Args:
        value: List of messages, or the text of a single message.
    """
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return messages_of(messages, place)


def messages_of(value: Any, place: str) -> tuple[Message, ...]:
    """Validate messages, and return them without fields that are None."""
    if not isinstance(value, list) or not value:
        raise CorruptDataError(f"{place} must be a non-empty list of messages. {REMEDY}")
    return tuple(
        _message(message, f"{place}, message {number}") for number, message in enumerate(value, 1)
    )


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise CorruptDataError(
            f"{place} must be an object with role and content: it is a {type(value).__name__}. "
            f"{REMEDY}"
        )
    message = {name: part for name, part in value.items() if part is not None}
    role = message.get("role")
    if role not in ROLES:
        raise CorruptDataError(
            f"{place}: the role must be one of {', '.join(ROLES)}: it is {role!r}. {REMEDY}"
        )
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(message.get("content", "" if calls else None), str):
        raise CorruptDataError(f"{place} of the role {role} must have a text as content. {REMEDY}")
    if role == "assistant" and not calls and not message["content"].strip():
        raise CorruptDataError(f"{place} is an answer without text. {REMEDY}")
    return message
