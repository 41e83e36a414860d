"""The subcommand ``convert``: conversion between checkpoints and Hugging Face folders."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import is_sharded_checkpoint
from lightning_megatron.checkpoint.hugging_face import (
    SavedModel,
    SavedOwnCodeModel,
    export_model,
    find_model,
    import_model,
)
from lightning_megatron.cli.checkpoint import DTYPES
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.swap import parallelize

EXAMPLE = """examples:
  lightning-megatron convert runs/last.ckpt exported            a folder for from_pretrained
  lightning-megatron convert path/to/folder model.ckpt          a checkpoint for validate and test
  lightning-megatron convert runs/last.ckpt exported --verify   compare both on some tokens
  lightning-megatron convert runs/last.ckpt exported --tokenizer path/to/folder"""

#: Files of a Hugging Face folder that checkpoints do not store, copied by ``--tokenizer``.
_COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "spiece.model",
)
#: Number of tokens that ``--verify`` runs through both models.
_NUM_TOKENS = 32
#: Largest accepted difference of their float32 results, relative to the largest result.
_TOLERANCE = 1e-3


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    options = convert_parser().parse_args(args)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    if Path(options.out).exists():
        raise CheckpointMismatchError(
            f"the result must not exist yet: {options.out}. Its files would be mixed with the new "
            "ones. Use another name."
        )
    is_export = is_sharded_checkpoint(options.source)
    _check_options(options, is_export)
    if is_export:
        limit = options.max_file_bytes
        export_model(
            options.source, options.out, options.name, dtype, limit, options.unsafe, options.merge
        )
        for file in _copied_files(options.tokenizer):
            shutil.copy(file, options.out)
    else:
        import_model(options.source, options.out, options.name or "model", dtype)
    print(
        f"{options.out}: {'a Hugging Face folder' if is_export else 'a checkpoint'} of "
        f"{options.source}"
    )
    if options.verify:
        checkpoint, folder = (
            (options.source, options.out) if is_export else (options.out, options.source)
        )
        saved = find_model(checkpoint, options.name, options.unsafe)
        if isinstance(saved, SavedOwnCodeModel):
            what = "tensors"
            gap = saved.gap(folder)
        else:
            what = f"results for {_NUM_TOKENS} tokens"
            gap = compare(saved, folder)
        print(f"{what} differ by {gap:.1e} of the largest")
        if gap > _TOLERANCE:
            raise UnsupportedError(
                f"both forms of a model must have the same {what}: they differ by {gap:.1e} of the "
                f"largest, more than {_TOLERANCE:.0e}. Either they are of different models, or "
                f"--dtype rounded the weights. Do not use {options.out}."
            )


def _check_options(options: argparse.Namespace, is_export: bool) -> None:
    """Reject options that cannot be combined, before anything is written."""
    for name in ("merge", "tokenizer"):
        if getattr(options, name) and not is_export:
            raise UnsupportedError(
                f"--{name} is only for conversion to a Hugging Face folder: {options.source} is "
                f"already one. Leave --{name} out."
            )
    if options.tokenizer and not _copied_files(options.tokenizer):
        raise CheckpointMismatchError(
            f"--tokenizer must be a folder with files of a tokenizer: {options.tokenizer} has "
            "none. Use the folder of the original model."
        )
    if not (is_export and options.verify) or options.merge:
        return
    saved = find_model(options.source, options.name, options.unsafe)
    if isinstance(saved, SavedModel) and saved.adapter:
        raise UnsupportedError(
            "--verify needs a whole model, because an adapter computes nothing without its base: "
            "only an adapter would be written. Add --merge, or leave --verify out."
        )


def _copied_files(folder: str | None) -> list[Path]:
    """List the files of a folder that belong to the tokenizer or to generation."""
    if folder is None:
        return []
    return sorted({file for pattern in _COPIED_FILES for file in Path(folder).glob(pattern)})


def convert_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron convert",
        description="Turn checkpoints into Hugging Face folders, and back.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a checkpoint of this library, or a local Hugging Face folder",
    )
    add("out", metavar="OUT", help="the folder or checkpoint to write")
    add(
        "--name",
        help=(
            "attribute of the LightningModule that holds the model (default: the only one, or "
            "model)"
        ),
    )
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    add(
        "--max-file-bytes",
        type=int,
        default=5 * 10**9,
        metavar="N",
        help="maximum size of a file (default: 5e9)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="copy the files of the tokenizer, and of generation, from this folder",
    )
    add(
        "--merge",
        action="store_true",
        help="write the model with its adapter merged, instead of the adapter alone",
    )
    add(
        "--verify",
        action="store_true",
        help="compare the results of both afterwards (needs transformers)",
    )
    add("--unsafe", action="store_true", help="unpickle objects of any type from the checkpoint")
    return parser


@torch.no_grad()
def compare(saved: SavedModel, folder: str) -> float:
    """Return the largest difference between the outputs of a checkpoint and a Hugging Face folder.

    Returns:
        Largest absolute difference in float32, divided by the largest absolute output
    """
    library: Any = import_extra("transformers", "hf")
    original = (
        getattr(library, saved.family.architecture).from_pretrained(folder, dtype="float32").eval()
    )
    root = nn.ModuleDict({"model": deepcopy(original)})
    parallelize(root, ParallelMesh.single())
    converted: Any = root["model"]
    full = dict(saved.merged_tensors())
    for key, tensor in (*converted.named_parameters(), *converted.named_buffers()):
        if key in full or isinstance(tensor, nn.Parameter):
            # This package may pad the vocabulary; the checkpoint has no rows for the padding.
            tensor[: full[key].shape[0]] = full[key]
    config = saved.family.config(saved.config)
    count = min(_NUM_TOKENS, config.max_seq_length)
    tokens = torch.randint(
        0, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0)
    )
    computed, expected = (_result(model(input_ids=tokens)) for model in (converted, original))
    return float((computed - expected).abs().max() / expected.abs().max())


def _result(output: Any) -> Tensor:
    result: Tensor = output["logits"] if "logits" in output.keys() else output["last_hidden_state"]  # noqa: SIM118
    return result
