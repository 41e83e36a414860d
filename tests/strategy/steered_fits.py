"""Fits whose batches set the number of rows that experts need, eagerly and by graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, MegatronStrategy
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.experts.routing.router import Router, Routing
from lightning_megatron.graphs import tape
from lightning_megatron.graphs.tape import TapeBackend, TapeGraph
from tests.strategy.graph_fits import num_graphs_of
from tests.strategy.limited_fits import EXPERTS, Excess, Record, Watch, strategy_of
from tests.strategy.tiny import LENGTH, TinyLM, Words

#: Samples of a microbatch, of which a batch has two. An even share is 256 rows.
SIZE = 16
TOKENS = SIZE * (LENGTH - 1)
NUM_LAYERS = 2


class Steering(Words):
    """Words with the number of rows that rank 0 gets above an even share in each layer.

    Args:
        kind: Kind of the steps, ``train`` or ``val``.
        excess: Rows by kind, batch, microbatch and layer.
        num_batches: Number of batches of each rank.
    """

    def __init__(self, kind: str, excess: Excess, num_batches: int) -> None:
        super().__init__(2 * 2 * SIZE * num_batches, seed=len(kind))
        self.kind, self.excess = kind, excess

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch, sample = divmod(index // 2, 2 * SIZE)
        rows = [
            self.excess.get((self.kind, batch, sample // SIZE, layer), 0)
            for layer in range(NUM_LAYERS)
        ]
        return {**super().__getitem__(index), "rows": torch.tensor(rows)}


class Steered(TinyLM):
    """A module whose steps graphs may capture, and change everything that a repeated step must find
    unchanged.

    Args:
        is_fused: Whether torch's fused AdamW updates the parameters.
    """

    reads_gradients = False

    def __init__(self, is_fused: bool = False, **options: Any) -> None:
        model = {"mlp_bias": False, "ffn_hidden_size": 16, "hidden_dropout": 0.1}
        super().__init__(**{**model, "experts": EXPERTS, "schedule": None, **options})
        self.is_fused = is_fused
        self.rows = torch.zeros(NUM_LAYERS, dtype=torch.int64)
        self.register_buffer("drawn", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.rows.copy_(batch["rows"][0])
        return super().forward(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=self.is_fused)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert isinstance(self.drawn, Tensor)
        assert isinstance(self.num_steps, Tensor)
        noise = torch.rand((), dtype=torch.float64, device=self.drawn.device)
        self.drawn += noise
        self.num_steps += 1
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * (1.0 + 0.01 * noise)}


@dataclass
class SteeredRecord(Record):
    """Results of a fit by graphs, and the number of replays.

    Args:
        num_graphs: Number of graphs after each batch.
        num_replays: Replays up to the end of each batch.
        num_entries: Operators and collectives of all captured graphs.
        evaluated: Losses of validation batches.
    """

    num_graphs: list[int] = field(default_factory=list)
    num_replays: list[int] = field(default_factory=list)
    num_entries: list[int] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)

    def differences_from(self, expected: Record) -> list[str]:
        """Return the names of results that are not the same bit for bit."""
        assert isinstance(expected, SteeredRecord)
        names = super().differences_from(expected)
        return names + (["evaluated"] if self.evaluated != expected.evaluated else [])


class SteeredWatch(Watch):
    """Route as batches say, and record the results of the fit.

    Args:
        record: Record of the results.
        saves: Path of a checkpoint by the number of batches after which it is saved.
    """

    record: SteeredRecord

    def __init__(self, record: SteeredRecord, saves: dict[int, str]) -> None:
        super().__init__(record, {})
        self.saves = saves

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, Steered)
        module.rows = module.rows.to(module.device)
        layers = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
        first = strategy_of(trainer).mesh.pp.rank * len(layers)
        for number, layer in enumerate(layers, first):
            vars(layer.router)["rows"] = module.rows[number]

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs)
        self.record.num_graphs.append(num_graphs_of(trainer))
        self.record.num_replays.append(CountedGraph.num_replays)
        number = len(self.record.losses)
        if number in self.saves:
            trainer.save_checkpoint(self.saves[number])

    def on_validation_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.record.evaluated += [] if outputs is None else [float(outputs)]

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.calls, module.losses = 0, []
        self.record.num_entries = list(CountedGraph.num_entries)
        super().on_train_end(trainer, module)


class CountedGraph(TapeGraph):
    """CPU graph whose entries and replays are counted."""

    num_replays = 0
    num_entries: ClassVar[list[int]] = []

    def __init__(self, entries: Sequence[Any], *how: Any) -> None:
        super().__init__(entries, *how)
        CountedGraph.num_entries.append(len(entries))

    def replay(self) -> None:
        CountedGraph.num_replays += 1
        super().replay()


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
    """Steer all routers inside the block, and count replays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", steered(Router.forward))
        patch.setattr(CountedGraph, "num_replays", 0)
        patch.setattr(CountedGraph, "num_entries", [])
        patch.setattr(tape, "TapeGraph", CountedGraph)
        yield


def fit(
    rows: float | None,
    excess: Excess,
    graphs: CudaGraphs | None = None,
    *,
    num_batches: int = 8,
    accelerator: str = "cpu",
    ckpt_path: str | None = None,
    saves: dict[int, str] | None = None,
    layout: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **trainer: Any,
) -> SteeredRecord:
    """Train on two ranks of ep in each stage, with two microbatches a batch, and validate."""
    seed_everything(3, verbose=False)
    record = SteeredRecord()
    sizes: dict[str, Any] = {"ep": 2, "expert_transport": "one_sided", "microbatch_size": SIZE}
    strategy = MegatronStrategy(
        **{**sizes, "check_microbatches": False, "bucket_size": 500, **(layout or {})},
        expert_rows=rows,
        cuda_graphs=graphs,
    )
    if graphs is not None and accelerator == "cpu":
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    settings: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": 2,
        "strategy": strategy,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [SteeredWatch(record, saves or {})],
        "max_steps": num_batches,
        "val_check_interval": 4,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 2,
        "use_distributed_sampler": False,
    }
    data = []
    for kind, number in (("train", num_batches), ("val", 2)):
        samples = Steering(kind, excess, number)
        indices = range(dist.get_rank() % 2, len(samples), 2)
        data.append(DataLoader(samples, 2 * SIZE, sampler=indices))
    runner = Trainer(**{**settings, **trainer})
    with steering(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(Steered(**(model or {})), *data, ckpt_path=ckpt_path, weights_only=False)
    texts = [str(warning.message) for warning in caught]
    record.warnings = [text for text in texts if text.startswith("experts: ")]
    return record
