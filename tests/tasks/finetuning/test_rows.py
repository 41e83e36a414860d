"""Files of GLUE, RACE and SQuAD become the rows that transformers' tokenizers make, scores equal torchmetrics
and a search over all spans, and malformed files are named.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.tasks.finetuning import GlueDataModule, RaceDataModule, SquadDataModule
from lightning_megatron.tasks.finetuning.glue_datamodule import GLUE_TASKS, read_glue
from lightning_megatron.tasks.finetuning.race_datamodule import race_files, read_race
from lightning_megatron.tasks.finetuning.scores import ClassScores
from lightning_megatron.tasks.finetuning.span_scores import Answer, SpanScores, best_spans
from lightning_megatron.tasks.finetuning.squad import (
    SquadQuestion,
    exact_score,
    f1_score,
    normalised,
    read_squad,
)
from lightning_megatron.tasks.finetuning.squad_datamodule import encoded_windows
from lightning_megatron.tasks.finetuning.tokens import PairTokenizer
from tests.tasks.finetuning.folders import (
    TOKENIZERS,
    save_byte_tokenizer,
    sentence,
    squad_content,
    write_mnli,
    write_qqp,
    write_race,
    write_squad,
    write_table,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def glue_of(folder: Path, task: Any = "qqp", kind: str = "bert", **options: Any) -> GlueDataModule:
    tokenizer = TOKENIZERS[kind](folder / "tokenizer")
    return GlueDataModule(task, str(folder), str(tokenizer), **{"seq_length": 16, **options})


@kinds
def test_rows_of_glue_equal_those_of_transformers(tmp_path, kind):
    write_mnli(tmp_path)
    data = glue_of(tmp_path, "mnli", kind)
    data.setup("fit")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    examples = read_glue(tmp_path / "train.tsv", GLUE_TASKS["mnli"])
    expected = tokenizer(
        *examples.texts, truncation="longest_first", max_length=16, padding="max_length",
        return_tensors="pt", return_token_type_ids=True,
    )  # fmt: skip
    order = data.training_samples(None)
    batch = data.evaluation_loader(order).batches[list(range(40))]
    numbers = torch.tensor([order.row(at) for at in range(40)])
    assert batch["row"].tolist() == numbers.tolist()
    assert sorted(numbers.tolist()) == list(range(40))
    assert torch.equal(batch["tokens"], expected["input_ids"][numbers])
    assert torch.equal(batch["token_types"], expected["token_type_ids"][numbers])
    assert torch.equal(batch["valid"].long(), expected["attention_mask"][numbers])
    assert torch.equal(batch["lengths"], expected["attention_mask"][numbers].sum(1))
    assert batch["labels"].tolist() == [examples.labels[number] for number in numbers]


@kinds
def test_options_of_race_equal_the_rows_of_transformers(tmp_path, kind):
    write_race(tmp_path)
    tokenizer = TOKENIZERS[kind](tmp_path / "tokenizer")
    data = RaceDataModule(str(tmp_path), str(tokenizer), seq_length=24)
    data.setup("validate")
    batch = data.val_dataloader().batches[[*range(12), -1]]
    assert batch["tokens"].shape == (13, 4, 24)
    files = race_files(tmp_path / "dev" / group for group in ("middle", "high"))
    questions = [
        question for path in files for question in read_race(path, path.parent.name == "high")
    ]
    assert "_" not in questions[0].texts[0]
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(
        [text for question in questions for text in question.texts],
        [question.passage for question in questions for _ in range(4)],
        truncation="only_second", max_length=24, padding="max_length", return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    assert torch.equal(batch["tokens"][:12].flatten(0, 1), expected["input_ids"])
    assert torch.equal(batch["token_types"][:12].flatten(0, 1), expected["token_type_ids"])
    assert torch.equal(batch["valid"][:12].flatten(0, 1).long(), expected["attention_mask"])
    assert torch.equal(batch["lengths"], batch["valid"].sum(-1))
    assert batch["labels"].tolist() == [*(question.label for question in questions), -100]
    assert batch["row"].tolist() == [*range(12), -1]
    assert data.encoded("val").groups.tolist() == [0] * 6 + [1] * 6
    short = RaceDataModule(str(tmp_path), str(tokenizer), question_length=2, seq_length=64)
    with pytest.warns(UserWarning, match=r"12 read, 0 malformed rows left out, \d\d texts trunc"):
        short.setup("validate")


def test_malformed_lines_of_glue_are_named_or_counted(tmp_path):
    write_qqp(tmp_path)
    path = tmp_path / "train.tsv"
    lines = path.read_text().split("\n")
    for line, fault in {
        "3\t1\t2\tonly one question": "must have 6 columns: it has 4",
        "3\t1\t2\t \tb\t1": "must have a text in the column question1: it is empty",
        "3\t1\t2\ta\tb\t-": "must have a label of 0, 1: it has '-'",
    }.items():
        path.write_text("\n".join([*lines[:4], line, *lines[4:]]))
        with pytest.raises(CorruptDataError, match=f"train.tsv:5 {fault}."):
            glue_of(tmp_path).setup("fit")
        data = glue_of(tmp_path, malformed="leave_out")
        with pytest.warns(UserWarning, match="20 read, 1 malformed rows left out"):
            data.setup("fit")
        assert len(data.encoded("train")) == 20
    rows = [['"a "cat', "1"], ["b\u2028c \x85 d", "0"]]
    path = write_table(tmp_path / "plain.tsv", ["sentence", "label"], rows)
    examples = read_glue(path, GLUE_TASKS["sst2"])
    assert examples.texts == ([row[0] for row in rows],), "quotation marks are plain characters"
    write_table(tmp_path / "dev.tsv", ["id", "question1", "question2"], [["1", "a", "b"]])
    with pytest.raises(CorruptDataError, match=r"dev.tsv:1 must name .* is_duplicate missing"):
        glue_of(tmp_path).setup("validate")


def test_folders_without_data_or_without_a_tokenizer_are_refused(tmp_path):
    for make, phrase in (
        (glue_of, "files of the task qqp must exist: .*train.tsv"),
        (lambda folder: RaceDataModule(str(folder), ""), "folder of RACE must have files"),
        (
            lambda folder: PairTokenizer(str(folder)),
            "local folder with tokenizer.json or vocab.txt",
        ),
    ):
        with pytest.raises(UnsupportedError, match=phrase):
            make(tmp_path)
    folder = save_byte_tokenizer(tmp_path / "damaged", is_named=False)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CorruptDataError, match="no tokenizer that transformers can read"):
        PairTokenizer(str(folder))


def test_damaged_files_of_race_are_named(tmp_path):
    write_race(tmp_path)
    path = tmp_path / "dev" / "high" / "0.txt"
    content = json.loads(path.read_text())
    for change, fault in (
        ({"answers": ["A", "E", "B"]}, "question 2 must have an answer of A, B, C, D: it has 'E'"),
        ({"answers": ["A"]}, "must have as many questions as options and answers: it has 3, 3, 1"),
        ({"options": [["a"] * 4, ["a"] * 3, ["a"] * 4]}, "question 2 must have 4 texts as options"),
        ({"article": ""}, "must have a text as article"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(CorruptDataError, match=f"{path}.*{fault}"):
            read_race(path, 1)


def test_cached_rows_equal_new_rows_and_follow_changes_of_their_file(tmp_path):
    write_qqp(tmp_path)
    fresh = glue_of(tmp_path).encoded("val")
    cache = str(tmp_path / "cache")
    for _ in range(2):
        cached = glue_of(tmp_path, cache_dir=cache).encoded("val")
        assert cached.tokens.tolist() == fresh.tokens.tolist()
        assert cached.labels.tolist() == fresh.labels.tolist()
    write_qqp(tmp_path, num_val=5)
    assert len(glue_of(tmp_path, cache_dir=cache).encoded("val")) == 5


def test_scores_equal_torchmetrics_in_any_order_of_rows():
    labels, groups, logits = torch.randint(2, (50,)), torch.randint(2, (50,)), torch.randn(50, 2)
    metric = ClassScores(labels, groups, ["a", "b"], has_f1=True)
    order = torch.randperm(50)[:40]
    for part in order.split(7):
        metric.update(torch.cat([part, torch.tensor([-1])]), torch.cat([logits[part], logits[:1]]))
    actual = {name: float(value) for name, value in metric.compute().items()}
    chosen, accuracy = logits.argmax(1), MulticlassAccuracy(2, average="micro")
    expected = {"accuracy": float(accuracy(chosen[order], labels[order]))}
    expected["f1"] = float(BinaryF1Score()(chosen[order], labels[order]))
    for number, name in enumerate("ab"):
        part = order[groups[order] == number]
        expected[f"accuracy_{name}"] = float(accuracy(chosen[part], labels[part]))
    assert actual == pytest.approx(expected, abs=1e-7)
    # An ensemble's scores are the mean of its models' probabilities.
    tables = torch.tensor([[[0.0, 0.0]], [[0.0, 50.0]]])
    torch.testing.assert_close(ClassScores.combined(tables), torch.tensor([[0.25, 0.75]]))


PAIRS = (["the cat sees", "a dog"], ["who runs", "the old house near the river"])


def test_a_tokenizer_json_without_a_class_name_is_read_by_its_kind(tmp_path):
    named = PairTokenizer(str(save_byte_tokenizer(tmp_path / "named")))
    unnamed = PairTokenizer(str(save_byte_tokenizer(tmp_path / "unnamed", is_named=False)))
    actual = unnamed.pairs(*PAIRS, 32, "longest_first")
    assert actual == named.pairs(*PAIRS, 32, "longest_first")
    tokens, types, num_cut = actual
    # <s> a </s></s> b </s>
    assert [sequence[0] for sequence in tokens] == [0, 0]
    assert [sequence.count(2) for sequence in tokens] == [3, 3]
    assert tokens[1][3:5] == [2, 2]
    assert not any(map(any, types))
    assert num_cut == 0
    assert (named.num_separators, named.padding) == (4, 1)
    # The space and the three bytes of the sign are tokens.
    text = "the \u20ac cat"
    for limit, short in {1: "the", 4: "the ", 5: "the \u20ac", 6: text}.items():
        assert named.short([text], limit) == ([short], int(short != text))


@kinds
def test_a_first_text_must_leave_room_for_the_second(tmp_path, kind):
    tokenizer = PairTokenizer(str(TOKENIZERS[kind](tmp_path)))
    special = tokenizer.num_separators
    assert special == (3 if kind == "bert" else 4)
    [row], _, _ = tokenizer.pairs(["the cat"], ["a dog sees"], 3 + special, "only_second")
    assert len(row) == 3 + special
    with pytest.raises(CorruptDataError, match=f"has 2, and a pair has {special} special"):
        tokenizer.pairs(["the cat"], ["a dog sees"], 2 + special, "only_second")


LENGTH, SHARED, QUESTION = 20, 4, 6


def squad_of(
    folder: Path, version: Any = "2.0", *, kind: str = "bert", **options: Any
) -> SquadDataModule:
    tokenizer = str(TOKENIZERS[kind](folder / "tokenizer"))
    defaults = {"seq_length": LENGTH, "doc_stride": SHARED, "question_length": QUESTION}
    return SquadDataModule(version, str(folder), tokenizer, **(defaults | options))


@kinds
def test_windows_and_labels_equal_transformers(tmp_path, kind):
    write_squad(tmp_path, num_train=12)
    data = squad_of(tmp_path, kind=kind)
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


@kinds
def test_perfect_scores_give_the_labelled_answers(tmp_path, kind):
    write_squad(tmp_path, num_val=9)
    metric, scores = perfect_scores(squad_of(tmp_path, threshold=-1.0, kind=kind))
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
    metric, scores = perfect_scores(squad_of(tmp_path))
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
    metric, scores = perfect_scores(squad_of(tmp_path, "1.1"))
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
        squad_of(tmp_path, doc_stride=11)
    # A pair of RoBERTa has one more special token.
    with pytest.raises(ParallelPlanError, match=r"- 4 \(10\), .* and 4 special tokens"):
        squad_of(tmp_path, doc_stride=10, kind="roberta").encoded("val")


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
