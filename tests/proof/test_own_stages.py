"""Tests that models without a table in this package train in pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.models.staged_blocks import StagedBlocks
from tests.proof.fine_tuning import LENGTH, FineTune, InOrder, V, trainer_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "sliding_window": 5,
    # No family computes this activation, so the models keep their own code.
    "hidden_act": "tanh",
}
PLANS = {
    "pipeline_plan": {"model.body.blocks": "blocks"},
    "tensor_parallel_plan": {
        "*.up": "column", "*.down": "row", "*.norm": "sequence", "*.words": "vocab", "*.head": "vocab",
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dp2 pp2": {"pp": 2},
    "dp2 pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2 pp2 zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "tp2 pp2 zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1"},
}


class Block(nn.Module):
    """Return the hidden state and a second value, as blocks of older models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden)))) * weight, None


class Body(nn.Module):
    """Blocks between an embedding with an additional parameter and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, 16), nn.Parameter(torch.randn(LENGTH, 16) / 4)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(5)), nn.LayerNorm(16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places
        for number, block in enumerate(self.blocks):
            hidden, _ = block(hidden * (1 + number / 8), mask[..., None].to(hidden.dtype))
        return self.norm(hidden)


class Plain(nn.Module):
    """Language model that no table describes; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(16, V, bias=False)
        self.head.weight = self.body.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(input_ids, attention_mask))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class Train(FineTune):
    """Train a model of random weights."""

    def __init__(self, kind: str) -> None:
        super().__init__(folder="")
        self.kind = kind

    def configure_model(self) -> None:
        torch.manual_seed(0)
        model_class = getattr(transformers, self.kind, None)
        self.model = (
            Plain() if model_class is None else model_class(model_class.config_class(**SIZES))
        )


def train(kind: str, layout: dict[str, Any] | None, devices: int) -> Train:
    """Train on a few batches with any number of ranks; no layout means ordinary Lightning."""
    seed_everything(1, verbose=False)
    module = Train(kind)
    if kind == "Plain" and layout is not None:
        layout = {**layout, **PLANS}
    trainer = trainer_of(layout, devices, 1, max_steps=3)
    trainer.fit(module, InOrder())
    return module


def train_all(rank: int, size: int) -> dict[tuple[str, str], tuple[list[float], bool]]:
    """Train every model under its layouts."""
    results = {}
    for kind, name in FITS:
        module = train(kind, LAYOUTS[name], size)
        results[kind, name] = (
            module.losses,
            any(isinstance(part, StagedBlocks) for part in module.modules()),
        )
    return results


KINDS = ("Starcoder2ForCausalLM", "Olmo2ForCausalLM", "Plain")
FITS = chosen(
    [
        (kind, name)
        for kind in KINDS
        for name, layout in LAYOUTS.items()
        if "vpp" not in layout or kind == "Plain"
    ],
    ("Starcoder2ForCausalLM", "tp2 pp2 zb-h1"),
    ("Olmo2ForCausalLM", "dp2 pp2"),
    ("Plain", "tp2 pp2"),
    ("Plain", "dp2 pp2 vpp2"),
    ("Plain", "dp2 pp2 zb-v"),
)


def test_stages_of_any_list_of_blocks_train_as_one_process() -> None:
    plain = {kind: train(kind, None, 1).losses for kind in KINDS}
    for rank, reports in enumerate(run_world(train_all, 4)):
        for (kind, layout), (losses, is_staged) in reports.items():
            assert is_staged
            assert losses == pytest.approx(plain[kind], abs=1e-5), f"{kind}, {layout}, rank {rank}"
    assert all(losses[-1] < losses[0] for losses in plain.values())
