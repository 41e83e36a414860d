"""Weights are exported one tensor at a time, into files of a requested size that the format's own
library reads.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_megatron.families import family_of
from lightning_megatron.swap.weights import safetensors_writer
from lightning_megatron.swap.weights.export import export_folder
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

safetensors_torch = pytest.importorskip("safetensors.torch")

CONFIG = {"vocab_size": 53, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}


def random_tensors() -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors, and check that nothing holds the previous tensor."""
    generator = torch.Generator().manual_seed(0)
    previous: weakref.ref[Tensor] | None = None
    for tensor in family_of("gpt2").tensors(family_of("gpt2").config(CONFIG)):
        assert previous is None or previous() is None, (
            f"the tensor before {tensor.target} is still in memory"
        )
        full = torch.randn(tensor.shape, generator=generator)
        previous = weakref.ref(full)
        yield tensor.target, full
        del full


def test_export_holds_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path)
    assert SafetensorsFolder.exists_in(tmp_path)


def test_files_keep_their_maximum_size_and_the_index_lists_all_tensors(tmp_path: Path) -> None:
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path, 16_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    stored = {
        name: (path.name, tensor)
        for path in files
        for name, tensor in safetensors_torch.load_file(path).items()
    }
    sizes = {
        path.name: sum(t.nbytes for file, t in stored.values() if file == path.name)
        for path in files
    }
    assert len(files) > 2
    assert max(sizes.values()) <= 16_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    folder = SafetensorsFolder(tmp_path)
    assert all(torch.equal(folder.read(name), tensor) for name, (_, tensor) in stored.items())


def test_a_tensor_larger_than_the_maximum_file_size_gets_its_own_file(tmp_path: Path) -> None:
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path, 1)
    names = set(SafetensorsFolder(tmp_path).names())
    assert len(list(tmp_path.glob("*.safetensors"))) == len(names)


def test_a_full_header_starts_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path / "one")
    monkeypatch.setattr(safetensors_writer, "_MAX_HEADER_BYTES", 500)
    monkeypatch.setattr(safetensors_writer, "_BLOCK", 300)
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path / "several")
    single, several = SafetensorsFolder(tmp_path / "one"), SafetensorsFolder(tmp_path / "several")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 5
    assert set(single.names()) == set(several.names())
    assert all(torch.equal(single.read(name), several.read(name)) for name in single.names())


def test_weights_are_converted_to_the_requested_dtype(tmp_path: Path) -> None:
    export_folder(random_tensors(), family_of("gpt2"), CONFIG, tmp_path, dtype=torch.float16)
    assert SafetensorsFolder(tmp_path).dtype == torch.float16
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {
        **CONFIG,
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float16",
    }


def test_exported_configuration_does_not_name_code_outside_of_the_folder(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "auto_map": {"AutoConfig": "code.Config"},
        "_name_or_path": "here",
        "torch_dtype": "float64",
    }
    export_folder(random_tensors(), family_of("gpt2"), config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).keys() == CONFIG.keys() | {
        "model_type",
        "architectures",
        "dtype",
    }
