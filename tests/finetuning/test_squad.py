"""Windows of SQuAD equal the windows of transformers, and scores equal torchmetrics and a search over
all spans.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron import SquadDataModule
from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.finetuning.span_scores import Answer, SpanScores, best_spans
from lightning_megatron.finetuning.squad import (
    SquadQuestion,
    exact_score,
    f1_score,
    normalised,
    read_squad,
)
from lightning_megatron.finetuning.squad_datamodule import encoded_windows
from lightning_megatron.finetuning.tokens import PairTokenizer
from tests.finetuning.folders import TOKENIZERS, sentence, squad_content, write_squad

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")
LENGTH, SHARED, QUESTION = 20, 4, 6


def data_of(
    folder: Path, version: Any = "2.0", *, kind: str = "bert", **options: Any
) -> SquadDataModule:
    tokenizer = str(TOKENIZERS[kind](folder / "tokenizer"))
    defaults = {"seq_length": LENGTH, "doc_stride": SHARED, "question_length": QUESTION}
    return SquadDataModule(version, str(folder), tokenizer, **(defaults | options))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_windows_and_labels_equal_transformers(tmp_path, kind):
    write_squad(tmp_path, num_train=12)
    data = data_of(tmp_path, kind=kind)
    rows = data.encoded("train")
    questions = read_squad(tmp_path / "train-v2.0.json", "2.0")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    reference = tokenizer(
        [entry.text for entry in questions], [entry.context for entry in questions],
        truncation="only_second", max_length=LENGTH, stride=SHARED, padding="max_length",
        return_overflowing_tokens=True, return_offsets_mapping=True, return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    assert len(rows) == len(reference["input_ids"]) > len(questions)
    batch = data.evaluation_loader(data.training_samples(None)).batches
    order = [batch.samples.row(at) for at in range(len(rows))]
    actual = batch[list(range(len(rows)))]
    assert torch.equal(actual["tokens"], reference["input_ids"][order])
    assert torch.equal(actual["token_types"], reference["token_type_ids"][order])
    num_answers = 0
    for window, (first, last) in enumerate(rows.labels.tolist()):
        question = questions[int(reference["overflow_to_sample_mapping"][window])]
        expected = reference_label(question, reference, window)
        assert (first, last) == expected, window
        num_answers += expected != (0, 0)
    assert num_answers > 10


def reference_label(question: Any, reference: Any, window: int) -> tuple[int, int]:
    """Return the labels as the example run_qa.py of transformers makes them. Its search for the start
    goes on with the separator, whose offset is 0; this one ends with the context.
    """
    if not question.answers:
        return 0, 0
    offsets, sequence = reference["offset_mapping"][window].tolist(), reference.sequence_ids(window)
    begin, stop = question.start, question.start + len(question.answers[0])
    start, end = sequence.index(1), len(sequence) - 1 - sequence[::-1].index(1)
    if not (offsets[start][0] <= begin and offsets[end][1] >= stop):
        return 0, 0
    last = end
    while start <= last and offsets[start][0] <= begin:
        start += 1
    while offsets[end][1] >= stop:
        end -= 1
    return start - 1, end + 1


def test_best_spans_equal_a_search_over_all_spans():
    scores, allowed = torch.randn(5, 13, 2, dtype=torch.float64), torch.rand(5, 13) < 0.7
    first, last, values = best_spans(scores, allowed, 4, 6)
    for row in range(5):
        pairs = [(i, j) for i in range(13) for j in range(i, min(13, i + 4))]
        spans = [
            (float(scores[row, i, 0] + scores[row, j, 1]), i, j)
            for i, j in pairs
            if allowed[row, i] and allowed[row, j]
        ]
        expected = sorted(spans, reverse=True)[:6]
        assert first[row].tolist() == [start for _, start, _ in expected]
        assert last[row].tolist() == [end for _, _, end in expected]
        assert values[row].tolist() == pytest.approx([value for value, _, _ in expected])


def test_scores_of_texts_equal_torchmetrics():
    text = pytest.importorskip("torchmetrics.text")
    draw = random.Random(6)
    metric = text.SQuAD()
    exact, f1 = [], []
    for number in range(60):
        answers = [f"The {sentence(draw, 1, 4)}!" for _ in range(draw.randint(1, 3))]
        prediction = draw.choice([answers[-1].lower(), sentence(draw, 1, 4), answers[0] + " a cat"])
        metric.update(
            [{"prediction_text": prediction, "id": str(number)}],
            [{"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": str(number)}],
        )
        exact.append(exact_score(prediction, answers))
        f1.append(f1_score(prediction, answers))
    expected = metric.compute()
    assert 100 * sum(exact) / 60 == pytest.approx(float(expected["exact_match"]), abs=1e-4)
    assert 100 * sum(f1) / 60 == pytest.approx(float(expected["f1"]), abs=1e-4)
    assert 0 < sum(exact) < sum(f1) < 60


def test_answers_are_normalised_and_compared_like_the_official_evaluation():
    assert normalised(" The  Cat's (an) 'Old' house. ") == "cats old house"
    assert f1_score("cat", ()) == 0.0
    # An answer of only articles equals no answer in the official evaluation of version 2.0.
    assert exact_score("", ()) == exact_score("", ("the",)) == 1.0
    assert f1_score("a red cat", ("red cat", "cat")) == 1.0
    assert f1_score("big cat", ("red cat",)) == 0.5
    assert Answer(("cat",), (3.0,), 4.5).advantage == 1.5, "of no answer above the best span"
    assert Answer((), (), 0.0).advantage == float("inf")
    # No answer counts where the right one has only articles.
    questions = [SimpleNamespace(answers=("the",)), SimpleNamespace(answers=("red river",))]
    answers = {0: Answer(("blue",), (1.0,), 3.0), 1: Answer(("red river",), (2.0,), 1.0)}
    assert SpanScores._best_f1(SimpleNamespace(questions=questions), answers) == (1.0, -1.0)


def perfect_scores(data: SquadDataModule, strength: float = 9.0) -> tuple[SpanScores, torch.Tensor]:
    """Return the metric and scores that are largest at the labels of every window."""
    metric = data.scores("val")
    assert isinstance(metric, SpanScores)
    labels = torch.from_numpy(data.encoded("val").labels.copy())
    scores = torch.zeros(len(labels), LENGTH, 2)
    for side in (0, 1):
        scores[torch.arange(len(labels)), labels[:, side], side] = strength
    return metric, scores


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_perfect_scores_give_the_labelled_answers(tmp_path, kind):
    write_squad(tmp_path, num_val=9)
    metric, scores = perfect_scores(data_of(tmp_path, threshold=-1.0, kind=kind))
    for part in torch.randperm(len(scores)).split(5):
        metric.update(part, scores[part])
    table, is_seen = metric.table()
    assert torch.equal(table, scores)
    assert bool(is_seen.all())
    questions = metric.questions
    texts = metric.predictions(metric.answers(table, is_seen))
    assert len(texts) == len(questions) == 18
    labels = zip(metric.places.question, metric.rows.labels, strict=True)
    complete = {questions[int(owner)].key for owner, label in labels if label.any()}
    for question in questions:
        if not question.answers or question.key in complete:
            assert normalised(texts[question.key]) == normalised((*question.answers, "")[0])
    assert len(complete) > 8


def test_the_threshold_suppresses_answers_and_the_best_threshold_is_found(tmp_path):
    write_squad(tmp_path, num_val=6)
    metric, scores = perfect_scores(data_of(tmp_path))
    all_rows = torch.ones(len(scores), dtype=torch.bool)
    scores += torch.randn(scores.shape, generator=torch.Generator().manual_seed(4)) * 4
    answers, results = metric.answers(scores, all_rows), metric.results(scores, all_rows)
    f1_of = {}
    for threshold in sorted({answer.advantage for answer in answers.values()} | {-1e9}):
        metric.threshold = threshold
        f1_of[threshold] = metric.results(scores, all_rows)["f1"]
    assert results["best_f1"] == pytest.approx(max(f1_of.values()))
    nearest = min(f1_of, key=lambda threshold: abs(threshold - results["best_f1_threshold"]))
    assert f1_of[nearest] == max(f1_of.values())
    metric.threshold = -1e9
    assert set(metric.predictions(answers).values()) == {""}


def test_questions_with_unseen_windows_do_not_count(tmp_path):
    write_squad(tmp_path, "1.1", num_val=6)
    metric, scores = perfect_scores(data_of(tmp_path, "1.1"))
    is_seen = torch.ones(len(scores), dtype=torch.bool)
    is_seen[metric.places.question.tolist().index(3)] = False
    assert sorted(metric.answers(scores, is_seen)) == [n for n in range(12) if n != 3]
    assert sorted(metric.results(scores, is_seen)) == ["exact_match", "f1"]


def test_damaged_questions_are_named(tmp_path):
    path = tmp_path / "dev-v1.1.json"
    for change, fault in (
        ({"answers": [{"text": "zebra", "answer_start": 0}]}, "answer in the context"),
        ({"answers": []}, r"must have an answer: it has none.*version='2.0'"),
        ({"question": None}, "must have an id, a question and the context"),
    ):
        content = squad_content(random.Random(1), 3, may_lack=False)
        content["data"][1]["paragraphs"][0]["qas"][1].update(change)
        path.write_text(json.dumps(content))
        with pytest.raises(CorruptDataError, match=f"dev-v1.1.json, question '1-1' .*{fault}"):
            read_squad(path, "1.1")


def test_windows_without_new_tokens_are_refused(tmp_path):
    write_squad(tmp_path)
    with pytest.raises(ParallelPlanError, match=r"doc_stride \(11\) must be below .* \(11\)"):
        data_of(tmp_path, doc_stride=11)
    # A pair of RoBERTa has one more special token.
    with pytest.raises(ParallelPlanError, match=r"- 4 \(10\), .* and 4 special tokens"):
        data_of(tmp_path, doc_stride=10, kind="roberta").encoded("val")


def test_answers_have_all_bytes_of_their_characters(tmp_path):
    context = "the cat \u20ac likes a dog"
    question = SquadQuestion("1", "what?", context, ("\u20ac",), context.index("\u20ac"))
    tokenizer = PairTokenizer(str(TOKENIZERS["roberta"](tmp_path)))
    windows = encoded_windows([question], tokenizer, 32, 4, 8)
    first, last = windows["labels"][0].tolist()
    decoder = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert last == first + 2
    assert decoder.decode(windows["tokens"][first : last + 1]).strip() == "\u20ac"
    begin, end = windows["contexts"][0].tolist()
    assert decoder.decode(windows["tokens"][begin:end]) == context
