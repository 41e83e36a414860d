"""A corpus with a damaged or foreign file gives the same tokens, or an error names the file."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data import token_file
from lightning_megatron.data.checked_files import check_once
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.description import read_description
from lightning_megatron.data.preprocess import EncodingOptions, write_token_file
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError

SUFFIXES = ("bin", "idx", "json")


def read(prefix: Path) -> tuple[Any, ...]:
    corpus = TokenFile(prefix)
    tokens = [corpus[i].tolist() for i in range(len(corpus))]
    return tokens, corpus.document_index.tolist(), corpus.description


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write three corpora: by preprocess, with several sequences a document, and of int32 tokens."""
    folder = tmp_path_factory.mktemp("sound")
    lines = [json.dumps({"text": f"text {n} é"}) + "\n" for n in range(9)]
    (folder / "raw.jsonl").write_text("".join(lines))
    encoding = EncodingOptions("bytes", append_eod=True)
    write_token_file([str(folder / "raw.jsonl")], str(folder / "a"), encoding, progress=False)
    with TokenFileWriter(folder / "b", tokenizer=ByteTokenizer()) as writer:
        for number in range(6):
            writer.add_document(np.arange(number, number + 9), num_bytes=9, lengths=[4, 3, 2])
    with TokenFileWriter(folder / "c", dtype="i4") as writer:
        for number in range(7):
            writer.add_document([] if number == 3 else np.arange(9))
    return [folder / name for name in "abc"]


def copy(source: Path, folder: Path) -> Path:
    for suffix in SUFFIXES:
        shutil.copyfile(f"{source}.{suffix}", folder / f"{source.name}.{suffix}")
    return folder / source.name


def batches_of(prefix: Path, cache: Path) -> list[list[int]]:
    data = TokenDataModule(str(prefix), seq_length=8, cache_dir=str(cache), seed=3)
    return [batch["tokens"].flatten().tolist() for batch in data.train_dataloader()]


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, zero, cut, extend, repeat or exchange bytes."""
    start = draw.randrange(max(len(content), 1))
    stop = min(start + draw.choice([1, 2, 8, 64]), len(content))
    before, part, after = content[:start], content[start:stop], content[stop:]
    flipped = bytes([part[0] ^ (1 << draw.randrange(8))]) + part[1:] if part else b""
    parts = [
        flipped,
        draw.randbytes(len(part)),
        bytes(len(part)),
        b"\xff" * len(part),
        b"",
        2 * part,
    ]
    wholes = [before, content + draw.randbytes(draw.choice([1, 4, 8])), b""]
    return draw.choice([*(before + changed + after for changed in parts), *wholes])


def test_damaged_bytes_give_the_same_tokens_or_an_error(sources, tmp_path):
    draw, refused = random.Random(7), 0
    for source in sources:
        expected = read(source)
        for suffix in SUFFIXES:
            prefix = copy(source, tmp_path)
            path = Path(f"{prefix}.{suffix}")
            content = path.read_bytes()
            for _ in range(60):
                path.write_bytes(damaged_bytes(content, draw))
                outcome = ""
                try:
                    assert read(prefix) == expected, suffix
                except CorruptDataError as error:
                    outcome = str(error)
                assert not outcome or str(prefix) in outcome
                refused += bool(outcome)
    assert refused > 450


def test_wrong_fields_of_a_description_are_named_with_file_rule_and_remedy(sources, tmp_path):
    prefix = copy(sources[1], tmp_path)
    path = Path(f"{prefix}.json")
    text = path.read_text()
    fields = json.loads(text)
    edited = [{**fields, name: None} for name in fields if fields[name] is not None]
    edited += [{k: v for k, v in fields.items() if k != name} for name in fields]
    cases = [(json.dumps(each).encode(), r"b\.json") for each in edited]
    for name, value, reason in (
        ("extra", 1, r"b\.json"),
        ("vocab_size", 257.0, r"must be a whole number of at least 1 or None: it is 257\.0"),
        ("eod", None, r"json has changed: its checksum must be [0-9a-f]{8}"),
        ("num_tokens", 3, r"b\.idx has 54: they do not belong together"),
        ("vocab_size", float("nan"), r"b\.json"),
    ):
        cases.append((json.dumps({**fields, name: value}).encode(), reason))
    twice = text.replace('"vocab_size": 257,', '"vocab_size": 257,\n"vocab_size": 512,')
    cases.append((twice.encode(), "the key 'vocab_size' occurs twice"))
    contents = (b"", b"{", b"null", b"[]", b"{}", b"\x00" * 300, b"\xff\xfe", b"[" * 10**5)
    for content, reason in [*cases, *((each, r"b\.json") for each in contents)]:
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=rf"(?s){reason}.*again"):
            TokenFile(prefix)


LARGE = (2**31, 2**40, 2**62, 2**63, 2**64 - 1)
HEADER_EDITS = [
    *((0, "<9s", value) for value in (b"MMIDIDX\x00\x01", b"MMIDRET\x00\x00", bytes(9))),
    *((9, "<Q", value) for value in (0, 2, 256, *LARGE)),
    *((17, "<B", value) for value in range(256) if value != 8),
    *((18, "<Q", value) for value in (0, 1, 17, 19, *LARGE)),
    *((26, "<Q", value) for value in (0, 1, 6, 8, *LARGE)),
    *((34 + 4 * k, "<i", v) for k in (0, 7, 17) for v in (-1, 0, 1, 5, 2**31 - 1, -(2**31))),
    *((106 + 8 * k, "<q", v) for k in (0, 1, 17) for v in (-8, 1, 9, 10**6, 2**63 - 1, -(2**63))),
    *((250 + 8 * k, "<q", v) for k in (0, 1, 6) for v in (-1, 2, 17, 19, 2**40, 2**63 - 1)),
]


def test_every_field_of_an_index_without_checksums_is_checked(sources, tmp_path):
    prefix = copy(sources[1], tmp_path)
    Path(f"{prefix}.json").unlink()
    path, accepted = Path(f"{prefix}.idx"), []
    content, tokens = path.read_bytes(), read(prefix)[0]
    for position, form, value in HEADER_EDITS:
        packed, refusal = struct.pack(form, value), ""
        edited = content[:position] + packed + content[position + len(packed) :]
        path.write_bytes(edited)
        try:
            assert read(prefix)[0] == tokens, (position, value)
        except CorruptDataError as error:
            refusal = str(error)
        assert not refusal or "b.idx" in refusal
        if edited != content and not refusal:
            accepted.append((position, value))
    # A reader cannot tell signed from unsigned 16-bit tokens, or find a wrong end of a document
    # between sequences.
    assert accepted == [(17, 3), (250 + 8, 2)]


REPLACEMENTS: list[Callable[[Path], Any]] = [
    Path.mkdir,
    os.mkfifo,
    lambda path: path.symlink_to("nowhere"),
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("/dev/zero"),
]


def test_paths_that_are_not_files_are_refused_without_waiting(sources, tmp_path):
    for number, replace in enumerate(REPLACEMENTS):
        for suffix in SUFFIXES:
            folder = tmp_path / f"{number}{suffix}"
            folder.mkdir()
            prefix = copy(sources[0], folder)
            path = Path(f"{prefix}.{suffix}")
            path.unlink()
            replace(path)
            with pytest.raises(CorruptDataError, match=rf"a\.{suffix}"):
                TokenFile(prefix)
    for suffix in SUFFIXES:
        (tmp_path / f"a.{suffix}").symlink_to(f"{sources[0]}.{suffix}")
    assert read(tmp_path / "a") == read(sources[0]), "links to sound files are read"


class Gadget:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


def test_pickled_objects_in_files_are_never_executed(sources, tmp_path):
    prefix, cache, trace = copy(sources[0], tmp_path), tmp_path / "cache", tmp_path / "executed"
    expected = batches_of(prefix, cache)
    folder = next(path for path in cache.iterdir() if path.is_dir())
    np.save(tmp_path / "gadget.npy", np.array([Gadget(trace)], dtype=object), allow_pickle=True)
    contents = (pickle.dumps(Gadget(trace)), (tmp_path / "gadget.npy").read_bytes())
    corpus = [tmp_path / f"a.{suffix}" for suffix in SUFFIXES]
    for path in (*corpus, folder / "shuffle.npy", folder / "index.json"):
        sound = path.read_bytes()
        for content in contents:
            path.write_bytes(content)
            if path in corpus:
                with pytest.raises(CorruptDataError):
                    batches_of(prefix, cache)
            else:
                assert batches_of(prefix, cache) == expected
            assert not trace.exists()
        path.write_bytes(sound)
    pickle.loads(contents[0])
    assert trace.exists()


def test_checksums_are_compared_once_and_again_when_a_file_changes(sources, tmp_path, monkeypatch):
    prefix, calls, crc32_of = copy(sources[0], tmp_path), [], token_file.crc32_of
    monkeypatch.setattr(token_file, "crc32_of", lambda path: calls.append(path) or crc32_of(path))
    monkeypatch.setattr("lightning_megatron.data.checked_files.SETTLING_NS", 0)
    data = [TokenDataModule(str(prefix), seq_length=8, checksums=i != 4) for i in range(5)]
    for each in data[:2]:
        each.setup("fit")
    assert len(calls) == 1
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[7] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    # A mismatch is remembered, too: waiting ranks do not read the file again.
    for each in data[2:4]:
        with pytest.raises(CorruptDataError, match=r"a\.bin has changed: its checksum must be"):
            each.setup("fit")
    data[4].setup("fit")
    assert len(calls) == 2


def test_files_are_checked_by_one_process_if_the_result_cannot_be_stored(
    sources, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("lightning_megatron.data.checked_files.SETTLING_NS", 0)
    (tmp_path / "file").write_text("")
    calls: list[int] = []
    for in_charge in (False, True):
        assert not calls
        files, results = [Path(f"{sources[0]}.bin")], tmp_path / "file" / "results"
        check_once(results, files, lambda: calls.append(1), in_charge)
    assert calls == [1]
    assert "every run reads the files again" in caplog.text


def test_a_description_of_version_1_is_read_without_checksums(sources, tmp_path):
    prefix = copy(sources[0], tmp_path)
    path = Path(f"{prefix}.json")
    newer = ("bin_crc32", "idx_sha256", "fields_crc32")
    old = {k: v for k, v in json.loads(path.read_text()).items() if k not in newer}
    path.write_text(json.dumps({**old, "version": 1}))
    assert read_description(prefix) == read_description(sources[0])
    TokenFile(prefix)
    path.write_text(json.dumps({**old, "version": 1, "tokenizer": None}))
    with pytest.raises(CorruptDataError, match="tokenizer of version 1 must be text"):
        TokenFile(prefix)


def test_a_damaged_cache_gives_the_same_samples(sources, tmp_path):
    prefix, cache, draw = copy(sources[0], tmp_path), tmp_path / "cache", random.Random(3)
    expected = batches_of(prefix, cache)
    folder = next(path for path in cache.iterdir() if path.is_dir())
    for path in sorted(folder.iterdir()):
        for _ in range(20):
            path.write_bytes(damaged_bytes(path.read_bytes(), draw))
            assert batches_of(prefix, cache) == expected
        for replace in REPLACEMENTS:
            path.unlink()
            replace(path)
            assert batches_of(prefix, cache) == expected
    fields = json.loads((folder / "index.json").read_text())
    for edited in (
        [],
        {"arrays": 3},
        {**fields, "arrays": {"../x": "0"}},
        {**fields, "fields": {}},
    ):
        (folder / "index.json").write_text(json.dumps(edited))
        assert batches_of(prefix, cache) == expected
