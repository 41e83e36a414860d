"""Tokenization of conversations with the chat template of a tokenizer, and masks of the answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from lightning_megatron.building_blocks import (
    local_folder,
    read_pretrained_tokenizer,
    tokenizer_files,
)
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.tasks.chat.conversations import Conversation, Message

#: Length of rendered text that is always accepted, and the factor by which a template may lengthen
#: its messages and tools beyond it (characters).
_MOST_CHARACTERS = 1 << 20
_GROWTH = 16
#: Limit of the time that the rendering of one conversation computes (s).
_MOST_SECONDS = 5.0
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


class ChatTokenizer:
    """Hugging Face tokenizer with a chat template. It runs no code from the folder.

    Args:
        folder: Folder with ``tokenizer.json``, or a model's name on the Hub.
        template: Path of a Jinja file whose template replaces that of the tokenizer; None uses the
            template of the tokenizer.
    """

    def __init__(self, folder: str, template: str | None = None) -> None:
        folder = local_folder(folder, has_weights=False)
        text = read_template(folder, template)
        self._tokenizer = read_pretrained_tokenizer(folder, "PreTrainedTokenizerFast")
        self.folder = folder
        self._template_file = template
        if template is not None:
            self._tokenizer.chat_template = text
        _check_one(self._tokenizer.chat_template, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process reads the files once, instead of unpickling a tokenizer for each task.
        return _chat_tokenizer, (self.folder, self._template_file)

    @property
    def template(self) -> str:
        """Text of the template."""
        template: str = self._tokenizer.chat_template
        return template

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens of conversations."""
        state = self._tokenizer.backend_tokenizer.to_str(), self.template
        special = sorted(
            (name, str(text)) for name, text in self._tokenizer.special_tokens_map.items()
        )
        version = import_extra("transformers", "hf").__version__
        return hashlib.sha256(repr((state, special, version)).encode()).hexdigest()

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Special token that ends an answer of the template; empty if there is none."""
        messages = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            tokens, is_answer = self.encode(Conversation(messages, 1, None, "a short conversation"))
        except (CorruptDataError, UnsupportedError):
            # A template may demand other messages.
            return ()
        added = self._tokenizer.added_tokens_decoder
        ends = [int(token) for token in tokens[is_answer] if token in added]
        return tuple(token for token in ends[-1:] if added[token].special)

    def prompt_tokens(
        self, messages: Sequence[Message], place: str, tools: list[Any] | None = None
    ) -> list[int]:
        """Return the tokens of messages, and of what the template writes before an answer to them.

        Args:
            place: Name of the conversation in errors.
            tools: Descriptions of tools, which the template writes; None for none.
        """
        conversation = Conversation(tuple(messages), len(messages), tools, place)
        tokens: list[int] = self._render(messages, conversation, header=True)["input_ids"]
        return tokens

    def files(self) -> dict[str, bytes]:
        """Return the files with which others tokenize, chat and stop like this tokenizer.

        They are those of the folder, with this template, and with the tokens that end its answers
        among those that end generation.
        """
        files = tokenizer_files(self.folder)
        for name in [name for name in files if name.startswith("chat_template")]:
            del files[name]
        files["chat_template.jinja"] = self.template.encode()
        settings = json.loads(files.get("tokenizer_config.json", b"{}"))
        if "chat_template" in settings:
            # Old readers look at this place alone.
            content = json.dumps(settings | {"chat_template": self.template}, indent=2)
            files["tokenizer_config.json"] = content.encode()
        generation = json.loads(files.get("generation_config.json", b"{}"))
        if not generation:
            path = Path(self.folder, "config.json")
            config = json.loads(path.read_bytes()) if path.is_file() else {}
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            generation = {name: config[name] for name in names if config.get(name) is not None}
        ends = generation.get("eos_token_id") or []
        ends = ends if isinstance(ends, list) else [ends]
        new = [token for token in self.end_tokens if token not in ends]
        if new:
            generation["eos_token_id"] = [*ends, *new]
            files["generation_config.json"] = json.dumps(generation, indent=2).encode()
        return files

    def encode(self, conversation: Conversation) -> tuple[npt.NDArray, npt.NDArray]:
        """Return the tokens of a conversation, and a mask of those that the assistant wrote.

        If the template marks answers with ``{% generation %}``, the mask has the marked tokens.
        Otherwise an answer is the difference between two renderings of the conversation: up to and
        including its message, and up to the message before it plus the generation prompt.

        Returns:
            Ids of all tokens, and an array of the same length that is True for tokens of answers.
        """
        messages = conversation.messages
        prompt = messages[: conversation.num_prompt_messages]
        if _MARK.search(self.template):
            rendered = self._render(messages, conversation, mask=True)
            tokens = rendered["input_ids"]
            is_answer = np.array(rendered["assistant_masks"], bool)
            if prompt:
                is_answer[: self._end(prompt, tokens, conversation, header=True)] = False
        else:
            tokens = self._render(messages, conversation)["input_ids"]
            is_answer = np.zeros(len(tokens), bool)
            for index in range(len(prompt), len(messages)):
                if messages[index]["role"] == "assistant":
                    start = self._end(messages[:index], tokens, conversation, header=True)
                    stop = self._end(messages[: index + 1], tokens, conversation)
                    is_answer[start:stop] = True
        if not is_answer[1:].any():
            raise CorruptDataError(
                f"{conversation.place} must have an answer with at least one token: the template "
                f"of {self.folder} makes {len(tokens)} tokens, and none belongs to an answer. "
                "Repair the row or the template."
            )
        return np.array(tokens, np.int64), is_answer

    def _end(
        self,
        messages: Sequence[Message],
        tokens: list[int],
        conversation: Conversation,
        header: bool = False,
    ) -> int:
        """Return the number of tokens of the first messages, a prefix of all tokens.

        Args:
            header: Whether to count the generation prompt that follows these messages, too.
        """
        if not messages:
            raise CorruptDataError(
                f"{conversation.place} must not begin with an answer, because the template does "
                "not mark answers with {% generation %}: an answer is then found by the tokens of "
                "the messages before it. Repair the row."
            )
        first_tokens = self._render(messages, conversation, header)["input_ids"]
        if tokens[: len(first_tokens)] != first_tokens:
            differ = [
                token != token_of_all
                for token, token_of_all in zip(first_tokens, tokens, strict=False)
            ]
            index = differ.index(True) if True in differ else len(tokens)
            raise UnsupportedError(
                f"{conversation.place}: the first {len(messages)} messages must have the same "
                f"tokens alone and with the messages after them: the template of {self.folder} "
                f"changes them from token {index} on, so the tokens of the answer are unknown. Set "
                "chat_template to a template that encloses answers in {% generation %} and "
                "{% endgeneration %}."
            )
        return len(first_tokens)

    def _render(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        header: bool = False,
        mask: bool = False,
    ) -> Any:
        given = [dict(message) for message in messages]
        apply = partial(
            self._tokenizer.apply_chat_template,
            given,
            tools=conversation.tools,
            add_generation_prompt=header,
        )
        limit = _MOST_CHARACTERS + _GROWTH * len(repr((given, conversation.tools)))
        try:
            # To render takes a small part of the time, but tokens of an endless text take hours.
            with _time_limit(_MOST_SECONDS):
                num_written = len(apply(tokenize=False))
            if num_written > limit:
                raise ValueError(
                    f"it writes {num_written} characters, and at most {limit} are expected of "
                    "messages of this length"
                )
            return apply(tokenize=True, return_dict=True, return_assistant_tokens_mask=mask)
        # A template can raise any exception: those of Jinja, and those of the expressions in it.
        except Exception as error:
            raise CorruptDataError(
                f"{conversation.place} is rejected by the chat template of {self.folder}: {error}. "
                "Repair the row, or use another template."
            ) from error


def read_template(folder: str, template: str | None) -> str:
    """Return the text of the chat template that a ``ChatTokenizer`` would have, without loading it.

    Args:
        folder: Local folder with ``tokenizer.json``, which must exist.
        template: Path of a Jinja file; None reads the template of the folder.

    Raises:
        UnsupportedError: If the folder has no tokenizer, or not one template.
        CorruptDataError: If a file cannot be read, or the template is not Jinja.
    """
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise UnsupportedError(
            f"the tokenizer of conversations must be a local folder with tokenizer.json: "
            f"{folder!r} is not. Use the folder of a Hugging Face model."
        )
    path = Path(template or os.path.join(folder, "chat_template.jinja"))
    settings = Path(folder, "tokenizer_config.json")
    text: Any = None
    try:
        if template is not None or path.is_file():
            text = path.read_text("utf-8")
        elif settings.is_file():
            path = settings
            text = json.loads(path.read_text("utf-8")).get("chat_template")
    except OSError as error:
        raise CorruptDataError(
            f"{path} cannot be read: {error.strerror}. Name a Jinja file as chat_template."
        ) from error
    except UnicodeDecodeError as error:
        raise CorruptDataError(
            f"{path}: byte {error.start} is not UTF-8. Name a Jinja file as chat_template."
        ) from error
    except (ValueError, AttributeError) as error:
        raise CorruptDataError(f"{path} is not a JSON object: {error}. Copy it again.") from error
    jinja = import_extra("jinja2", "hf")
    try:
        # Only transformers knows the marks of answers, and takes seconds to import.
        jinja.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
            _MARKS.sub("", _check_one(text, folder))
        )
    except jinja.TemplateSyntaxError as error:
        raise CorruptDataError(
            f"the chat template in {path} is not Jinja: {error.message} in its line "
            f"{error.lineno}. Repair it, or use another template."
        ) from error
    return text


def _check_one(template: Any, folder: str) -> str:
    if not isinstance(template, str):
        raise UnsupportedError(
            f"the tokenizer of {folder} must have one chat template: it has none or several. "
            "Use the folder of an instruction model, or set chat_template to a Jinja file."
        )
    return template


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise an error in the block once the process has computed for a time, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        raise TimeoutError(f"it still computes after {seconds} seconds")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@lru_cache(maxsize=1)
def _chat_tokenizer(folder: str, template: str | None) -> ChatTokenizer:
    return ChatTokenizer(folder, template)
