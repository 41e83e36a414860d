"""JSON of files is read as Python's own reader does, and refused where that would guess or give up."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.plan.strict_json import MAX_DEPTH, parse_json, read_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@seed(0)
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES))
def test_mappings_are_what_python_s_own_reader_gives(value: dict[str, object]) -> None:
    content = json.dumps(value).encode()
    assert parse_json(content, "x") == json.loads(content) == value


@seed(0)
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789eE.-NaInfity \\u', max_size=40).map(str.encode))
def test_any_bytes_give_a_mapping_or_an_error_with_the_file_s_name(content: bytes) -> None:
    found, message = None, ""
    try:
        found = parse_json(content, "some/file.json")
    except CorruptDataError as error:
        message = str(error)
    assert "some/file.json" in message if found is None else found == json.loads(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "it has 'c' twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "limit"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b"[1]", "must be a mapping: .* has a list"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, f"inside each other {MAX_DEPTH} times"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b"", "does not"),
    ],
)
def test_what_a_reader_would_have_to_guess_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(CorruptDataError, match=message):
        parse_json(content, "x")


def test_a_file_that_is_too_large_is_not_read() -> None:
    assert read_json(io.BytesIO(b'{"a": 1}'), "x", 8) == {"a": 1}
    with pytest.raises(CorruptDataError, match="x has more"):
        read_json(io.BytesIO(b'{"a": 1} '), "x", 8)
