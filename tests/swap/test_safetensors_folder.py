"""Tensors read from safetensors files equal those of the format's own library, and other files are
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.swap.weights.safetensors_folder import DTYPES, SafetensorsFolder

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = {
        kind: torch.randint(0, 2 if kind == "BOOL" else 100, (7, 5, 3), generator=generator).to(
            dtype
        )
        for kind, dtype in DTYPES.items()
    }
    return {
        **plain,
        "vector": torch.randn(9),
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


def save_folder(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    safetensors_torch.save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def have_same_bits(actual: Tensor, expected: Tensor) -> bool:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return torch.equal(
        actual.contiguous().view(-1).view(torch.uint8),
        expected.contiguous().view(-1).view(torch.uint8),
    )


def test_read_tensors_equal_the_saved_tensors(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = SafetensorsFolder(save_folder(tmp_path, tensors))
    assert set(folder.names()) == set(tensors)
    for name, expected in tensors.items():
        assert folder.shape(name) == tuple(expected.shape)
        assert folder.dtype_of(name) == expected.dtype
        assert have_same_bits(folder.read(name), expected)


def test_parts_of_tensors_equal_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = SafetensorsFolder(save_folder(tmp_path, tensors))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as theirs:
        for kind in ("F32", "BF16", "I64", "BOOL"):
            for slices in (
                (slice(2, 5), slice(0, 5), slice(0, 3)),
                (slice(6, 7), slice(1, 4), slice(2, 3)),
            ):
                assert have_same_bits(folder.read(kind, slices), theirs.get_slice(kind)[slices])
        assert have_same_bits(
            folder.read("F32", (slice(3, 3), slice(0, 5), slice(0, 3))), tensors["F32"][3:3]
        )


def test_writing_into_a_read_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    folder = SafetensorsFolder(save_folder(tmp_path, random_tensors()))
    before = (tmp_path / "model.safetensors").read_bytes()
    folder.read("F32").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def save_indexed_files(folder: Path) -> dict[str, Tensor]:
    tensors = random_tensors()
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[:6],
        "model-00002-of-00002.safetensors": names[6:],
    }
    for file, part in files.items():
        save_folder(folder, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tensors


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    tensors = save_indexed_files(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.names()) == set(tensors)
    assert all(have_same_bits(folder.read(name), expected) for name, expected in tensors.items())
    assert SafetensorsFolder.exists_in(tmp_path)
    assert not SafetensorsFolder.exists_in(tmp_path / "elsewhere")


def test_the_dtype_of_a_folder_is_the_dtype_of_most_elements(tmp_path: Path) -> None:
    assert (
        SafetensorsFolder(
            save_folder(tmp_path, {"a": torch.ones(9).bfloat16(), "b": torch.ones(2)})
        ).dtype
        == torch.bfloat16
    )


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    save_indexed_files(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="has no 'absent'. It has 'BF16', 'BOOL'"):
        SafetensorsFolder(tmp_path).read("absent")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["absent"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointMismatchError, match="'absent' of .* not in their files"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointMismatchError, match="lacks 'model-00002-of-00002.safetensors' of 2"
    ):
        SafetensorsFolder(tmp_path)
    content["weight_map"]["absent"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointMismatchError, match=r"of its own folder: '\.\./elsewhere.safetensors'"
    ):
        SafetensorsFolder(tmp_path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(CorruptDataError, match="must map tensors to files"):
        SafetensorsFolder(tmp_path)


def test_a_folder_of_pickled_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="has only 'pytorch_model.bin'"):
        SafetensorsFolder(tmp_path)


def test_folders_without_weights_or_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="has neither"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="nothing is downloaded"):
        SafetensorsFolder("meta-llama/Llama-3.1-8B")
    save_folder(tmp_path, random_tensors())
    with pytest.raises(CheckpointMismatchError, match="must have a config.json"):
        _ = SafetensorsFolder(tmp_path).config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-10], "truncated or damaged"),
        (lambda content: content[:5], "begin with the length of its header"),
        (lambda content: content[:60], "begin with the length of its header"),
        (lambda content: b"", "begin with the length of its header"),
        (
            lambda content: b"version https://git-lfs.github.com/spec/v1\n",
            "begin with the length of its header",
        ),
        (lambda content: content.replace(b'"dtype"', b'"drype"'), "dtype, shape and data_offsets"),
        (
            lambda content: content.replace(b'"shape":[7,5,3]', b'"shape":[7,9,3]'),
            "truncated or damaged",
        ),
        (
            lambda content: content.replace(b'"shape":[7,5,3]', b'"shape":[7,5,x]'),
            "is not valid JSON",
        ),
        (lambda content: content.replace(b'"F32"', b'"F33"'), "has F33"),
    ],
)
def test_damaged_files_are_refused(change: object, message: str, tmp_path: Path) -> None:
    path = save_folder(tmp_path, random_tensors()) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises((CorruptDataError, UnsupportedError), match=message):
        SafetensorsFolder(tmp_path)
