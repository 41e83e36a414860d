"""The subcommand ``checkpoint``: show, verify, consolidate or reshard a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint import (
    load_metadata,
    read_header,
    saved_tensors,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.consolidate import MODEL, OPTIMIZERS, WrittenSize, consolidate
from lightning_megatron.checkpoint.rewrite import rewrite
from lightning_megatron.checkpoint.single_file import read_single_file, verify_single_file
from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
#: Exit status for a damaged checkpoint; unusable arguments exit with 2.
DAMAGED = 1

EXAMPLE = """examples:
  lightning-megatron checkpoint show runs/last.ckpt
  lightning-megatron checkpoint verify runs/last.ckpt
  lightning-megatron checkpoint consolidate runs/last.ckpt plain.ckpt  one file, for ddp
  lightning-megatron checkpoint reshard runs/last.ckpt weights --weights-only --dtype bfloat16"""


def main(args: Sequence[str]) -> None:
    """Run the subcommand with its arguments; exit with status 1 if a checkpoint is damaged."""
    options = checkpoint_parser().parse_args(args)
    try:
        options.run(options)
    except CorruptDataError as error:
        print(f"lightning-megatron checkpoint {options.name}: damaged: {error}", file=sys.stderr)
        sys.exit(DAMAGED)
    except UnsupportedError as error:
        if "weights_only=False" not in str(error):
            raise
        raise UnsupportedError(
            f"{error} For this command, the option is --unsafe instead of weights_only=False."
        ) from error


def checkpoint_parser() -> argparse.ArgumentParser:
    """Build the parser of ``show``, ``verify``, ``consolidate`` and ``reshard``."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron checkpoint",
        description="Show and verify checkpoints, and write them in another form.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="show|verify|consolidate|reshard")
    show = _add(commands, "show", run_show, "print layout, step, tensors, optimizers and files")
    show.add_argument(
        "--all", action="store_true", help="list the tensors of the optimizers one by one as well"
    )
    _add(
        commands,
        "verify",
        run_verify,
        "compare every file with its checksum; the exit status is 1 if a file is damaged",
    )
    one_file = _add(
        commands,
        "consolidate",
        run_consolidate,
        (
            "write one plain file that Trainer(strategy='auto') or 'ddp' continues from, and "
            "load_from_checkpoint reads"
        ),
    )
    one_file.add_argument("out", metavar="OUT.ckpt", type=Path, help="the file to write")
    reshard = _add(
        commands,
        "reshard",
        run_reshard,
        "write the checkpoint again, with another number of files, without what only training "
        "needs, or in another dtype. Not needed to load it under another layout: every layout "
        "loads every checkpoint",
    )
    reshard.add_argument("out", metavar="OUT", help="the directory or URL to write")
    reshard.add_argument(
        "--files",
        type=at_least_one,
        default=1,
        metavar="N",
        help="number of tensor files (default: 1)",
    )
    for command in (one_file, reshard):
        _add_result_options(command)
    for command in (show, one_file, reshard):
        command.add_argument(
            "--unsafe",
            action="store_true",
            help="unpickle objects of any type, which runs code that the file names",
        )
    return parser


def _add_result_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--weights-only", action="store_true", help="leave out what only training needs"
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights; reshard accepts it only with --weights-only",
    )
    command.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def run_show(options: argparse.Namespace) -> None:
    """Print the layout, tensors, optimizers and files of a checkpoint."""
    lines = _describe_file(options) if Path(options.path).is_file() else _describe(options)
    print("\n".join(lines))


def run_verify(options: argparse.Namespace) -> None:
    """Read all files of a checkpoint and compare them with their checksums."""
    if Path(options.path).is_file():
        num_files = 1
        size = verify_single_file(options.path)
    else:
        verify_checkpoint(options.path)
        files = read_header(options.path).files
        num_files = len(files)
        size = sum(record.size for record in files.values())
    print(f"{options.path}: {_plural(num_files, 'file')}, {_size(size)}, as written")


def run_consolidate(options: argparse.Namespace) -> None:
    """Write a sharded checkpoint as one plain file."""
    _check_sharded(options.path)
    _check_new(options.out, options.overwrite)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    written = consolidate(options.path, options.out, options.weights_only, dtype, options.unsafe)
    print(_summary(options.out, written, options.weights_only))


def run_reshard(options: argparse.Namespace) -> None:
    """Write a checkpoint with another number of files, another dtype, or weights only."""
    _check_sharded(options.path)
    if options.dtype is not None and not options.weights_only:
        raise UnsupportedError(
            f"--dtype {options.dtype} needs --weights-only, because continued training needs the "
            "weights in their own type. Add --weights-only, or leave --dtype out."
        )
    if "://" not in options.out:
        _check_new(Path(options.out), options.overwrite)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    written = rewrite(
        options.path, options.out, options.files, options.weights_only, dtype, options.unsafe
    )
    print(_summary(options.out, written, options.weights_only))


def _describe(options: argparse.Namespace) -> list[str]:
    header = read_header(options.path)
    tensors = saved_tensors(options.path)
    layout = header.layout
    sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.saved_at))
    lines = [
        f"{options.path}",
        (
            f"step {header.global_step:,}, epoch {header.epoch}, saved {saved_at} with torch "
            f"{header.torch}"
        ),
        f"saved by {_plural(layout.world_size, 'rank')} = {sizes}"
        + (f", vpp {layout.vpp}" if layout.vpp > 1 else ""),
    ]
    weights = {
        name.removeprefix(MODEL): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL)
    }
    rows = [
        (name, _shape(tensor.shape), _dtype(tensor.dtype), _size(_bytes(tensor)))
        for name, tensor in weights.items()
    ]
    lines += [
        "",
        *_table(("model", "shape", "dtype", "size"), rows),
        _total(weights.values(), "tensor"),
    ]
    states = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    lines += _describe_optimizers(options, states)
    files = [(name, _size(record.size), record.checksum) for name, record in header.files.items()]
    return [*lines, "", *_table(("file", "size", "crc32"), files)]


def _describe_optimizers(options: argparse.Namespace, states: Mapping[str, Any]) -> list[str]:
    try:
        optimizers = load_metadata(options.path, weights_only=not options.unsafe).get(OPTIMIZERS)
    except UnsupportedError as error:
        return ["", f"optimizers: not read. {error}"]
    if not optimizers:
        return ["", "no optimizer: saved with weights only"]
    lines: list[str] = []
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer.{number}.state."
        entries = {
            name.removeprefix(prefix): tensor
            for name, tensor in states.items()
            if name.startswith(prefix)
        }
        groups = [
            (str(index), str(len(group["parameters"])), _hyperparameters(group["hyperparameters"]))
            for index, group in enumerate(optimizer["groups"])
        ]
        lines += [
            "",
            *_table((f"optimizer {number}: group", "parameters", "hyperparameters"), groups),
        ]
        by_key: dict[str, list[Any]] = {}
        for name, tensor in entries.items():
            by_key.setdefault(name if options.all else name.rpartition(".")[2], []).append(tensor)
        rows = []
        for key, saved in by_key.items():
            dtypes = " ".join(sorted({_dtype(tensor.dtype) for tensor in saved}))
            rows.append((key, str(len(saved)), dtypes, _size(sum(map(_bytes, saved)))))
        lines += [
            "",
            *_table(("state", "tensors", "dtype", "size"), rows),
            _total(entries.values(), "tensor"),
        ]
    return lines


def _describe_file(options: argparse.Namespace) -> list[str]:
    content = read_single_file(options.path, weights_only=not options.unsafe)
    tensors = {
        name: value
        for name, value in content["state_dict"].items()
        if isinstance(value, torch.Tensor)
    }
    rows = [
        (name, _shape(tensor.shape), _dtype(tensor.dtype), _size(_bytes(tensor)))
        for name, tensor in tensors.items()
    ]
    optimizers = content.get("optimizer_states", ())
    return [
        f"{options.path}: a file of another strategy, {_size(Path(options.path).stat().st_size)}",
        f"step {content.get('global_step', 0):,}, epoch {content.get('epoch', 0)}, saved with "
        f"Lightning {content.get('pytorch-lightning_version', '?')}",
        "",
        *_table(("model", "shape", "dtype", "size"), rows),
        _total(tensors.values(), "tensor"),
        "",
        f"{_plural(len(optimizers), 'optimizer')}: "
        + ", ".join(_plural(len(o["state"]), "state") for o in optimizers)
        if optimizers
        else "no optimizer: saved with weights only",
    ]


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary}.".capitalize()
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint")
    parser.set_defaults(run=run, name=name)
    return parser


def _check_sharded(path: str) -> None:
    if Path(path).is_file():
        raise CheckpointMismatchError(
            f"only a directory that this library saved can be converted: {path} is already a plain "
            "file, or not a checkpoint. Load a plain file directly, which every layout can."
        )


def _check_new(out: Path, overwrite: bool) -> None:
    if not out.absolute().parent.is_dir():
        raise CheckpointMismatchError(
            f"the folder of the result must exist: {out.parent}. Create it first."
        )
    if out.exists() and not overwrite:
        raise CheckpointMismatchError(
            f"the result must not exist yet: {out}. Use another name, or --overwrite to replace it."
        )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [tuple(titles), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(line.rstrip())
    return [lines[0], "-" * min(120, sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _summary(out: object, written: WrittenSize, weights_only: bool) -> str:
    what = "weights only" if weights_only else "to continue from"
    return f"{out}: {_plural(written.num_tensors, 'tensor')}, {_size(written.num_bytes)}, {what}"


def _total(tensors: Iterable[Any], what: str) -> str:
    sizes = [_bytes(tensor) for tensor in tensors]
    return f"{_plural(len(sizes), what)}, {_size(sum(sizes))}"


def _hyperparameters(values: Mapping[str, Any]) -> str:
    shown = ("lr", "betas", "momentum", "eps", "weight_decay")
    return ", ".join(f"{name} {values[name]}" for name in shown if name in values)


def _bytes(tensor: Any) -> int:
    return prod(tensor.shape) * int(tensor.dtype.itemsize)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units = units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
