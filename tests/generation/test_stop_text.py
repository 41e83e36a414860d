"""Streamed text has no incomplete characters and ends before the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.data.tokenizer import ByteTokenizer
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.generation.stop_text import StopStrings, TextStream, before_stop

BYTES = ByteTokenizer()


def pieces_of(data: bytes, strings: tuple[str, ...] = (), before: bytes = b"") -> list[str]:
    stream = TextStream(BYTES.decode, strings, list(before))
    return [*(stream.push(token) for token in data), stream.finish()]


def test_a_character_appears_when_its_bytes_are_complete():
    assert pieces_of("aé€b".encode()) == ["a", "", "é", "", "", "€", "b", ""]
    assert pieces_of(b"a\xe2\x82") == ["a", "", "", "\ufffd"]


@given(data=st.binary(max_size=40), before=st.text(max_size=5))
def test_pieces_of_any_bytes_join_to_the_full_text(data, before):
    assert "".join(pieces_of(data, before=before.encode())) == data.decode(errors="replace")


@given(
    data=st.text(alphabet="abé", max_size=30),
    strings=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_pieces_end_before_the_first_stop_string(data, strings):
    tokens = list(data.encode())
    stops = StopStrings(BYTES.decode, strings)
    ends = [n for n in range(1, len(tokens) + 1) if stops(tokens[:n])]
    tokens_read = tokens[: ends[0]] if ends else tokens
    text = "".join(pieces_of(bytes(tokens_read), tuple(strings)))
    assert text == before_stop(BYTES.decode(tokens_read), strings)
    # The stream prints no text that it would have to take back.
    assert text == "".join(pieces_of(bytes(tokens), tuple(strings)))


def words(tokens: list[int]) -> str:
    """Decode words as SentencePiece does, which omits the blank before the first word."""
    return "".join([f" {token}" for token in tokens]).removeprefix(" ")


def test_the_blank_before_the_first_new_word_is_printed():
    stream = TextStream(words, before=[1, 2])
    assert [stream.push(3), stream.push(4), stream.finish()] == [" 3", " 4", ""]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UnsupportedError, match="one is empty"):
        StopStrings(BYTES.decode, ["a", ""])
