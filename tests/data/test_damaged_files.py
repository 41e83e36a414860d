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

from lightning_megatron.data import corpora, token_file
from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.description import CorpusDescription, read_description
from lightning_megatron.data.preprocess import EncodingOptions, preprocess
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError

SUFFIXES = ("bin", "idx", "json")
RankSnapshot = tuple[list[list[int]], list[int], CorpusDescription | None]


def read(prefix: Path) -> RankSnapshot:
    corpus = TokenFile(prefix)
    return (
        [corpus[i].tolist() for i in range(len(corpus))],
        corpus.document_index.tolist(),
        corpus.description,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write three corpora: by preprocess, with several sequences a document, and of int32 tokens."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "raw.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} é"}) + "\n" for n in range(9))
    )
    preprocess(
        [str(folder / "raw.jsonl")],
        str(folder / "a"),
        EncodingOptions("bytes", append_eod=True),
        progress=False,
    )
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


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip, zero, cut, extend, repeat or exchange bytes."""
    start = chance.randrange(max(len(content), 1))
    stop = min(start + chance.choice([1, 2, 8, 64]), len(content))
    kind = chance.choice(
        ["flip", "set", "zero", "ones", "cut", "extend", "drop", "double", "empty"]
    )
    new = {
        "flip": lambda: (
            bytes([content[start] ^ (1 << chance.randrange(8))]) + content[start + 1 : stop]
        ),
        "set": lambda: chance.randbytes(stop - start),
        "zero": lambda: bytes(stop - start),
        "ones": lambda: b"\xff" * (stop - start),
        "drop": lambda: b"",
        "double": lambda: content[start:stop] * 2,
    }
    if kind in new:
        return content[:start] + new[kind]() + content[stop:]
    return {
        "cut": content[:start],
        "empty": b"",
        "extend": content + chance.randbytes(chance.choice([1, 4, 8])),
    }[kind]


def test_damaged_bytes_give_the_same_tokens_or_an_error(
    sources: list[Path], tmp_path: Path
) -> None:
    chance, refused = random.Random(7), 0
    for source in sources:
        expected = read(source)
        for suffix in SUFFIXES:
            prefix = copy(source, tmp_path)
            path = Path(f"{prefix}.{suffix}")
            content = path.read_bytes()
            for number in range(120):
                damaged = damaged_bytes(content, chance)
                path.write_bytes(damaged)
                try:
                    assert read(prefix) == expected, (suffix, number, damaged)
                except CorruptDataError as error:
                    refused += 1
                    assert str(prefix) in str(error), error  # noqa: PT017
            path.write_bytes(content)
    assert refused > 900


WRONG_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 256, 258, 2**31, 2**63, 10**30, 1.0, 257.0, 1e308),
    *(
        "",
        "257",
        "bytes",
        "0" * 64,
        "0" * 8,
        "x" * 10**5,
        [],
        [257],
        {},
        {"a": 1},
        float("nan"),
        float("inf"),
    ),
]


def test_wrong_fields_of_a_description_raise_an_error_that_names_the_file(
    sources: list[Path], tmp_path: Path
) -> None:
    for source in sources[:2]:
        prefix = copy(source, tmp_path)
        path = Path(f"{prefix}.json")
        fields = json.loads(path.read_text())
        edits = [
            {**fields, name: value}
            for name in fields
            for value in WRONG_VALUES
            if not same(fields[name], value)
        ]
        edits += [{k: v for k, v in fields.items() if k != name} for name in fields]
        edits += [{**fields, "extra": 1}, {**fields, "": None}, {}]
        for edited in edits:
            path.write_text(json.dumps(edited))
            with pytest.raises(CorruptDataError, match="a.json|b.json"):
                TokenFile(prefix)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "vocab_size",
            257.0,
            r"vocab_size must be a whole number in \[1, 2147483648\]: it is 257\.0",
        ),
        ("vocab_size", True, "vocab_size must be a whole number"),
        ("eod", 257, r"eod must be null or a whole number in \[0, 256\]: it is 257"),
        ("eod", None, r"json has changed: its checksum must be [0-9a-f]{8}"),
        ("num_bytes", -1, "num_bytes must be a whole number"),
        ("num_tokens", 3, r"has num_tokens 3, but b\.idx has 54: they do not belong together"),
        ("num_documents", 7, r"has num_documents 7, but b\.idx has 6"),
        ("tokenizer", "", "tokenizer must be a text"),
        ("tokenizer", None, "tokenizer_fingerprint must be null where tokenizer is"),
        ("idx_sha256", "0" * 63, "idx_sha256 must be 64 hexadecimal digits"),
        ("bin_crc32", "0" * 8, r"json has changed"),
        ("version", 3, "version must be 1 or 2: it is 3"),
        ("format", "other", "format must be 'lightning_megatron.corpus': it is 'other'"),
    ],
)
def test_a_wrong_field_is_named_with_rule_value_and_remedy(
    sources: list[Path], tmp_path: Path, field: str, value: Any, message: str
) -> None:
    prefix = copy(sources[1], tmp_path)
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CorruptDataError, match=message) as caught:
        TokenFile(prefix)
    assert "again" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{",
            b"null",
            b"[]",
            b"{}",
            b"3",
            b'"text"',
            b"\x00" * 300,
            b"\xff\xfe",
            b"[" * 10**5,
        ),
        *(
            b'{"format": "lightning_megatron.corpus"}',
            b'{"version": 2}',
            b'{"num_tokens": 4}',
            b"{" * 10**6,
            b" " * 10**7,
        ),
    ],
)
def test_invalid_descriptions_raise(sources: list[Path], tmp_path: Path, content: bytes) -> None:
    prefix = copy(sources[0], tmp_path)
    Path(f"{prefix}.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"a\.json.*again"):
        TokenFile(prefix)


def test_a_key_that_occurs_twice_is_refused(sources: list[Path], tmp_path: Path) -> None:
    prefix = copy(sources[0], tmp_path)
    path = Path(f"{prefix}.json")
    path.write_text(
        path.read_text().replace('"vocab_size": 257,', '"vocab_size": 257,\n"vocab_size": 512,')
    )
    with pytest.raises(CorruptDataError, match="the key 'vocab_size' occurs twice"):
        TokenFile(prefix)


def test_raw_text_of_the_same_name_is_ignored_with_a_warning(
    sources: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = copy(sources[2], tmp_path)
    for content in ('{"text": "raw"}', '{"text": "raw"}\n{"text": "more"}\n' * 50_000):
        caplog.clear()
        Path(f"{prefix}.json").write_text(content)
        assert TokenFile(prefix).description is None
        assert "c.json is ignored" in caplog.text


HEADER_EDITS = [
    *((0, "<9s", value) for value in (b"MMIDIDX\x00\x01", b"MMIDRET\x00\x00", bytes(9))),
    *((9, "<Q", value) for value in (0, 2, 256, 2**63, 2**64 - 1)),
    *((17, "<B", value) for value in range(256) if value != 8),
    *((18, "<Q", value) for value in (0, 1, 17, 19, 2**31, 2**40, 2**62, 2**63, 2**64 - 1)),
    *((26, "<Q", value) for value in (0, 1, 6, 8, 2**31, 2**40, 2**62, 2**64 - 1)),
    *(
        (34 + 4 * k, "<i", value)
        for k in (0, 7, 17)
        for value in (-1, 0, 1, 5, 2**31 - 1, -(2**31))
    ),
    *(
        (34 + 72 + 8 * k, "<q", value)
        for k in (0, 1, 17)
        for value in (-8, 1, 9, 10**6, 2**63 - 1, -(2**63))
    ),
    *(
        (34 + 72 + 144 + 8 * k, "<q", value)
        for k in (0, 1, 6)
        for value in (-1, 2, 17, 19, 2**40, 2**63 - 1)
    ),
]


@pytest.mark.parametrize("with_description", [True, False])
def test_every_field_of_an_index_is_checked(
    sources: list[Path], tmp_path: Path, with_description: bool
) -> None:
    prefix = copy(sources[1], tmp_path)
    if not with_description:
        Path(f"{prefix}.json").unlink()
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    tokens = [sequence.tolist() for sequence in map(TokenFile(prefix).__getitem__, range(18))]
    accepted = []
    for position, form, value in HEADER_EDITS:
        packed = struct.pack(form, value)
        edited = content[:position] + packed + content[position + len(packed) :]
        path.write_bytes(edited)
        try:
            corpus = TokenFile(prefix)
            assert [corpus[i].tolist() for i in range(len(corpus))] == tokens, (position, value)
            if edited != content:
                accepted.append((position, value))
        except CorruptDataError as error:
            assert "b.idx" in str(error), error  # noqa: PT017
    # Without checksums, a reader cannot tell signed from unsigned 16-bit tokens, or find a wrong
    # end of a document between sequences.
    assert accepted == ([] if with_description else [(17, 3), (34 + 72 + 144 + 8, 2)])


def test_files_of_different_corpora_are_refused(sources: list[Path], tmp_path: Path) -> None:
    for number, source in enumerate(sources):
        for foreign in (sources[number - 1], sources[number - 2]):
            for suffix in SUFFIXES:
                prefix = copy(source, tmp_path)
                shutil.copyfile(f"{foreign}.{suffix}", f"{prefix}.{suffix}")
                with pytest.raises(CorruptDataError):
                    TokenFile(prefix)


def replace_by_directory(path: Path) -> None:
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    os.mkfifo(path)


def replace_by_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def replace_by_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def replace_by_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def replace_by_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "replace", [value for name, value in list(globals().items()) if name.startswith("replace_by")]
)
def test_paths_that_are_not_files_are_refused_without_waiting(
    sources: list[Path], tmp_path: Path, suffix: str, replace: Callable[[Path], None]
) -> None:
    prefix = copy(sources[0], tmp_path)
    path = Path(f"{prefix}.{suffix}")
    path.unlink()
    replace(path)
    with pytest.raises(CorruptDataError, match=rf"a\.{suffix}"):
        TokenFile(prefix)


def test_links_to_sound_files_are_read(sources: list[Path], tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        (tmp_path / f"a.{suffix}").symlink_to(f"{sources[0]}.{suffix}")
    assert read(tmp_path / "a") == read(sources[0])


class Gadget:
    """Object that writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a.json", "shuffle.npy", "index.json"])
def test_pickled_objects_in_files_are_never_executed(
    sources: list[Path], tmp_path: Path, name: str
) -> None:
    prefix, cache, trace = copy(sources[0], tmp_path), tmp_path / "cache", tmp_path / "executed"

    def batches() -> list[list[int]]:
        data = TokenDataModule(str(prefix), seq_length=8, cache_dir=str(cache), seed=3)
        return [batch["tokens"].flatten().tolist() for batch in data.train_dataloader()]

    expected = batches()
    folder = next(path for path in cache.iterdir() if path.is_dir())
    path = tmp_path / name if name.startswith("a.") else folder / name
    for content in (
        pickle.dumps(Gadget(trace)),
        object_array(Gadget(trace), tmp_path),
        archive(Gadget(trace), tmp_path),
    ):
        path.write_bytes(content)
        if name.startswith("a."):
            with pytest.raises(CorruptDataError):
                batches()
        else:
            assert batches() == expected
        assert not trace.exists()
    pickle.loads(pickle.dumps(Gadget(trace)))
    assert trace.exists()


def object_array(gadget: Gadget, folder: Path) -> bytes:
    np.save(folder / "gadget.npy", np.array([gadget], dtype=object), allow_pickle=True)
    return (folder / "gadget.npy").read_bytes()


def archive(gadget: Gadget, folder: Path) -> bytes:
    np.savez(folder / "gadget.npz", documents=np.array([gadget], dtype=object), allow_pickle=True)
    return (folder / "gadget.npz").read_bytes()


def test_checksums_are_compared_once_and_again_when_a_file_changes(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = copy(sources[0], tmp_path)
    calls: list[Path] = []
    crc32_of = token_file.crc32_of
    monkeypatch.setattr(token_file, "crc32_of", lambda path: calls.append(path) or crc32_of(path))
    monkeypatch.setattr("lightning_megatron.data.checked_files.SETTLING_NS", 0)

    def set_up(**options: Any) -> None:
        TokenDataModule(str(prefix), seq_length=8, **options).setup("fit")

    for _ in range(3):
        set_up()
    assert len(calls) == 1
    path = Path(f"{prefix}.bin")
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    # A mismatch is remembered, too: waiting ranks do not read the file again.
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=r"a\.bin has changed: its checksum must be"):
            set_up()
    assert len(calls) == 2
    set_up(checksums=False)
    content[7] ^= 1
    path.write_bytes(content)
    set_up()
    assert len(calls) == 3
    (next((tmp_path / "index_cache").glob("checked-*.json"))).write_text('{"fault": 3}')
    set_up()


def test_the_result_for_a_recently_changed_file_is_not_stored(
    sources: list[Path], tmp_path: Path
) -> None:
    prefix = copy(sources[0], tmp_path)
    corpora.check_corpus_once(TokenFile(prefix), tmp_path / "cache", in_charge=True)
    assert not (tmp_path / "cache").exists()


def test_without_a_stored_result_the_process_in_charge_compares_checksums(
    sources: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefix = copy(sources[0], tmp_path)
    monkeypatch.setattr("lightning_megatron.data.checked_files.SETTLING_NS", 0)
    (tmp_path / "file").write_text("")
    Path(f"{prefix}.bin").write_bytes(bytes(Path(f"{prefix}.bin").stat().st_size))
    corpus = TokenFile(prefix, check=False)
    corpora.check_corpus_once(corpus, tmp_path / "file" / "cache", in_charge=False)
    with pytest.raises(CorruptDataError, match="has changed: its checksum"):
        corpora.check_corpus_once(corpus, tmp_path / "file" / "cache", in_charge=True)
    assert "every run reads the files" in caplog.text


def test_a_description_of_version_1_is_read_without_checksums(
    sources: list[Path], tmp_path: Path
) -> None:
    prefix = copy(sources[0], tmp_path)
    path = Path(f"{prefix}.json")
    fields = json.loads(path.read_text())
    old = {
        name: value
        for name, value in fields.items()
        if name not in ("bin_crc32", "idx_sha256", "fields_crc32")
    }
    path.write_text(json.dumps({**old, "version": 1}))
    assert read_description(prefix) == read_description(sources[0])
    TokenFile(prefix)
    path.write_text(json.dumps({**old, "version": 1, "tokenizer": None}))
    with pytest.raises(CorruptDataError, match="tokenizer must be a text"):
        TokenFile(prefix)


class Oversized(ByteTokenizer):
    vocab_size = 10


def test_a_tokenizer_that_contradicts_itself_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(
        CorruptDataError, match=r"eod must be null or a whole number in \[0, 9\]: it is 256"
    ):
        TokenFileWriter(tmp_path / "c", tokenizer=Oversized())


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1.5], None, "token ids must be whole numbers: document 0 has ids of type float64"),
        ([True], None, "of type bool"),
        ([1, 2], [3, -1], "lengths must not be negative"),
        ([1, 2], [1], "sum to 1"),
    ],
)
def test_a_writer_rejects_invalid_ids_and_lengths(
    tmp_path: Path, tokens: list[Any], lengths: list[int] | None, message: str
) -> None:
    with (
        pytest.raises(CorruptDataError, match=message),
        TokenFileWriter(tmp_path / "c", vocab_size=257) as writer,
    ):
        writer.add_document(tokens, lengths=lengths)
    with pytest.raises(CorruptDataError, match="token files hold"):
        TokenFileWriter(tmp_path / "c", dtype="f4")


def test_a_damaged_cache_gives_the_same_samples(sources: list[Path], tmp_path: Path) -> None:
    prefix, cache, chance = copy(sources[0], tmp_path), tmp_path / "cache", random.Random(3)

    def batches() -> list[list[int]]:
        data = TokenDataModule(str(prefix), seq_length=8, cache_dir=str(cache), seed=3)
        return [batch["tokens"].flatten().tolist() for batch in data.train_dataloader()]

    expected = batches()
    folder = next(path for path in cache.iterdir() if path.is_dir())
    for path in sorted(folder.iterdir()):
        for _ in range(60):
            content = path.read_bytes()
            path.write_bytes(damaged_bytes(content, chance))
            assert batches() == expected
        for replace in (
            replace_by_directory,
            replace_by_pipe,
            replace_by_broken_link,
            replace_by_link_to_device,
        ):
            path.unlink()
            replace(path)
            assert batches() == expected
    fields = json.loads((folder / "index.json").read_text())
    for edited in (
        [],
        {},
        {"arrays": 3},
        {**fields, "arrays": {"../x": "0"}},
        {**fields, "fields": {}},
    ):
        (folder / "index.json").write_text(json.dumps(edited))
        assert batches() == expected
