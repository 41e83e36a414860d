"""Tokens of conversations by a tokenizer's own chat template, and which of them are answers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.conversations import Conversation, Message
from lightning_megatron.data.pretrained_tokenizer import read_pretrained_tokenizer
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.strict_json import read_regular_file

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """Hugging Face tokenizer with a chat template. No code of its folder runs.

    Args:
        folder: Local folder with ``tokenizer.json``.
        template: Path of a Jinja file that takes the place of the tokenizer's own template; None
            uses that.

    Raises:
        UnsupportedError: If there is no such folder, or no template.
        CorruptDataError: If transformers cannot read the folder.
        MissingExtraError: If transformers is not installed.
    """

    def __init__(self, folder: str, template: str | None = None) -> None:
        if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
            raise UnsupportedError(
                f"the tokenizer of conversations must be a local folder with tokenizer.json: "
                f"{folder!r} is not. Use the folder of a Hugging Face model."
            )
        self._tokenizer = read_pretrained_tokenizer(folder, "PreTrainedTokenizerFast")
        self.folder = folder
        self._template_file = template
        if template is not None:
            content = read_regular_file(Path(template), "Name a Jinja file as chat_template.")
            self._tokenizer.chat_template = content.decode()
        if not isinstance(self._tokenizer.chat_template, str):
            raise UnsupportedError(
                f"the tokenizer of {folder} must have one chat template: it has none or several. "
                "Use the folder of an instruction model, or name a Jinja file as chat_template."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the files once, instead of a copy for each piece of work.
        return _chat_tokenizer, (self.folder, self._template_file)

    @property
    def template(self) -> str:
        """Text of the template."""
        found: str = self._tokenizer.chat_template
        return found

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that determines the tokens of conversations."""
        state = self._tokenizer.backend_tokenizer.to_str(), self.template
        special = sorted(
            (name, str(text)) for name, text in self._tokenizer.special_tokens_map.items()
        )
        version = import_extra("transformers", "hf").__version__
        return hashlib.sha256(repr((state, special, version)).encode()).hexdigest()

    def encode(self, conversation: Conversation) -> tuple[npt.NDArray, npt.NDArray]:
        """Return the tokens of a conversation, and which of them the assistant wrote.

        Where the template marks answers (``{% generation %}``), they are the tokens of these
        marks. Otherwise an answer is what its message adds to the tokens of those before it, with
        the header of an answer at their end.

        Args:
            conversation: Messages of a row.

        Returns:
            Token ids, and True for those of answers; both have a number for each token

        Raises:
            CorruptDataError: If the template refuses the messages, or no token is an answer.
            UnsupportedError: If the template has no marks, and the tokens of the first messages
                change when others follow them.
        """
        messages = conversation.messages
        given = messages[: conversation.num_given]
        if _MARK.search(self.template):
            found = self._render(messages, conversation, return_assistant_tokens_mask=True)
            tokens = found["input_ids"]
            is_answer = np.array(found["assistant_masks"], bool)
            if given:
                is_answer[: self._end(given, tokens, conversation, header=True)] = False
        else:
            tokens = self._render(messages, conversation)["input_ids"]
            is_answer = np.zeros(len(tokens), bool)
            for at in range(len(given), len(messages)):
                if messages[at]["role"] == "assistant":
                    start = self._end(messages[:at], tokens, conversation, header=True)
                    stop = self._end(messages[: at + 1], tokens, conversation)
                    is_answer[start:stop] = True
        if not is_answer[1:].any():
            raise CorruptDataError(
                f"{conversation.place} has an answer without tokens: the template of {self.folder} "
                f"makes {len(tokens)} tokens, none of them an answer's. Repair the row or the "
                "template."
            )
        return np.array(tokens, np.int64), is_answer

    def _end(
        self,
        messages: Sequence[Message],
        tokens: list[int],
        conversation: Conversation,
        header: bool = False,
    ) -> int:
        """Return where the tokens of the first messages end among those of all."""
        if not messages:
            raise CorruptDataError(
                f"{conversation.place} begins with an answer: a template without marks of answers "
                "({% generation %}) needs a message before each of them. Repair the row."
            )
        found = self._render(messages, conversation, add_generation_prompt=header)["input_ids"]
        if tokens[: len(found)] != found:
            differ = [own != whole for own, whole in zip(found, tokens, strict=False)]
            at = differ.index(True) if True in differ else len(tokens)
            raise UnsupportedError(
                f"{conversation.place}: the first {len(messages)} messages must have the same "
                f"tokens alone and with the messages after them: the template of {self.folder} "
                f"changes them from token {at} on, so that it is unknown which tokens are the "
                "answer. Name a template as chat_template that encloses answers in {% generation "
                "%} and {% endgeneration %}."
            )
        return len(found)

    def _render(
        self, messages: Sequence[Message], conversation: Conversation, **options: Any
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=conversation.tools,
                tokenize=True,
                return_dict=True,
                **options,
            )
        # Templates raise errors of Jinja, and what the code inside of them raises.
        except Exception as error:
            raise CorruptDataError(
                f"{conversation.place} is refused by the chat template of {self.folder}: {error}. "
                "Repair the row, or use another template."
            ) from error


@lru_cache(maxsize=1)
def _chat_tokenizer(folder: str, template: str | None) -> ChatTokenizer:
    return ChatTokenizer(folder, template)
