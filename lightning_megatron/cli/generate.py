"""The command ``generate``: continue prompts with a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse.typing import PositiveInt

from lightning_megatron.cli.model_call import LayoutOptions, ModelCall
from lightning_megatron.cli.opened_model import OpenedModel
from lightning_megatron.cli.talk import Talk
from lightning_megatron.cli.text_generation import PromptText, TextGeneration
from lightning_megatron.data.documents import TextFiles
from lightning_megatron.data.row_files import FileRow, read_rows
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.generation.prompts import check_prompts
from lightning_megatron.generation.sampling import GenerationSettings
from lightning_megatron.generation.stop_text import StopStrings
from lightning_megatron.tasks.chat import ChatTokenizer, Message, side_of, tools_of

EXAMPLES = """examples:
  lightning-megatron generate path/to/folder --prompt "The state of the union"
  lightning-megatron generate runs/last.ckpt --tokenizer gpt2 --prompts prompts.txt \\
      --sample --top_p 0.9 --samples 4 --tp 2 --pp 2 --devices 4 --precision bf16-true
  lightning-megatron generate exported --chat --prompt "Who spoke first?"
  lightning-megatron generate exported --interactive --max_new_tokens 500"""


class GivenPrompt(NamedTuple):
    """Prompt of the command line or of a file.

    Args:
        value: Its text, or the messages of a conversation.
        place: Its name in errors.
        tools: Descriptions of tools, which the chat template writes; None for none.
    """

    value: Any
    place: str
    tools: list[Any] | None = None

    def read(self, encode: Callable[[str], list[int]]) -> PromptText:
        """Return the text to continue, with its tokens."""
        return PromptText(self.value, encode(self.value))


@dataclass(frozen=True)
class ChatOptions:
    """Answers to prompts as messages of a conversation, instead of their continuation.

    Args:
        chat: Answer the prompts: each is the question of a conversation, which the chat template of
            the tokenizer writes.
        interactive: Answer what you type, as one conversation, until an empty line.
        system: System message before the questions.
        chat_template: Jinja file whose template replaces that of the tokenizer.
    """

    chat: bool = False
    interactive: bool = False
    system: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("system", "chat_template"):
            if getattr(self, name) is not None and not self.is_used:
                raise UnsupportedError(
                    f"--{name} has no effect without a conversation, of which it is a part: "
                    f"neither --chat nor --interactive is given. Add one of them, or leave "
                    f"--{name} out."
                )

    @property
    def is_used(self) -> bool:
        """Whether there is a conversation."""
        return self.chat or self.interactive

    def tokenizer(self, folder: str) -> ChatTokenizer | None:
        """Return the tokenizer with the template; None without a conversation."""
        return ChatTokenizer(folder, self.chat_template) if self.is_used else None

    @property
    def beginning(self) -> tuple[Message, ...]:
        """Messages before the first question."""
        return () if self.system is None else ({"role": "system", "content": self.system},)

    def asked(self, chat: ChatTokenizer, prompt: GivenPrompt) -> PromptText:
        """Return a question, or the last message of a conversation, with the tokens before its
        answer.
        """
        place = prompt.place
        messages = side_of(prompt.value, "user", place)
        if messages[-1]["role"] == "assistant":
            raise UnsupportedError(
                f"an answer follows a question: the last message of {place} is an answer.\n"
                "Leave it out."
            )
        if self.system is not None and messages[0]["role"] == "system":
            raise UnsupportedError(
                f"a conversation begins with one system message: {place} has one, and --system is "
                "another.\nLeave one of them out."
            )
        tokens = chat.prompt_tokens([*self.beginning, *messages], place, prompt.tools)
        return PromptText(messages[-1].get("content", ""), tokens)


def generate(
    model: str,
    settings: GenerationSettings,
    layout: LayoutOptions,
    chat: ChatOptions,
    prompt: tuple[str, ...] = (),
    prompts: Path | None = None,
    tokenizer: str | None = None,
    special_tokens: bool | None = None,
    stop: tuple[str, ...] = (),
    samples: PositiveInt = 1,
    batch_size: PositiveInt = 1,
    json: bool = False,
) -> None:
    """Continue prompts with a language model, under any layout. The text appears as it is produced.

    Args:
        model: A Hugging Face folder, a model's name on the Hub, or a checkpoint.
        prompt: Prompts.
        prompts: Text with a prompt on each line, or JSON lines with the key `prompt`, and with
            --chat also `messages`.
        tokenizer: bytes, gpt2 or a path; by default that of the Hugging Face folder.
        special_tokens: Whether prompts get the special tokens that the tokenizer adds; by default
            with a Hugging Face folder.
        stop: Texts that end a row.
        samples: Rows of each prompt.
        batch_size: Rows at once of a copy.
        json: Print a JSON object for each row.
    """
    if samples > 1 and not settings.sample:
        raise UnsupportedError(
            f"--samples {samples} needs --sample: without draws all of them would be equal. Add "
            "--sample, or leave --samples out."
        )
    opened = OpenedModel.at(model, layout.dtype)
    name = opened.tokenizer_name(tokenizer)
    words = load_tokenizer(name)
    template = chat.tokenizer(name)
    ends = {*(opened.end_tokens or (() if words.eod is None else (words.eod,)))}
    ends |= set() if template is None else {*template.end_tokens}
    settings = replace(settings, stop_tokens=tuple(sorted(ends.union(settings.stop_tokens))))
    StopStrings(words.decode, stop)
    call: Talk | TextGeneration
    if chat.interactive:
        _check_keyboard(prompt, prompts, samples, json)
        assert template is not None, "a conversation has a template"
        call = Talk(template, words, settings, stop, chat.beginning, opened.max_length)
    else:
        # A CausalLM is trained on token files, whose texts have no special tokens before them.
        adds_special = opened.folder is not None if special_tokens is None else special_tokens
        encode = words.encode_prompt if adds_special else words.encode
        given = _given(prompt, prompts, chat.chat)
        texts = [chat.asked(template, one) if template else one.read(encode) for one in given]
        # Check the prompts here, so that errors are raised before other processes start.
        check_prompts([text.tokens for text in texts], opened.module.vocab_size)
        _check_length(texts, settings.max_new_tokens, opened.max_length)
        call = TextGeneration(texts, words, settings, stop, samples, batch_size, json, chat.chat)
    ModelCall(opened.module, call).run(layout.trainer(), opened.checkpoint)


COMMAND = generate


def _check_keyboard(prompt: Sequence[str], prompts: Path | None, samples: int, json: bool) -> None:
    given = {"--prompt": prompt, "--prompts": prompts, "--samples": samples > 1, "--json": json}
    used = [option for option, value in given.items() if value]
    if used:
        raise UnsupportedError(
            f"--interactive answers what is typed, one line after the other: {used[0]} does not go "
            f"with it. Leave {used[0]} out, or use --chat."
        )


def _given(texts: Sequence[str], file: Path | None, is_chat: bool) -> list[GivenPrompt]:
    """Return the prompts of the command line or of the file; refuse empty prompts."""
    if bool(texts) == (file is not None):
        raise UnsupportedError(
            "there must be prompts, from one source: give either --prompt or --prompts."
        )
    prompts = [GivenPrompt(text, f"--prompt {text!r}") for text in texts]
    if file is not None:
        prompts = _given_in(file, is_chat)
    for value, place, _ in prompts:
        if isinstance(value, str) and not value.strip():
            raise UnsupportedError(
                f"a prompt must have a word, which the model continues: {place} has none. Leave it "
                "out, or write a word."
            )
    return prompts


def _given_in(path: Path, is_chat: bool) -> list[GivenPrompt]:
    if not path.is_file():
        raise UnsupportedError(
            f"the prompts must be a file: {path} is none. Give a text file with a prompt on each "
            'line, or JSON lines such as {"prompt": "..."} (.jsonl).'
        )
    [file] = TextFiles([path]).paths
    prompts = [_given_row(row, is_chat) for row in read_rows(file, document="line")]
    if not prompts:
        raise CorruptDataError(f"{path} has no prompt. Write one on each line.")
    return prompts


def _given_row(row: FileRow, is_chat: bool) -> GivenPrompt:
    is_text = isinstance(row.content, bytes) and not row.is_json
    fields = {} if is_text else row.fields()
    if not is_chat and "messages" in fields:
        raise UnsupportedError(
            f"a conversation is answered by the chat template: {row.place} has messages, and "
            "--chat is not given.\nAdd --chat."
        )
    if is_chat and ("messages" in fields or isinstance(fields.get("prompt"), list)):
        value = fields.get("messages", fields.get("prompt"))
        return GivenPrompt(value, row.place, tools_of(fields, row.place))
    return GivenPrompt(row.text("prompt").rstrip("\r\n"), row.place)


def _check_length(prompts: Sequence[PromptText], num_new: int, limit: int | None) -> None:
    if limit is None:
        return
    for number, prompt in enumerate(prompts, start=1):
        length = len(prompt.tokens)
        if length + num_new > limit:
            raise ParallelPlanError(
                f"a prompt and its new tokens must not exceed the model's longest row ({limit} "
                f"tokens): prompt {number} has {length}, and --max_new_tokens is {num_new}. The "
                "model has no later positions. Use --max_new_tokens "
                f"{max(0, limit - length)} or fewer, or a shorter prompt."
            )
