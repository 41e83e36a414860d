"""A rank that loads its shard of a large file never holds much more memory than the shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.families import family_of
from lightning_megatron.swap.weights.copying import _NUM_CONCURRENT, PIECE_BYTES

CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
}
CONFIG |= {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
#: Almost all parameters are experts.
MIXTRAL = {
    **CONFIG,
    "model_type": "mixtral",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_local_experts": 16,
}
MIXTRAL |= {"num_hidden_layers": 2, "num_attention_heads": 8}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from lightning_megatron.families import family_of
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder
from tests.swap.parts import expert_mesh_of, mesh_of, part_on_meta

def memory(kind):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024

torch.set_default_dtype(torch.bfloat16)
folder = SafetensorsFolder(sys.argv[1])
family = family_of(folder.config["model_type"])
has_experts = "num_local_experts" in folder.config
model = part_on_meta(family.config(folder.config), expert_mesh_of(8, 2, 3, 1) if has_experts else mesh_of(8, 1, 3))
shard = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
torch.ones(10).sum()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
load_from(model, folder, family)
assert all(not parameter.is_meta for parameter in model.parameters())
print(json.dumps({"growth": memory("VmHWM") - before, "shard": shard}))
"""


def shapes_of(config: dict[str, Any], is_packed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a folder's tensors; experts are separate, or packed in two tensors."""
    family = family_of(config["model_type"])
    for tensor in family.tensors(family.config(config)):
        for name, shape in tensor.source_shapes.items():
            if not is_packed or ".block_sparse_moe." not in name:
                yield name, shape
    size, inner = config["hidden_size"], config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]) if is_packed else ():
        name, count = f"model.layers.{layer}.mlp", config["num_local_experts"]
        yield f"{name}.gate.weight", (count, size)
        yield f"{name}.experts.gate_up_proj", (count, 2 * inner, size)
        yield f"{name}.experts.down_proj", (count, size, inner)


def sparse_folder(folder: Path, config: dict[str, Any], is_packed: bool = False) -> tuple[int, int]:
    """Write a folder of zeros that takes no disk space; return the size of all tensors and of the
    largest tensor (bytes).
    """
    entries, size, largest = {}, 0, 0
    for name, shape in shapes_of(config, is_packed):
        num_bytes = 2 * prod(shape)
        entries[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [size, size + num_bytes],
        }
        size, largest = size + num_bytes, max(largest, num_bytes)
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    (folder / "config.json").write_text(json.dumps(config))
    return size, largest


HAS_PEAK = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the kernel does not report the peak memory of a process",
)


@HAS_PEAK
def test_memory_of_loading_stays_below_the_shard_and_one_tensor(tmp_path: Path) -> None:
    size, largest = sparse_folder(tmp_path, CONFIG)
    assert size > 4e9
    memory = memory_of(tmp_path)
    assert size / 9 < memory["shard"] < size / 7
    assert memory["shard"] * 0.9 < memory["growth"] < memory["shard"] + largest, memory


@HAS_PEAK
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_rank_that_loads_experts_holds_little_more_than_its_shard(
    is_packed: bool, tmp_path: Path
) -> None:
    size, _ = sparse_folder(tmp_path, MIXTRAL, is_packed)
    assert size > 2.8e9
    memory = memory_of(tmp_path)
    assert memory["shard"] < size / 7
    assert (
        memory["shard"] * 0.9
        < memory["growth"]
        < memory["shard"] + 2 * _NUM_CONCURRENT * PIECE_BYTES
    ), memory


def memory_of(folder: Path) -> dict[str, int]:
    """Load a rank's part of a folder; return its size, and the largest growth of the process
    (bytes).
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert process.returncode == 0, process.stderr
    memory: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return memory
