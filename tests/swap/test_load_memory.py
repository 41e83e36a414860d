"""A rank that loads its shard of a large file never holds much more than the shard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.swap.families import family_of

CONFIG = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8}
CONFIG |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from lightning_megatron.swap.families import family_of
from lightning_megatron.swap.load import load_from
from lightning_megatron.swap.safetensors_folder import SafetensorsFolder
from tests.swap.parts import mesh_of, part_on_meta

def memory(kind):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024

torch.set_default_dtype(torch.bfloat16)
folder, family = SafetensorsFolder(sys.argv[1]), family_of("llama")
model = part_on_meta(family.config(folder.config), mesh_of(8, 1, 3))
shard = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
torch.ones(10).sum()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
load_from(model, folder, family)
assert all(not parameter.is_meta for parameter in model.parameters())
print(json.dumps({"growth": memory("VmHWM") - before, "shard": shard}))
"""


def sparse_folder(folder: Path, config: GPTConfig) -> tuple[int, int]:
    """Write a folder of zeros that takes no space; return the size of all tensors and of the largest (bytes)."""
    entries, size, largest = {}, 0, 0
    for tensor in family_of("llama").tensors(config):
        for name, shape in tensor.source_shapes.items():
            num_bytes = 2 * prod(shape)
            entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, size + num_bytes]}
            size, largest = size + num_bytes, max(largest, num_bytes)
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return size, largest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell a process's peak")
def test_memory_stays_below_the_shard_and_one_tensor(tmp_path: Path) -> None:
    size, largest = sparse_folder(tmp_path, family_of("llama").config(CONFIG))
    assert size > 4e9
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert size / 9 < found["shard"] < size / 7
    assert found["shard"] * 0.9 < found["growth"] < found["shard"] + largest, found
