"""Fits of a small BERT on rows with padding, eagerly or by graphs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import BERTPretraining, CudaGraphs, EncoderConfig, MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from tests.strategy.graph_fits import Fit, Watch

VOCABULARY, LENGTH, STEPS, BATCH = 61, 32, 6, 4


class PaddedPairs(Dataset):
    """Repeatable sentence pairs of different lengths, with a mask and optionally with lengths."""

    def __init__(self, has_lengths: bool) -> None:
        self.has_lengths = has_lengths

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        true = torch.randint(4, VOCABULARY, (LENGTH,), generator=draw)
        size = torch.randint(6, LENGTH + 1, (), generator=draw)
        valid = torch.arange(LENGTH) < size
        masked = (torch.rand(LENGTH, generator=draw) < 0.3) & valid
        row = {
            "tokens": torch.where(masked, 3, true).masked_fill(~valid, 0),
            "labels": true.masked_fill(~masked, -100),
            "token_types": (torch.arange(LENGTH) >= size // 2).long() * valid,
            "valid": valid,
            "order": torch.randint(2, (), generator=draw),
        }
        return row | ({"lengths": size} if self.has_lengths else {})


def bert_fit(
    graphs: CudaGraphs | None,
    *,
    has_lengths: bool = True,
    order: str = "pre",
    dropout: tuple[float, float] = (0.0, 0.0),
    **options: Any,
) -> Fit:
    """Train a few steps of two microbatches.

    Args:
        graphs: Settings of graphs; None trains eagerly.
        has_lengths: Whether batches have the lengths of rows.
        order: Position of norms.
        dropout: Probability that a hidden state and an attention weight is dropped.
        options: Arguments of the Trainer.
    """
    pl.seed_everything(3, verbose=False)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "num_positions": LENGTH, "num_layers": 2, "hidden_size": 64,
        "num_heads": 2, "hidden_dropout": dropout[0], "attention_dropout": dropout[1],
    }  # fmt: skip
    config = EncoderConfig.bert(**sizes, ffn_hidden_size=96, norm_position=order, init_std=0.2)
    result = Fit("" if graphs is None else graphs.mode)
    strategy = MegatronStrategy(
        microbatch_size=2, check_microbatches=False, cuda_graphs=graphs, zero=0
    )
    settings = {"accelerator": "cpu", "precision": "64-true", "max_steps": STEPS} | options
    if graphs is not None and settings["accelerator"] == "cpu":
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    trainer = pl.Trainer(
        devices=1, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch(result)], **settings,
    )  # fmt: skip
    # On the CPU the host reads the number of tokens, which a graph of a step must not do.
    module = BERTPretraining(config, learning_rate=0.01, max_steps=STEPS, token_weighted=False)
    trainer.fit(module, DataLoader(PaddedPairs(has_lengths), batch_size=BATCH))
    return result
