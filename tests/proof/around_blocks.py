"""Modules that run code around a list of blocks, or call a model more than once in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

D, NUM_BLOCKS, SAMPLES = 8, 4, 8
BLOCKS = {"body.blocks": "blocks"}


class Body(nn.Module):
    """Four blocks between a layer and a head; a subclass defines the code around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shift = nn.Linear(D, D), nn.Parameter(torch.randn(D) / 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.enter(x)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ResidualInLoop(Body):
    def middle(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x) * (number + 1)
        return x


class ResidualAround(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=False) + super().middle(x.tanh())


class SkipFromInput(Body):
    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        return self.head(F.gelu(first[..., :4]).repeat(1, 2) * self.middle(first)) + (
            first * self.shift
        ).sum(-1, True)


class SkipsBetween(Body):
    def middle(self, x: Tensor) -> Tensor:
        hiddens: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x + hiddens[NUM_BLOCKS - 1 - number] if number >= NUM_BLOCKS // 2 else x)
            hiddens.append(x)
        return torch.stack(hiddens).sum(0)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * D, D)

    def forward(
        self, x: Tensor, *, states: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        bias = states.mean(-1, keepdim=True) if bias is None else bias
        return self.layer(torch.cat([x, states], -1)).tanh() + bias, bias


class TwoStreams(Body):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoInputs() for _ in range(NUM_BLOCKS))

    def middle(self, x: Tensor) -> Tensor:
        states, bias = x.sin(), None
        for block in self.blocks:
            x, bias = block(x, states=states, bias=bias)
        return x + bias


class EarlyLoss(Body):
    def middle(self, x: Tensor) -> Tensor:
        self.penalty: Any = 0.0
        for block in self.blocks:
            x = block(x)
            self.penalty = self.penalty + x.pow(2).mean()
        return x


class NormsBetween(Body):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(NUM_BLOCKS))

    def middle(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return x


class Checkpointed(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@dataclass(frozen=True)
class HiddenAndTerm:
    """Hidden state and loss term."""

    hidden: Tensor
    term: Tensor


class BlockWithTerm(nn.Module):
    """Block that returns a dataclass, and stores a loss term in its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, inputs: HiddenAndTerm) -> HiddenAndTerm:
        hidden = self.inner(inputs.hidden).tanh()
        self.inner.term = hidden.pow(2).mean()
        return HiddenAndTerm(hidden, inputs.term + hidden.mean())


class TermsOfBlocks(Body):
    """Read loss terms of blocks, a list of parameters, and a weight of the first stage after the
    blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockWithTerm() for _ in range(NUM_BLOCKS))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((D,), 1.5)) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        state = HiddenAndTerm(x, x.mean())
        for block in self.blocks:
            state = block(state)
        self.penalty = (
            state.term + sum(block.inner.term for block in self.blocks) + self.enter.weight.norm()
        )
        for scale in self.scales:
            self.penalty = self.penalty + scale.pow(2).sum()
        return state.hidden * self.scales[-1]


class TermsOfModules(TermsOfBlocks):
    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        self.penalty = sum(part.term for part in self.modules() if hasattr(part, "term"))
        return x


class WeightsOfBlocks(Body):
    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        self.penalty = sum(block[0].weight.norm() for block in self.blocks)
        return x


class AppendingLinear(nn.Linear):
    def forward(self, x: Tensor, terms: list[Tensor]) -> Tensor:
        terms.append(x.pow(2).mean())
        return super().forward(x)


class TermsInAList(Body):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendingLinear(D, D) for _ in range(NUM_BLOCKS))

    def middle(self, x: Tensor) -> Tensor:
        terms: list[Tensor] = []
        for block in self.blocks:
            x = block(x, terms)
        self.penalty = sum(terms)
        return x


class OnBothSides(Body):
    def middle(self, x: Tensor) -> Tensor:
        return self.enter(super().middle(x))


class InnerLists(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for part in block:
                x = part(x)
        return x


class BlocksInPlace(Body):
    """Body whose blocks write into their inputs; an input from another stage is a leaf of the
    graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)) for _ in range(NUM_BLOCKS)
        )


class WrittenByABlock(BlocksInPlace):
    def middle(self, x: Tensor) -> Tensor:
        return x + super().middle(x)


class WritesWeights(Body):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in (*self.enter.parameters(), *self.head.parameters()):
                weight.mul_(0.9)
        return super().middle(x)


class WrittenInPlace(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 0] = 0.0
        return x


class ReadByTheHost(Body):
    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e6:
                raise FloatingPointError
        return x


class DropoutBeside(Body):
    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5, training=True) + super().middle(x)


class Train(LightningModule):
    """Train a body on numbers; the loss is a mean over samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.losses = kind, []

    def configure_model(self) -> None:
        if hasattr(self, "body"):
            return
        torch.manual_seed(3)
        self.body: Any = globals()[self.kind]().double()

    def loss_of(self, batch: Tensor) -> Tensor:
        loss = (self.body(batch).squeeze(-1) - batch.sum(-1)).pow(2).mean()
        return loss + getattr(self.body, "penalty", 0.0)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class CalledTwice(Train):
    """Compare the outputs of a body for inputs of different lengths and scales."""

    def loss_of(self, batch: Tensor) -> Tensor:
        near, far = self.body(batch), self.body(torch.cat([batch, batch[:1] * 2], 0))
        middle = [self.body(batch * factor) for factor in (0.5, 2.0)]
        return (
            (near - far[:-1].detach() * 2).pow(2).mean()
            + (middle[0] * middle[1]).mean()
            + near.mean()
        )


def make_loader(samples: int = SAMPLES) -> DataLoader:
    numbers = torch.randn(
        samples, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    return DataLoader(numbers, batch_size=4)
