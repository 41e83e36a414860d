"""Checks of a batch before it moves to the device: lengths of documents and of padded rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.layers.attention.span import check_lengths
from lightning_megatron.models.causal_lm import CausalLM
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.token_module import TokenModule


def check_batch(batch: Any, module: LightningModule) -> None:
    """Refuse a batch whose lengths of documents or of padded rows cannot be true.

    Args:
        batch: Batch before it moves. Values on another device are not read.
    """
    check_documents(batch, module)
    check_padding(batch, module)


def check_documents(batch: Any, module: LightningModule) -> None:
    """Refuse lengths of documents that do not fit the rows of a batch.

    Args:
        batch: Batch before it moves. Lengths on another device are not read.
        module: Module that will receive the batch. Only for a :class:`CausalLM` does ``lengths``
            certainly mean lengths of documents; ``cu_seq_lens_q`` has the same meaning everywhere.
    """
    if not isinstance(batch, Mapping):
        return
    lengths = batch.get("lengths")
    tokens = batch.get("tokens")
    if isinstance(module, CausalLM) and _is_known(lengths) and isinstance(tokens, Tensor):
        check_lengths(lengths.tolist(), tokens.shape[1])
    borders = batch.get("cu_seq_lens_q")
    tokens = batch.get("input_ids")
    if _is_known(borders) and isinstance(tokens, Tensor) and tokens.dim() == 2:
        if batch.get("attention_mask") is not None:
            raise UnsupportedError(
                "a batch must have either attention_mask or cu_seq_lens_q: both were given. Packed "
                "rows have padding only at their end. Leave one of them out."
            )
        _check_borders(borders.tolist(), tokens.shape[1], batch.get("max_length_q"))


def check_padding(batch: Any, module: LightningModule) -> None:
    """Refuse lengths of padded rows that differ from the mask of the padding.

    Args:
        batch: Batch before it moves. Values on another device are not read.
        module: Module that will receive the batch. Only for a :class:`TokenModule` with an
            :class:`Encoder` do ``lengths`` and ``valid`` certainly describe padding.
    """
    has_encoder = isinstance(getattr(module, "model", None), Encoder)
    if not (isinstance(batch, Mapping) and isinstance(module, TokenModule) and has_encoder):
        return
    lengths = batch.get("lengths")
    valid = batch.get("valid")
    if not (_is_known(lengths) and _is_known(valid)):
        return
    if lengths.shape != valid.shape[:-1]:
        raise ParallelPlanError(
            f"lengths must have a number for each row of valid {tuple(valid.shape)}, because both "
            f"describe the padding of the same rows: the shape is {tuple(lengths.shape)}. Leave "
            "lengths out, or give each row its number of tokens before the padding."
        )
    is_before = torch.arange(valid.shape[-1]) < lengths[..., None]
    differs = (valid.bool() != is_before).any(-1).flatten()
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        number = int(lengths.flatten()[row])
        raise ParallelPlanError(
            "valid must be true for the first tokens of a row, as many as its length, if a batch "
            f"has lengths: row {row} has the length {number} and "
            f"{int(valid.flatten(0, -2)[row].sum())} valid tokens. Leave lengths out if padding "
            "is not on the right of each row, or compute them from valid again."
        )


def _is_known(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _check_borders(borders: list[int], seq_length: int, longest: Any) -> None:
    lengths = [after - before for before, after in zip(borders, borders[1:], strict=False)]
    if borders[:1] != [0] or min(lengths, default=0) < 0 or borders[-1] > seq_length:
        raise ParallelPlanError(
            f"cu_seq_lens_q must rise from 0 to at most the {seq_length} tokens of the row: it is "
            f"{borders}. Each number is the end of a document and the start of the next one. Use "
            "the cumulative lengths of the documents, starting with 0."
        )
    check_lengths([lengths], seq_length, None if longest is None else int(longest))
