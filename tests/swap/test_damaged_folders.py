"""A damaged or hostile folder of weights gives the saved tensors bit for bit, or an error that names
the folder.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.cli.main import OUR_ERRORS
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.swap.weights.safetensors_folder import INDEX, WEIGHTS, SafetensorsFolder

safetensors_torch = pytest.importorskip("safetensors.torch")

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def saved_tensors() -> dict[str, Tensor]:
    # All sizes differ, because no header reveals an exchange of tensors of the same size.
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(n + 1, 3, generator=generator) for n in range(6)}
    return {
        **weights,
        "half": torch.randn(5, generator=generator).bfloat16(),
        "nothing": torch.empty(0, 4),
    }


def save_single_file(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors_torch.save_file(saved_tensors(), folder / WEIGHTS, metadata={"format": "pt"})
    return folder / WEIGHTS


def save_indexed_files(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(saved_tensors())
    parts = dict(zip(FILES, (names[:3], names[3:]), strict=True))
    for file, part in parts.items():
        safetensors_torch.save_file({name: saved_tensors()[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return folder / INDEX


def check_folder(folder: Path, label: str) -> str:
    """Read a folder; return the text of the error, or an empty text if all tensors equal the saved
    ones.
    """
    refusal = None
    try:
        source = SafetensorsFolder(folder)
        source.check_types(source.names())
        actual = {name: source.read(name) for name in source.names()}
    except OUR_ERRORS as error:
        refusal = str(error)
    if refusal is not None:
        assert str(folder) in refusal, f"{label}: the error names no file: {refusal}"
        return refusal
    assert actual.keys() == saved_tensors().keys(), label
    for name, tensor in saved_tensors().items():
        is_equal = actual[name].dtype == tensor.dtype and torch.equal(tensor, actual[name])
        is_equal |= (
            not actual[name].numel() and not tensor.numel()
        )  # dtype and shape of an empty tensor may differ
        assert is_equal, f"{label}: {name} differs from the saved tensor"
    return ""


# ---- headers


def split_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_file(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ODD_VALUES = (
    0,
    1,
    -1,
    7,
    2**31,
    2**63,
    2**70,
    10**400,
    1.5,
    True,
    None,
    "",
    "x",
    [],
    [1],
    [0, 4],
    [8, 4],
    {},
    "I32",
    "F16",
)
ODD_TYPES = ("F64", "I64", "BF16", "F8_E4M3", "F4", "C64", "U32", "BOOL", "f32", ["F32"])


def edit_header(header: dict[str, Any], draw: random.Random) -> str:
    """Change one entry of a header, and describe the change."""
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = draw.choice(("entry", "key", "field", "number", "drop", "rename", "metadata", "shift"))
    new = draw.choice(ODD_VALUES + ODD_TYPES)
    if kind == "entry":
        header[name] = new
    elif kind == "key":
        entry[draw.choice(("dtype", "shape", "data_offsets"))] = new
    elif kind == "field":
        entry.pop(draw.choice(list(entry)))
    elif kind == "number":
        numbers = entry[draw.choice(("shape", "data_offsets"))]
        numbers[draw.randrange(len(numbers))] = draw.choice(
            (*ODD_VALUES, numbers[0] + 1, numbers[0] + 4)
        )
    elif kind == "drop":
        del header[name]
    elif kind == "rename":
        header[draw.choice(("", "x", f"{name}.", "__metadata__"))] = header.pop(name)
    elif kind == "metadata":
        header["__metadata__"] = new
    else:
        shift = draw.choice((-4, 1, 4))
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    return f"{kind} of {name}: {new!r}"[:200]


def test_edited_headers_are_refused_or_give_the_saved_tensors(tmp_path: Path) -> None:
    path, num_refused = save_single_file(tmp_path), 0
    header, data = split_file(path.read_bytes())
    for seed in range(400):
        changed = copy.deepcopy(header)
        change = edit_header(changed, random.Random(seed))
        if "nothing" not in changed or changed.keys() - header.keys():
            continue  # loading a model detects a missing empty tensor and new names
        path.write_bytes(join_file(changed, data))
        num_refused += bool(check_folder(tmp_path, f"seed {seed}, {change}"))
    assert num_refused > 250


def test_headers_with_damaged_bytes_are_refused_or_give_the_saved_tensors(tmp_path: Path) -> None:
    path = save_single_file(tmp_path)
    content = path.read_bytes()
    header, _ = split_file(content)
    names = "".join(header).encode()
    for seed in range(400):
        draw = random.Random(seed)
        changed, position = bytearray(content), draw.randrange(len(content) - 200)
        if content[position : position + 1] in names:
            continue  # perhaps part of a name
        changed[position] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        length = 8 + struct.unpack("<Q", content[:8])[0]
        if position < length:
            check_folder(tmp_path, f"bit of byte {position}, seed {seed}")
    for length in (0, 1, 7, 8, 9, 40, len(content) - 1):
        path.write_bytes(content[:length])
        assert check_folder(tmp_path, f"cut to {length}")
    for suffix in (b"x", bytes(8), content):
        path.write_bytes(content + suffix)
        assert check_folder(tmp_path, "extended")


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hole": (lambda h: h["half"]["data_offsets"].__setitem__(0, 4), "inside its file"),
    "same place": (
        lambda h: h["layers.1.weight"].update(shape=[1, 3], data_offsets=list(h["layers.0.weight"]["data_offsets"])),
        "Error while deserializing header",
    ),
    "dropped": (lambda h: h.pop("layers.2.weight"), "Error while deserializing header"),
    "integers": (lambda h: h["layers.2.weight"].update(dtype="I32"), "weights must be floating-point"),
    "other half": (lambda h: h["half"].update(dtype="F16") or h["layers.3.weight"].update(dtype="BF16", shape=[8, 3]),
                   "must not mix types of the same width"),
    "metadata": (lambda h: h.update(__metadata__={"a": 1}), "expected a string"),
    "many": (lambda h: h.update({f"{n:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                                 for n in range(1 << 17)}),
             "too many values"),
}  # fmt: skip


@pytest.mark.parametrize("edit", HEADERS)
def test_header_edits_are_refused_with_their_reason(edit: str, tmp_path: Path) -> None:
    path, (change, message) = save_single_file(tmp_path), HEADERS[edit]
    header, data = split_file(path.read_bytes())
    change(header)
    path.write_bytes(join_file(header, data))
    with pytest.raises(CorruptDataError, match=message):
        SafetensorsFolder(tmp_path).check_types(SafetensorsFolder(tmp_path).names())


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a\xff": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}',
        b"[]",
        b"null",
        b'"\\ud800"',
    ],
)
def test_malformed_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(join_file(header, bytes(8)))
    with pytest.raises(CorruptDataError, match=str(tmp_path)):
        SafetensorsFolder(tmp_path)


# ---- index


def test_edited_indexes_are_refused_or_give_the_saved_tensors(tmp_path: Path) -> None:
    path, num_refused = save_indexed_files(tmp_path), 0
    index = json.loads(path.read_text())
    for seed in range(200):
        draw, changed = random.Random(seed), copy.deepcopy(index)
        weight_map = changed["weight_map"]
        name, new = (
            draw.choice(list(weight_map)),
            draw.choice((*ODD_VALUES, "../x.safetensors", ".", "..", FILES[0], "\0", INDEX)),
        )
        kind = draw.choice(("drop", "drop a file", "place", "rename", "map", "top"))
        if kind == "drop":
            del weight_map[name]
        elif kind == "drop a file":
            changed["weight_map"] = {
                key: file for key, file in weight_map.items() if file != weight_map[name]
            }
        elif kind == "place":
            weight_map[name] = new
        elif kind == "rename":
            weight_map[str(new)] = weight_map.pop(name)
        elif kind == "map":
            changed["weight_map"] = new
        else:
            changed = new
        path.write_text(json.dumps(changed))
        num_refused += bool(check_folder(tmp_path, f"seed {seed}: {kind} of {name}: {new!r}"[:200]))
    assert num_refused > 150


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"weight_map": {}}', "{}", '{"weight_map": {"a": NaN}}', "[" * 100_000,
     '{"weight_map": ' + '{"a": ' * 50 + '"x"' + "}" * 51, '{"weight_map": {"a": "\\ud800.safetensors"}}'],
)  # fmt: skip
def test_malformed_indexes_are_refused(text: str, tmp_path: Path) -> None:
    save_indexed_files(tmp_path).write_text(text)
    with pytest.raises(CorruptDataError, match=str(tmp_path / INDEX)):
        SafetensorsFolder(tmp_path)


def test_index_with_a_repeated_key_is_refused(tmp_path: Path) -> None:
    path = save_indexed_files(tmp_path)
    path.write_text(
        path.read_text().replace('"weight_map": {', f'"weight_map": {{"half": "{FILES[1]}", ')
    )
    with pytest.raises(CorruptDataError, match="the key 'half' occurs twice"):
        SafetensorsFolder(tmp_path)


def test_tensors_and_files_that_the_index_leaves_out_are_named(tmp_path: Path) -> None:
    path = save_indexed_files(tmp_path)
    index = json.loads(path.read_text())
    remaining = {name: file for name, file in index["weight_map"].items() if name != "half"}
    path.write_text(json.dumps({"weight_map": remaining}))
    with pytest.raises(CheckpointMismatchError, match=f"'half in {FILES[0]}' of .* are not"):
        SafetensorsFolder(tmp_path)
    remaining = {name: file for name, file in index["weight_map"].items() if file != FILES[1]}
    path.write_text(json.dumps({"weight_map": remaining}))
    with pytest.raises(
        CheckpointMismatchError, match=r"it names 1 of the 2 files model-...-of-00002 of"
    ):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/{0}/secret.safetensors", "..", ".", "", ".hidden.safetensors",
             "a/b.safetensors", "a\\b.safetensors", "a\0.safetensors", "secret.bin", "x" * 5000 + ".safetensors"],
)  # fmt: skip
def test_index_entries_other_than_files_of_the_folder_are_refused(
    name: str, tmp_path: Path
) -> None:
    path = save_indexed_files(tmp_path / "model")
    safetensors_torch.save_file({"secret": torch.ones(2)}, tmp_path / "secret.safetensors")
    shutil.copy(tmp_path / "secret.safetensors", tmp_path / "model" / "secret.bin")
    index = json.loads(path.read_text())
    index["weight_map"]["secret"] = name.format(tmp_path)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointMismatchError, match="of its own folder|lacks"):
        SafetensorsFolder(tmp_path / "model")


def test_symbolic_file_links_are_followed_only_in_the_hugging_face_cache(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    save_indexed_files(outside)
    folder = tmp_path / "linked"
    folder.mkdir()
    shutil.copy(outside / INDEX, folder)
    for file in FILES:
        (folder / file).symlink_to(outside / file)
    with pytest.raises(CheckpointMismatchError, match="links to files elsewhere.*hard links"):
        SafetensorsFolder(folder)
    for file in FILES:
        (folder / file).unlink()
        os.link(outside / file, folder / file)
    assert not check_folder(folder, "hard links")
    (tmp_path / "shortcut").symlink_to(folder)
    assert not check_folder(tmp_path / "shortcut", "a link to the folder")
    cache = tmp_path / "hub" / "models--org--name"
    for part in ("blobs", "snapshots/0123"):
        (cache / part).mkdir(parents=True)
    for number, file in enumerate((INDEX, *FILES)):
        shutil.copy(outside / file, cache / "blobs" / f"hash{number}")
        (cache / "snapshots" / "0123" / file).symlink_to(Path("../../blobs") / f"hash{number}")
    assert not check_folder(cache / "snapshots" / "0123", "the cache")


@pytest.mark.parametrize("name", [WEIGHTS, INDEX, FILES[0]])
def test_paths_that_are_not_files_are_refused_without_waiting(name: str, tmp_path: Path) -> None:
    save = save_indexed_files if name != WEIGHTS else save_single_file
    save(tmp_path)
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)):
        (tmp_path / name).unlink(missing_ok=True) if not (tmp_path / name).is_dir() else (
            tmp_path / name
        ).rmdir()
        make(tmp_path / name)
        with pytest.raises(OUR_ERRORS, match=str(tmp_path)):
            SafetensorsFolder(tmp_path)
