"""A damaged or edited checkpoint gives exactly the saved values, or an error that names one of its files.

Edited files get valid checksums, so values that only checksums protect may change unnoticed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_megatron.checkpoint import (
    load_metadata,
    load_rank_state,
    read_full,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import consolidate, rewrite
from lightning_megatron.checkpoint.header import _sum_of
from lightning_megatron.checkpoint.storage import FileRecord, LocalFolder
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.errors import REFUSALS, CheckpointMismatchError, CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entries, entry_of

MESH = ParallelMesh.single()
HEADER = "checkpoint.json"
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt", HEADER)
SHAPES = {"embedding": (12, 4), "up": (4, 4), "down": (4, 4), "bias": (4,)}


def tensors_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = {f"state_dict.{name}": shape for name, shape in SHAPES.items()}
    for name, key in product(SHAPES, ("exp_avg", "exp_avg_sq")):
        shapes[f"optimizer.0.state.{name}.{key}"] = SHAPES[name]
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["state_dict.half"] = torch.randn(4, 4, generator=generator).bfloat16()
    return tensors | {"state_dict.count": torch.tensor(step)}


def metadata_at(step: int) -> dict[str, Any]:
    trained = [["embedding", "up"], ["down", "bias"]]
    groups = [{"hyperparameters": {"lr": 0.1}, "parameters": names} for names in trained]
    order = ["embedding", "up", "down", "bias", "count", "half", "head", "nothing"]
    one_process = {"order": order, "aliases": {"head": "embedding"}, "numbering": [trained]}
    one_process |= {"padded_rows": {"embedding": 16}, "empty": {"nothing": [0, 4]}}
    return {
        "epoch": 0,
        "global_step": step,
        "loops": {"fit_loop": {"state_dict": {}}},
        "megatron_optimizers": [{"groups": groups, "values": {"up": {"count": 3}}}],
        "megatron_one_process": one_process,
    }


def save(path: Path, step: int) -> Path:
    single_file = path.with_suffix(".whole")
    named = {name: entry_of(tensor) for name, tensor in tensors_at(step).items()}
    save_checkpoint(single_file, named, metadata_at(step), {"seen": step}, MESH)
    rewrite(single_file, path, num_files=2)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two checkpoints of the same run."""
    folder = tmp_path_factory.mktemp("run")
    return save(folder / "a", 1), save(folder / "b", 2)


def resharded(path: Path, out: Path) -> dict[str, Tensor]:
    rewrite(path, out / "again", num_files=1)
    tensors = read_full(out / "again")
    assert load_metadata(out / "again") == metadata_at(1)
    assert load_rank_state(out / "again", MESH).values == {"seen": 1}
    return tensors


def as_one_file(path: Path, out: Path) -> dict[str, Tensor]:
    consolidate(path, out / "plain.ckpt")
    loaded = torch.load(out / "plain.ckpt", weights_only=True)
    state, optimizer = loaded["state_dict"], loaded["optimizer_states"][0]
    names = list(SHAPES)
    assert list(state) == metadata_at(1)["megatron_one_process"]["order"]
    assert torch.equal(state["head"], state["embedding"])
    assert state.pop("head").shape[0] == 16
    assert state.pop("nothing").shape == (0, 4)
    assert [group["params"] for group in optimizer["param_groups"]] == [[0, 1], [2, 3]]
    assert optimizer["state"][1].pop("count") == 3
    tensors = {f"state_dict.{name}": tensor for name, tensor in state.items()}
    for number, values in optimizer["state"].items():
        start = f"optimizer.0.state.{names[number]}"
        tensors |= {f"{start}.{key}": tensor for key, tensor in values.items()}
    return {name: tensor[:12] if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


USES = {"reshard": resharded, "consolidate": as_one_file}


def check_use(path: Path, name: str, label: str, renames: bool = False) -> str:
    """Use a checkpoint; return the error, or an empty text if all values are the saved ones.

    With ``renames``, an edit may have changed the name of a tensor.
    """
    out, refusal = path.parent / "out", ""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        actual = USES[name](path, out)
    except REFUSALS as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal, f"{label}: the error names no file: {refusal}"
        left = [file.name for file in out.iterdir()]
        assert not left, f"{label}: {left} is left of a failed result"
        return refusal
    expected = tensors_at(1)
    assert actual.keys() == expected.keys() or renames, label
    for key in actual.keys() & expected.keys():
        same = actual[key].dtype == expected[key].dtype and torch.equal(actual[key], expected[key])
        assert same, f"{label}: {key} differs from the saved value"
    return ""


def copy_of(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    path = tmp_path / "c"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved[0], path)
    return path


def other_file(file: Path, draw: random.Random) -> Path:
    return file.with_name(draw.choice([name for name in FILES if name != file.name]))


Accident = Callable[[Path, Path, random.Random], object]


def flip(file: Path, _: Any = None, draw: random.Random | None = None) -> None:
    """Flip a bit, which is in the middle of the file unless it is drawn."""
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content)) if draw else len(content) // 2
    content[place] ^= 1 << (draw.randrange(8) if draw else 0)
    file.write_bytes(content)


def cut(file: Path, _: Any = None, draw: random.Random | None = None) -> None:
    size = file.stat().st_size
    os.truncate(file, draw.randrange(size) if draw else size - 5)


def zero(file: Path, _: Any, draw: random.Random) -> None:
    content, start = file.read_bytes(), draw.randrange(file.stat().st_size // 2)
    file.write_bytes(content[:start] + bytes(64) + content[start + 64 :])


def exchange_files(file: Path, _: Any, draw: random.Random) -> None:
    other = other_file(file, draw)
    other.rename(file.with_name("x"))
    file.rename(other)
    file.with_name("x").rename(file)


def instead(make: Callable[[Path, Path, random.Random], object]) -> Accident:
    return lambda file, source, draw: (file.unlink(), make(file, source, draw))


ACCIDENTS: dict[str, Accident] = {
    "flip": flip,
    "zero": zero,
    "cut": cut,
    "extend": lambda file, _, draw: file.write_bytes(file.read_bytes() + bytes(draw.randrange(1, 9))),
    "remove": lambda file, *_: file.unlink(),
    "empty": lambda file, *_: file.write_bytes(b""),
    "of another checkpoint": lambda file, source, _: shutil.copy(source / file.name, file),
    "link to another checkpoint": instead(lambda file, source, _: file.symlink_to(source / file.name)),
    "hard link to another file": instead(lambda file, _, draw: os.link(other_file(file, draw), file)),
    "exchange with another file": exchange_files,
    "a directory": instead(lambda file, *_: file.mkdir()),
    "a pipe": instead(lambda file, *_: os.mkfifo(file)),
    "a link to itself": instead(lambda file, *_: file.symlink_to(file.name)),
    "a link to an endless file": instead(lambda file, *_: file.symlink_to("/dev/zero")),
}  # fmt: skip


def test_an_accident_to_any_file_is_detected(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    assert [check_use(path, use, use) for use in USES] == ["", ""], "without an accident"
    for (accident, damage), (number, name) in product(ACCIDENTS.items(), enumerate(FILES)):
        for seed in range(2 if accident in ("flip", "zero", "cut") else 1):
            path, use = copy_of(saved, tmp_path), list(USES)[(number + seed) % 2]
            damage(path / name, saved[1], random.Random(seed))
            is_file, original = (path / name).is_file(), (saved[0] / name).read_bytes()
            if is_file and (path / name).read_bytes() == original:
                continue
            # The reader of headers ignores blanks at the end.
            is_blank = name == HEADER and accident == "extend"
            label = f"{accident} of {name}, {seed}"
            assert check_use(path, use, label) or is_blank, f"{label} is not detected"


def put(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    fields = json.loads((path / HEADER).read_text())
    record = FileRecord(len(content), f"{zlib.crc32(content):08x}")
    fields["files"][name] = dataclasses.asdict(record)
    put_header(path, fields)


def put_header(path: Path, fields: dict[str, Any]) -> None:
    fields.pop("checksum", None)
    (path / HEADER).write_text(json.dumps({**fields, "checksum": _sum_of(fields)}))


def parts_of(value: Any, depth: int = 6) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """List the parts inside a value, each with a function that replaces the part."""
    pairs: list[tuple[Any, Callable[[Any], None]]] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        pairs = [(value[key], lambda new, key=key: value.__setitem__(key, new)) for key in keys]  # type: ignore[misc]
        if isinstance(value, dict):
            pairs += [
                (key, lambda new, key=key: value.__setitem__(new, value.pop(key))) for key in keys
            ]  # type: ignore[misc]
    elif dataclasses.is_dataclass(value):
        pairs = [(getattr(value, field.name), lambda new, field=field: object.__setattr__(value, field.name, new))
                 for field in dataclasses.fields(value) if hasattr(value, field.name)]  # type: ignore[misc]  # fmt: skip
    for part, replace in pairs:
        yield part, replace
        if depth:
            yield from parts_of(part, depth - 1)


ODD: tuple[Any, ...] = (
    0, 1, -1, 3, 2**40, 2**70, 1.5, float("nan"), True, None, "", "x", "../x", [], [1], {}, {"a": 1}, (), b"x",
    torch.float64, torch.int32, torch.qint8, torch.Size((2, 2)), torch.Size(()), torch.Size((2**31, 2**31)),
)  # fmt: skip


def change_randomly(value: Any, draw: random.Random) -> str:
    """Replace a part of a value by an odd value or by another part of the same type."""
    parts = list(parts_of(value))
    part, replace = draw.choice(parts)
    same_type = [other for other, _ in parts if type(other) is type(part) and other is not part]
    new = draw.choice(same_type if same_type and draw.random() < 0.4 else ODD)
    try:
        replace(copy.deepcopy(new))
    except TypeError:
        return ""  # the part cannot be replaced by such a value
    return f"{part!r} became {new!r}"[:300]


def test_edits_change_no_value_silently(saved, tmp_path):
    index = pickle.loads((saved[0] / ".metadata").read_bytes())
    fields, refused = json.loads((saved[0] / HEADER).read_text()), 0
    for seed in range(150):
        path, draw = copy_of(saved, tmp_path), random.Random(seed)
        kind, use = ("index", "bytes", "header")[seed % 3], list(USES)[seed % 2]
        if kind == "bytes":
            content = bytearray((path / ".metadata").read_bytes())
            for _ in range(draw.choice((1, 1, 8))):
                content[draw.randrange(len(content))] = draw.randrange(256)
            put(path, ".metadata", bytes(content))
            check_use(path, use, f"seed {seed}", renames=True)
            continue
        edited = copy.deepcopy(index if kind == "index" else fields)
        change = change_randomly(edited, draw)
        try:
            if kind == "index":
                put(path, ".metadata", pickle.dumps(edited))
            else:
                put_header(path, edited)
        except (RuntimeError, TypeError, ValueError):
            continue  # such a value cannot be written
        refused += bool(check_use(path, use, f"seed {seed}: {change}"))
    assert refused > 30


def test_names_without_tensors_and_tensors_without_names_are_refused(saved, tmp_path):
    for order in (["embedding"], [*metadata_at(1)["megatron_one_process"]["order"], "other"]):
        path, edited = copy_of(saved, tmp_path), metadata_at(1)
        edited["megatron_one_process"]["order"] = order
        put(path, "meta.pt", to_bytes(edited))
        with pytest.raises(CorruptDataError, match=f"{path}.* do not match its tensors"):
            consolidate(path, tmp_path / "plain.ckpt")


def exchange(index: Any) -> None:
    keys, places = {key.fqn: key for key in index.storage_data}, index.storage_data
    up, down = keys["state_dict.up"], keys["state_dict.down"]
    places[up], places[down] = places[down], places[up]


def shift(index: Any, start: int, length: int) -> None:
    place = next(candidate for candidate in index.storage_data.values() if candidate.offset)
    place.offset, place.length = place.offset + start, place.length + length


def up_in(index: Any) -> Any:
    return index.state_dict_metadata["state_dict.up"]


def resize(index: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(up_in(index).chunks[0], name, torch.Size(value))


def remove(index: Any, name: str, **size: Any) -> None:
    del index.storage_data[MetadataIndex(name, **size)]


EDITS: list[tuple[Callable[[Any], object], str]] = [
    (exchange, "is listed at byte"),
    (lambda index: setattr(up_in(index).properties, "dtype", torch.int32), r"but the list of tensors says \(4, 4\) and torch\.int32"),
    (lambda index: (setattr(up_in(index), "size", torch.Size((2, 4))), resize(index, sizes=(2, 4))), r"has the shape \(4, 4\)"),
    (lambda index: resize(index, sizes=(2, 4)), "each of its 16 elements once"),
    (lambda index: resize(index, sizes=(5, 4)), "outside of"),
    (lambda index: up_in(index).chunks.clear(), "has no pieces"),
    (lambda index: shift(index, 1, -1), "is listed at byte"),
    (lambda index: remove(index, "state_dict.up", offset=torch.Size((0, 0))), "is listed at byte"),
    (lambda index: index.storage_data.update({MetadataIndex("x"): _StorageInfo("__0_0.distcp", 0, 1)}), "pieces and places"),
    (lambda index: (index.state_dict_metadata.pop("rank_state.0"), remove(index, "rank_state.0")), "is listed at byte|but its tensors have"),
]  # fmt: skip


def test_edits_of_the_list_of_tensors_are_refused_with_their_reason(saved, tmp_path):
    for change, message in EDITS:
        path = copy_of(saved, tmp_path)
        index = pickle.loads((path / ".metadata").read_bytes())
        change(index)
        put(path, ".metadata", pickle.dumps(index))
        with pytest.raises(CorruptDataError, match=message):
            read_full(path)


def test_verification_finds_missing_and_cut_files(tmp_path):
    for damage, name in product((cut, Path.unlink), ("meta.pt", ".metadata", "__0_0.distcp")):
        path = tmp_path / "a"
        save_checkpoint(path, entries(size=1000), {}, {}, MESH)
        damage(path / name)
        with pytest.raises(CorruptDataError, match=name):
            verify_checkpoint(path)
    (path / HEADER).unlink()
    with pytest.raises(CheckpointMismatchError, match=HEADER):
        verify_checkpoint(path)


def test_verification_asks_for_the_size_of_each_file_once(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a", entries(), {}, {}, MESH)
    size, asked = LocalFolder.size, []

    def counted(folder: LocalFolder, name: str) -> int:
        asked.append(name)
        return size(folder, name)

    monkeypatch.setattr(LocalFolder, "size", counted)
    verify_checkpoint(tmp_path / "a")
    assert len(asked) == len(set(asked)) > 2, asked


def test_a_file_that_the_header_does_not_list_is_damage(tmp_path):
    save_checkpoint(tmp_path / "a", entries(), {}, {}, MESH)
    fields = json.loads((tmp_path / "a" / HEADER).read_text())
    del fields["files"][".metadata"]
    put_header(tmp_path / "a", fields)
    with pytest.raises(CorruptDataError, match="the header does not list it"):
        verify_checkpoint(tmp_path / "a")
