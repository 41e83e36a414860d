"""Questions of SQuAD 1.1 and 2.0, and exact match and F1 of the official evaluation."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.building_blocks import read_json
from lightning_megatron.errors import CorruptDataError

SquadVersion = Literal["1.1", "2.0"]
#: Maximum size of a file; the training set has 42 megabytes (bytes).
_MAX_FILE_BYTES = 1 << 30
_REMEDY = "Copy the file of SQuAD again."


@dataclass(frozen=True)
class SquadQuestion:
    """Question on a paragraph.

    Args:
        key: ``id`` of the question in the file.
        answers: Texts of the reference answers; empty if the paragraph has no answer.
        start: Index of the first answer's first character in the paragraph, -1 without an answer.
    """

    key: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int


def read_squad(path: Path, version: SquadVersion) -> list[SquadQuestion]:
    """Read the questions of a file of SQuAD in order.

    Args:
        path: File, such as ``train-v1.1.json``.
        version: ``2.0`` accepts questions without an answer.
    """
    content = read_json(path, _REMEDY, _MAX_FILE_BYTES)
    articles = content.get("data") if isinstance(content, dict) else None
    questions = list(_questions(path, articles, version))
    if not questions:
        raise CorruptDataError(
            f"{path} must have a list data of articles with paragraphs and questions: it has none. "
            f"{_REMEDY}"
        )
    return questions


def _questions(path: Path, articles: Any, version: SquadVersion) -> Iterator[SquadQuestion]:
    for article in _mappings(articles):
        for paragraph in _mappings(article.get("paragraphs")):
            context = paragraph.get("context")
            for record in _mappings(paragraph.get("qas")):
                yield _question(f"{path}, question {record.get('id')!r}", record, context, version)


def _question(
    place: str, record: Mapping[str, Any], context: Any, version: SquadVersion
) -> SquadQuestion:
    key = record.get("id")
    text = record.get("question")
    if not (isinstance(key, str) and isinstance(text, str) and isinstance(context, str)):
        raise CorruptDataError(
            f"{place} must have an id, a question and the context of its paragraph, all texts. "
            f"{_REMEDY}"
        )
    answers = list(_mappings(record.get("answers")))
    if record.get("is_impossible"):
        answers = []  # The plausible answers to unanswerable questions do not count.
    if not answers and version == "1.1":
        raise CorruptDataError(
            f"{place} must have an answer: it has none. Only version 2.0 has questions without "
            "answers. Set version='2.0'."
        )
    for answer in answers:
        start: Any = answer.get("answer_start")
        expected: Any = answer.get("text")
        is_there = isinstance(start, int) and isinstance(expected, str) and expected
        if not is_there or context[start : start + len(expected)] != expected:
            raise CorruptDataError(
                f"{place} must have its answer in the context at answer_start: {expected!r} is not "
                f"at {start!r}. {_REMEDY}"
            )
    texts = tuple(answer["text"] for answer in answers)
    return SquadQuestion(key, text, context, texts, answers[0]["answer_start"] if answers else -1)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict):
            yield entry


def normalised(text: str) -> str:
    """Return an answer in lower case without punctuation, articles and extra spaces.

    Equal to ``normalize_answer`` of the official evaluation.
    """
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_score(text: str, answers: Sequence[str]) -> float:
    """Return 1 if a prediction equals a reference answer after normalisation, else 0.

    Args:
        text: Predicted answer; empty for no answer.
        answers: Reference answers; empty if the question has no answer.
    """
    return max(float(normalised(answer) == normalised(text)) for answer in _comparable(answers))


def f1_score(text: str, answers: Sequence[str]) -> float:
    """Return the largest F1 between the words of a prediction and those of a reference answer.

    Args:
        text: Predicted answer; empty for no answer.
        answers: Reference answers; empty if the question has no answer.
    """
    return max(_f1(text, answer) for answer in _comparable(answers))


def _comparable(answers: Sequence[str]) -> Sequence[str]:
    return [answer for answer in answers if normalised(answer)] or [""]


def _f1(text: str, answer: str) -> float:
    words = normalised(text).split()
    expected = normalised(answer).split()
    if not words or not expected:
        return float(words == expected)
    num_same = sum((Counter(words) & Counter(expected)).values())
    return 2 * num_same / (len(words) + len(expected))
