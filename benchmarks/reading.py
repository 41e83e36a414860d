"""Benchmark of one rank's reading of a Hugging Face folder: time, and additional host memory.

    python -m benchmarks.reading --create FOLDER
    python -m benchmarks.reading --folder FOLDER --tp 8 --cold --accelerator cuda

``--create`` writes 4 GB of random Llama weights in bfloat16, in four files. The time is the median
of ``--runs``. ``--cold`` drops the files from the page cache before each run. The memory is the
peak of the process minus its memory before the run and minus the rank's part if that is in host
memory (Linux only)."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron.families import family_of
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap.weights.export import export_folder
from lightning_megatron.swap.weights.load import load_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
FAMILY = family_of("llama")
MIB = 2**20


def create(folder: Path, sizes: dict[str, int]) -> None:
    """Write random weights in four files."""
    config = FAMILY.config(sizes)
    dtype = torch.bfloat16

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for tensor in FAMILY.tensors(config):
            yield tensor.target, torch.empty(tensor.shape, dtype=dtype).uniform_(-1, 1)

    num_bytes = (
        sum(torch.Size(tensor.shape).numel() for tensor in FAMILY.tensors(config)) * dtype.itemsize
    )
    export_folder(tensors(), FAMILY, sizes, folder, max_file_bytes=num_bytes * 7 // 25)
    files = sorted(folder.glob("*.safetensors"))
    print(
        f"{folder}: {sum(file.stat().st_size for file in files) / 1e9:.2f} GB in {len(files)} files"
    )


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def host_memory(key: str) -> int:
    """Return a field of /proc/self/status (bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def part_on_meta(folder: SafetensorsFolder, tp: int, device: torch.device) -> GPT:
    """Return the model of one tensor-parallel rank on the meta device."""
    axis = MeshAxis("tp", tuple(range(tp)), tp - 1)
    mesh = replace(ParallelMesh.single(device), layout=ParallelLayout(tp, tp=tp), tp=axis)
    with torch.device("meta"):
        return GPT(FAMILY.config(folder.config), mesh)


def read(path: Path, tp: int, device: torch.device) -> tuple[float, int, int]:
    """Read once; return time (s), size of the part (bytes) and additional host memory (bytes)."""
    folder = SafetensorsFolder(path)
    model = part_on_meta(folder, tp, device)
    # Writing 5 resets the peak `VmHWM` to the current memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = host_memory("VmRSS")
    begin = time.perf_counter()
    load_from(model, folder, FAMILY)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    part = sum(parameter.nbytes for parameter in model.parameters())
    return seconds, part, host_memory("VmHWM") - before - (part if device.type == "cpu" else 0)


def main() -> None:
    """Create the folder, or read it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--create", metavar="FOLDER", help="write random weights")
    parser.add_argument("--small", action="store_true", help="only a few megabytes")
    parser.add_argument("--folder", help="folder to read")
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size; the part of one rank is read"
    )
    parser.add_argument(
        "--cold", action="store_true", help="read from the disk instead of the page cache"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--accelerator", default="cpu", choices=["cuda", "cpu"])
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    if args.create:
        create(Path(args.create), LLAMA | SMALL if args.small else LLAMA)
        return
    runs = []
    for _ in range(args.runs):
        if args.cold:
            forget(Path(args.folder))
        runs.append(read(Path(args.folder), args.tp, torch.device(args.accelerator)))
    seconds = statistics.median(run[0] for run in runs)
    part, additional = runs[0][1] / MIB, max(run[2] for run in runs) / MIB
    case = f"tp{args.tp}, {args.accelerator}, {'cold' if args.cold else 'warm'}"
    print(f"| {case} | {seconds:.2f} s | {part:.0f} MiB | {additional:.0f} MiB beside it |")


if __name__ == "__main__":
    main()
