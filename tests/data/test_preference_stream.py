"""Streamed preference pairs equal unstreamed pairs, and runs resume within a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megatron import PreferenceDataModule, Streaming
from lightning_megatron.data.preference_samples import PairSamples
from lightning_megatron.data.preference_stream import StreamedPairs
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from tests.chat_folder import preferences, save_chat_llama, turn, write_lines
from tests.data.recorder import limited, make_trainer, run
from tests.data.test_chat_stream import write_shards
from tests.data.test_datamodule_resume import StopAfter, TwoReplicas
from tests.data.test_preference_datamodule import LENGTH, PairRecorder
from tests.preferences.parts import as_messages

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_llama(tmp_path_factory.mktemp("model"))


def make_data(path: str | list[str], folder: str, **options: Any) -> PreferenceDataModule:
    settings = {"seq_length": LENGTH, "global_batch_size": 3, "streaming": Streaming(7), **options}
    return PreferenceDataModule(path, folder, **settings)


def streamed(data: PreferenceDataModule) -> StreamedPairs:
    samples = data.training_samples(None)
    assert isinstance(samples, StreamedPairs)
    return samples


def assert_same_batch(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys() == {"tokens", "labels", "pairs"}
    for name, values in actual.items():
        assert torch.equal(values, expected[name]), name


def write_pairs(folder: Path) -> dict[str, list[str]]:
    """Write 22 pairs as three shards of each kind of file, and return the paths by kind."""
    # Parquet needs fields of the same types in all rows.
    return write_shards(folder, [as_messages(row) for row in preferences(22)])


def numbers_of_pass(samples: StreamedPairs, number: int = 0) -> list[int]:
    """Return the number of each pair of a pass, in order."""
    numbers = []
    position = 0
    while samples.pass_of(position) <= number:
        if samples.pass_of(position) == number:
            numbers.append(samples.pair(position))
        position += 1
    return numbers


def numbers_in(*sizes: int, lines: int = 1) -> list[int]:
    """Return the numbers of pairs of files in which a row takes `lines` lines, empty ones included."""
    return [file * 2**40 + lines * row for file, size in enumerate(sizes) for row in range(size)]


@pytest.mark.filterwarnings("ignore:Pass .* left out as too long")
@pytest.mark.parametrize("length_multiple", [8, None])
def test_a_section_of_a_complete_file_equals_the_module_without_streaming(
    tmp_path: Path, folder: str, length_multiple: int | None
) -> None:
    # One pair is left out: its answers differ only after the cut.
    omitted = {"prompt": "why", "chosen": "z" * 300 + "a", "rejected": "z" * 300 + "b"}
    rows = preferences(14)
    path = write_lines(tmp_path / "rows.jsonl", [*rows[:5], omitted, *rows[5:]])
    options: dict[str, Any] = {"seed": 3, "length_multiple": length_multiple}
    unstreamed = make_data(path, folder, streaming=None, **options)
    count = 2 * 14 + 3
    numbers = list(range(count))
    with pytest.warns(UserWarning, match="15 read, 0 cut .*, 1 left out"):
        expected = unstreamed.training_samples(count)
    stream = make_data(path, folder, streaming=Streaming(), **options)
    with pytest.warns(UserWarning, match="15 pairs read, 0 cut .*, 1 left out as too long"):
        # The samples span several passes, each in another order.
        actual = stream.batches_of(streamed(stream))[numbers]
    assert_same_batch(actual, unstreamed.batches_of(expected)[numbers])
    assert sorted(actual["pairs"].tolist()[:14]) == [*range(5), *range(6, 15)]
    assert actual["pairs"].tolist()[:14] != actual["pairs"].tolist()[14:28]
    # The same holds without shuffling.
    plain = make_data(path, folder, streaming=Streaming(shuffle=False), **options)
    in_order = PairSamples(unstreamed.encoded("train"), None, count)
    assert_same_batch(
        plain.batches_of(streamed(plain))[numbers], unstreamed.batches_of(in_order)[numbers]
    )


@pytest.mark.parametrize("buffer", [1, 5, 7, 1000])
def test_each_pass_has_every_pair_once(tmp_path: Path, folder: str, buffer: int) -> None:
    for kind, paths in write_pairs(tmp_path).items():
        # Line numbers count the empty lines between rows, too.
        lines = 1 + (kind in ("jsonl", "gz"))
        expected_numbers = numbers_in(7, 1, 14, lines=lines)
        unstreamed = make_data(paths, folder, streaming=None)
        texts = PairSamples(unstreamed.encoded("train"), None)
        expected = {texts.pair(at): texts[at].tolist() for at in range(22)}
        assert list(expected) == expected_numbers, kind
        samples = streamed(make_data(paths, folder, streaming=Streaming(buffer)))
        passes = [numbers_of_pass(samples, number) for number in range(3)]
        for numbers in passes:
            assert sorted(numbers) == expected_numbers, kind
        # With sections of one row, only the order of files is shuffled.
        assert len({str(numbers) for numbers in passes}) >= (2 if buffer == 1 else 3)
        for at in range(22):
            assert samples[at].tolist() == expected[passes[0][at]]
            assert sum(samples.lengths(at)) == len(samples[at])
        data = make_data(
            paths, folder, num_workers=2 * (buffer == 5), streaming=Streaming(buffer, False)
        )
        samples = streamed(data)
        assert numbers_of_pass(samples) == numbers_of_pass(samples, 1) == expected_numbers
        samples.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_has_each_pair_once_in_the_order_of_the_files(
    tmp_path: Path, folder: str, num_workers: int
) -> None:
    paths = write_pairs(tmp_path)["jsonl"]
    plain = make_data(paths, folder, streaming=None, global_batch_size=4)
    stream = make_data(paths, folder, num_workers=num_workers, global_batch_size=4)
    batches = list(stream.each_pair_once("train"))
    # 22 pairs are five batches and a half.
    assert len(batches) == 6
    for actual, expected in zip(batches, plain.each_pair_once("train"), strict=True):
        assert_same_batch(actual, expected)
    assert stream.pairs_key("train") != plain.pairs_key("train")
    assert stream.pairs_key("train") == make_data(paths, folder, seed=9).pairs_key("train")
    assert stream.pairs_key("train") != make_data(paths[:2], folder).pairs_key("train")


def test_ranks_share_the_last_batch_of_the_loader(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", preferences(9))
    for options in ({"streaming": None}, {"streaming": Streaming(4)}):
        shares = []
        for rank in range(2):
            data = make_data(path, folder, global_batch_size=4, **options)
            monkeypatch.setattr(data, "data_parallel", lambda rank=rank: (rank, 2))
            shares.append([batch["pairs"].tolist() for batch in data.each_pair_once("train")])
        assert shares == [[[0, 1], [4, 5], [-1]], [[2, 3], [6, 7], [8]]], options


@limited
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_run_continues_with_the_next_pair(
    tmp_path: Path, folder: str, limits: dict[str, int], num_workers: int
) -> None:
    paths = write_pairs(tmp_path)["jsonl"]

    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        return run(
            PairRecorder(), make_data(paths, folder, num_workers=num_workers), trainer, ckpt_path
        )

    uninterrupted = trained()
    samples = streamed(make_data(paths, folder))
    assert sum(uninterrupted, []) == [samples.pair(at) for at in range(3 * len(uninterrupted))]
    # Without a limit of steps, the run has three passes of 22 pairs.
    assert len(uninterrupted) == (22 if limits == {"max_epochs": 3} else 14)
    killed = tmp_path / "killed.ckpt"
    for stop in (1, 4, 6, 9) if not num_workers else (6,):
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted
        state = torch.load(killed, weights_only=False)["PreferenceDataModule"]
        assert state["stream"] == samples.state_at(3 * stop)
    # The last position is in the middle of a section of 7 pairs.
    assert state["stream"]["first"] < state["consumed"] < state["stream"]["first"] + 7


def test_a_run_continues_under_another_number_of_ranks(tmp_path: Path, folder: str) -> None:
    paths = write_pairs(tmp_path)["jsonl"]

    def trained(ranks: int, *callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        pairs_of_ranks = []
        for index in range(ranks):
            strategy_options: dict[str, Any] = {}
            if ranks == 2:
                strategy = TwoReplicas()
                strategy.index = index
                strategy_options = {"strategy": strategy, "devices": 1}
            trainer = make_trainer(
                tmp_path, *callbacks, max_steps=9, max_epochs=-1, **strategy_options
            )
            data = make_data(paths, folder, global_batch_size=4)
            pairs_of_ranks.append(run(PairRecorder(), data, trainer, ckpt_path))
            if ranks == 2:
                torch.distributed.destroy_process_group()
        return [sum(shares, []) for shares in zip(*pairs_of_ranks, strict=True)]

    uninterrupted = trained(1)
    assert len(uninterrupted) == 9
    assert trained(2) == uninterrupted
    killed = tmp_path / "killed.ckpt"
    first = trained(1, StopAfter(4, killed))
    assert first + trained(2, ckpt_path=killed) == uninterrupted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, folder: str, num_workers: int) -> None:
    bad = {"prompt": "why", "chosen": [turn("robot", "hi")], "rejected": "no"}
    write_lines(tmp_path / "0.jsonl", preferences(3))
    write_lines(tmp_path / "1.jsonl", [*preferences(9), bad])
    data = make_data(
        str(tmp_path), folder, num_workers=num_workers, streaming=Streaming(4, shuffle=False)
    )
    samples = streamed(data)
    assert [samples.pair(at) for at in range(8)] == numbers_in(3, 5)
    with pytest.raises(CorruptDataError, match=r"1\.jsonl:10: chosen, message 1: the role must be"):
        samples[12]
    samples.close()
    # The same holds after a restart in the middle of the file.
    state = samples.state_at(7)
    assert state["number"] > 0
    samples = streamed(data)
    samples.restore(state)
    with pytest.raises(CorruptDataError, match=r"1\.jsonl:10"):
        samples[12]
    samples.close()
    with pytest.raises(CorruptDataError, match=r"1\.jsonl:10"):
        list(data.each_pair_once("train"))


def test_unsupported_settings_of_a_stream_raise(tmp_path: Path, folder: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", preferences(8))
    with pytest.raises(UnsupportedError, match=r"train_samples \(9\) .* Use max_steps"):
        make_data(path, folder, train_samples=9)
    with pytest.raises(UnsupportedError, match=r"max_conversations \(4\) cannot be used with pai"):
        make_data(path, folder, streaming=Streaming(max_conversations=4))
    for options, reason in (
        ({"max_epochs": -1}, "needs max_steps, max_epochs or max_time"),
        ({"max_steps": 3, "overfit_batches": 1}, r"overfit_batches \(1\)"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            make_trainer(tmp_path, **options).fit(
                PairRecorder(), datamodule=make_data(path, folder)
            )
