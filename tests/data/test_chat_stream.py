"""Streamed conversations equal unstreamed conversations, and runs resume within a file."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megatron import ChatDataModule, Streaming
from lightning_megatron.data.chat_samples import ChatSamples
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
    UnsupportedError,
)
from tests.chat_folder import conversations, save_chat_llama, turn, write_lines
from tests.data.recorder import Watcher, limited, make_trainer, run
from tests.data.test_chat_datamodule import LENGTH, tokens_and_labels
from tests.data.test_datamodule_resume import StopAfter, TwoReplicas

pytest.importorskip("transformers")

Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_llama(tmp_path_factory.mktemp("model"))


def streamed(data: ChatDataModule, num_samples: int | None = None) -> StreamedSamples:
    samples = data.training_samples(num_samples)
    assert isinstance(samples, StreamedSamples)
    return samples


def batch_of(data: ChatDataModule, samples: Any, numbers: list[int]) -> Batch:
    """Return rows as a batch, without columns of zeros in the lengths."""
    batch = data.loader_of(samples, None).batches[numbers]  # type: ignore[arg-type]
    if "lengths" in batch:
        width = int((batch["lengths"] != 0).sum(1).max())
        assert not batch["lengths"][:, width:].any()
        batch["lengths"] = batch["lengths"][:, :width]
    return batch


def assert_equal(actual: Batch, expected: Batch) -> None:
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize(
    "options", [{}, {"packing": False}, {"seq_length": 248, "context_windows": 4}], ids=str
)
def test_a_section_of_a_complete_file_equals_the_module_without_streaming(
    tmp_path: Path, folder: str, options: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", conversations(40))
    options = {"seq_length": LENGTH, "seed": 3, **options}
    unstreamed = ChatDataModule(path, folder, **options)
    count = 2 * len(unstreamed.training_samples(None)) + 3
    numbers = list(range(count))
    stream = ChatDataModule(path, folder, streaming=Streaming(), **options)
    # The samples span several passes, each in another order.
    actual = batch_of(stream, streamed(stream), numbers)
    assert_equal(actual, batch_of(unstreamed, unstreamed.training_samples(count), numbers))
    # The same holds without shuffling.
    plain = ChatDataModule(path, folder, streaming=Streaming(shuffle=False), **options)
    windows = 0 if options.get("packing") is False else options.get("context_windows", 1)
    expected = ChatSamples(unstreamed.encoded("train"), options["seq_length"], None, windows, count)
    assert_equal(batch_of(plain, streamed(plain), numbers), batch_of(unstreamed, expected, numbers))


def rows_of_pass(samples: StreamedSamples, number: int = 0) -> list[list[int]]:
    """Return the tokens of each conversation of a pass, in order."""
    rows = []
    position = 0
    while samples.pass_of(position) <= number:
        if samples.pass_of(position) == number:
            window = samples[position].tolist()
            start = 0
            for size in samples.lengths(position):
                rows.append(window[start : start + size])
                start += size
        position += 1
    return rows


def write_shards(folder: Path, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Write rows as three shards of each kind of file, and return the paths by kind."""
    parts = [rows[:7], rows[7:8], rows[8:]]
    paths: dict[str, list[str]] = {"jsonl": [], "gz": []}
    for at, part in enumerate(parts):
        # Readers skip empty lines.
        text = Path(write_lines(folder / f"{at}.jsonl", part)).read_text().replace("\n", "\n\n")
        (folder / f"{at}.jsonl").write_text(text)
        (folder / f"{at}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        paths["jsonl"].append(str(folder / f"{at}.jsonl"))
        paths["gz"].append(str(folder / f"{at}.jsonl.gz"))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return paths
    paths["parquet"] = [str(folder / f"{at}.parquet") for at in range(3)]
    for path, part in zip(paths["parquet"], parts, strict=True):
        parquet.write_table(pyarrow.Table.from_pylist(part), path, row_group_size=4)
    try:
        import datasets
    except ImportError:
        return paths
    paths["datasets"] = [str(folder / f"set{at}") for at in range(3)]
    for path, part in zip(paths["datasets"], parts, strict=True):
        datasets.Dataset.from_list(part).save_to_disk(path)
    return paths


@pytest.mark.parametrize("buffer", [1, 5, 7, 1000])
@pytest.mark.parametrize("packing", [True, False])
def test_each_pass_has_every_conversation_once(
    tmp_path: Path, folder: str, packing: bool, buffer: int
) -> None:
    rows = conversations(22)
    expected = [tokens_and_labels(folder, row["messages"])[0] for row in rows]
    for kind, paths in write_shards(tmp_path, rows).items():
        data = ChatDataModule(
            paths, folder, seq_length=LENGTH, packing=packing, streaming=Streaming(buffer)
        )
        samples = streamed(data)
        passes = [rows_of_pass(samples, number) for number in range(3)]
        for actual in passes:
            assert sorted(actual) == sorted(expected), kind
        # With sections of one row, only the order of files is shuffled.
        assert len({str(actual) for actual in passes}) >= (2 if buffer == 1 else 3)
        data = ChatDataModule(
            paths, folder, seq_length=LENGTH, packing=packing, num_workers=2 * (buffer == 5),
            streaming=Streaming(buffer, shuffle=False),
        )  # fmt: skip
        samples = streamed(data)
        if not packing:
            assert rows_of_pass(samples) == expected, kind
        assert rows_of_pass(samples, 1) == rows_of_pass(samples)
        samples.close()


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet"])
def test_rows_have_the_order_of_streaming_datasets(tmp_path: Path, folder: str, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    paths = write_shards(tmp_path, conversations(22))[kind]
    reader = "parquet" if kind == "parquet" else "json"
    rows = datasets.load_dataset(reader, data_files=paths, split="train", streaming=True)
    expected = [tokens_and_labels(folder, row["messages"])[0] for row in rows]
    data = ChatDataModule(
        paths, folder, seq_length=LENGTH, packing=False, streaming=Streaming(6, shuffle=False)
    )
    assert rows_of_pass(streamed(data)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_restores_any_state_and_gives_samples_in_any_order(
    tmp_path: Path, folder: str, num_workers: int
) -> None:
    for kind, paths in write_shards(tmp_path, conversations(22)).items():
        if num_workers and kind != "jsonl":
            continue

        def fresh(paths: list[str] = paths) -> StreamedSamples:
            return streamed(
                ChatDataModule(
                    paths, folder, seq_length=LENGTH, num_workers=num_workers,
                    streaming=Streaming(5),
                )
            )  # fmt: skip

        samples = fresh()
        expected = [samples[number].tolist() for number in range(40)]
        states = [samples.state_at(number) for number in range(40)]
        assert len({state["first"] for state in states}) > 8
        for number in range(0, 40, 1 + 6 * bool(num_workers)):
            restored = fresh()
            restored.restore(states[number])
            # The section of this sample may begin several samples earlier.
            assert restored[number].tolist() == expected[number], kind
            assert restored.state_at(number) == states[number]
            restored.close()
        # Samples are read backwards, and forwards over freed sections.
        samples.free_before(35)
        for number in (38, 3, 36, 0, 39):
            assert samples[number].tolist() == expected[number], kind
        samples.close()


def test_rows_hold_at_most_max_conversations(tmp_path: Path, folder: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}] * 50
    path = write_lines(tmp_path / "rows.jsonl", rows)
    for windows in (1, 4):
        data = ChatDataModule(
            path, folder, seq_length=1024, context_windows=windows,
            streaming=Streaming(max_conversations=8),
        )  # fmt: skip
        samples = streamed(data)
        sizes = []
        while samples.pass_of(len(sizes)) == 0:
            sizes.append(len(samples.lengths(len(sizes))))
        assert max(sizes) == 8
        batch = data.loader_of(samples, None).batches[[0, 1]]  # type: ignore[arg-type]
        assert batch["lengths"].shape == (2, 8)
        assert len(rows_of_pass(samples)) - sum(sizes) == 0
    with pytest.raises(ParallelPlanError, match=r"at least 2 \* context_windows \(8\)"):
        ChatDataModule(path, folder, context_windows=4, streaming=Streaming(max_conversations=7))


def make_data(path: str | list[str], folder: str, **options: Any) -> ChatDataModule:
    defaults = {"seq_length": LENGTH, "global_batch_size": 3, "streaming": Streaming(7)}
    return ChatDataModule(path, folder, **{**defaults, **options})


@limited
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_run_continues_with_the_next_row(
    tmp_path: Path, folder: str, limits: dict[str, int], num_workers: int
) -> None:
    paths = write_shards(tmp_path, conversations(40))["jsonl"]

    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        data = make_data(paths, folder, num_workers=num_workers)
        return run(Watcher(), data, trainer, ckpt_path)

    uninterrupted = trained()
    samples = streamed(make_data(paths, folder))
    sums = [
        int((torch.from_numpy(samples[at][:-1]) * torch.arange(len(samples[at]) - 1)).sum())
        for at in range(3 * len(uninterrupted))
    ]
    assert sum(uninterrupted, []) == sums
    if limits == {"max_epochs": 3}:
        # The run has every batch of the three passes, and no further batch.
        assert samples.pass_of(3 * len(uninterrupted) - 1) == 2
        assert samples.pass_of(3 * len(uninterrupted) + 2) == 3
    else:
        assert len(uninterrupted) == 14
    killed = tmp_path / "killed.ckpt"
    for stop in (1, 4, 6, 9) if not num_workers else (6,):
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted
        state = torch.load(killed, weights_only=False)["ChatDataModule"]
        assert set(state["stream"]) == set(samples.state_at(0))
        assert state["consumed"] == 3 * stop


def test_a_run_continues_under_another_number_of_ranks(tmp_path: Path, folder: str) -> None:
    paths = write_shards(tmp_path, conversations(40))["jsonl"]
    limits = {"max_steps": 9, "max_epochs": -1}
    options = {"global_batch_size": 4}

    def trained(ranks: int, *callbacks: Callback, ckpt_path: Path | None = None) -> list[list[int]]:
        rows_of_ranks = []
        for index in range(ranks):
            strategy_options = {}
            if ranks == 2:
                strategy = TwoReplicas()
                strategy.index = index
                strategy_options = {"strategy": strategy, "devices": 1}
            trainer = make_trainer(tmp_path, *callbacks, **limits, **strategy_options)
            data = make_data(paths, folder, **options)
            rows_of_ranks.append(run(Watcher(), data, trainer, ckpt_path))
            if ranks == 2:
                torch.distributed.destroy_process_group()
        return [sum(shares, []) for shares in zip(*rows_of_ranks, strict=True)]

    uninterrupted = trained(1)
    assert trained(2) == uninterrupted
    killed = tmp_path / "killed.ckpt"
    first = trained(1, StopAfter(4, killed))
    assert first + trained(2, ckpt_path=killed) == uninterrupted
    # Steps and passes have the same order.
    limits = {"max_epochs": 2}
    assert first + trained(2, ckpt_path=killed) == trained(1)


def test_balanced_ranks_share_the_same_global_batches(tmp_path: Path, folder: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", conversations(60))
    limits = {"max_steps": 5, "max_epochs": -1}
    runs = []
    for balanced in (False, True):
        data = make_data(path, folder, global_batch_size=6, balance_attention=balanced)
        runs.append(run(Watcher(), data, make_trainer(tmp_path, **limits)))
    plain, balanced_rows = runs
    assert [sorted(batch) for batch in plain] == [sorted(batch) for batch in balanced_rows]


def test_warnings_count_cut_and_omitted_conversations_of_each_pass(
    tmp_path: Path, folder: str
) -> None:
    question, answer = turn("user", "why"), turn("assistant", "so")
    long = [turn("user", "x" * 30), turn("assistant", "y" * 100)]
    omitted = [turn("user", "x" * 300), answer]
    rows = [{"messages": messages} for messages in ([question, answer], long, omitted)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = make_data(path, folder, seq_length=99, packing=False, global_batch_size=1)
    module = Watcher()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    reported = [str(warning.message) for warning in caught if "Pass" in str(warning.message)]
    assert len(module.seen) == 4
    assert len(reported) == 2
    for number, line in enumerate(reported, 1):
        assert line.startswith(f"Pass {number} over {path} ended: 3 conversations read, 1 cut")
        assert "1 left out as too long" in line
        assert "in 2 rows" in line
    # A warning reports cut conversations of the first sections before their pass ends.
    data = make_data(path, folder, seq_length=99, streaming=Streaming(2, shuffle=False))
    with pytest.warns(UserWarning, match=r"Pass 1 .* so far: 2 conversations read, 1 cut"):
        streamed(data)[0]
    data = make_data(path, folder, seq_length=99, too_long="refuse")
    with pytest.raises(CorruptDataError, match=r"rows.jsonl:2 has \d+ tokens"):
        streamed(data)[0]
    path = write_lines(tmp_path / "rows.jsonl", rows[2:])
    data = make_data(path, folder, seq_length=99)
    with pytest.raises(CorruptDataError, match=r"1 were read, and 1 left out as too long"):
        streamed(data)[0]


def test_the_log_counts_unused_rows(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for module in ("conversation_datamodule", "row_datamodule"):
        monkeypatch.setattr(
            f"lightning_megatron.data.{module}.log_row_counts", lambda line, _: lines.append(line)
        )
    path = write_lines(tmp_path / "rows.jsonl", conversations(20))
    data = make_data(path, folder, packing=False)
    run(Watcher(), data, make_trainer(tmp_path, max_steps=5))
    # 15 rows were trained on, and the third section of 7 rows has the end of the pass, 6 rows.
    assert len(lines) == 2
    assert "ended: 20 conversations read" in lines[0]
    assert lines[1] == f"5 rows of {path} were read and not trained on."
    lines.clear()
    run(Watcher(), data, make_trainer(tmp_path, max_steps=4))
    [line] = lines
    assert line.startswith(f"Pass 1 over {path} stopped: 14 conversations read")
    assert line.endswith(f"2 rows of {path} were read and not trained on.")
    lines.clear()
    run(
        Watcher(),
        make_data(path, folder, packing=False, global_batch_size=5),
        make_trainer(tmp_path, max_steps=4),
    )  # type: ignore[arg-type]
    assert len(lines) == 1, "the run ends with its pass"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, folder: str, num_workers: int) -> None:
    bad = {"messages": [turn("robot", "hi")]}
    write_lines(tmp_path / "0.jsonl", conversations(3))
    write_lines(tmp_path / "1.jsonl", [*conversations(9), bad])
    data = make_data(
        str(tmp_path), folder, num_workers=num_workers, packing=False,
        streaming=Streaming(4, shuffle=False),
    )  # fmt: skip
    samples = streamed(data)
    assert len([samples[at] for at in range(8)]) == 8
    with pytest.raises(CorruptDataError, match=r"1\.jsonl:10, .*|1\.jsonl:10: messages"):
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


def test_unsupported_settings_of_a_stream_raise(tmp_path: Path, folder: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", conversations(8))
    with pytest.raises(UnsupportedError, match=r"train_samples \(9\) .* Use max_steps"):
        make_data(path, folder, train_samples=9)
    with pytest.raises(ParallelPlanError, match=r"streaming\.shuffle_buffer must be"):
        Streaming(0)
    for options, reason in (
        ({"max_epochs": -1}, "needs max_steps, max_epochs or max_time"),
        ({"max_steps": 3, "overfit_batches": 1}, r"overfit_batches \(1\)"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            make_trainer(tmp_path, **options).fit(Watcher(), datamodule=make_data(path, folder))
    data = make_data(path, folder)
    run(Watcher(), data, make_trainer(tmp_path, max_steps=1))
    state = data.state_dict()
    for wrong in ({**state["stream"], "first": -1}, {"first": 0}, 7):
        with pytest.raises(CheckpointMismatchError, match="the stream in the data position"):
            make_data(path, folder).load_state_dict({**state, "stream": wrong})


def test_changed_data_settings_restart_from_the_beginning_with_a_warning(
    tmp_path: Path, folder: str
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", conversations(40))
    killed = tmp_path / "killed.ckpt"
    limits = {"max_steps": 8, "max_epochs": -1}
    run(Watcher(), make_data(path, folder), make_trainer(tmp_path, StopAfter(3, killed), **limits))
    changes: list[Callable[[], ChatDataModule]] = [
        lambda: make_data(path, folder, streaming=None),
        lambda: make_data(path, folder, streaming=Streaming(8)),
        lambda: make_data(path, folder, seed=2),
    ]
    for change in changes:
        fresh = run(Watcher(), change(), make_trainer(tmp_path, **limits))
        module = Watcher()
        with pytest.warns(UserWarning, match="written with other training data"):
            make_trainer(tmp_path, **limits).fit(module, datamodule=change(), ckpt_path=killed)
        assert module.seen == fresh[:5]
