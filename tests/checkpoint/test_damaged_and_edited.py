"""A damaged or edited checkpoint gives exactly the saved values, or an error that names one of its
files.

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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning_megatron.checkpoint import (
    load_metadata,
    load_rank_states,
    read_full,
    save_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.header import Header, _sum_of
from lightning_megatron.checkpoint.rewrite import rewrite
from lightning_megatron.checkpoint.storage import FileRecord, LocalFolder
from lightning_megatron.checkpoint.values import to_bytes
from lightning_megatron.cli.main import OUR_ERRORS
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.mesh import ParallelMesh
from tests.checkpoint.pieces import entry_of

MESH = ParallelMesh.single()
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt", "checkpoint.json")
HEADER = "checkpoint.json"


def tensors_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"embedding": (12, 4), "up": (4, 4), "down": (4, 4), "bias": (4,)}
    names = [f"state_dict.{name}" for name in shapes]
    names += [
        f"optimizer.0.state.{name}.{key}" for name in shapes for key in ("exp_avg", "exp_avg_sq")
    ]
    tensors = {name: torch.randn(shapes[name.split(".")[-1 if "state_dict" in name else 3]], generator=generator)
             for name in names}  # fmt: skip
    return {
        **tensors,
        "state_dict.count": torch.tensor(step),
        "state_dict.half": torch.randn(4, 4).bfloat16(),
    }


def metadata_at(step: int) -> dict[str, Any]:
    trained = [["embedding", "up"], ["down", "bias"]]
    groups = [
        {"hyperparameters": {"lr": 0.1}, "parameters": names, "states": ["exp_avg", "exp_avg_sq"]}
        for names in trained
    ]
    order = ["embedding", "up", "down", "bias", "count", "half", "head", "nothing"]
    one_process = {
        "order": order,
        "aliases": {"head": "embedding"},
        "padded_rows": {"embedding": 16},
    }
    return {
        "epoch": 0,
        "global_step": step,
        "loops": {"fit_loop": {"state_dict": {}}},
        "megatron_optimizers": [{"groups": groups, "values": {"up": {"count": 3}}}],
        "megatron_one_process": {
            **one_process,
            "empty": {"nothing": [0, 4]},
            "numbering": [trained],
        },
    }


def save(path: Path, step: int) -> Path:
    single_file = path.with_suffix(".whole")
    entries = {name: entry_of(tensor) for name, tensor in tensors_at(step).items()}
    save_checkpoint(single_file, entries, metadata_at(step), {"seen": step}, MESH)
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
    assert load_rank_states(out / "again") == {0: {"seen": 1}}
    return tensors


def as_one_file(path: Path, out: Path) -> dict[str, Tensor]:
    consolidate(path, out / "plain.ckpt")
    loaded = torch.load(out / "plain.ckpt", weights_only=True)
    state, optimizer = loaded["state_dict"], loaded["optimizer_states"][0]
    names = ["embedding", "up", "down", "bias"]
    assert list(state) == metadata_at(1)["megatron_one_process"]["order"]
    assert torch.equal(state["head"], state["embedding"])
    assert state.pop("head").shape[0] == 16
    assert state.pop("nothing").shape == (0, 4)
    assert [group["params"] for group in optimizer["param_groups"]] == [[0, 1], [2, 3]]
    assert optimizer["state"][1].pop("count") == 3
    tensors = {f"state_dict.{name}": tensor for name, tensor in state.items()}
    for number, values in optimizer["state"].items():
        tensors |= {
            f"optimizer.0.state.{names[number]}.{key}": tensor for key, tensor in values.items()
        }
    return {name: tensor[:12] if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


USES: dict[str, Callable[[Path, Path], dict[str, Tensor]]] = {
    "reshard": resharded,
    "consolidate": as_one_file,
}


def check_use(path: Path, name: str, label: str) -> str:
    """Use a checkpoint. Return the text of the error, or an empty text if all values are the saved
    values.
    """
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    refusal = None
    try:
        actual = USES[name](path, out)
    except OUR_ERRORS as error:
        refusal = str(error)
    if refusal is not None:
        assert str(path) in refusal, f"{label}: the error names no file: {refusal}"
        left = [file.name for file in out.iterdir()]
        assert not left, f"{label}: {left} is left of a failed result"
        return refusal
    expected = tensors_at(1) | {
        "state_dict.half": read_full(path.parent / "whole")["state_dict.half"]
    }
    assert actual.keys() == expected.keys(), label
    for key, tensor in actual.items():
        same = tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key])
        assert same, f"{label}: {key} differs from the saved value"
    return ""


def copy_of(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    path = tmp_path / "c"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(saved[0], path)
    if not (tmp_path / "whole").exists():
        shutil.copytree(saved[0], tmp_path / "whole")
    return path


# ---- accidents


def overwrite(file: Path, start: int, content: bytes) -> None:
    old = file.read_bytes()
    file.write_bytes(old[:start] + content + old[start + len(content) :])


def other_file(file: Path, draw: random.Random) -> Path:
    return file.with_name(draw.choice([name for name in FILES if name != file.name]))


ACCIDENTS: dict[str, Callable[[Path, Path, random.Random], object]] = {
    "flip": lambda file, source, draw: overwrite(
        file,
        at := draw.randrange(file.stat().st_size),
        bytes([file.read_bytes()[at] ^ (1 << draw.randrange(8))]),
    ),
    "zero": lambda file, source, draw: overwrite(
        file, draw.randrange(file.stat().st_size // 2), bytes(64)
    ),
    "cut": lambda file, source, draw: os.truncate(file, draw.randrange(file.stat().st_size)),
    "extend": lambda file, source, draw: file.write_bytes(
        file.read_bytes() + bytes(draw.randrange(1, 9))
    ),
    "remove": lambda file, source, draw: file.unlink(),
    "empty": lambda file, source, draw: file.write_bytes(b""),
    "of another checkpoint": lambda file, source, draw: shutil.copy(source / file.name, file),
    "link to another checkpoint": lambda file, source, draw: (
        file.unlink(),
        file.symlink_to(source / file.name),
    ),
    "hard link to another file": lambda file, source, draw: (
        file.unlink(),
        os.link(other_file(file, draw), file),
    ),
    "exchange with another file": lambda file, source, draw: (
        (name := other_file(file, draw)).rename(file.with_name("x")),
        file.rename(name),
        file.with_name("x").rename(file),
    ),  # fmt: skip
    "a directory": lambda file, source, draw: (file.unlink(), file.mkdir()),
    "a pipe": lambda file, source, draw: (file.unlink(), os.mkfifo(file)),
    "a link to itself": lambda file, source, draw: (file.unlink(), file.symlink_to(file.name)),
    "a link to an endless file": lambda file, source, draw: (
        file.unlink(),
        file.symlink_to("/dev/zero"),
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_accident_to_any_file_is_detected(
    accident: str, use: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in FILES:
        for seed in range(2 if accident in ("flip", "zero", "cut") else 1):
            path = copy_of(saved, tmp_path)
            ACCIDENTS[accident](path / name, saved[1], random.Random(seed))
            if (path / name).is_file() and (path / name).read_bytes() == (
                saved[0] / name
            ).read_bytes():
                continue
            # The reader of headers ignores blanks at the end.
            is_blank = name == HEADER and accident == "extend"
            assert check_use(path, use, f"{accident} {name} {seed}") or is_blank, (
                f"{accident} of {name} is not detected"
            )


# ---- edits


def put(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    fields = json.loads((path / HEADER).read_text())
    fields["files"][name] = dataclasses.asdict(
        FileRecord(len(content), f"{zlib.crc32(content):08x}")
    )
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


ODD = (
    0,
    1,
    -1,
    3,
    2**40,
    2**70,
    1.5,
    float("nan"),
    True,
    None,
    "",
    "x",
    "../x",
    [],
    [1],
    {},
    {"a": 1},
    (),
    b"x",
)
ODD_TYPES = (
    torch.float64,
    torch.int32,
    torch.qint8,
    torch.Size((2, 2)),
    torch.Size(()),
    torch.Size((2**31, 2**31)),
)


def change_randomly(value: Any, draw: random.Random) -> str:
    """Replace a part of a value by an odd value or by another part of the same type."""
    parts = list(parts_of(value))
    part, replace = draw.choice(parts)
    same_type = [
        candidate
        for candidate, _ in parts
        if type(candidate) is type(part) and candidate is not part
    ]
    new = (
        draw.choice(same_type)
        if same_type and draw.random() < 0.4
        else draw.choice(ODD + ODD_TYPES)
    )
    try:
        replace(copy.deepcopy(new))
    except TypeError:
        return ""  # the part cannot be replaced by such a value
    return f"{part!r} became {new!r}"[:300]


@pytest.mark.parametrize("use", USES)
def test_an_edited_list_of_tensors_changes_no_value_silently(
    use: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    index, refused = pickle.loads((saved[0] / ".metadata").read_bytes()), 0
    for seed in range(80):
        edited, path = copy.deepcopy(index), copy_of(saved, tmp_path)
        change = change_randomly(edited, random.Random(seed))
        try:
            put(path, ".metadata", pickle.dumps(edited))
        except RuntimeError:
            continue  # such a value cannot be written
        refused += bool(check_use(path, use, f"seed {seed}: {change}"))
    assert refused > 10


@pytest.mark.parametrize("use", USES)
def test_edited_bytes_of_the_list_of_tensors_change_no_value_silently(
    use: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    for seed in range(50):
        draw, path = random.Random(seed), copy_of(saved, tmp_path)
        content = bytearray((path / ".metadata").read_bytes())
        for _ in range(draw.choice((1, 1, 8))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        put(path, ".metadata", bytes(content))
        check_use(path, use, f"seed {seed}")


@pytest.mark.parametrize("use", USES)
def test_an_edited_header_changes_no_value_silently(
    use: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    fields, refused = json.loads((saved[0] / HEADER).read_text()), 0
    for seed in range(40):
        edited, path = copy.deepcopy(fields), copy_of(saved, tmp_path)
        change = change_randomly(edited, random.Random(seed))
        try:
            put_header(path, edited)
        except (TypeError, ValueError):
            continue  # not valid JSON
        refused += bool(check_use(path, use, f"seed {seed}: {change}"))
    assert refused > 10


def test_edited_metadata_is_refused_or_leaves_the_weights_unchanged(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    for seed in range(50):
        edited, path = copy.deepcopy(metadata_at(1)), copy_of(saved, tmp_path)
        change = change_randomly(edited, random.Random(seed))
        put(path, "meta.pt", to_bytes(edited))
        refusal = None
        try:
            consolidate(path, tmp_path / "plain.ckpt")
        except OUR_ERRORS as error:
            refusal = str(error)
        if refusal is not None:
            assert str(path) in refusal, change
            continue
        # No check can find an edit of learning rates and the like, because any value is valid.
        state = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
        for name in ("embedding", "up", "down", "bias"):
            expected = tensors_at(1)[f"state_dict.{name}"]
            # Nor can a check find an edited number of padded rows of one process: loading a wrong
            # number fails there.
            assert torch.equal(state[name][: len(expected)], expected), change
            assert not state[name][len(expected) :].any(), change


def exchange(index: Any, first: str, second: str) -> None:
    keys = {key.fqn: key for key in index.storage_data}
    places = index.storage_data
    places[keys[first]], places[keys[second]] = places[keys[second]], places[keys[first]]


def shift(index: Any, start: int, length: int) -> None:
    place = next(candidate for candidate in index.storage_data.values() if candidate.offset)
    place.offset, place.length = place.offset + start, place.length + length


def with_chunk(index: Any, **values: Any) -> None:
    entry = index.state_dict_metadata["state_dict.up"]
    for name, value in values.items():
        object.__setattr__(entry.chunks[0], name, torch.Size(value))


def repeat_chunk(index: Any) -> None:
    entry = index.state_dict_metadata["state_dict.up"]
    entry.chunks.append(entry.chunks[0])


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "places exchanged": (lambda index: exchange(index, "state_dict.up", "state_dict.down"), "is listed at byte"),
    "type": (
        lambda index: setattr(index.state_dict_metadata["state_dict.up"].properties, "dtype", torch.int32),
        r"torch\.float32, but the list of tensors says \(4, 4\) and torch\.int32",
    ),
    "shape": (
        lambda index: (setattr(index.state_dict_metadata["state_dict.up"], "size", torch.Size((2, 4))),
                       with_chunk(index, sizes=(2, 4))),
        r"has the shape \(4, 4\)",
    ),
    "hole": (lambda index: with_chunk(index, sizes=(2, 4)), "each of its 16 elements once"),
    "outside": (lambda index: with_chunk(index, offsets=(1, 0)), "outside of"),
    "overlap": (repeat_chunk, "each of its 16 elements once"),
    "start": (lambda index: shift(index, 1, -1), "is listed at byte"),
    "length": (lambda index: shift(index, 0, -1), "is listed at byte|but its tensors have"),
    "dropped": (lambda index: index.storage_data.pop(MetadataIndex("state_dict.up", torch.Size((0, 0)))), "pieces and"),
    "added": (
        lambda index: index.storage_data.update({MetadataIndex("x"): _StorageInfo("__0_0.distcp", 0, 1)}),
        "pieces and places",
    ),
    "another rank": (
        lambda index: index.state_dict_metadata.pop("rank_state.0") and index.storage_data.pop(
            MetadataIndex("rank_state.0")), "but its tensors have|should be at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_the_list_of_tensors_are_refused_with_their_reason(
    edit: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    path, (change, message) = copy_of(saved, tmp_path), EDITS[edit]
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    put(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CorruptDataError, match=message):
        read_full(path)


def test_an_undamaged_checkpoint_passes_all_checks(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    path = copy_of(saved, tmp_path)
    assert [check_use(path, use, use) for use in USES] == ["", ""]
    put(path, ".metadata", pickle.dumps(pickle.loads((path / ".metadata").read_bytes())))
    assert [check_use(path, use, use) for use in USES] == ["", ""]
    assert Header.read(LocalFolder(path)).global_step == 1
