"""Files of GLUE become the rows that transformers' tokenizer makes, and malformed lines are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import GlueDataModule
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.finetuning.glue import GLUE_TASKS, read_glue
from lightning_megatron.finetuning.scores import ClassScores
from tests.finetuning.folders import TOKENIZERS, write_mnli, write_qqp, write_table

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")


def data_of(
    folder: Path, task: Any = "mnli", *, kind: str = "bert", **options: Any
) -> GlueDataModule:
    tokenizer = TOKENIZERS[kind](folder / "tokenizer")
    return GlueDataModule(task, str(folder), str(tokenizer), **{"seq_length": 16, **options})


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rows_equal_the_rows_of_transformers(tmp_path: Path, kind: str) -> None:
    write_mnli(tmp_path)
    data = data_of(tmp_path, kind=kind)
    data.setup("fit")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    task = GLUE_TASKS["mnli"]
    examples = read_glue(tmp_path / "train.tsv", task)
    expected = tokenizer(
        *examples.texts, truncation="longest_first", max_length=16, padding="max_length",
        return_tensors="pt", return_token_type_ids=True,
    )  # fmt: skip
    rows = data.encoded("train")
    batch = data.evaluation_loader(data.training_samples(None)).batches.__getitem__
    order = data.training_samples(None)
    actual = batch(list(range(len(rows))))
    numbers = torch.tensor([order.row(at) for at in range(len(rows))])
    assert actual["row"].tolist() == numbers.tolist()
    assert sorted(numbers.tolist()) == list(range(40))
    assert torch.equal(actual["tokens"], expected["input_ids"][numbers])
    assert torch.equal(actual["token_types"], expected["token_type_ids"][numbers])
    assert torch.equal(actual["valid"].long(), expected["attention_mask"][numbers])
    assert torch.equal(actual["lengths"], expected["attention_mask"][numbers].sum(1))
    assert actual["labels"].tolist() == [examples.labels[number] for number in numbers]


def test_quotation_marks_and_unicode_line_breaks_are_plain_characters(tmp_path: Path) -> None:
    rows = [['"a "cat', "1"], ["b\u2028c \x85 d", "0"], ['the end"', "0"]]
    path = write_table(tmp_path / "train.tsv", ["sentence", "label"], rows)
    examples = read_glue(path, GLUE_TASKS["sst2"])
    assert examples.texts == ([row[0] for row in rows],)
    assert examples.labels == [1, 0, 0]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("3\t1\t2\tonly one question", "must have 6 columns: it has 4"),
        ("3\t1\t2\t \tb\t1", "must have a text in the column question1: it is empty"),
        ("3\t1\t2\ta\tb\t-", "must have a label of 0, 1: it has '-'"),
        ("", "must have 6 columns: it has 1"),
    ],
)
def test_malformed_lines_are_named_or_counted(tmp_path: Path, line: str, fault: str) -> None:
    write_qqp(tmp_path)
    path = tmp_path / "train.tsv"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]))
    with pytest.raises(CorruptDataError) as error:
        data_of(tmp_path, "qqp").setup("fit")
    assert f"{path}:5 {fault}." in str(error.value)
    data = data_of(tmp_path, "qqp", malformed="leave_out")
    with pytest.warns(UserWarning, match="20 read, 1 malformed rows left out"):
        data.setup("fit")
    assert len(data.encoded("train")) == 20


def test_missing_columns_and_files_are_named(tmp_path: Path) -> None:
    write_qqp(tmp_path)
    path = write_table(tmp_path / "dev.tsv", ["id", "question1", "question2"], [["1", "a", "b"]])
    with pytest.raises(CorruptDataError, match=r"dev.tsv:1 must name .* is_duplicate missing"):
        data_of(tmp_path, "qqp").setup("validate")
    path.unlink()
    with pytest.raises(UnsupportedError, match=r"files of the task qqp must exist: .*dev.tsv"):
        data_of(tmp_path, "qqp")


def test_cached_rows_equal_new_rows_and_follow_changes_of_their_file(tmp_path: Path) -> None:
    write_qqp(tmp_path)
    fresh = data_of(tmp_path, "qqp")
    for _ in range(2):
        cached = data_of(tmp_path, "qqp", cache_dir=str(tmp_path / "cache"))
        assert cached.encoded("val").tokens.tolist() == fresh.encoded("val").tokens.tolist()
        assert cached.encoded("val").labels.tolist() == fresh.encoded("val").labels.tolist()
    write_qqp(tmp_path, num_val=5)
    assert len(data_of(tmp_path, "qqp", cache_dir=str(tmp_path / "cache")).encoded("val")) == 5


def test_scores_equal_torchmetrics_in_any_order_of_rows() -> None:
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(2, (50,), generator=draw)
    groups = torch.randint(2, (50,), generator=draw)
    logits = torch.randn(50, 2, generator=draw)
    metric = ClassScores(labels, groups, ["a", "b"], has_f1=True)
    order = torch.randperm(50, generator=draw)[:40]
    for part in order.split(7):
        metric.update(torch.cat([part, torch.tensor([-1])]), torch.cat([logits[part], logits[:1]]))
    actual = {name: float(value) for name, value in metric.compute().items()}
    chosen = logits.argmax(1)
    accuracy = MulticlassAccuracy(2, average="micro")
    true_positives = ((chosen == 1) & (labels == 1))[order].sum()
    expected = {
        "accuracy": float(accuracy(chosen[order], labels[order])),
        "f1": float(2 * true_positives / (chosen[order].sum() + labels[order].sum())),
    }
    for number, name in enumerate("ab"):
        part = order[groups[order] == number]
        expected[f"accuracy_{name}"] = float(accuracy(chosen[part], labels[part]))
    assert actual == pytest.approx(expected, abs=1e-7)


def test_an_ensemble_has_the_mean_probabilities_of_its_models() -> None:
    one_is_sure, two_are_not = [[0.0, 10.0]], [[3.0, 0.0]]
    combined = ClassScores.combined(torch.tensor([one_is_sure, two_are_not, two_are_not]))
    # The mean of the scores would choose class 1.
    assert combined.argmax(1).tolist() == [0]
    torch.testing.assert_close(combined.sum(1), torch.ones(1))
