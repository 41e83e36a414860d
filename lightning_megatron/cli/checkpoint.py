"""The command ``checkpoint``: show, verify, consolidate or reshard a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveInt

from lightning_megatron.checkpoint import (
    load_metadata,
    read_header,
    saved_tensors,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import (
    MODEL,
    OPTIMIZERS,
    WrittenSize,
    consolidate,
    rewrite,
)
from lightning_megatron.checkpoint.values import read_single_file, verify_single_file
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]

_NO_OPTIMIZER = "no optimizer: saved with weights only"

EXAMPLES = """examples:
  lightning-megatron checkpoint show runs/last.ckpt
  lightning-megatron checkpoint verify runs/last.ckpt
  lightning-megatron checkpoint consolidate runs/last.ckpt plain.ckpt  one file, for ddp
  lightning-megatron checkpoint reshard runs/last.ckpt weights --weights_only --dtype bfloat16"""


def show(path: str, all: bool = False, unsafe: bool = False) -> None:
    """Print layout, step, tensors, optimizers and files.

    Args:
        path: A checkpoint.
        all: List the tensors of the optimizers one by one as well.
        unsafe: Unpickle objects of any type, which runs code that the file names.
    """
    lines = _describe_file(path, unsafe) if Path(path).is_file() else _describe(path, all, unsafe)
    print("\n".join(lines))


def verify(path: str) -> None:
    """Compare every file with its checksum; the exit status is 1 if a file is damaged.

    Args:
        path: A checkpoint.
    """
    if Path(path).is_file():
        sizes = [verify_single_file(path)]
    else:
        verify_checkpoint(path)
        sizes = [record.size for record in read_header(path).files.values()]
    print(f"{path}: {_plural(len(sizes), 'file')}, {_size(sum(sizes))}, as written")


def write_one_file(
    path: str,
    output: Path,
    weights_only: bool = False,
    dtype: DtypeName | None = None,
    overwrite: bool = False,
    unsafe: bool = False,
) -> None:
    """Write one plain file, as Trainer(strategy='auto') or 'ddp' and load_from_checkpoint read it.

    Args:
        path: A checkpoint.
        output: The file to write.
        weights_only: Leave out what only training needs.
        dtype: Dtype of the weights.
        overwrite: Replace OUT if it exists.
        unsafe: Unpickle objects of any type, which runs code that the file names.
    """
    _check_sharded(path)
    _check_new(output, overwrite)
    written = consolidate(path, output, weights_only, dtype_of(dtype), unsafe)
    print(_summary(output, written, weights_only))


def reshard(
    path: str,
    output: str,
    files: PositiveInt = 1,
    weights_only: bool = False,
    dtype: DtypeName | None = None,
    overwrite: bool = False,
    unsafe: bool = False,
) -> None:
    """Write a checkpoint again: other files, without what only training needs, or another dtype.

    Not needed to load it under another layout: every layout loads every checkpoint.

    Args:
        path: A checkpoint.
        output: The directory or URL to write.
        files: Number of tensor files.
        weights_only: Leave out what only training needs.
        dtype: Dtype of the weights, only with --weights_only.
        overwrite: Replace OUT if it exists.
        unsafe: Unpickle objects of any type, which runs code that the file names.
    """
    _check_sharded(path)
    if dtype is not None and not weights_only:
        raise UnsupportedError(
            f"--dtype {dtype} needs --weights_only, because continued training needs the "
            "weights in their own type. Add --weights_only, or leave --dtype out."
        )
    if "://" not in output:
        _check_new(Path(output), overwrite)
    written = rewrite(path, output, files, weights_only, dtype_of(dtype), unsafe)
    print(_summary(output, written, weights_only))


COMMAND = {"show": show, "verify": verify, "consolidate": write_one_file, "reshard": reshard}


def dtype_of(name: DtypeName | None) -> torch.dtype | None:
    """Return the dtype of a name; None for none."""
    return None if name is None else getattr(torch, name)


def _describe(path: str, all: bool, unsafe: bool) -> list[str]:
    header = read_header(path)
    tensors = saved_tensors(path)
    layout = header.layout
    sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.saved_at))
    chunks = f", vpp {layout.vpp}" if layout.vpp > 1 else ""
    files = [(name, _size(record.size), record.checksum) for name, record in header.files.items()]
    return [
        path,
        f"step {header.global_step:,}, epoch {header.epoch}, saved {saved_at} with torch "
        f"{header.torch}",
        f"saved by {_plural(layout.world_size, 'rank')} = {sizes}{chunks}",
        *_listed(_below(MODEL, tensors)),
        *_describe_optimizers(path, tensors, all, unsafe),
        *_table(("file", "size", "crc32"), files),
    ]


def _below(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }


def _describe_optimizers(
    path: str, tensors: Mapping[str, Any], all: bool, unsafe: bool
) -> list[str]:
    try:
        optimizers = load_metadata(path, weights_only=not unsafe).get(OPTIMIZERS)
    except UnsupportedError as error:
        return ["", f"optimizers: not read. {error}"]
    if not optimizers:
        return ["", _NO_OPTIMIZER]
    lines: list[str] = []
    for number, optimizer in enumerate(optimizers):
        entries = _below(f"optimizer.{number}.state.", tensors)
        groups = [
            (str(index), str(len(group["parameters"])), _hyperparameters(group["hyperparameters"]))
            for index, group in enumerate(optimizer["groups"])
        ]
        lines += _table((f"optimizer {number}: group", "parameters", "hyperparameters"), groups)
        by_key: dict[str, list[Any]] = {}
        for name, tensor in entries.items():
            by_key.setdefault(name if all else name.rpartition(".")[2], []).append(tensor)
        rows = []
        for key, saved in by_key.items():
            dtypes = " ".join(sorted({_dtype(tensor.dtype) for tensor in saved}))
            rows.append((key, str(len(saved)), dtypes, _size(sum(map(_bytes, saved)))))
        lines += [*_table(("state", "tensors", "dtype", "size"), rows), _total(entries.values())]
    return lines


def _describe_file(path: str, unsafe: bool) -> list[str]:
    content = read_single_file(path, weights_only=not unsafe)
    values = content["state_dict"].items()
    tensors = {name: value for name, value in values if isinstance(value, torch.Tensor)}
    states = [_plural(len(one["state"]), "state") for one in content.get("optimizer_states", ())]
    return [
        f"{path}: a file of another strategy, {_size(Path(path).stat().st_size)}",
        f"step {content.get('global_step', 0):,}, epoch {content.get('epoch', 0)}, saved with "
        f"Lightning {content.get('pytorch-lightning_version', '?')}",
        *_listed(tensors),
        "",
        f"{_plural(len(states), 'optimizer')}: {', '.join(states)}" if states else _NO_OPTIMIZER,
    ]


def _check_sharded(path: str) -> None:
    if Path(path).is_file():
        raise CheckpointMismatchError(
            f"only a directory that this library saved can be converted: {path} is already a plain "
            "file, or not a checkpoint. Load a plain file directly, which every layout can."
        )


def _check_new(output: Path, overwrite: bool) -> None:
    if not output.absolute().parent.is_dir():
        raise CheckpointMismatchError(
            f"the folder of the result must exist: {output.parent}. Create it first."
        )
    if output.exists() and not overwrite:
        raise CheckpointMismatchError(
            f"the result must not exist yet: {output}. Use another name, or --overwrite to replace "
            "it."
        )


def _listed(weights: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, tensor in weights.items():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        rows.append((name, shape, _dtype(tensor.dtype), _size(_bytes(tensor))))
    return [*_table(("model", "shape", "dtype", "size"), rows), _total(weights.values())]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, after a blank one."""
    cells = [tuple(titles), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(line.rstrip())
    return ["", lines[0], "-" * min(120, sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _summary(output: object, written: WrittenSize, weights_only: bool) -> str:
    what = "weights only" if weights_only else "to continue from"
    return f"{output}: {_plural(written.num_tensors, 'tensor')}, {_size(written.num_bytes)}, {what}"


def _total(tensors: Iterable[Any]) -> str:
    sizes = [_bytes(tensor) for tensor in tensors]
    return f"{_plural(len(sizes), 'tensor')}, {_size(sum(sizes))}"


def _hyperparameters(values: Mapping[str, Any]) -> str:
    shown = ("lr", "betas", "momentum", "eps", "weight_decay")
    return ", ".join(f"{name} {values[name]}" for name in shown if name in values)


def _bytes(tensor: Any) -> int:
    return prod(tensor.shape) * int(tensor.dtype.itemsize)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    power = min(max(len(str(num_bytes)) - 1, 0) // 3, 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {unit}"


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
