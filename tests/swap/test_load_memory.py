"""A rank that loads its shard of a large file never holds much more memory than the shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.families import family_of
from lightning_megatron.swap.weights.load import _NUM_CONCURRENT, PIECE_BYTES
from tests.swap.families import transformers

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096}
LLAMA |= {"intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "max_position_embeddings": 4096}
#: Almost all parameters are experts.
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 1000, "hidden_size": 1024}
MIXTRAL |= {"num_local_experts": 16, "num_hidden_layers": 2, "num_attention_heads": 8}

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


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's tensors; experts are packed in two tensors of a layer."""
    family = family_of(config["model_type"])
    complete = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config).to_dict()
    tensors = family.tensors(family.config(complete))
    shapes = {name: shape for tensor in tensors for name, shape in tensor.source_shapes.items()}
    shapes = {name: shape for name, shape in shapes.items() if ".block_sparse_moe." not in name}
    size, inner, count = (
        config.get(key, 0) for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    for layer in range(config["num_hidden_layers"]) if count else ():
        name = f"model.layers.{layer}.mlp"
        shapes[f"{name}.gate.weight"] = (count, size)
        shapes[f"{name}.experts.gate_up_proj"] = (count, 2 * inner, size)
        shapes[f"{name}.experts.down_proj"] = (count, size, inner)
    return shapes


def sparse_folder(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Write a folder of zeros that takes no disk space; return the size of all tensors and of the
    largest tensor (bytes).
    """
    entries, size, sizes = {}, 0, []
    for name, shape in shapes_of(config).items():
        sizes.append(2 * prod(shape))
        offsets = [size, size + sizes[-1]]
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        size += sizes[-1]
    header, path = json.dumps(entries).encode(), folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    (folder / "config.json").write_text(json.dumps(config))
    return size, max(sizes)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel reports no peak memory"
)
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL])
def test_memory_of_loading_stays_near_the_shard(config, tmp_path):
    size, largest = sparse_folder(tmp_path, config)
    assert size > 2e9
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    memory = json.loads(process.stdout.splitlines()[-1])
    shard, pieces = memory["shard"], 2 * _NUM_CONCURRENT * PIECE_BYTES
    allowed = largest if config is LLAMA else pieces
    assert shard < size / 7
    assert shard * 0.9 < memory["growth"] < shard + allowed, memory
