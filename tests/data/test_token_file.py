"""Token files equal Megatron's byte by byte, appear only when complete, and errors name damage."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
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


@pytest.fixture
def golden(tmp_path: Path) -> str:
    prefix = tmp_path / "golden"
    idx_path(prefix).write_bytes(GOLDEN_INDEX)
    bin_path(prefix).write_bytes(GOLDEN_TOKENS)
    return str(prefix)


def test_the_index_has_the_94_bytes_of_megatron(tmp_path):
    with TokenFileWriter(tmp_path / "ours", vocab_size=257) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5, 6, 7, 8, 9], lengths=[2, 4])
    assert len(GOLDEN_INDEX) == 94
    assert idx_path(tmp_path / "ours").read_bytes() == GOLDEN_INDEX
    assert bin_path(tmp_path / "ours").read_bytes() == GOLDEN_TOKENS
    # The token type follows the vocabulary as in Megatron.
    types = [str(smallest_dtype(size)) for size in (257, 65499, 65500, None)]
    assert types == ["uint16", "uint16", "int32", "int32"]


def test_a_corpus_of_megatron_is_read_without_description(golden):
    corpus = TokenFile(golden)
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
    content = pickle.dumps(corpus)
    assert len(content) < 500, "a reader is small"
    assert pickle.loads(content)[1].tolist() == [4, 5]
    # The modes of a multimodal corpus are ignored.
    idx_path(golden).write_bytes(GOLDEN_INDEX + b"\x00\x01\x00")
    assert TokenFile(golden)[2].tolist() == [6, 7, 8, 9]


@given(
    st.lists(st.lists(st.integers(0, 256), max_size=9), max_size=12),
    st.sampled_from(["u2", "i4", "i8", "i2"]),
)
def test_written_documents_are_read_back(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    with TokenFileWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    corpus = TokenFile(prefix)
    assert corpus.num_documents == len(documents)
    written = [tokens for tokens in documents if tokens]
    assert [corpus[i].tolist() for i in range(len(corpus))] == written
    starts = corpus.starts[corpus.document_index]
    assert (starts[1:] - starts[:-1]).tolist() == [len(tokens) for tokens in documents]


def test_damaged_and_missing_files_are_refused_with_the_reason(golden):
    index, tokens = (idx_path(golden), GOLDEN_INDEX), (bin_path(golden), GOLDEN_TOKENS)
    for (path, content), damaged, reason in (
        (index, GOLDEN_INDEX[:20], "truncated: 20 bytes found"),
        (index, b"TORCH" + GOLDEN_INDEX[5:], "is not a token index"),
        (index, GOLDEN_INDEX[:9] + b"\x02" + GOLDEN_INDEX[10:], "has version 2; only version 1"),
        (index, GOLDEN_INDEX + b"\x00", "too long: 94 bytes expected .* 95 found"),
        (tokens, GOLDEN_TOKENS[:-2], "truncated: .* 18 bytes, 16 found"),
        (tokens, GOLDEN_TOKENS + b"\x00", "too long: .* 19 found"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptDataError, match=reason):
            TokenFile(golden)
        path.write_bytes(content)
    bin_path(golden).unlink()
    for prefix, reason in (
        (golden, "bin is missing"),
        (f"{golden}-other", "idx cannot be read"),
        ("a\0", "cannot be read: .*null"),
    ):
        with pytest.raises(CorruptDataError, match=reason):
            TokenFile(prefix)


def test_an_interrupted_writer_leaves_no_files_and_an_older_corpus_unchanged(tmp_path, golden):
    def interrupted(prefix: str | Path) -> None:
        with TokenFileWriter(prefix, vocab_size=257) as writer:
            writer.add_document([1])
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    for prefix in (tmp_path / "c", golden):
        with pytest.raises(KeyboardInterrupt):
            interrupted(prefix)
    assert sorted(tmp_path.iterdir()) == before
    assert TokenFile(golden).num_tokens == 9


def test_a_writer_refuses_invalid_tokens_and_lengths(tmp_path):
    plain: dict[str, Any] = {"vocab_size": 257}
    for options, tokens, lengths, reason in (
        (plain, [257], None, "document 0 holds .*257"),
        (plain, [-1], None, "document 0 holds .*-1"),
        ({"dtype": "i4"}, [2**31], None, f"document 0 holds .*{2**31}"),
        (plain, [1.5], None, "must be whole numbers: document 0 has ids of type float64"),
        (plain, [1, 2], [3, -1], "lengths must not be negative"),
        (plain, [1, 2], [1], "sum to 1"),
        ({"dtype": "f4"}, [1], None, "tokens of a type in .* float32 was given"),
    ):
        with (
            pytest.raises(CorruptDataError, match=reason),
            TokenFileWriter(tmp_path / "c", **options) as writer,
        ):
            writer.add_document(tokens, lengths=lengths)


def test_the_description_counts_tokens_documents_and_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    with TokenFileWriter(tmp_path / "c", tokenizer=tokenizer) as writer:
        writer.add_document([*tokenizer.encode("né"), 256], num_bytes=3)
        writer.add_document([])
    counts = {"num_documents": 2, "num_tokens": 4, "num_bytes": 3}
    expected = CorpusDescription("bytes", tokenizer.fingerprint, 257, 256, **counts)
    assert read_description(tmp_path / "c") == expected
    # A corpus can be renamed with its three files.
    for suffix in ("bin", "idx", "json"):
        shutil.move(tmp_path / f"c.{suffix}", tmp_path / f"d.{suffix}")
    corpus = TokenFile(tmp_path / "d")
    assert corpus.description == expected
    corpus.check_tokenizer(ByteTokenizer())
    other = SimpleNamespace(name="other", fingerprint="0" * 64)
    with pytest.raises(CorruptDataError, match=r"written with 'bytes' .* but 'other'"):
        corpus.check_tokenizer(other)


def test_a_foreign_json_beside_the_corpus_is_neither_read_nor_overwritten(golden):
    description_path(golden).write_text(json.dumps({"text": "raw"}))
    assert TokenFile(golden).description is None
    with (
        pytest.raises(CorruptDataError, match="exists and is not a corpus description"),
        TokenFileWriter(golden, tokenizer=ByteTokenizer()) as writer,
    ):
        writer.add_document([1])
    assert json.loads(description_path(golden).read_text()) == {"text": "raw"}
