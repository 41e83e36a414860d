"""Answers from the scores of span starts and ends, and the metrics of SQuAD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.shapes import Bool, Float, Int
from lightning_megatron.tasks.finetuning.rows import TaskRows
from lightning_megatron.tasks.finetuning.scores import TaskScores
from lightning_megatron.tasks.finetuning.squad import SquadQuestion, exact_score, f1_score

#: Number of windows whose spans are searched at once (windows).
_CHUNK = 128


@dataclass(frozen=True)
class Answer:
    """Best predicted answers to a question.

    Args:
        values: Score of each span, the sum of the scores of its start and end.
        without: No-answer score, the smallest over the windows of the question.
    """

    texts: tuple[str, ...]
    values: tuple[float, ...]
    without: float

    @property
    def advantage(self) -> float:
        """No-answer score minus the score of the best span."""
        return self.without - (self.values[0] if self.values else float("-inf"))


@dataclass(frozen=True)
class WindowPlaces:
    """Questions of windows, and positions of their tokens in the contexts.

    Args:
        offsets: Start and end (exclusive) of each token in its context, for all tokens of all
            windows (characters).
        contexts: Start and end (exclusive) of the context within each window (tokens).
    """

    question: npt.NDArray
    offsets: npt.NDArray
    contexts: npt.NDArray


class SpanScores(TaskScores):
    """Exact match and F1 of answers, as the official evaluations of SQuAD define them.

    The results are fractions between 0 and 1: ``exact_match`` and ``f1``. If questions may have no
    answer, there are also ``exact_match_answerable``, ``f1_answerable`` and
    ``exact_match_unanswerable``, and ``best_f1``, the largest F1 over all thresholds, with its
    ``best_f1_threshold``. Questions with a window that has no scores are left out.

    Args:
        may_lack: Whether questions may have no answer.
        num_best: Number of best spans of each window that are considered.
        answer_length: Maximum length of a predicted answer (tokens).
        threshold: The prediction is no answer if the no-answer score exceeds the score of the best
            span by more than this.
        metric: Arguments of ``torchmetrics.Metric``.

    Source: Devlin et al. 2018, sections 4.2 and 4.3; Rajpurkar et al. 2016 and 2018.
    """

    def __init__(
        self,
        rows: TaskRows,
        places: WindowPlaces,
        questions: Sequence[SquadQuestion],
        may_lack: bool,
        num_best: int,
        answer_length: int,
        threshold: float,
        **metric: Any,
    ) -> None:
        super().__init__(len(rows), **metric)
        self.rows = rows
        self.places = places
        self.questions = tuple(questions)
        self.may_lack = may_lack
        self.num_best = num_best
        self.answer_length = answer_length
        self.threshold = threshold

    def answers(
        self, scores: Float[Tensor, "rows seq 2"], is_seen: Bool[Tensor, "rows"]
    ) -> dict[int, Answer]:
        """Return the best answers by the index of their question."""
        candidates: dict[int, list[tuple[float, str]]] = {}
        without: dict[int, float] = {}
        unseen = set(self.places.question[~is_seen.numpy()].tolist())
        for start in range(0, len(scores), _CHUNK):
            part = scores[start : start + _CHUNK].double()
            spans = best_spans(
                part, self._is_context(start, part), self.answer_length, self.num_best
            )
            for index, (first, last, value) in enumerate(zip(*spans, strict=True)):
                window = start + index
                question = int(self.places.question[window])
                if question in unseen:
                    continue
                no_answer = float(part[index, 0].sum())
                without[question] = min(no_answer, without.get(question, no_answer))
                listed = candidates.setdefault(question, [])
                for span in zip(first.tolist(), last.tolist(), value.tolist(), strict=True):
                    if span[2] > float("-inf"):
                        listed.append((span[2], self._text(window, span[0], span[1])))
        return {
            question: _answer(listed, without[question], self.num_best)
            for question, listed in candidates.items()
        }

    def predictions(self, answers: dict[int, Answer]) -> dict[str, str]:
        """Return the text of each answer by the ``id`` of its question, empty for no answer.

        The official evaluation scripts read this mapping as JSON.
        """
        return {
            self.questions[number].key: self._chosen(answer) for number, answer in answers.items()
        }

    @override
    def results(
        self, scores: Float[Tensor, "rows seq 2"], is_seen: Bool[Tensor, "rows"]
    ) -> dict[str, float]:
        answers = self.answers(scores, is_seen)
        chosen = {number: self._chosen(answer) for number, answer in answers.items()}
        right = {number: self.questions[number].answers for number in answers}
        exact = {number: exact_score(text, right[number]) for number, text in chosen.items()}
        f1 = {number: f1_score(text, right[number]) for number, text in chosen.items()}
        results = {"exact_match": _mean(exact.values()), "f1": _mean(f1.values())}
        if not self.may_lack:
            return results
        with_answer = [number for number in answers if right[number]]
        without_answer = [number for number in answers if not right[number]]
        results["exact_match_answerable"] = _mean(exact[number] for number in with_answer)
        results["f1_answerable"] = _mean(f1[number] for number in with_answer)
        results["exact_match_unanswerable"] = _mean(exact[number] for number in without_answer)
        results["best_f1"], results["best_f1_threshold"] = self._best_f1(answers)
        return results

    @staticmethod
    @override
    def combined(tables: Float[Tensor, "models rows seq 2"]) -> Float[Tensor, "rows seq 2"]:
        # Average scores, not probabilities: no-answer scores are compared between windows, and
        # probabilities of different windows are not comparable.
        return tables.mean(0)

    def _best_f1(self, answers: dict[int, Answer]) -> tuple[float, float]:
        """Return the largest mean F1 over all thresholds, and the smallest such threshold.

        Where the right answer has only articles, no answer counts as right, as in :func:`f1_score`.
        """
        ordered = sorted(answers.items(), key=lambda item: item[1].advantage)
        # With a threshold below all advantages, no question is predicted to have an answer.
        total = sum(f1_score("", self.questions[number].answers) for number in answers)
        best = total
        threshold = ordered[0][1].advantage - 1.0 if ordered else 0.0
        for number, answer in ordered:
            right = self.questions[number].answers
            best_text = answer.texts[0] if answer.texts else ""
            total += f1_score(best_text, right) - f1_score("", right)
            if total > best:
                best = total
                threshold = answer.advantage
        return best / max(1, len(ordered)), threshold

    def _chosen(self, answer: Answer) -> str:
        if self.may_lack and answer.advantage > self.threshold:
            return ""
        return next((text for text in answer.texts if text), "")

    def _is_context(self, start: int, part: Tensor) -> Tensor:
        """Return which tokens of some windows belong to the context."""
        places = torch.from_numpy(np.array(self.places.contexts[start : start + len(part)]))
        positions = torch.arange(part.shape[1])
        return (positions >= places[:, :1]) & (positions < places[:, 1:])

    def _text(self, window: int, first: int, last: int) -> str:
        begin = int(self.rows.bounds[window])
        start = int(self.places.offsets[begin + first, 0])
        stop = int(self.places.offsets[begin + last, 1])
        return self.questions[int(self.places.question[window])].context[start:stop]


def best_spans(
    scores: Float[Tensor, "batch seq 2"],
    is_allowed: Bool[Tensor, "batch seq"],
    answer_length: int,
    num_best: int,
) -> tuple[Int[Tensor, "batch best"], Int[Tensor, "batch best"], Float[Tensor, "batch best"]]:
    """Return the spans with the largest sums of start and end, the best first.

    All pairs of a start and an end are compared, not only the best starts and ends.

    Args:
        answer_length: Maximum length of a span (tokens).

    Returns:
        First tokens, last tokens and sums of the spans; sums are -inf if there are fewer spans
    """
    start, end = scores.masked_fill(~is_allowed[..., None], float("-inf")).unbind(-1)
    longest = min(answer_length, scores.shape[1])
    ends = F.pad(end, (0, longest - 1), value=float("-inf")).unfold(1, longest, 1)
    sums = (start[..., None] + ends).flatten(1)
    values, place = sums.topk(min(num_best, sums.shape[1]), dim=1)
    first = place // longest
    return first, first + place % longest, values


def _answer(listed: list[tuple[float, str]], no_answer: float, num_best: int) -> Answer:
    # Sorting is stable, so among spans with equal scores the span of the earlier window is first.
    best = sorted(listed, key=lambda entry: -entry[0])[:num_best]
    texts = tuple(text for _, text in best)
    return Answer(texts, tuple(value for value, _ in best), no_answer)


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
