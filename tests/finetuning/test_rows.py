"""Files of GLUE and RACE become the rows that transformers' tokenizers of BERT and RoBERTa make, and
malformed ones are named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

from lightning_megatron import GlueDataModule, RaceDataModule
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.finetuning.glue import GLUE_TASKS, read_glue
from lightning_megatron.finetuning.race import race_files, read_race
from lightning_megatron.finetuning.scores import ClassScores
from lightning_megatron.finetuning.tokens import PairTokenizer
from tests.finetuning.folders import (
    TOKENIZERS,
    save_byte_tokenizer,
    write_mnli,
    write_qqp,
    write_race,
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


def test_an_ensemble_has_the_mean_probabilities_of_its_models():
    one_is_sure, two_are_not = [[0.0, 10.0]], [[3.0, 0.0]]
    combined = ClassScores.combined(torch.tensor([one_is_sure, two_are_not, two_are_not]))
    # The mean of the scores would choose class 1.
    assert combined.argmax(1).tolist() == [0]
    torch.testing.assert_close(combined.sum(1), torch.ones(1))


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
