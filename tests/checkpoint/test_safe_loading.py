"""Loading runs no code of a checkpoint, even of a checkpoint that is made to deceive."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo

from lightning_megatron import CausalLM
from lightning_megatron.checkpoint import (
    load_metadata,
    load_rank_state,
    read_full,
    read_header,
    save_checkpoint,
    saved_tensors,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.storage import FileRecord, LocalFolder
from lightning_megatron.checkpoint.tensor_index import _layout_named, read_index
from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.cli import MegatronCLI
from tests.checkpoint.pieces import entries
from tests.recipes.test_wrong_settings import RECIPE, SIZES

MESH = ParallelMesh.single()


class Trap:
    """Create a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def put(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and update its checksum."""
    (path / name).write_bytes(content)
    header = read_header(path)
    record = FileRecord(len(content), f"{zlib.crc32(content):08x}")
    replace(header, files={**header.files, name: record}).write(LocalFolder(path))
    verify_checkpoint(path)


def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "c", entries(size=8), {"step": 1}, {"seen": 2}, MESH)
    return tmp_path / "c"


def zipped(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_values_and_rank_state_that_run_code_are_refused(tmp_path, sprung):
    save_checkpoint(tmp_path / "rank", entries(), {}, {"seen": Trap(sprung)}, MESH)
    with pytest.raises(UnsupportedError, match=r"rank_state\.0 of .*mkdir"):
        load_rank_state(tmp_path / "rank", MESH)
    path = saved(tmp_path)
    for protocol in (0, 2, 4):
        put(path, "meta.pt", pickle.dumps({"step": Trap(sprung)}, protocol))
        with pytest.raises(UnsupportedError, match=r"c/meta\.pt holds"):
            load_metadata(path)
    put(path, "meta.pt", zipped({"step": Trap(sprung)}))
    with pytest.raises(UnsupportedError, match=r"c/meta\.pt holds .*mkdir"):
        load_metadata(path)
    assert not sprung.exists()
    load_metadata(path, weights_only=False)  # the trap works where the user asks for it
    assert sprung.exists()


def test_a_list_of_tensors_that_runs_code_is_refused(tmp_path, sprung):
    path = saved(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Trap(sprung)
    for content in (pickle.dumps(Trap(sprung)), pickle.dumps(index)):
        put(path, ".metadata", content)
        for load in (saved_tensors, read_full, lambda path: load_rank_state(path, MESH)):
            with pytest.raises(CorruptDataError, match=r"c/\.metadata is not: it names posix\.mk"):
                load(path)
    assert not sprung.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert sprung.exists()


CALLS: tuple[bytes, ...] = (
    b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n(S'x'\ntR.", b"ctorch.serialization\nload\n(S'x'\ntR.",
    b"ctorch\nhub.load\n(S'x'\ntR.", b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.",
    b"ctorch.distributed.checkpoint.metadata\ndataclass\n.", b"(lp0\n.", b"",
    b"ctorch.distributed.checkpoint.filesystem\npickle.loads\n.", b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.mkdir\x93.",
)  # fmt: skip


def test_a_list_of_tensors_may_name_only_its_own_classes():
    for call in CALLS:
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            read_index(io.BytesIO(call))


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
SHARED = (
    b"ctorch\nSize\n",
    METADATA + b"ChunkStorageMetadata\n",
    b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
    METADATA + b"_MEM_FORMAT_ENCODING\n",
    METADATA + b"_MEM_FORMAT_ENCODING\n(I0\ntR",
    b"ctorch.serialization\n_get_layout\n(S'torch.strided'\ntR",
    b"ctorch\nfloat32\n",
)


def test_a_list_of_tensors_changes_no_object_that_others_share():
    for shared, state in product(SHARED, (b"N(S'note'\nI7\nd\x86", b"(S'note'\nI7\nd")):
        with pytest.raises((pickle.UnpicklingError, AttributeError, TypeError)):
            read_index(io.BytesIO(shared + state + b"b."))
    owners = [getattr(dcp_metadata, name) for name in dcp_metadata.__all__]
    owners += [dcp_metadata._MEM_FORMAT_ENCODING(0), dcp_metadata._MEM_FORMAT_ENCODING]
    owners += [_StorageInfo, torch.Size, torch.float32, torch.strided, _layout_named]
    assert not any(hasattr(owner, "note") for owner in owners)


def test_lists_of_tensors_are_read_by_every_torch(tmp_path, monkeypatch):
    index = read_index(io.BytesIO((saved(tmp_path) / ".metadata").read_bytes()))
    kind = dcp_metadata.TensorProperties
    five = kind().__getstate__()[:5]
    for later in ((), ((8, 1),)):  # torch 2.11, torch 2.15
        monkeypatch.setattr(kind, "__getstate__", lambda self, later=later: (*five, *later))
        assert read_index(io.BytesIO(pickle.dumps(index))) == index


def test_tensors_that_run_code_are_refused(tmp_path, sprung):
    path = saved(tmp_path)
    index = read_index(io.BytesIO((path / ".metadata").read_bytes()))
    first, *later_places = index.storage_data.values()
    content = (path / first.relative_path).read_bytes()[first.length :]
    trap = zipped([Trap(sprung), torch.ones(8)])
    for place in later_places:
        place.offset += len(trap) - first.length
    first.length = len(trap)
    put(path, first.relative_path, trap + content)
    put(path, ".metadata", pickle.dumps(index))
    with pytest.raises(CorruptDataError, match=r"__0_0\.distcp is not: no tensor can be read"):
        read_full(path)
    assert not sprung.exists()


def test_a_checkpoint_cannot_name_files_outside_of_its_folder(tmp_path):
    for outside in ("../secret", "/etc/hostname", "c/../../secret"):
        path = saved(tmp_path)
        (tmp_path / "secret").write_bytes(zipped(torch.ones(8)))
        index = read_index(io.BytesIO((path / ".metadata").read_bytes()))
        for place in index.storage_data.values():
            place.relative_path = outside
        put(path, ".metadata", pickle.dumps(index))
        with pytest.raises(CorruptDataError, match="must be in a file that"):
            read_full(path)
        header = read_header(path)
        replace(header, folder=outside).write(LocalFolder(path))
        with pytest.raises(CorruptDataError, match="folder that a save created"):
            load_metadata(path)
        files = {**header.files, outside: header.files["meta.pt"]}
        replace(header, files=files).write(LocalFolder(path))
        with pytest.raises(CorruptDataError, match="that is the name of a file"):
            read_full(path)


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[], object]) -> bool:
    """Return whether loading imported the module that a file in the folder defines."""
    (folder / "named_in_a_file.py").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "named_in_a_file", raising=False)
    load()
    return "named_in_a_file" in sys.modules


def file_with(folder: Path, settings: dict[str, Any]) -> str:
    """Write a plain checkpoint of a small model with these hyperparameters."""
    module = CausalLM(SIZES)
    module.configure_model()
    content = {"state_dict": module.state_dict(), "hyper_parameters": {"config": SIZES} | settings}
    torch.save(content | {"pytorch-lightning_version": "2.6.0"}, folder / "one.ckpt")
    return str(folder / "one.ckpt")


NAMED = {"class_path": "named_in_a_file.Schedule", "init_args": {}}
PARSED = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}


def test_hyperparameters_in_a_file_import_nothing(tmp_path, monkeypatch):
    for settings in (
        {"weight_decay_schedule": NAMED},
        {"lr_schedule": NAMED, **PARSED},
        {"lr_schedule": "named_in_a_file.Schedule", **PARSED},
        {"betas": "{class_path: named_in_a_file.Schedule}", **PARSED},
    ):
        load = partial(CausalLM.load_from_checkpoint, file_with(tmp_path, settings))
        with pytest.raises(ParallelPlanError, match=f"^{next(iter(settings))} must be a"):
            imported(tmp_path, monkeypatch, load)
        assert "named_in_a_file" not in sys.modules


class ParsedCLI(MegatronCLI):
    """End with the settings of the model once all are parsed."""

    def before_instantiate_classes(self) -> None:
        sys.exit(str(self.config.fit.model.init_args.as_dict()))


def test_the_command_line_takes_no_setting_from_a_file(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    file = file_with(tmp_path, {"learning_rate": 7.0, "lr_schedule": NAMED})

    def load() -> None:
        arguments = ["fit", "-c", str(recipe), "--model.learning_rate=3", "--ckpt_path", file]
        monkeypatch.setattr(sys, "argv", ["lightning-megatron", *arguments])
        with pytest.raises(SystemExit, match=r"'learning_rate': 3\.0"):
            ParsedCLI()

    assert not imported(tmp_path, monkeypatch, load)
