"""PreferenceDataModule has the tokens and labels of transformers' templates, and resumes runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.data import chat_template
from lightning_megatron.data.preference_datamodule import PreferenceDataModule
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from tests.chat_folder import PLAIN, preferences, save_chat_llama, turn, write_lines
from tests.data.recorder import Watcher, make_trainer, run
from tests.data.test_datamodule_resume import StopAfter
from tests.preferences.parts import as_messages

transformers = pytest.importorskip("transformers")

LENGTH = 200
WHY = turn("user", "why")
SO = turn("assistant", "so")
NO = turn("assistant", "no")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_llama(tmp_path_factory.mktemp("model"))


def tokens_and_labels(folder: str, row: dict[str, Any], side: str) -> tuple[list[int], list[int]]:
    """Return tokens and labels; the prompt and the header of the answer have no labels."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = as_messages(row)
    options = {"chat_template": PLAIN, "return_dict": True}
    encoded_prompt = tokenizer.apply_chat_template(
        messages["prompt"], add_generation_prompt=True, **options
    )
    tokens = tokenizer.apply_chat_template(messages["prompt"] + messages[side], **options)[
        "input_ids"
    ]
    start = len(encoded_prompt["input_ids"])
    return tokens, [-100] * start + tokens[start:]


def check_batch(batch: dict[str, torch.Tensor], folder: str, rows: list[dict[str, Any]]) -> None:
    length = batch["tokens"].shape[2]
    for at, pair in enumerate(batch["pairs"].tolist()):
        for side, name in enumerate(("chosen", "rejected")):
            tokens, labels = tokens_and_labels(folder, rows[pair], name)
            padding = length - len(tokens) + 1
            assert batch["tokens"][at, side].tolist() == tokens[:-1] + [0] * padding
            assert batch["labels"][at, side].tolist() == labels[1:] + [-100] * padding


@pytest.mark.parametrize("is_marked", [True, False])
def test_tokens_and_labels_match_the_chat_template(
    tmp_path: Path, folder: str, is_marked: bool
) -> None:
    rows = preferences(14)
    (tmp_path / "plain.jinja").write_text(PLAIN)
    data = PreferenceDataModule(
        write_lines(tmp_path / "rows.jsonl", rows), folder, seq_length=LENGTH, batch_size=3,
        chat_template=None if is_marked else str(tmp_path / "plain.jinja"), length_multiple=8,
    )  # fmt: skip
    data.setup("fit")
    batches = list(data.each_pair_once("train"))
    for batch in batches:
        check_batch(batch, folder, rows)
        longest = max(
            len(tokens_and_labels(folder, rows[pair], side)[0]) - 1
            for pair in batch["pairs"].tolist()
            for side in ("chosen", "rejected")
        )
        assert batch["tokens"].shape[2] == -(-longest // 8) * 8
    assert torch.cat([batch["pairs"] for batch in batches]).tolist() == list(range(14))
    samples = data.training_samples(28)
    numbers = [samples.pair(at) for at in range(28)]
    assert sorted(numbers[:14]) == sorted(numbers[14:]) == list(range(14))
    assert numbers[:14] != numbers[14:]
    assert [samples.pair(at) for at in range(5)] == [
        data.training_samples(5).pair(at) for at in range(5)
    ]
    padded = PreferenceDataModule(
        str(tmp_path), folder, seq_length=LENGTH, batch_size=3, length_multiple=None
    )
    batch = next(iter(padded.each_pair_once("train")))
    assert batch["tokens"].shape == (3, 2, LENGTH)
    check_batch(batch, folder, rows)


def test_a_warning_counts_truncated_and_omitted_pairs(tmp_path: Path, folder: str) -> None:
    long = turn("assistant", "y" * 100)
    rows = [
        {"prompt": "why", "chosen": "so", "rejected": "no"},
        {"prompt": "why", "chosen": [long], "rejected": "no"},
        {"prompt": "x" * 300, "chosen": "so", "rejected": "no"},
        # The two answers differ only after the cut.
        {"prompt": "why", "chosen": "z" * 200 + "a", "rejected": "z" * 200 + "b"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = PreferenceDataModule(path, folder, seq_length=99)
    with pytest.warns(UserWarning, match=r"4 read, 1 cut after 100 tokens .*, 2 left out"):
        data.setup("fit")
    [batch] = [data.each_pair_once("train").batches[[0, 1]]]
    tokens, labels = tokens_and_labels(folder, rows[1], "chosen")
    assert batch["tokens"][1, 0].tolist() == tokens[:99]
    assert batch["labels"][1, 0].tolist() == labels[1:100]
    data = PreferenceDataModule(path, folder, seq_length=99, too_long="leave_out")
    with pytest.warns(UserWarning, match=r"4 read, 0 cut .*, 3 left out"):
        data.setup("fit")
    assert len(data.encoded("train")) == 1
    data = PreferenceDataModule(path, folder, seq_length=99, too_long="refuse")
    with pytest.raises(CorruptDataError, match=r"rows.jsonl:2 has \d+ tokens"):
        data.setup("fit")


GOOD = {"prompt": "why", "chosen": "so", "rejected": "no"}
BAD: dict[str, tuple[Any, str]] = {
    "no rejected": ({"prompt": "why", "chosen": "so"}, "must have chosen and rejected"),
    "texts alone": (
        {"chosen": "why so", "rejected": "why no"},
        "chosen must be a list of messages if",
    ),
    "role": ({**GOOD, "chosen": [turn("robot", "so")]}, "chosen, message 1: the role must be"),
    "empty answer": ({**GOOD, "rejected": " "}, "rejected, message 1 is an answer without text"),
    "no list": ({**GOOD, "prompt": 7}, "prompt must be a non-empty list"),
    "equal": ({**GOOD, "rejected": "so"}, "chosen and rejected must differ"),
    "equal lists": ({"chosen": [WHY, SO], "rejected": [WHY, SO]}, "must differ"),
    "other prompts": (
        {"chosen": [WHY, SO], "rejected": [turn("user", "how"), NO]},
        "must begin with the same prompt",
    ),
    "no answer": (
        {"chosen": [WHY, SO, WHY], "rejected": [WHY, SO, NO]},
        "chosen has no message of the role assistant after the prompt",
    ),
    "beginning": ({"chosen": [WHY, SO], "rejected": [WHY, SO, NO]}, "chosen has no message"),
    "tools": ({**GOOD, "tools": "a"}, "tools must be a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, folder: str, name: str) -> None:
    bad, reason = BAD[name]
    path = write_lines(tmp_path / "rows.jsonl", [*preferences(2), bad])
    with pytest.raises(CorruptDataError, match=rf"rows\.jsonl:3.*{reason}"):
        PreferenceDataModule(path, folder).setup("fit")


def test_settings_and_templates_are_checked(tmp_path: Path, folder: str) -> None:
    from tests.tiny_llama import save_tiny_llama

    path = write_lines(tmp_path / "rows.jsonl", preferences(2))
    with pytest.raises(ParallelPlanError, match="length_multiple must be a whole number"):
        PreferenceDataModule(path, folder, length_multiple=0)
    save_tiny_llama(tmp_path / "model")
    with pytest.raises(UnsupportedError, match="must have one chat template"):
        PreferenceDataModule(path, str(tmp_path / "model")).setup("fit")
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:1 is rejected by .* no"):
        PreferenceDataModule(path, folder, chat_template=str(tmp_path / "bad.jinja")).setup("fit")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (b"{{ 'a' * 9999999 }}", r"rows\.jsonl:1 is rejected .* at most \d+ are expected"),
        (
            b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            r"rows\.jsonl:1 is rejected .* still computes",
        ),
        (b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", r"rows\.jsonl:1 is rejected"),
        (b"\xff", r"x\.jinja: byte \d+ is not UTF-8"),
    ],
)
def test_templates_without_end_are_refused(
    end: bytes, reason: str, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 2.0)
    path = write_lines(tmp_path / "rows.jsonl", preferences(2))
    template = tmp_path / "x.jinja"
    template.write_bytes(PLAIN.encode() + end)
    with pytest.raises(CorruptDataError, match=reason):
        PreferenceDataModule(path, folder, chat_template=str(template)).setup("fit")


def test_pairs_whose_tokens_are_equal_are_refused(tmp_path: Path, folder: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", preferences(2))
    template = tmp_path / "constant.jinja"
    template.write_text(PLAIN.replace("message['content']", "'x'"))
    with pytest.raises(CorruptDataError, match=r"rows\.jsonl:1: .* makes the same \d+ tokens"):
        PreferenceDataModule(path, folder, chat_template=str(template)).setup("fit")


def test_parquet_has_the_rows_of_json_lines(tmp_path: Path, folder: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [as_messages(row) for row in preferences(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = PreferenceDataModule(str(tmp_path / "rows.parquet"), folder, seq_length=LENGTH)
    check_batch(data.each_pair_once("train").batches[list(range(5))], folder, rows)


class PairRecorder(Watcher):
    """Module that records the numbers of pairs."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        return batch["pairs"].tolist()


@pytest.mark.parametrize("limits", [{"max_steps": 9, "max_epochs": -1}, {"max_epochs": 2}])
def test_a_killed_run_continues_with_the_next_pair(
    tmp_path: Path, folder: str, limits: dict[str, int]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", preferences(14))

    def trained(*callbacks: Any, ckpt_path: Path | None = None) -> list[list[int]]:
        data = PreferenceDataModule(path, folder, seq_length=LENGTH, global_batch_size=3)
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        return run(PairRecorder(), data, trainer, ckpt_path)

    uninterrupted = trained()
    assert len(uninterrupted) >= 8
    killed = tmp_path / "killed.ckpt"
    for stop in (2, 6):
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted
