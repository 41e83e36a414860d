"""The command ``convert``: conversion between checkpoints and Hugging Face folders."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from lightning_megatron.checkpoint import is_sharded_checkpoint
from lightning_megatron.checkpoint.hugging_face import (
    SavedModel,
    SavedOwnCodeModel,
    export_model,
    find_model,
    import_model,
)
from lightning_megatron.checkpoint.load import saved_tokenizer
from lightning_megatron.cli.checkpoint import DtypeName, dtype_of
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.hub import local_folder, tokenizer_files
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.hugging_face_folder import CONFIG
from lightning_megatron.swap import parallelize

EXAMPLES = """examples:
  lightning-megatron convert runs/last.ckpt exported            a folder for from_pretrained
  lightning-megatron convert path/to/folder model.ckpt          a checkpoint for generate, validate
  lightning-megatron convert runs/last.ckpt exported --verify   compare both on some tokens
  lightning-megatron convert runs/last.ckpt exported --tokenizer path/to/folder"""

#: Number of tokens that ``--verify`` runs through both models.
_NUM_TOKENS = 32
#: Largest accepted difference of their float32 results, relative to the largest result.
_TOLERANCE = 1e-3


def convert(
    source: str,
    output: str,
    name: str | None = None,
    dtype: DtypeName | None = None,
    max_file_bytes: PositiveInt = 5 * 10**9,
    tokenizer: str | None = None,
    merge: bool = False,
    verify: bool = False,
    unsafe: bool = False,
) -> None:
    """Turn checkpoints into Hugging Face folders, and back.

    Args:
        source: A checkpoint of this library, a Hugging Face folder, or a model's name on the Hub.
        output: The folder or checkpoint to write.
        name: Attribute of the LightningModule that holds the model; by default the only one, or
            model.
        dtype: Dtype of the weights; by default unchanged.
        max_file_bytes: Maximum size of a file (bytes).
        tokenizer: Copy the files of the tokenizer, and of generation, from this folder; by default
            those in the checkpoint, with the chat template that trained it.
        merge: Write the model with its adapter merged, instead of the adapter alone.
        verify: Compare the results of both afterwards (needs transformers).
        unsafe: Unpickle objects of any type from the checkpoint.
    """
    if Path(output).exists():
        raise CheckpointMismatchError(
            f"the result must not exist yet: {output}. Its files would be mixed with the new ones. "
            "Use another name."
        )
    if is_sharded_checkpoint(source):
        checkpoint = source
        folder = output
        given = _tokenizer_files(tokenizer)
        if verify and not merge:
            _check_whole(find_model(source, name, unsafe))
        export_model(source, output, name, dtype_of(dtype), max_file_bytes, unsafe, merge)
        for file, content in (given or saved_tokenizer(source, not unsafe)).items():
            # The export has a configuration of its own, and an adapter has none.
            if file != CONFIG:
                Path(output, file).write_bytes(content)
        print(f"{output}: a Hugging Face folder of {source}")
    else:
        if merge or tokenizer is not None:
            raise UnsupportedError(
                "--merge and --tokenizer are only for conversion to a Hugging Face folder: "
                f"{source} is already one. Leave them out."
            )
        checkpoint = output
        folder = local_folder(source)
        import_model(folder, checkpoint, name or "model", dtype_of(dtype))
        print(f"{output}: a checkpoint of {source}")
    if verify:
        _verify(find_model(checkpoint, name, unsafe), folder, output)


COMMAND = convert


def _verify(saved: SavedModel | SavedOwnCodeModel, folder: str, output: str) -> None:
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
            f"--dtype rounded the weights. Do not use {output}."
        )


def _check_whole(saved: SavedModel | SavedOwnCodeModel) -> None:
    if isinstance(saved, SavedModel) and saved.adapter:
        raise UnsupportedError(
            "--verify needs a whole model, because an adapter computes nothing without its base: "
            "only an adapter would be written. Add --merge, or leave --verify out."
        )


def _tokenizer_files(folder: str | None) -> dict[str, bytes]:
    """Return the files of a folder that belong to the tokenizer or to generation."""
    if folder is None:
        return {}
    folder = local_folder(folder, has_weights=False)
    files = tokenizer_files(folder)
    if not files:
        raise CheckpointMismatchError(
            f"--tokenizer must be a folder with files of a tokenizer: {folder} has none. Use the "
            "folder of the original model."
        )
    return files


@torch.no_grad()
def compare(saved: SavedModel, folder: str) -> float:
    """Return the largest difference between the outputs of a checkpoint and a Hugging Face folder.

    Returns:
        Largest absolute difference in float32, divided by the largest absolute output
    """
    library: Any = import_extra("transformers", "hf")
    kind = getattr(library, saved.family.architecture)
    original = kind.from_pretrained(folder, dtype="float32").eval()
    if saved.gpt is None:
        root = nn.ModuleDict({"model": deepcopy(original)})
        parallelize(root, ParallelMesh.single())
        converted: Any = root["model"]
    else:
        converted = GPT(saved.gpt).eval()
    full = dict(saved.merged_tensors())
    for key, tensor in (*converted.named_parameters(), *converted.named_buffers()):
        if key in full or isinstance(tensor, nn.Parameter):
            # This package may pad the vocabulary; the checkpoint has no rows for the padding.
            tensor[: full[key].shape[0]] = full[key]
    config = saved.gpt or saved.family.config(saved.config)
    count = min(_NUM_TOKENS, config.max_seq_length)
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, count), generator=draws)
    computed, expected = (_result(model(tokens)) for model in (converted, original))
    return float((computed - expected).abs().max() / expected.abs().max())


def _result(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    result: Tensor = output["logits"] if "logits" in output.keys() else output["last_hidden_state"]  # noqa: SIM118
    return result
