"""Conversation on the terminal with a model placed under a layout."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from torch import nn

from lightning_megatron.cli.text_generation import PromptText, TextGeneration
from lightning_megatron.data.tokenizer import Tokenizer
from lightning_megatron.generation.decoding import gpt_of
from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import MeshAxis
from lightning_megatron.tasks.chat import ChatTokenizer, Message

#: Time after which the first rank tells the others that the user still writes, long before their
#: wait would end as a failure (s).
_SIGN_OF_LIFE = 60.0


@dataclass(frozen=True)
class Talk:
    """Function that answers the lines of a user until an empty line or the end of the input.

    Each answer follows the whole conversation so far. If the model has no room for it, the
    conversation begins anew with the last question.

    Args:
        chat: Tokenizer with the chat template.
        beginning: Messages before the first question.
        max_length: Maximum tokens of a conversation with its answer; None if unknown (tokens).
    """

    chat: ChatTokenizer
    tokenizer: Tokenizer
    settings: GenerationSettings
    stop_strings: tuple[str, ...] = ()
    beginning: tuple[Message, ...] = ()
    max_length: int | None = None

    def __call__(self, model: nn.Module) -> None:
        """Talk with the user; all ranks call this, and the first one reads and prints.

        Communication: that of the model, and one broadcast of an object over the world for each
            question, and for each minute that the user thinks.
        """
        mesh = gpt_of(model).mesh
        prints = mesh.rank == 0
        messages = [*self.beginning]
        number = 0
        while question := _next_line(mesh.world_cpu):
            asked: Message = {"role": "user", "content": question}
            if not self._fits([*messages, asked]):
                messages = [*self.beginning]
                if not self._fits([*messages, asked]):
                    _note("the question is too long for the model; ask a shorter one", prints)
                    continue
                _note("the conversation has become too long, and begins anew", prints)
            messages.append(asked)
            prompt = PromptText(question, self._tokens(messages))
            call = TextGeneration(
                [prompt], self.tokenizer, self.settings, self.stop_strings, is_chat=True
            )
            text = call.answer(model, number, prints=prints)
            messages.append({"role": "assistant", "content": text})
            number += 1

    def _tokens(self, messages: list[Message]) -> list[int]:
        return self.chat.prompt_tokens(messages, "the conversation")

    def _fits(self, messages: list[Message]) -> bool:
        needed = len(self._tokens(messages)) + self.settings.max_new_tokens
        return self.max_length is None or needed <= self.max_length


def _note(text: str, prints: bool) -> None:
    if prints:
        print(f"({text})", flush=True)


def _next_line(world: MeshAxis) -> str:
    """Return the next line of the user on all ranks; empty at the end of the input."""
    lines: SimpleQueue[str] = SimpleQueue()
    if world.rank == 0:
        # A thread waits for the user, so that the ranks can meet meanwhile.
        Thread(target=_read_line, args=(lines,), daemon=True).start()
    line: str | None = None
    while line is None:
        if world.rank == 0:
            with suppress(Empty):
                line = lines.get(timeout=_SIGN_OF_LIFE)
        line = broadcast_object(line, world)
    return line


def _read_line(lines: SimpleQueue[str]) -> None:
    line = ""
    with suppress(EOFError):
        line = input("> " if sys.stdin.isatty() else "")
    lines.put(line.strip())
