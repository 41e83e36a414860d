"""Token files equal Megatron's byte by byte, appear only when complete, and errors name damage."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.description import (
    CorpusDescription,
    description_path,
    read_description,
)
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter
from lightning_megatron.data.token_index import bin_path, idx_path, smallest_dtype
from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import CorruptDataError

# 16-bit tokens, sequences of 3, 2 and 4 tokens, documents [0, 1) and [1, 3): the index that
# Megatron-Core writes.
GOLDEN_INDEX = bytes.fromhex(
    "4d4d49444944580000"  # "MMIDIDX\0\0"
    + "0100000000000000"  # version 1
    + "08"  # 16 bits, unsigned
    + "0300000000000000"  # 3 sequences
    + "0300000000000000"  # 3 document entries
    + "03000000" + "02000000" + "04000000"  # lengths
    + "0000000000000000" + "0600000000000000" + "0a00000000000000"  # byte offsets
    + "0000000000000000" + "0100000000000000" + "0300000000000000"  # document entries
)  # fmt: skip
GOLDEN_TOKENS = bytes.fromhex("010002000300" + "04000500" + "0600070008000900")

documents_of_tokens = st.lists(st.lists(st.integers(0, 256), max_size=9), max_size=12)


def write_golden(directory: Path) -> str:
    prefix = directory / "golden"
    idx_path(prefix).write_bytes(GOLDEN_INDEX)
    bin_path(prefix).write_bytes(GOLDEN_TOKENS)
    return str(prefix)


def test_the_index_has_the_94_bytes_of_megatron(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "ours", vocab_size=257) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5, 6, 7, 8, 9], lengths=[2, 4])
    assert len(GOLDEN_INDEX) == 94
    assert idx_path(tmp_path / "ours").read_bytes() == GOLDEN_INDEX
    assert bin_path(tmp_path / "ours").read_bytes() == GOLDEN_TOKENS


def test_a_corpus_of_megatron_is_read_without_description(tmp_path: Path) -> None:
    corpus = TokenFile(write_golden(tmp_path))
    assert corpus.description is None
    corpus.check_tokenizer(ByteTokenizer())
    assert (len(corpus), corpus.num_documents, corpus.num_tokens) == (3, 2, 9)
    assert corpus.lengths.tolist() == [3, 2, 4]
    assert corpus.document_index.tolist() == [0, 1, 3]
    assert corpus.document_starts.tolist() == [0, 3, 9]
    assert [corpus[i].tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert corpus.get(2, 1, 2).tolist() == [7, 8]
    with pytest.raises(IndexError, match=r"sequence 1 .* has 2 tokens"):
        corpus.get(1, 1, 2)


def test_the_modes_of_a_multimodal_corpus_are_ignored(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    idx_path(prefix).write_bytes(GOLDEN_INDEX + b"\x00\x01\x00")
    assert TokenFile(prefix)[2].tolist() == [6, 7, 8, 9]


@settings(max_examples=40, deadline=None)
@given(documents=documents_of_tokens, dtype=st.sampled_from(["u2", "i4", "i8", "i2"]))
def test_written_documents_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    with TokenFileWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    corpus = TokenFile(prefix)
    assert corpus.num_documents == len(documents)
    assert [corpus[i].tolist() for i in range(len(corpus))] == [
        tokens for tokens in documents if tokens
    ]
    bounds = corpus.document_index
    sizes = [
        int(corpus.starts[stop] - corpus.starts[start])
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    assert sizes == [len(tokens) for tokens in documents]


def test_a_pickled_reader_is_small_and_reads_the_same_tokens(tmp_path: Path) -> None:
    corpus = TokenFile(write_golden(tmp_path))
    content = pickle.dumps(corpus)
    assert len(content) < 500
    assert pickle.loads(content)[1].tolist() == [4, 5]


def test_the_token_type_follows_the_vocabulary_as_in_megatron() -> None:
    assert [str(smallest_dtype(size)) for size in (257, 65499, 65500, None)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def damage_header(position: int, value: bytes) -> bytes:
    return GOLDEN_INDEX[:position] + value + GOLDEN_INDEX[position + len(value) :]


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"", "truncated: 0 bytes found, but the header has 34"),
        (GOLDEN_INDEX[:20], "truncated: 20 bytes found"),
        (b"TORCH" + GOLDEN_INDEX[5:], "is not a token index"),
        (damage_header(9, b"\x02"), "has version 2; only version 1"),
        (damage_header(17, b"\x09"), "it has type 9"),
        (GOLDEN_INDEX[:-1], "truncated: 94 bytes expected .* 93 found"),
        (GOLDEN_INDEX[:50], "truncated: 94 bytes expected .* 50 found"),
        (GOLDEN_INDEX + b"\x00", "too long: 94 bytes expected .* 95 found"),
        (damage_header(46 + 8, b"\x08"), "the offset of sequence 1"),
        (damage_header(34, b"\xff\xff\xff\xff"), "has -1 tokens"),
        (damage_header(86, b"\x02"), "end with 2"),
        (damage_header(70, b"\x01"), "must rise from 0"),
        (damage_header(78, b"\x04"), "must rise from 0"),
        (damage_header(17, b"\x04"), "the offset of sequence 1"),
    ],
)
def test_a_damaged_index_is_refused_with_the_reason(
    tmp_path: Path, index: bytes, reason: str
) -> None:
    prefix = write_golden(tmp_path)
    idx_path(prefix).write_bytes(index)
    with pytest.raises(CorruptDataError, match=reason):
        TokenFile(prefix)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (GOLDEN_TOKENS[:-2], "truncated: .* 18 bytes, 16 found"),
        (GOLDEN_TOKENS + b"\x00", "too long: .* 19 found"),
    ],
)
def test_token_data_of_the_wrong_size_are_refused(
    tmp_path: Path, tokens: bytes, reason: str
) -> None:
    prefix = write_golden(tmp_path)
    bin_path(prefix).write_bytes(tokens)
    with pytest.raises(CorruptDataError, match=reason):
        TokenFile(prefix)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match=r"nothing\.idx cannot be read"):
        TokenFile(tmp_path / "nothing")
    with pytest.raises(CorruptDataError, match="embedded null byte. A corpus is named by its path"):
        TokenFile("a\0b")
    prefix = write_golden(tmp_path)
    bin_path(prefix).unlink()
    with pytest.raises(CorruptDataError, match=r"golden\.bin is missing"):
        TokenFile(prefix)


def test_an_interrupted_writer_leaves_no_files(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TokenFileWriter(tmp_path / "c", vocab_size=257) as writer:
            writer.add_document([1, 2, 3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_an_older_corpus_unchanged(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)

    def interrupted() -> None:
        with TokenFileWriter(prefix, vocab_size=257) as writer:
            writer.add_document([1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert TokenFile(prefix).num_tokens == 9


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "token"),
    [(257, None, 257), (257, None, -1), (None, "u2", 65536), (None, "i4", 2**31)],
)
def test_tokens_outside_vocabulary_or_type_are_refused(
    tmp_path: Path, vocab_size: int | None, dtype: str | None, token: int
) -> None:
    with (
        pytest.raises(CorruptDataError, match=f"document 0 holds .*{token}"),
        TokenFileWriter(tmp_path / "c", vocab_size=vocab_size, dtype=dtype) as writer,
    ):
        writer.add_document([token])


def test_the_description_counts_tokens_documents_and_bytes(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    with TokenFileWriter(tmp_path / "c", tokenizer=tokenizer) as writer:
        writer.add_document([*tokenizer.encode("né"), 256], num_bytes=3)
        writer.add_document([])
    expected = CorpusDescription(
        "bytes", tokenizer.fingerprint, 257, 256, num_documents=2, num_tokens=4, num_bytes=3
    )
    assert read_description(tmp_path / "c") == expected
    assert TokenFile(tmp_path / "c").description == expected


class OtherTokenizer(ByteTokenizer):
    name = "other"
    fingerprint = "0" * 64


def test_a_check_with_another_tokenizer_raises_an_error_with_both_names(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "c", tokenizer=ByteTokenizer()) as writer:
        writer.add_document([1])
    corpus = TokenFile(tmp_path / "c")
    corpus.check_tokenizer(ByteTokenizer())
    with pytest.raises(CorruptDataError, match=r"written with 'bytes' .* but 'other'"):
        corpus.check_tokenizer(OtherTokenizer())


def test_a_foreign_json_beside_the_corpus_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    prefix = write_golden(tmp_path)
    description_path(prefix).write_text(json.dumps({"text": "raw"}))
    assert TokenFile(prefix).description is None
    with (
        pytest.raises(CorruptDataError, match="exists and is not a corpus description"),
        TokenFileWriter(prefix, tokenizer=ByteTokenizer()) as writer,
    ):
        writer.add_document([1])
    assert json.loads(description_path(prefix).read_text()) == {"text": "raw"}


def test_a_corpus_can_be_renamed_with_its_three_files(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "c", tokenizer=ByteTokenizer()) as writer:
        writer.add_document([7, 8])
    for suffix in ("bin", "idx", "json"):
        shutil.move(tmp_path / f"c.{suffix}", tmp_path / f"d.{suffix}")
    assert TokenFile(tmp_path / "d").description is not None


def test_a_corpus_of_empty_documents_is_valid(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "c", vocab_size=257) as writer:
        writer.add_document([])
        writer.add_document([])
    corpus = TokenFile(tmp_path / "c")
    assert (len(corpus), corpus.num_documents, corpus.num_tokens) == (0, 2, 0)
