"""Ranks that share the sequence between the layers of a plan compute the results of the full module,
also if other layers lie between them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.sequence_shard import SequenceShard
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.oracles import assert_equal, full_gradients
from tests.world import run_world

PLAN = {
    "words": "vocab",
    "*.norm": "sequence",
    "*.drop": "sequence",
    "*.up": "column",
    "*.down": "row",
}
PLAN |= {"*.heads": "partial", "norm": "sequence", "head": "vocab"}


class Block(nn.Module):
    """Add results of each position, and results across positions, to the hidden states."""

    def __init__(self, rms: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8) if rms else nn.LayerNorm(8)
        self.up, self.down, self.heads, self.drop = (
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.LayerNorm(4),
            nn.Dropout(0.0),
        )
        self.scale, self.mix = nn.Parameter(torch.rand(8)), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        inner = self.up(self.norm(hidden))
        inner = F.gelu(self.heads(inner.unflatten(-1, (-1, 4))).flatten(-2))
        hidden = hidden + self.drop(self.down(inner)) * self.scale * mask
        assert hidden.shape == (2, 6, 8), "the shape is that of the full sequence"
        return hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2) / hidden.shape[1]


class Model(nn.Module):
    """Predict tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block(rms) for rms in (False, True))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, mask = self.words(tokens), (tokens > 2).to(torch.float64)[..., None]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def check_all(rank: int, size: int) -> None:
    """Compare outputs and gradients, and check the shapes of shards."""
    for shares in (True, False):
        mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=shares)
        torch.manual_seed(0)
        twin: Any = Model().double()
        model: Any = Model().double()
        model.load_state_dict(twin.state_dict())
        parallelize(model, mesh, PLAN)
        tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(1))
        results = [network(tokens) for network in (twin, model)]
        assert type(results[1]) is Tensor
        normed = model.norm(torch.ones(2, 6, 8, dtype=torch.float64))
        assert isinstance(normed, SequenceShard) == shares
        assert not shares or normed.part.shape == (2, 6 // size, 8)
        assert_equal(results[1], results[0], "logits", 1e-9)
        for result in results:
            result.square().sum().backward()
        gradients = full_gradients(model, mesh)
        for name, parameter in twin.named_parameters():
            assert_equal(gradients[name], parameter.grad, f"gradient of {name}", 1e-9)
    _check_refusals(mesh)


def _check_refusals(mesh: ParallelMesh) -> None:
    mesh = ParallelMesh.create(mesh.layout, sequence_parallel=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).double()
    hidden = torch.rand(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wrong = nn.ModuleDict({"mlp": model})
    parallelize(wrong, mesh, {"mlp.0": "column", "mlp.1": "sequence", "mlp.2": "row"})
    with pytest.raises(
        UnsupportedError, match="'mlp.1' of the kind 'sequence' must get the same input on all"
    ):
        model(hidden)
    norm = nn.ModuleDict({"norm": nn.LayerNorm(8).double()})
    parallelize(norm, mesh, {"norm": "sequence"})
    with pytest.raises(ValueError, match="must be a multiple of tp"):
        norm["norm"](hidden[:, :5])
    shard = norm["norm"](hidden)
    with pytest.raises(UnsupportedError, match="must not be written in place"):
        shard += 1.0


def test_two_ranks_that_share_the_sequence_match_one_process() -> None:
    run_world(check_all, 2)
