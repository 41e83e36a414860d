"""Fits of small models: a :class:`Job` says what to train, :func:`run_job` trains it in this process
or on the ranks of a world, and a :class:`Report` holds what must not depend on the layout.

A test of layouts is a table of jobs, one world that runs them, and one twin of each model::

    JOBS = {"tp2": Job(GPT2, {"tp": 2}), "pp2": Job(GPT2, {"pp": 2})}

    @pytest.fixture(scope="module")
    def reports() -> dict[str, list[Report]]:
        return run_jobs_on(2, JOBS)

    @pytest.mark.parametrize("name", JOBS)
    def test_every_layout_trains_as_one_process(name, reports):
        check_equal(reports[name], run_job(JOBS[name].twin()))
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron import GPT, GPTConfig, MegatronStrategy
from lightning_megatron.groups.shard_spec import ShardSpec, shard_spec_of
from lightning_megatron.optimizer.clip import grad_norm
from lightning_megatron.optimizer.main_parameters import original_name
from tests.oracles import assert_equal, copy_to_full
from tests.tape import TapeBackend
from tests.world import run_world

STEPS, BATCH, SEQUENCE, VOCABULARY = 3, 8, 16, 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_seq_length": SEQUENCE,
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
}
LLAMA_SIZES: dict[str, Any] = {**SIZES, "num_kv_heads": 2, "ffn_hidden_size": 48}
GPT2 = GPTConfig.gpt2(**SIZES)
LLAMA = GPTConfig.llama(**LLAMA_SIZES)
#: A mixture whose auxiliary losses do not depend on how a batch is cut.
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_hidden_size": 16,
    "aux_loss": 0.1,
    "aux_loss_scope": "sequence",
    "z_loss": 0.01,
}
MIXTURE = GPTConfig.llama(**LLAMA_SIZES, experts=EXPERTS)


class Tokens(Dataset):
    """Random tokens; every step has the same global batch, so that the loss must fall."""

    def __init__(self, num_samples: int = STEPS * BATCH, batch: int = BATCH) -> None:
        self.num_samples, self.batch = num_samples, batch

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % self.batch)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Vectors(Dataset):
    """Random vectors of float64 and a function of them, as a tuple."""

    def __init__(self, shape: Sequence[int] = (6, 8), num_samples: int = STEPS * BATCH) -> None:
        self.shape, self.num_samples = tuple(shape), num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index % BATCH)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return x, x.flip(-1).tanh()


class Module(pl.LightningModule):
    """What the modules of tests share: the optimizer, and a loss logged as ``loss``."""

    def __init__(self) -> None:
        super().__init__()
        #: What a module records for its report.
        self.outcomes: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        # A large eps keeps gradients that are zero but for rounding from becoming full steps.
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class InTurns(Module):
    """Step the optimizers of a module in turn by manual optimization, each with the parameters of
    the others off.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # type: ignore[call-arg]
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)


class Language(Module):
    """Train a GPT, as a user would write it."""

    def __init__(self, config: GPTConfig = GPT2) -> None:
        super().__init__()
        self.config, self.model = config, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config, mesh=self.device_mesh, seed=1234)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None, "configure_model ran"
        return self.model(batch["tokens"], batch["labels"]).mean()


class Regress(Module):
    """Fit a network of the user's own to :class:`Vectors`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make().double()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


@dataclass(frozen=True)
class Job:
    """A fit.

    Args:
        model: Sizes of a GPT, or a function that makes a LightningModule.
        strategy: Options of MegatronStrategy (those of records by names such as ``job.timeout``;
            microbatches have 2 samples and are not compared with the batch unless they say
            otherwise), the name of one of Lightning's strategies, or None
            for one process.
        precision: Precision of the Trainer.
        steps: Number of optimizer steps.
        trainer: Further options of the Trainer; a logger as a function that makes it.
        data: Makes the training data; all data-parallel ranks together get ``batch`` samples a step
            in order. Or it makes a data module, which has batches and validation of its own.
        validation: Makes the validation data, if there is any.
        batch: Samples in a step.
        callbacks: Makes callbacks.
        resume: Checkpoint to continue from.
        save: Path at which to save in the end.
        norms: Whether to record the norms of gradients, which takes a hook that reads gradients.
    """

    model: GPTConfig | Callable[[], pl.LightningModule] = GPT2
    strategy: Mapping[str, Any] | str | None = None
    precision: Any = "64-true"
    steps: int = STEPS
    trainer: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Dataset | pl.LightningDataModule] = Tokens
    validation: Callable[[], Dataset] | None = None
    batch: int = BATCH
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple
    resume: str | None = None
    save: str | None = None
    norms: bool = True

    def twin(self) -> Job:
        """Return the same fit by Lightning alone in one process."""
        return replace(self, strategy=None)


@dataclass
class Report:
    """Results of a job on one rank.

    Args:
        losses: Loss of every step: the logged ``train_loss``, or else a mean of the losses of the
            data-parallel ranks.
        norms: Norm of the whole gradient before every update.
        metrics: Last values of the logged metrics.
        pieces: This rank's part of every parameter at the end and its place in the full tensor, by
            name: see :func:`joined`.
        graphs: Number of captured graphs after every step.
        outcomes: What the module and the callbacks kept in a dictionary ``outcomes``, by key.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    pieces: dict[str, tuple[Tensor, ShardSpec]] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)
    outcomes: dict[str, Any] = field(default_factory=dict)


class Record(pl.Callback):
    """Fill a report."""

    def __init__(self) -> None:
        self.report = Report()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            self.report.norms.append(float(grad_norm(strategy.run.state.main)))
        else:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            norms = torch.tensor([float(g.norm()) for g in grads], dtype=torch.float64)
            self.report.norms.append(float(norms.norm()))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        strategy, logged = trainer.strategy, trainer.callback_metrics
        if "train_loss" in logged:
            # A mean over tokens is not the mean of the ranks' means.
            loss = logged["train_loss"]
        elif outputs:
            loss = strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        else:
            loss = logged["loss"]  # of manual optimization
        self.report.losses.append(float(loss))
        graphs = strategy.run.graphs if isinstance(strategy, MegatronStrategy) else None
        self.report.graphs.append(graphs.num_graphs if graphs else 0)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy, rank = trainer.strategy, 0
        if isinstance(strategy, MegatronStrategy):
            strategy.run.state.main.wait()
            rank = strategy.mesh.tp.rank
        self.report.metrics = {name: float(v) for name, v in trainer.callback_metrics.items()}
        self.report.pieces = {
            name: (p.detach().to("cpu", copy=True), shard_spec_of(p, rank))
            for name, p in module.named_parameters()
        }


class RecordWithoutNorms(Record):
    """Fill a report without a hook that reads gradients."""

    on_before_optimizer_step = pl.Callback.on_before_optimizer_step


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with a mapping for each record: ``{"job.timeout": 5}`` becomes
    ``{"job": {"timeout": 5}}``. Flat options can be merged.
    """
    result: dict[str, Any] = {}
    for name, value in options.items():
        record, _, field_name = name.rpartition(".")
        (result.setdefault(record, {}) if record else result)[field_name] = value
    return result


def strategy_with(**options: Any) -> MegatronStrategy:
    """Return the strategy with these options, as :func:`nested` takes them."""
    return MegatronStrategy(**nested(options))


def trainer_of(job: Job, size: int = 1, *callbacks: pl.Callback) -> pl.Trainer:
    """Return the quiet Trainer of a job on ``size`` CPU processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for noise in (".*LeafSpec.*", ".*have no `val_dataloader`.*"):
        warnings.filterwarnings("ignore", message=noise)
    pl.seed_everything(1234, verbose=False)
    strategy: Any = job.strategy or "auto"
    if job.strategy is not None and not isinstance(job.strategy, str):
        options = {"microbatch_size": 2, "job.check_microbatches": False, **job.strategy}
        strategy = strategy_with(**options)
        if options.get("cuda_graphs") and job.trainer.get("accelerator", "cpu") == "cpu":
            strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    options = {
        "accelerator": "cpu",
        "devices": size,
        "precision": job.precision,
        "max_steps": job.steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "gradient_clip_val": 1.0,
        **job.trainer,
    }
    if callable(options["logger"]):
        options["logger"] = options["logger"]()
    return pl.Trainer(**options, strategy=strategy, callbacks=[*callbacks, *job.callbacks()])


def module_of(job: Job) -> pl.LightningModule:
    """Return the module of a job."""
    return Language(job.model) if isinstance(job.model, GPTConfig) else job.model()


def loader_of(data: Dataset, batch: int, trainer: pl.Trainer) -> DataLoader:
    """Return the loader of this rank: all data-parallel ranks together get the same batches under
    every layout.
    """
    ranks: dict[str, Any] = getattr(trainer, "distributed_sampler_kwargs", None) or {
        "num_replicas": 1,
        "rank": 0,
    }
    sampler: Any = DistributedSampler(data, shuffle=False, **ranks)
    return DataLoader(data, batch_size=batch // ranks["num_replicas"], sampler=sampler)


def run_job(job: Job, size: int = 1) -> Report:
    """Train a job in this process, which may be one of ``size`` ranks of a world."""
    record = Record() if job.norms else RecordWithoutNorms()
    trainer, module = trainer_of(job, size, record), module_of(job)
    data = job.data()
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data, ckpt_path=job.resume)
    else:
        validation = job.validation and loader_of(job.validation(), job.batch, trainer)
        trainer.fit(module, loader_of(data, job.batch, trainer), validation, ckpt_path=job.resume)
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        record.report.outcomes |= getattr(owner, "outcomes", {})
    if job.save is not None:
        trainer.save_checkpoint(job.save)
    return record.report


def run_jobs(rank: int, size: int, jobs: Mapping[Any, Job]) -> dict[Any, Report]:
    """Train jobs one after the other on all ranks of a world."""
    reports = {}
    for name, job in jobs.items():
        try:
            reports[name] = run_job(job, size)
        except BaseException as error:
            error.add_note(f"in the job {name!r}")
            raise
    return reports


def run_jobs_on(size: int, jobs: Mapping[Any, Job]) -> dict[Any, list[Report]]:
    """Start a world of ``size`` ranks that trains all jobs; return the reports of all ranks by job."""
    ranks = run_world(run_jobs, size, jobs)
    return {name: [reports[name] for reports in ranks] for name in jobs}


@cache
def gpt_twin(config: GPTConfig, steps: int = STEPS, precision: str = "64-true") -> Report:
    """Return the report of a GPT that Lightning alone trains in this process, once for all tests."""
    return run_job(Job(config, steps=steps, precision=precision))


def joined(reports: Sequence[Report]) -> dict[str, Tensor]:
    """Return the full parameters that all ranks hold together. Copies, which a tied weight of the
    last stage is, too, must be the same bit for bit.
    """
    names = {name for report in reports for name in report.pieces}
    full: dict[str, Tensor] = {}
    for report in reports:
        for copy, (piece, spec) in report.pieces.items():
            name = original_name(copy, spec.tied_to, names) if spec.tied_to else copy
            assert name is not None, f"no rank holds the original of {copy}"
            own = torch.full(spec.full_shape, torch.nan, dtype=piece.dtype)
            copy_to_full(spec, piece, own, counted_only=False)
            known = full.setdefault(name, own)
            both = ~(known.isnan() | own.isnan())
            assert torch.equal(known[both], own[both]), f"copies of {name} differ"
            full[name] = torch.where(known.isnan(), own, known)
    missing = [name for name, tensor in full.items() if tensor.isnan().any()]
    assert not missing, f"no rank holds all of {missing}"
    return full


def differences(actual: Report, expected: Report) -> list[str]:
    """Return the names of results of two jobs on this rank that are not the same bit for bit."""
    names = [
        name
        for name in ("losses", "norms", "metrics")
        if getattr(actual, name) != getattr(expected, name)
    ]
    assert actual.pieces.keys() == expected.pieces.keys(), "both jobs train the same model"
    return names + [
        name
        for name, (piece, _) in actual.pieces.items()
        if not torch.equal(piece, expected.pieces[name][0])
    ]


def check_equal(
    reports: Sequence[Report], twin: Report, tolerance: float = 1e-10, *, learns: bool = True
) -> None:
    """Check losses, norms of gradients and final weights of all ranks against one process's, which
    fall unless the steps have other data.
    """
    assert twin.losses[-1] < twin.losses[0] or not learns, "the twin learns"
    for report in reports:
        torch.testing.assert_close(report.losses, twin.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(report.norms, twin.norms, rtol=tolerance, atol=tolerance)
    weights, expected = joined(reports), joined([twin])
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert_equal(weight, expected[name], name, tolerance)
