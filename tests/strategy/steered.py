"""Jobs whose batches set the number of rows that each rank's experts need."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_megatron import CudaGraphs, GPTConfig
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.router import Router, Routing
from tests.fits import SEQUENCE, SIZES, Job, Language, Report, Tokens
from tests.graphs.jobs import differences as differences_of_graphs
from tests.graphs.jobs import run_graphs, strategy_of

#: Samples of a microbatch, of which each rank has two in a batch. An even share is 128 rows.
SIZE = 4
TOKENS = SIZE * SEQUENCE
NUM_LAYERS = 2
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "scoring": "sigmoid", "expert_bias": True,
    "expert_bias_rate": 0.01, "aux_loss": 0.01, "aux_loss_scope": "global", "jitter": 0.01,
}  # fmt: skip
_SIZES: dict[str, Any] = {**SIZES, "num_layers": NUM_LAYERS, "ffn_hidden_size": 16}
MIXTURE = GPTConfig.gpt2(**_SIZES, mlp_bias=False, hidden_dropout=0.1, experts=EXPERTS)
#: Rows that rank 0 gets above an even share, by kind of step, batch, microbatch and layer; with a
#: negative number rank 1 gets them.
Excess = dict[tuple[str, int, int, int], int]


class Steering(Tokens):
    """Tokens with the number of rows that rank 0 gets above an even share in each layer."""

    def __init__(self, kind: str, excess: Excess, num_batches: int) -> None:
        super().__init__(4 * SIZE * num_batches, 4 * SIZE * num_batches)
        self.kind, self.excess = kind, excess

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch, sample = divmod(index // 2, 2 * SIZE)
        places = [(self.kind, batch, sample // SIZE, layer) for layer in range(NUM_LAYERS)]
        rows = [self.excess.get(place, 0) for place in places]
        return {**super().__getitem__(index), "rows": torch.tensor(rows)}


class Steered(Language):
    """A module whose steps graphs may capture, and change everything that a repeated step must find
    unchanged.
    """

    def __init__(self, config: GPTConfig = MIXTURE) -> None:
        super().__init__(config)
        self.rows = torch.zeros(NUM_LAYERS, dtype=torch.int64)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.rows.copy_(batch["rows"][0])
        return super().loss(batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        noise = torch.rand((), dtype=torch.float64, device=self.rows.device)
        self.drawn += noise
        self.num_steps += 1
        return super().training_step(batch, batch_idx) * (1.0 + 0.01 * noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Changing(Steered):
    """A module whose steps also change attributes, batches and Python's generator."""

    def __init__(self, config: GPTConfig = MIXTURE) -> None:
        super().__init__(config)
        self.calls, self.seen = 0, list[float]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        batch = {**batch, "labels": batch.pop("labels")}
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.seen.append(float(loss))
        return loss * (1.0 + 0.01 * random.random())


class FusedSteered(Steered):
    """Update parameters by torch's fused AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


class SteeredWatch(pl.Callback):
    """Give routers the rows of the batches, and record what a repeated step must not change."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {}

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        if isinstance(module, Steered):
            module.rows = module.rows.to(module.device)
            layers = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
            first = strategy_of(trainer).mesh.pp.rank * len(layers)
            for number, layer in enumerate(layers, first):
                vars(layer.router)["rows"] = module.rows[number]

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        limited = strategy_of(trainer).run.limited_rows
        self.outcomes = {
            "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers()},
            "attributes": [getattr(module, name, None) for name in ("calls", "seen")],
            "generators": [torch.get_rng_state().tolist(), random.getstate()],
            "failures": 0 if limited is None else limited.num_failures,
            "factor": None if limited is None else limited.factor,
        }


def steered(route: Any) -> Any:
    """Return a router's forward pass that gives rank 0 as many more rows as the batch says."""

    def forward(router: Router, hidden: Tensor) -> Routing:
        routing = route(router, hidden)
        assert isinstance(routing, Routing)
        rows: Tensor = vars(router)["rows"]
        rank = router.mesh.ep.rank
        # One or both choices of each moved token go to experts of the peer rank.
        moved = torch.where((rows > 0) == (rank == 1), rows.abs(), 0)
        token = torch.arange(TOKENS, device=hidden.device)
        first = torch.where(token < moved, 2 - 2 * rank, 2 * rank)
        second = torch.where(token < moved - TOKENS, 3 - 2 * rank, 1 + 2 * rank)
        chosen = torch.stack([first, second], 1).to(routing.experts.dtype)
        return replace(routing, experts=chosen)

    return forward


@contextmanager
def steering() -> Iterator[None]:
    """Steer all routers inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", steered(Router.forward))
        yield


def run_steered(
    rows: float | None,
    excess: Excess,
    graphs: CudaGraphs | None = None,
    *,
    size: int = 2,
    kind: Any = Steered,
    config: GPTConfig = MIXTURE,
    num_batches: int = 4,
    trainer: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Train on two ranks of ep in each stage with a limit of rows, and validate after every second
    batch.
    """
    validates = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    settings = {
        "ep": 2,
        "experts.transport": "one_sided",
        "microbatch_size": SIZE,
        "optimizer.bucket_size": 500,
    }
    job = Job(
        lambda: kind(config),
        {**settings, "experts.rows": rows, **(layout or {})},
        **{"steps": num_batches, **options},
        trainer={**validates, "log_every_n_steps": 2, **(trainer or {})},
        data=lambda: Steering("train", excess, num_batches),
        validation=lambda: Steering("val", excess, 1),
        batch=4 * SIZE,
        callbacks=lambda: [SteeredWatch()],
    )
    with steering(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = run_graphs(job, graphs, size)
    texts = [str(warning.message) for warning in caught]
    report.outcomes["warnings"] = [text for text in texts if text.startswith("experts: ")]
    return report


def differences(actual: Report, expected: Report) -> list[str]:
    """Return the names of results of two jobs on this rank that are not the same bit for bit;
    collectives are not counted, because a repeated step has more.
    """
    return [name for name in differences_of_graphs(actual, expected) if name != "counts"]
