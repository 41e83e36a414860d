"""Training of a tiny GPT under any layout, with a report of the results."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.training.clip import grad_norm

STEPS, GLOBAL_BATCH, SEQUENCE, VOCABULARY = 4, 8, 16, 300
_SIZES = {
    "vocab_size": VOCABULARY,
    "max_seq_length": SEQUENCE,
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
}
_LLAMA = {**_SIZES, "num_kv_heads": 2, "ffn_hidden_size": 48}
#: Auxiliary losses of sequences do not depend on how a batch is cut into microbatches; losses of a
#: full step do not either.
_EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": 0.1, "z_loss": 0.01}
KINDS = {
    "gpt2-tied": GPTConfig.gpt2(**_SIZES),
    "gpt2-untied": GPTConfig.gpt2(**_SIZES, tie_embeddings=False),
    "llama-untied": GPTConfig.llama(**_SIZES, num_kv_heads=2, ffn_hidden_size=48),
    "llama-tied": GPTConfig.llama(**_SIZES, num_kv_heads=1, ffn_hidden_size=48, tie_embeddings=True),
    "eight layers": GPTConfig.gpt2(**{**_SIZES, "num_layers": 8}, tie_embeddings=True),
    "post-norm": GPTConfig.gpt2(**_SIZES, norm_position="post"),
    "gemma-tied": GPTConfig.llama(
        **_SIZES, num_kv_heads=2, ffn_hidden_size=48, activation="geglu_tanh", qk_norm=True, norm_offset=1.0,
        embedding_scale=5.7, sliding_window=5, tie_embeddings=True,
    ),
    "experts": GPTConfig.llama(**_LLAMA, experts={**_EXPERTS, "aux_loss_scope": "sequence"}),
    "experts, some layers": GPTConfig.llama(
        **_LLAMA, experts={**_EXPERTS, "aux_loss_scope": "sequence", "layers": [False, True, False, True],
        "shared_ffn_hidden_size": 16, "shared_gate": True, "capacity_factor": 8.0},
    ),
    "experts, whole step": GPTConfig.llama(
        **_LLAMA, tie_embeddings=True, experts={**_EXPERTS, "aux_loss_scope": "global", "scoring": "sigmoid",
        "num_groups": 2, "top_k_groups": 1, "expert_bias": True, "expert_bias_rate": 0.01},
    ),
    "latent attention": GPTConfig.llama(
        **_SIZES, ffn_hidden_size=48, latent_attention={
            "key_value_rank": 12, "query_rank": 20, "plain_dim": 6, "rotary_dim": 4, "value_dim": 8,
        },
        experts={
            **_EXPERTS, "aux_loss_scope": "sequence", "layers": [False, True, True, True], "scoring": "sigmoid",
            "num_groups": 4, "top_k_groups": 2, "score_scale": 2.5, "expert_bias": True, "expert_bias_rate": 0.01,
            "shared_ffn_hidden_size": 16,
        },
    ),
    "experts with biases": GPTConfig.llama(
        **_LLAMA, activation="clamped_swiglu", attention_sinks=True, qkv_bias=True, output_bias=True,
        sliding_window=5, window_layers=[True, False, True, False],
        experts={**_EXPERTS, "aux_loss_scope": "sequence", "linear_bias": True, "router_bias": True},
    ),
    "dropout": GPTConfig.gpt2(**_SIZES, hidden_dropout=0.2, attention_dropout=0.1),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Training run: a kind of model, a precision, and the strategy's arguments (None: ordinary
    Lightning).

    A step of a job that ``counts`` ignores some labels and returns the number of remaining labels.
    Only a job that ``compares`` makes the trial of microbatches against the full batch.
    """

    kind: str
    precision: str = "64-true"
    layout: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    counts: bool = False
    compares: bool = True
    callbacks: tuple[pl.Callback, ...] = ()


@dataclass
class Report:
    """Results of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Tokens(Dataset):
    """Repeatable random tokens."""

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # Every step sees the same global batch, so that the loss must fall.
        generator = torch.Generator().manual_seed(index % GLOBAL_BATCH)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Module(pl.LightningModule):
    """An ordinary LightningModule around a GPT, as a user would write it."""

    def __init__(self, config: GPTConfig, counts: bool = False) -> None:
        super().__init__()
        self.config, self.counts, self.model = config, counts, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config, mesh=self.device_mesh, seed=1234)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        assert self.model is not None, "configure_model ran"
        if self.counts:
            return self._counted_step(batch)
        loss = self.model(batch["tokens"], batch["labels"]).mean()
        self.log("train_loss", loss, batch_size=len(batch["tokens"]), sync_dist=True)
        return loss

    def _counted_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        labels = batch["labels"].masked_fill(batch["labels"] % 5 < batch["labels"][:, :1] % 5, -100)
        num_tokens = (labels != -100).sum()
        loss = self.model(batch["tokens"], labels, sums=True) / num_tokens
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "num_tokens": num_tokens}

    def configure_optimizers(self) -> dict[str, Any]:
        # A large eps keeps gradients that are zero except for rounding from becoming full steps.
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(pl.Callback):
    """Record the loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.report = Report()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any
    ) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            self.report.norms.append(float(grad_norm(strategy.run.state.main)))
        else:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.report.norms.append(float(torch.stack([g.norm() for g in grads]).norm()))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        self.report.losses.append(float(trainer.callback_metrics["train_loss"]))


def train(
    job: Job,
    devices: int,
    accelerator: str,
    checkpoint: str | None = None,
    *,
    steps: int = STEPS,
    resume_from: str | None = None,
) -> Report:
    """Run a job in this process up to ``steps``.

    With a path ``checkpoint``, save there and read the final weights from it; with ``resume_from``,
    continue from that checkpoint.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    pl.seed_everything(1234, verbose=False)
    record, size = Record(), devices
    strategy: Any = "auto"
    if job.layout is not None:
        options = {"microbatch_size": 2, "check_microbatches": job.compares, **job.layout}
        strategy = MegatronStrategy(**options)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=job.precision,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        callbacks=[record, *job.callbacks],
        **job.trainer,
    )
    replica = (
        {"num_replicas": 1, "rank": 0}
        if job.layout is None
        else _place(job.layout, size, trainer.global_rank)
    )
    sampler = DistributedSampler(Tokens(), shuffle=False, **replica)
    loader = DataLoader(
        Tokens(), batch_size=GLOBAL_BATCH // replica["num_replicas"], sampler=sampler
    )
    module = Module(KINDS[job.kind], job.counts)
    trainer.fit(module, loader, ckpt_path=resume_from)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            saved = OpenCheckpoint.open(checkpoint)
            names = [name for name in saved.tensors if name.startswith("state_dict.")]
            record.report.weights = {
                name.removeprefix("state_dict."): tensor
                for name, tensor in saved.read_full(names).items()
            }
    else:
        record.report.weights = {
            name: tensor.detach().clone() for name, tensor in module.state_dict().items()
        }
    return record.report


def train_all(
    rank: int, size: int, cases: dict[str, Job], folder: str, steps: int = STEPS
) -> dict[str, Report]:
    """Run jobs one after the other on all ranks, each with a separate checkpoint."""
    return {
        name: train(job, size, "cpu", os.path.join(folder, str(number)), steps=steps)
        for number, (name, job) in enumerate(cases.items())
    }


def _place(layout: dict[str, Any], size: int, rank: int) -> dict[str, int]:
    sizes = {name: layout.get(name, 1) for name in ("tp", "pp", "cp", "vpp")}
    grid = ParallelLayout(size, **sizes)
    return {"num_replicas": grid.dp, "rank": grid.coordinates(rank)["dp"]}
