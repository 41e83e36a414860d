"""Random numbers for sharded features differ between the ranks of tp, and all others are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.strategy.replica_runs import Regress, run
from tests.world import run_world

PLAN = {"net.up": "column", "net.down": "row", "net.chain.0": "column", "net.chain.2": "row"}


def drop_half(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x), 0.5)


class RandomNet(nn.Module):
    """Draw random numbers in many ways, before and after the row layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.5)
        self.chain = nn.Sequential(
            nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8), nn.Dropout(0.5)
        )
        self.on_parts: dict[str, Tensor] = {}
        self.on_all: dict[str, Tensor] = {}
        self.repeated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        heads = hidden.unflatten(-1, (-1, 3)).transpose(1, 2)
        self.on_parts = {
            "module": self.drop(torch.ones_like(hidden)),
            "function": F.dropout(torch.ones_like(hidden), 0.5),
            "method of a module": drop_half(hidden),
            "attention": F.scaled_dot_product_attention(
                heads * 0, heads * 0, torch.ones_like(heads), dropout_p=0.5
            ),
            "shape": torch.rand(hidden.shape, dtype=x.dtype),
            "like": torch.rand_like(hidden),
            "in place": torch.empty_like(hidden).bernoulli_(0.5),
            "one draw for a head": torch.rand(heads.shape[:2], dtype=x.dtype),
        }
        mask = sum(self.on_parts[name] for name in ("module", "function", "shape", "in place"))
        hidden = checkpoint(self.dropped_again, hidden * mask, use_reentrant=False)
        y = self.down(hidden)
        self.on_all = {
            "the same module": self.drop(torch.ones_like(y)),
            "the same function": drop_half(y),
            "path": torch.rand(len(y), 1, 1, dtype=x.dtype),
        }
        chained = self.chain(x.new_ones(x.shape))
        self.on_all["chain"] = chained
        return y * self.on_all["path"] + chained

    def dropped_again(self, hidden: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(hidden), 0.5)
        self.repeated.append(mask.detach())
        return hidden * mask


class Watched(Regress):
    """Copy what each step has drawn."""

    def __init__(self) -> None:
        super().__init__(RandomNet)
        self.draws: list[dict[str, dict[str, Tensor]]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        net: Any = self.net
        self.draws.append(
            {
                "parts": {
                    **{name: value.detach() for name, value in net.on_parts.items()},
                    "recomputed": net.repeated[-1],
                },
                "all": {name: value.detach() for name, value in net.on_all.items()},
            }
        )
        assert torch.equal(net.repeated[-1], net.repeated[-2]), "recomputation draws the same"


def draw(rank: int, size: int) -> list[dict[str, dict[str, Tensor]]]:
    module = Watched()
    outcome = run(module, size, {"tp": size, "tensor_parallel_plan": PLAN})
    assert not outcome.error, outcome.error
    return module.draws


def test_ranks_of_tp_draw_different_numbers_for_their_features_and_equal_numbers_otherwise() -> (
    None
):
    first, second = run_world(draw, 2)
    steps = zip(first, second, strict=True)
    for step, (ours, others) in enumerate(steps):
        for name, value in ours["parts"].items():
            assert not torch.equal(value, others["parts"][name]), f"step {step}: {name}"
        for name, value in ours["all"].items():
            assert torch.equal(value, others["all"][name]), f"step {step}: {name}"
    for name, value in first[0]["parts"].items():
        assert not torch.equal(value, first[1]["parts"][name]), f"{name} repeats in the next step"
