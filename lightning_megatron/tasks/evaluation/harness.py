"""Adapter that lets the lm-eval harness evaluate language models of this package."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from lightning_megatron import GenerationSettings, generate
from lightning_megatron.building_blocks import (
    IGNORED,
    StopStrings,
    Tokenizer,
    all_gather_objects,
    evaluation_mode,
    gpt_of,
    row_scores,
)
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.extras import import_extra

_log = logging.getLogger(__name__)

T = TypeVar("T")
#: Names of generation settings by their names in lm-eval, except length and stop strings.
_SETTINGS = {
    "do_sample": "sample",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "num_beams": "beams",
    "length_penalty": "length_penalty",
}


class Request(Protocol):
    """Protocol of the harness's requests, such as ``lm_eval.api.instance.Instance``."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Return the texts and settings of the request."""


class ScoredTokens(NamedTuple):
    """Row of tokens whose last tokens are scored.

    Args:
        tokens: Token ids of the row; the model reads all but the last one.
        num_scored: Number of scored tokens at the end of the row (tokens).
    """

    tokens: list[int]
    num_scored: int


class HarnessAnswers:
    """Methods with which the harness queries a model; every rank returns the same answers.

    All ranks must run the harness in the same way. The data-parallel replicas divide the requests
    and exchange the answers, so each rank has the answers that a single process would have.
    ``harness_lm`` combines this class with ``lm_eval.api.model.TemplateLM``.

    Args:
        model: Model that contains a GPT, such as that of a ``CausalLM`` or a replaced Hugging Face
            model.
        prefix_token: Token that precedes texts without a context; None if there is none.
        adds_special: Whether ``tok_encode`` adds the special tokens of the tokenizer.
        batch_size: Number of rows that a replica of the model reads at once (rows).
        max_new_tokens: Maximum number of new tokens if the task sets no limit (tokens).

    Communication: for each round of batches, that of the model, a broadcast of the answers over pp
        and one gather of objects over dp.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        prefix_token: int | None,
        end_tokens: Sequence[int] = (),
        adds_special: bool = False,
        batch_size: int = 1,
        max_new_tokens: int = 256,
    ) -> None:
        super().__init__()
        self._gpt = gpt_of(model)
        self._model = model
        self._tokenizer = tokenizer
        self._prefix_token = prefix_token
        self._end_tokens = tuple(end_tokens)
        self._adds_special = adds_special
        self._batch_size = batch_size
        self._max_new_tokens = max_new_tokens
        self._num_draws = 0

    @property
    def max_length(self) -> int:
        """Return the maximum length of a row of the model (tokens)."""
        return self._gpt.config.max_seq_length

    @property
    def eot_token_id(self) -> int:
        """Return the token that precedes texts without a context."""
        if self._prefix_token is None:
            raise UnsupportedError(
                "a text without a context needs a token before it, whose logits score the first "
                "token: the tokenizer has neither a beginning-of-text nor an end-of-text token. "
                "Give one (--prefix_token)."
            )
        return self._prefix_token

    @property
    def prefix_token_id(self) -> int:
        """Return the token that precedes texts without a context, as :attr:`eot_token_id`."""
        return self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            add_special_tokens: Whether special tokens are added; None means ``adds_special``,
                unless the text already starts with the prefix token.
        """
        adds = self._adds_special if add_special_tokens is None else add_special_tokens
        plain = self._tokenizer.encode(string)
        if not adds or (add_special_tokens is None and plain[:1] == [self._prefix_token]):
            return plain
        return self._tokenizer.encode_prompt(string)

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text (nats).

        A text longer than a row is divided into windows. Each token is scored once.

        Args:
            disable_tqdm: Argument of lm-eval without effect, because no progress bar is shown.
        """
        library: Any = import_extra("lm_eval.utils", "harness")
        owners: list[int] = []
        rows = []
        for number, request in enumerate(requests):
            windows = library.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, scored in map(library.make_disjoint_window, windows):
                owners.append(number)
                rows.append(self._scored(context, scored))
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._scores(rows), strict=True):
            sums[owner] += score
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([self._scored(context, scored) for _, context, scored in requests])

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Return the generated continuation of each context, up to the stop strings of its task.

        Args:
            disable_tqdm: Argument of lm-eval without effect, because no progress bar is shown.
        """
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        for kind, numbers in kinds.items():
            contexts = [requests[number].args[0] for number in numbers]
            texts = self._generated(contexts, json.loads(kind))
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
        return answers

    def _generated(self, contexts: Sequence[str], arguments: dict[str, Any]) -> list[str]:
        library: Any = import_extra("lm_eval.models.utils", "harness")
        kwargs = library.normalize_gen_kwargs(arguments, self._max_new_tokens)
        until = [text for text in kwargs.pop("until") if text]
        num_new = kwargs.pop("max_gen_toks")
        room = self.max_length - num_new
        if room < 1:
            raise ParallelPlanError(
                f"an answer must be shorter than the model's longest row ({self.max_length} "
                f"tokens): the task asks for {num_new}. The context needs at least one token. Use "
                "a smaller max_gen_toks."
            )
        settings = _settings_of(kwargs, num_new, self._end_tokens)
        prompts = [self.tok_encode(context) for context in contexts]
        cut = [prompt[-room:] for prompt in prompts]
        num_cut = sum(len(prompt) > room for prompt in prompts)
        if num_cut:
            _log.warning(
                "%d of %d contexts are cut on the left to %d tokens, so that %d new tokens fit.",
                num_cut,
                len(prompts),
                room,
                num_new,
            )
        stop = StopStrings(self._tokenizer.decode, until)

        def answer(batch: Sequence[list[int]], number: int) -> list[str]:
            draw_settings = GenerationSettings(**settings, seed=self._num_draws + number)
            continuations = generate(self._model, batch, draw_settings, stop if until else None)
            return [stop.before(self._text(row)) for row in continuations]

        answers = self._answer_all(cut, len, answer)
        self._num_draws += len(cut) if settings["sample"] else 0
        return answers

    def _text(self, row: list[int]) -> str:
        return self._tokenizer.decode([token for token in row if token not in self._end_tokens])

    def _scored(self, context: list[int], scored: list[int]) -> ScoredTokens:
        if not scored or len(scored) > self.max_length:
            raise UnsupportedError(
                f"a continuation must have at least one token and at most {self.max_length}, the "
                f"longest row of the model: one has {len(scored)}. Leave its document out."
            )
        tokens = [*context, *scored]
        if len(tokens) > self.max_length + 1:
            _log.warning(
                "a context of %d tokens is cut on the left, so that its row has %d tokens.",
                len(context),
                self.max_length,
            )
        return ScoredTokens(tokens[-(self.max_length + 1) :], len(scored))

    def _scores(self, rows: Sequence[ScoredTokens]) -> list[tuple[float, bool]]:
        """Return each row's log-likelihood, and whether all scored tokens are most probable."""
        return self._answer_all(rows, lambda row: len(row.tokens), self._scores_of_batch)

    def _scores_of_batch(
        self, batch: Sequence[ScoredTokens], number: int
    ) -> list[tuple[float, bool]]:
        # Replicas that share experts need batches of equal shape, so each replica pads its batch to
        # the batch size and to the longest row of the round.
        shape = self._batch_size, self._round_length
        tokens = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for place, row in enumerate(batch):
            size = len(row.tokens) - 1
            tokens[place, :size] = torch.tensor(row.tokens[:-1])
            labels[place, size - row.num_scored : size] = torch.tensor(
                row.tokens[len(row.tokens) - row.num_scored :]
            )
        device = self._gpt.mesh.device
        with evaluation_mode(self._model):
            scores = row_scores(self._model, tokens.to(device), labels.to(device))
        return scores[: len(batch)]

    def _answer_all(
        self, rows: Sequence[Any], length: Callable[[Any], int], answer: Callable[..., list[T]]
    ) -> list[T]:
        """Answer all rows in batches, which the data-parallel replicas process in turn.

        Args:
            length: Function that returns the number of tokens of a row.
            answer: Function of a batch of rows and the index of the batch.
        """
        dp = self._gpt.mesh.dp
        size = self._batch_size
        order = sorted(range(len(rows)), key=lambda number: -length(rows[number]))
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        answers: dict[int, T] = {}
        for first in range(0, len(batches), dp.size):
            number = first + dp.rank
            has_own = number < len(batches)
            batch = batches[number] if has_own else batches[first]
            # Rows are sorted by length, so the first row of a round is its longest.
            self._round_length = length(rows[batches[first][0]]) - 1
            texts = answer([rows[index] for index in batch], number if has_own else first)
            by_index = dict(zip(batch, texts, strict=True)) if has_own else {}
            for part in all_gather_objects(by_index, self._gpt.mesh.dp_cpu):
                answers |= part
        return [answers[number] for number in range(len(rows))]


def harness_lm(model: nn.Module, tokenizer: Tokenizer, **settings: Any) -> Any:
    """Return a model as an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate``.

    The results equal the results of lm-eval's model ``hf`` with the same weights, in any layout.
    All ranks must call ``simple_evaluate`` with the same arguments, outside of training steps.

    Args:
        model: Model that contains a GPT, such as that of a ``CausalLM`` or a replaced Hugging Face
            model.
        tokenizer: Tokenizer of the model; see ``load_tokenizer``.
        settings: Further arguments of ``HarnessAnswers``.

    Raises:
        MissingExtraError: If lm-eval is not installed.
        UnsupportedError: If the model has no GPT.
    """
    base = import_extra("lm_eval.api.model", "harness").TemplateLM
    kind: Any = type("HarnessLM", (HarnessAnswers, base), {"__doc__": HarnessAnswers.__doc__})
    return kind(model, tokenizer, **settings)


def _settings_of(
    kwargs: dict[str, Any], max_tokens: int, end_tokens: tuple[int, ...]
) -> dict[str, Any]:
    unknown = sorted(set(kwargs) - set(_SETTINGS))
    if unknown:
        raise UnsupportedError(
            f"generation_kwargs of a task must be {', '.join(_SETTINGS)}, until and max_gen_toks: "
            f"{', '.join(unknown)} would be ignored. Leave them out."
        )
    settings = {_SETTINGS[name]: value for name, value in kwargs.items() if value is not None}
    if not settings["sample"]:
        # Tasks set a temperature of 0 for greedy decoding.
        for name in ("temperature", "top_k", "top_p"):
            settings.pop(name, None)
    return {**settings, "max_new_tokens": max_tokens, "stop_tokens": end_tokens}
