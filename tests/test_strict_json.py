"""Tests of strict JSON: one value per file, and every fault raises an error that names the file."""

from __future__ import annotations

import contextlib
import json
import os
import random

import pytest

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.strict_json import MAX_DEPTH, MAX_SIGNS, parse_json, parse_object, read_json

FAULTS = [
    (b"", "Expecting value"),
    (b'{"a": 1} x', "Extra data"),
    (b"\xff{}", "byte 0 is not UTF-8"),
    (b'{"a": NaN}', "NaN is no number"),
    (b'{"a": 1e999}', "the number 1e999 is too large"),
    (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    (b'{"a": "\\ud800"}', "half of a surrogate pair"),
    (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    (b"[0" + b",0" * (MAX_SIGNS + 1) + b"]", "it has too many values"),
    (b"9" * 5000, "an integer has too many digits"),
]


def test_faults_are_named_with_file_and_remedy():
    for content, reason in FAULTS:
        with pytest.raises(CorruptDataError) as caught:
            parse_json(content, "x.json", "Write it again.")
        assert str(caught.value).startswith("x.json is not valid JSON: ")
        assert reason in str(caught.value)
        assert str(caught.value).endswith(" Write it again.")
    with pytest.raises(CorruptDataError, match=r"must hold a JSON object: it holds a list\. Write"):
        parse_object(b"[1]", "x.json", "Write it again.")
    assert parse_object(b'{"a": 1}', "x.json", "") == {"a": 1}


def test_nesting_is_accepted_up_to_the_largest_depth():
    deepest = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert parse_json(deepest, "x.json", "") == json.loads(deepest)
    with pytest.raises(CorruptDataError, match="nested too deeply"):
        parse_json(b"[" + deepest + b"]", "x.json", "")


def test_irregular_and_large_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text(" " * 101)
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in {
        "pipe": "is not a regular file",
        "large": "has more than 100 bytes",
        "loop": "cannot be read",
        "missing": "cannot be read: No such file",
    }.items():
        with pytest.raises(CorruptDataError, match=f"{name} {reason}"):
            read_json(tmp_path / name, "Write it again.", max_bytes=100)


def test_damaged_json_gives_a_value_or_a_corrupt_data_error():
    document = json.dumps({"a": [1, 2.5, {"b": "text"}], "c": None, "d": -3}).encode()
    chance = random.Random(15)
    for _ in range(2000):
        content = bytearray(document)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        with contextlib.suppress(CorruptDataError):
            part = bytes(content[: chance.randint(0, len(content))])
            value = parse_json(part, "x.json", "Write it again.")
            assert json.loads(json.dumps(value)) == value
