"""README: you do not rewrite your module. What modules do stays the same under every layout, or the
fit ends before its first step with an error that says what to do.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import FP8, CudaGraphs
from lightning_megatron.errors import ParallelPlanError, RankMismatchError, UnsupportedError
from lightning_megatron.groups import mesh_groups
from tests.fits import (
    GPT2,
    InTurns,
    Job,
    Language,
    Regress,
    Report,
    Vectors,
    check_equal,
    run_job,
    run_jobs_on,
)
from tests.world import run_world
from tests.worlds.user_script import run_script

PLAN = {"*.up": "column", "*.down": "row"}
TP = {"tp": 2, "tensor_parallel_plan": PLAN, "microbatch_size": 4}
PP = {"pp": 2, "pipeline_plan": {"net.blocks": "blocks"}, "microbatch_size": 4}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


class Mixes(Block):
    """A block whose code between the layers needs all features."""

    def between(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Net(nn.Module):
    """An embedding of vectors, blocks, and a skip connection around them."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        start = hidden = self.inner(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + start)


class Own(Regress):
    """A user's module, with what users add to one."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__(lambda: Net(kind))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.history: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(float(self.trainer.callback_metrics["loss"]))
        self.seen += 1
        self.outcomes = {"history": self.history, "seen": float(self.seen)}


class Encoder(Regress):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        super().__init__(lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class Single(Regress):
    """One layer."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))


class Adversaries(InTurns, Own):
    """Two optimizers in turn, by manual optimization."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net.blocks.parameters(), lr=0.05, momentum=0.9)
        return [first, torch.optim.AdamW(self.net.head.parameters(), lr=1e-2, eps=1e-3)]


class Halves(Callback):
    """Write weights between steps."""

    def on_train_batch_end(self, trainer: Any, module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)


class Unused(Own):
    """Use a layer for all samples, then for one sample of one rank, then for none."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8).double()

    def loss(self, batch: Any) -> Tensor:
        first = torch.stack([sample[0][0, 0] for sample in map(Vectors().__getitem__, range(8))])
        bound = (-100.0, float(first.sort().values[-2]), 100.0)[self.trainer.global_step]
        hidden, is_chosen = self.net(batch[0]), batch[0][:, 0, 0] > bound
        if is_chosen.any():
            hidden = hidden + 0.1 * is_chosen[:, None, None] * self.spare(batch[0])
        return F.mse_loss(hidden, batch[1])


class Counted(Own):
    """Means over the positive targets, which some samples do not have."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        is_counted = (y > 0) & (x[:, :1, :1] > 0)
        count = int(is_counted.sum())
        loss = ((self.net(x) - y).square() * is_counted).sum() / count
        self.log("loss", loss)
        return {"loss": loss, "num_tokens": count}


class Contrast(Own):
    """A loss that couples the samples of a batch."""

    def loss(self, batch: Any) -> Tensor:
        pooled = self.net(batch[0]).mean(1)
        return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


class Penalty(Own):
    """A loss with a penalty on weights, of which a rank has a part."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(p.square().sum() for p in self.net.blocks.parameters())


class Normed(Own):
    """Statistics over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), self.net).double()


class WholeModel(Own):
    """An optimizer that needs the whole model."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def own(
    module: Callable[[], LightningModule], strategy: dict[str, Any], *callbacks: type[Callback]
) -> Job:
    trainer = {"gradient_clip_val": None} if module is Adversaries else {}
    return Job(
        module,
        strategy,
        data=Vectors,
        trainer=trainer,
        callbacks=partial(made, callbacks),
    )


def made(kinds: Sequence[type[Callback]]) -> list[Callback]:
    return [kind() for kind in kinds]


#: What stays the same, on two processes.
SAME = {
    "own blocks, tp": own(Own, TP),
    "own blocks, stages with a skip around them": own(Own, PP),
    "own blocks, tp without a plan": own(Own, {"tp": 2, "microbatch_size": 4}),
    "own blocks, stages without a plan": own(Own, {"pp": 2, "microbatch_size": 4}),
    "own blocks, zero-bubble": own(Own, {**PP, "schedule": "zb-h1"}),
    "torch's encoder, tp": own(Encoder, {"tp": 2, "tensor_parallel_plan": {"net": "auto"}}),
    "manual optimization": own(Adversaries, TP | {"microbatch_size": None}),
    "weights written between steps": own(Own, TP, Halves),
    "a layer that some steps do not use": own(Unused, {}),
    "means over counts of each microbatch, some of them 0": own(
        Counted, PP | {"microbatch_size": 1}
    ),
    "a loss that couples samples, in one piece": own(Contrast, TP | {"microbatch_size": None}),
}
#: What the first batch shows, and a phrase of the error.
REFUSED = {
    "a loss that couples samples, cut": (own(Contrast, PP), "the loss of two microbatches"),
    "code that needs all features": (own(partial(Own, Mixes), TP), "column_gather"),
    "a penalty on sharded weights": (own(Penalty, TP), "weight_decay"),
    "statistics of a batch, cut": (own(Normed, {}), "batch statistics need the whole batch"),
    "an optimizer of the whole model": (own(WholeModel, TP), "LBFGS"),
    "tp without layers to shard": (own(Single, {"tp": 2}), "{'net': 'column_gather'}"),
    "pp without a list of blocks": (own(Single, {"pp": 2}), "at least 2 blocks"),
}


def in_one_process(job: Job) -> Job:
    return Job(job.model, data=Vectors, trainer=job.trainer, callbacks=job.callbacks)


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(2, SAME)


@pytest.mark.parametrize("name", SAME)
def test_what_modules_do_stays_the_same(name, reports):
    twin = run_job(in_one_process(SAME[name]))
    if SAME[name].model is Adversaries:
        for report in (twin, *reports[name]):
            report.norms = []  # each of the two optimizers has a part of the gradient
    check_equal(reports[name], twin)
    for report in reports[name]:
        torch.testing.assert_close(report.outcomes, twin.outcomes, rtol=0.0, atol=1e-10)


def refusals(rank: int, size: int) -> dict[str, str]:
    texts = {}
    for name, (job, _) in REFUSED.items():
        compared = {**job.strategy, "job.check_microbatches": True}
        with pytest.raises((UnsupportedError, ParallelPlanError, RuntimeError)) as caught:
            run_job(own(job.model, compared), size)
        texts[name] = str(caught.value)
    return texts


def test_what_would_train_otherwise_is_refused_on_all_ranks_with_its_remedy():
    for texts in run_world(refusals, 2):
        for name, (_, phrase) in REFUSED.items():
            assert phrase in texts[name], name


#: Options that cannot be honoured, by a phrase of the error; twelve processes are asked for.
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "num_heads|heads": {"tp": 3},
    "world_size|devices|processes": {"tp": 2, "cp": 5},
    "vpp": {"vpp": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
    "multiples of 16": {"tp": 4, "fp8": FP8("tensorwise", emulate=True)},
    "gpipe": {"pp": 2, "schedule": "gpipe", "cuda_graphs": CudaGraphs("segments")},
    "microbatch_size": {"microbatch_size": 0},
    "recompute": {"recompute": "everything"},
}


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Trainer that would start further processes fail."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("processes started"))


@pytest.mark.parametrize("phrase", IMPOSSIBLE)
def test_options_that_cannot_be_honoured_raise_before_any_process_exists(phrase, no_process):
    with pytest.raises((ParallelPlanError, UnsupportedError, ValueError), match=phrase):
        run_job(Job(GPT2, IMPOSSIBLE[phrase], batch=24), 12)
    assert not dist.is_initialized()


class Shuffled(Language):
    """Train on other tokens than the rest of the model from the second step on, on rank 1."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            batch["tokens"] = batch["tokens"].roll(1)
        return batch


def disagreements(rank: int, size: int) -> list[str]:
    def other_sources() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mesh_groups, "package_hash", lambda: f"of rank {rank}")
            run_job(Job(GPT2, {"tp": 2}), size)

    texts = []
    for fit in (other_sources, lambda: run_job(Job(Shuffled, {"tp": 2}), size)):
        with pytest.raises(RankMismatchError) as caught:
            fit()
        texts.append(str(caught.value))
    return texts


def test_ranks_that_disagree_end_the_fit_and_say_about_what():
    for sources, batches in run_world(disagreements, 2):
        assert "rank 1 has lightning-megatron sources='of rank 1'" in sources
        assert "rank 1 has training batch 2" in batches


def test_a_rank_that_ends_stops_the_job_and_is_named_first(tmp_path):
    result = run_script("os_exit", TMPDIR=str(tmp_path))
    assert result.returncode != 0
    first, *others = re.findall(r"^\[rank \d\].*", result.stderr, re.MULTILINE)
    assert first.startswith("[rank 1] ended with exit code 7")
    assert all(line.startswith("[rank 0] stops after rank 1 failed") for line in others)
