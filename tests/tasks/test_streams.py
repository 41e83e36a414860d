"""Streamed conversations, pairs and texts equal unstreamed ones, and runs resume within a file."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megatron import Streaming, TextDataModule, TokenDataModule
from lightning_megatron.data.preprocess import EncodingOptions, write_token_file
from lightning_megatron.data.token_file import TokenFile
from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    UnsupportedError,
)
from lightning_megatron.tasks.chat import ChatDataModule
from lightning_megatron.tasks.preferences import PreferenceDataModule
from tests.data.recorder import StopAfter, Watcher, check_resumes, make_trainer, run
from tests.tasks.chat.chat_folder import conversations, preferences, turn, write_lines
from tests.tasks.chat.test_conversations import tokens_and_labels
from tests.tasks.preferences.parts import as_messages
from tests.tasks.preferences.test_pairs import PairRecorder, side_of

Batch = dict[str, torch.Tensor]
#: Answers that differ only after the cut: the pair is left out.
OMITTED = {"prompt": "why", "chosen": "z" * 300 + "a", "rejected": "z" * 300 + "b"}


def texts(count: int) -> list[dict[str, Any]]:
    """Return documents of 0 to 120 bytes; some are empty, and some are longer than a row."""
    draw = random.Random(1)
    sizes = [draw.choice([0, 1, 3, 9, 14, 60]) for _ in range(count)]
    return [{"text": f"{'é' * size}{at}" * bool(size), "id": at} for at, size in enumerate(sizes)]


#: Modules and their rows. Parquet needs fields of the same types in all rows.
MODULES: dict[str, Any] = {"chat": ChatDataModule, "pairs": PreferenceDataModule}
ROWS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "chat": conversations,
    "pairs": lambda count: [as_messages(row) for row in preferences(count)],
    "text": texts,
}


def data_of(kind: str, paths: str | list[str], model: str, **options: Any) -> Any:
    """Return a module of a kind, by default with sections of 7 rows and batches of 3."""
    settings = {"seq_length": 250, "global_batch_size": 3, "streaming": Streaming(7), **options}
    if kind == "text":
        return TextDataModule(paths, "bytes", **settings)
    return MODULES[kind](paths, model, **settings)


def batch_of(data: Any, samples: Any, numbers: list[int]) -> Batch:
    """Return rows as a batch, without columns of zeros in the lengths."""
    batch = data.loader_of(samples, None).batches[numbers]
    if "lengths" in batch:
        width = int((batch["lengths"] != 0).sum(1).max())
        assert not batch["lengths"][:, width:].any()
        batch["lengths"] = batch["lengths"][:, :width]
    return batch


def assert_equal(actual: Batch, expected: Batch) -> None:
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert torch.equal(values, expected[name]), name


SECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {}),
    ("chat", {"packing": False}),
    ("pairs", {}),
    ("pairs", {"length_multiple": None}),
    ("text", {"seq_length": 32}),
]


@pytest.mark.filterwarnings("ignore:.* left out")
@pytest.mark.parametrize(("kind", "options"), SECTIONS, ids=str)
def test_a_section_of_a_complete_file_equals_the_module_without_streaming(
    tmp_path, model, kind, options
):
    rows, options = ROWS[kind](40), {"seed": 3, **options}
    rows[5:5] = [OMITTED] * (kind == "pairs")
    path = write_lines(tmp_path / "rows.jsonl", rows)
    if kind == "text":
        prefix = str(tmp_path / "rows")
        write_token_file([path], prefix, EncodingOptions("bytes", append_eod=True), progress=False)
        plain = TokenDataModule(prefix, prefix, documents="whole", global_batch_size=3, **options)
        options = {**options, "val": path}
    else:
        plain = data_of(kind, path, model, streaming=None, **options)
    plain.setup("fit")
    # The samples span several passes, each in another order.
    numbers = list(range(2 * len(plain.training_samples(None)) + 3))
    stream = data_of(kind, path, model, streaming=Streaming(), **options)
    stream.setup("fit")
    actual = batch_of(stream, stream.training_samples(None), numbers)
    assert_equal(actual, batch_of(plain, plain.training_samples(len(numbers)), numbers))
    if kind == "pairs":
        assert sorted(actual["pairs"].tolist()[:40]) == [*range(5), *range(6, 41)]
    if kind == "text":
        for ours, theirs in zip(stream.val_dataloader(), plain.val_dataloader(), strict=True):
            assert_equal(ours, theirs)


def write_shards(folder: Path, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Write rows as three shards of each kind of file, and return the paths by kind."""
    names = {"jsonl": "{}.jsonl", "gz": "{}.jsonl.gz"}
    names |= {"parquet": "{}.parquet"} if find_spec("pyarrow") else {}
    names |= {"datasets": "set{}"} if find_spec("datasets") else {}
    paths = {
        kind: [str(folder / name.format(at)) for at in range(3)] for kind, name in names.items()
    }
    for at, part in enumerate((rows[:7], rows[7:8], rows[8:])):
        # Readers skip empty lines.
        text = Path(write_lines(folder / f"{at}.jsonl", part)).read_text().replace("\n", "\n\n")
        Path(paths["jsonl"][at]).write_text(text)
        Path(paths["gz"][at]).write_bytes(gzip.compress(text.encode()))
        if "parquet" in paths:
            from pyarrow import Table, parquet

            parquet.write_table(Table.from_pylist(part), paths["parquet"][at], row_group_size=4)
        if "datasets" in paths:
            from datasets import Dataset

            Dataset.from_list(part).save_to_disk(paths["datasets"][at])
    return paths


def positions_of(samples: Any, number: int) -> list[int]:
    """Return the positions of a pass."""
    positions, position = [], 0
    while samples.pass_of(position) <= number:
        positions += [position] * (samples.pass_of(position) == number)
        position += 1
    return positions


def pieces_of(samples: Any, number: int = 0) -> list[list[int]]:
    """Return the tokens of each conversation or document of a pass, in order."""
    pieces = []
    for position in positions_of(samples, number):
        if hasattr(samples, "text"):
            pieces += [samples.text(position, side)[0].tolist() for side in (0, 1)]
            continue
        window, start = samples[position].tolist(), 0
        for size in samples.lengths(position):
            pieces.append(window[start : start + size])
            start += size
    return pieces


def expected_pieces(kind: str, model: str, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of rows by transformers, or the bytes of texts."""
    if kind == "chat":
        return [tokens_and_labels(model, row["messages"])[0] for row in rows]
    if kind == "pairs":
        return [side_of(model, row, side)[0] for row in rows for side in ("chosen", "rejected")]
    return [[*row["text"].encode(), 256] for row in rows if row["text"]]


@pytest.mark.parametrize("buffer", [1, 5, 1000])
@pytest.mark.parametrize("kind", ROWS)
def test_each_pass_has_every_row_once(tmp_path, model, kind, buffer):
    rows = ROWS[kind](22)
    expected = expected_pieces(kind, model, rows)
    more = {"packing": False} if kind == "chat" and buffer == 5 else {}

    def samples_of(paths: list[str], **options: Any) -> Any:
        return data_of(kind, paths, model, **options, **more).training_samples(None)

    for file_kind, paths in write_shards(tmp_path, rows).items():
        samples = samples_of(paths, streaming=Streaming(buffer))
        passes = [pieces_of(samples, number) for number in range(3)]
        for actual in passes:
            assert sorted(actual) == sorted(expected), file_kind
        # With sections of one row, only the order of files is shuffled.
        assert len({str(actual) for actual in passes}) >= (2 if buffer == 1 else 3)
        in_turn = Streaming(buffer, shuffle=False)
        samples = samples_of(paths, num_workers=2 * (buffer == 5), streaming=in_turn)
        in_order = pieces_of(samples)
        assert pieces_of(samples, 1) == in_order
        if kind == "pairs" or more:
            assert in_order == expected
        if kind == "pairs":
            # Line numbers count the empty lines between rows, too.
            lines = 1 + (file_kind in ("jsonl", "gz"))
            numbers = [samples.pair(position) for position in positions_of(samples, 0)]
            sizes = enumerate((7, 1, 14))
            assert numbers == [file * 2**40 + lines * row for file, n in sizes for row in range(n)]
        samples.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_restores_any_state_and_gives_samples_in_any_order(tmp_path, model, num_workers):
    for kind, paths in write_shards(tmp_path, conversations(22)).items():
        if num_workers and kind != "jsonl":
            continue

        def fresh(paths: list[str] = paths) -> Any:
            options = {"num_workers": num_workers, "streaming": Streaming(5)}
            return data_of("chat", paths, model, **options).training_samples(None)

        samples = fresh()
        expected = [samples[number].tolist() for number in range(40)]
        states = [samples.state_at(number) for number in range(40)]
        assert len({state["first"] for state in states}) > 8
        for number in range(0, 40, 13 if num_workers else 3):
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


@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_a_stream_of_text_reads_the_files_that_preprocess_reads(tmp_path, document):
    plain = tmp_path / "plain"
    (plain / "more").mkdir(parents=True)
    (plain / "a.txt").write_text("one\ntwo\n\n \nthrée\n\nfour\n")
    (plain / "more/b.md.gz").write_bytes(gzip.compress(b"\nfive\n\nsix\nseven"))
    (plain / "ignored.bin").write_bytes(b"\xff")
    inputs = {**write_shards(tmp_path, texts(22)), "plain": [str(plain)]}
    if find_spec("pyarrow"):
        import pyarrow

        with pyarrow.output_stream(tmp_path / "c.txt.zst", compression="zstd") as file:
            file.write((plain / "a.txt").read_bytes())
        inputs["zst"] = [str(tmp_path / "c.txt.zst")]
    for kind, paths in inputs.items():
        prefix = str(tmp_path / f"{kind}_tokens")
        options = EncodingOptions("bytes", append_eod=True)
        write_token_file(paths, prefix, options, document, progress=False)
        corpus = TokenFile(prefix)
        expected = [corpus[number].tolist() for number in range(len(corpus))]
        assert len(expected) == {"plain": {"file": 2, "line": 7, "paragraph": 5}[document]}.get(
            kind, len(expected)
        )

        def fresh(paths: list[str] = paths) -> Any:
            streaming = Streaming(2, shuffle=False)
            data = data_of("text", paths, "", document=document, streaming=streaming)
            return data.training_samples(None)

        samples = fresh()
        assert sorted(pieces_of(samples)) == sorted(expected), kind
        for number in range(0, 6):
            restored = fresh()
            restored.restore(samples.state_at(number))
            assert restored[number].tolist() == samples[number].tolist(), kind


STEPS, PASSES = {"max_steps": 14, "max_epochs": -1}, {"max_epochs": 3}


def watcher_of(kind: str) -> Watcher:
    return PairRecorder() if kind == "pairs" else Watcher()


@pytest.mark.parametrize(
    ("kind", "limits", "num_workers", "stops"),
    [
        ("chat", STEPS, 2, (1, 6, 9)),
        ("chat", PASSES, 0, (4, 9)),
        ("chat", {"max_steps": 14, "limit_train_batches": 4}, 0, (4, 6)),
        ("pairs", STEPS, 2, (6,)),
        ("text", PASSES, 0, (3,)),
    ],
)
def test_a_killed_run_continues_with_the_next_row(
    tmp_path, model, kind, limits, num_workers, stops
):
    paths = write_shards(tmp_path, ROWS[kind](40))["jsonl"]
    options = {"seq_length": 64} if kind == "text" else {}

    def trained(*callbacks: Callback, ckpt_path: Path | None = None) -> list[list[Any]]:
        data = data_of(kind, paths, model, num_workers=num_workers, **options)
        trainer = make_trainer(tmp_path, *callbacks, **limits)
        return run(watcher_of(kind), data, trainer, ckpt_path)

    uninterrupted = check_resumes(trained, tmp_path, *stops)
    data = data_of(kind, paths, model, **options)
    samples, count = data.training_samples(None), 3 * len(uninterrupted)
    batches = data.loader_of(samples, None).batches
    names = [watcher_of(kind).names_of(batches[[number]]) for number in range(count)]
    assert sum(uninterrupted, []) == sum(names, [])
    if limits is PASSES:
        # The run has every batch of the three passes, and no further batch.
        assert (samples.pass_of(count - 1), samples.pass_of(count + 2)) == (2, 3)
    else:
        assert len(uninterrupted) == 14
    state = torch.load(tmp_path / "killed.ckpt", weights_only=False)[type(data).__name__]
    assert state["consumed"] == 3 * stops[-1]
    assert state["stream"] == samples.state_at(state["consumed"])


def test_warnings_count_cut_and_omitted_conversations_of_each_pass(tmp_path, model):
    question, answer = turn("user", "why"), turn("assistant", "so")
    long = [turn("user", "x" * 30), turn("assistant", "y" * 100)]
    omitted = [turn("user", "x" * 300), answer]
    rows = [{"messages": messages} for messages in ([question, answer], long, omitted)]
    path, module = write_lines(tmp_path / "rows.jsonl", rows), Watcher()
    data = data_of("chat", path, model, seq_length=99, packing=False, global_batch_size=1)
    with pytest.warns(
        UserWarning, match="Pass 2 .* ended: 3 conversations read, 1 cut.*1 left out"
    ):
        make_trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    assert len(module.seen) == 4
    for given, options, message in (
        (rows, {"too_long": "refuse"}, r"rows.jsonl:2 has \d+ tokens"),
        (rows[2:], {}, "1 were read, and 1 left out as too long"),
    ):
        path = write_lines(tmp_path / "rows.jsonl", given)
        with pytest.raises(CorruptDataError, match=message):
            data_of("chat", path, model, seq_length=99, **options).training_samples(None)[0]


ROBOT = [turn("robot", "hi")]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": ROBOT}, "messages"),
    "pairs": ({"prompt": "why", "chosen": ROBOT, "rejected": "no"}, "chosen, message"),
    "text": ({"content": "a"}, "no text under the key 'text'"),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_named_by_file_and_line(tmp_path, model, kind, num_workers):
    bad, phrase = BAD[kind]
    rows = [{"text": "a" * 9}] * 9 if kind == "text" else ROWS[kind](9)
    write_lines(tmp_path / "0.jsonl", rows[:3])
    write_lines(tmp_path / "1.jsonl", [*rows, bad])
    more = {"chat": {"packing": False}, "text": {"seq_length": 9}}.get(kind, {})
    options = {"num_workers": num_workers, "streaming": Streaming(4, shuffle=False), **more}
    data = data_of(kind, str(tmp_path), model, **options)
    first, again = data.training_samples(None), data.training_samples(None)
    assert len([first.in_section(at) for at in range(8)]) == 8
    # The same holds after a restart in the middle of the file.
    again.restore(first.state_at(7))
    for samples in (first, again):
        with pytest.raises(CorruptDataError, match=rf"1\.jsonl:10.*{phrase}"):
            samples.in_section(12)
        samples.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_has_each_pair_once_in_the_order_of_the_files(
    tmp_path, model, monkeypatch, num_workers
):
    paths = write_shards(tmp_path, ROWS["pairs"](22))["jsonl"]
    plain = data_of("pairs", paths, model, streaming=None, global_batch_size=4)
    stream = data_of("pairs", paths, model, num_workers=num_workers, global_batch_size=4)
    batches = list(stream.each_pair_once("train"))
    assert len(batches) == 6, "22 pairs are five batches and a half"
    for actual, expected in zip(batches, plain.each_pair_once("train"), strict=True):
        assert_equal(actual, expected)
    key = stream.pairs_key("train")
    assert key == data_of("pairs", paths, model, seed=9).pairs_key("train")
    assert key != data_of("pairs", paths[:2], model).pairs_key("train")
    # Ranks share the last batch.
    path = write_lines(tmp_path / "rows.jsonl", preferences(9))
    shares = []
    for rank in range(2):
        data = data_of("pairs", path, model, global_batch_size=4, streaming=Streaming(4))
        monkeypatch.setattr(data, "data_parallel", lambda rank=rank: (rank, 2))
        shares.append([batch["pairs"].tolist() for batch in data.each_pair_once("train")])
    assert shares == [[[0, 1], [4, 5], [-1]], [[2, 3], [6, 7], [8]]]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_packed_rows_have_at_most_max_conversations(tmp_path, model, kind):
    path = write_lines(tmp_path / "rows.jsonl", ROWS[kind](40))
    streaming = Streaming(max_conversations=2)
    samples = data_of(kind, path, model, seq_length=400, streaming=streaming).training_samples(None)
    assert samples.max_documents == 2
    assert max(len(samples.lengths(row)) for row in range(10)) == 2


def test_unsupported_settings_of_a_stream_are_refused(tmp_path, model):
    for kind in ROWS:
        path = write_lines(tmp_path / f"{kind}.jsonl", ROWS[kind](8))
        cases = [({"max_epochs": -1}, "needs max_steps, max_epochs or")]
        if kind != "text":
            cases.append(({"max_steps": 3, "overfit_batches": 1}, r"overfit_batches \(1\)"))
        for options, reason in cases:
            trainer = make_trainer(tmp_path, **options)
            with pytest.raises(UnsupportedError, match=reason):
                trainer.fit(watcher_of(kind), datamodule=data_of(kind, path, model))
    with pytest.raises(UnsupportedError, match=r"train_samples \(9\) .* Use max_steps"):
        data_of("chat", path, model, train_samples=9)
    with pytest.raises(UnsupportedError, match=r"max_conversations \(4\) cannot be used with pai"):
        data_of("pairs", path, model, streaming=Streaming(max_conversations=4))
    empty = write_lines(tmp_path / "empty.jsonl", [{"text": ""}] * 3)
    for streaming in (Streaming(7), None):
        data = data_of("text", empty, model, append_eod=False, streaming=streaming)
        with pytest.raises(CorruptDataError, match="document of at least 2 tokens.*3 were read"):
            data.training_samples(None)[0]


def test_wrong_states_and_changed_settings_of_a_stream(tmp_path, model):
    path, killed = write_lines(tmp_path / "rows.jsonl", conversations(40)), tmp_path / "killed.ckpt"
    data, limits = data_of("chat", path, model), {"max_steps": 8, "max_epochs": -1}
    run(Watcher(), data, make_trainer(tmp_path, StopAfter(3, killed), **limits))
    state = data.state_dict()
    for wrong in ({**state["stream"], "first": -1}, {"first": 0}, 7):
        with pytest.raises(CheckpointMismatchError, match="the stream in the data position"):
            data_of("chat", path, model).load_state_dict({**state, "stream": wrong})
    for change in ({"streaming": None}, {"streaming": Streaming(8)}):
        fresh, again = (data_of("chat", path, model, **change) for _ in range(2))
        expected = run(Watcher(), fresh, make_trainer(tmp_path, **limits))
        module = Watcher()
        with pytest.warns(UserWarning, match="written with other training data"):
            make_trainer(tmp_path, **limits).fit(module, datamodule=again, ckpt_path=killed)
        assert module.seen == expected[:5], "it restarts from the beginning"
