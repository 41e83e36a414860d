"""A callback that measures every step of a training run and writes the figures of rank 0's run to a file."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.shards import padded_vocab_size
from lightning_megatron.strategy.progress import count_replicas, count_tokens


def flops_per_token(config: GPTConfig, seq_length: int) -> float:
    """Count model FLOPs of forward and backward for a token by the causal-half rule.

    Matrix products count twice their elements, attention scores and their use count half (a token sees half of the
    sequence on average), logits count with the padded vocabulary, backward counts twice the forward; of experts those
    count that a token goes to, and the router's logits; embeddings, norms and recomputation count nothing.
    """
    width, head = config.hidden_size, config.head_size
    projections = 2 * width * head * (2 * config.num_heads + 2 * config.kv_heads)
    attention = 2 * 2 * seq_length * config.num_heads * head / 2
    products = 2 * width * (3 if config.is_gated else 2)
    mlp, mixture = products * config.ffn_size, 0
    if config.experts is not None:
        shared = config.experts.shared_ffn_hidden_size or 0
        inner = config.experts.top_k * config.experts.ffn_hidden_size + shared
        mixture = products * inner + 2 * width * config.experts.num_experts
    num_mixtures = sum(config.has_experts_in(layer) for layer in range(config.num_layers))
    networks = num_mixtures * mixture + (config.num_layers - num_mixtures) * mlp
    logits = 2 * width * padded_vocab_size(config.vocab_size, 1, config.vocab_multiple)
    return 3 * (config.num_layers * (projections + attention) + networks + logits)


def mark_on_device() -> torch.cuda.Event:
    """Return an event that takes the time at which the device's compute stream comes to this place."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Measure(Callback):
    """Write loss and time of every step, and the highest memory of any rank, as JSON.

    Either the host waits for the device after every step, so that a step's time is its own, or steps follow in a row as
    in a training that reads nothing from the device: then a step is the time between two ends of steps on the device's
    compute stream, and what a step leaves for the next one, such as parameters on their way, counts there. The first
    steps are left out of the median, because they allocate memory and set up communication.

    Args:
        path: File that rank 0 writes.
        label: Name of the run in the table.
        warmup: Steps left out of the median (steps).
        steps: Steps that count after those; later ones are measured but left out, too. None means all (steps).
        in_a_row: Whether the host does not wait for the device between the steps.
        seq_length: Length of a sample; None is the longest that the model takes (tokens).
    """

    def __init__(
        self,
        path: str,
        label: str,
        warmup: int = 10,
        steps: int | None = None,
        in_a_row: bool = False,
        seq_length: int | None = None,
    ) -> None:
        self.path, self.label, self.warmup, self.steps, self.in_a_row = Path(path), label, warmup, steps, in_a_row
        self.seq_length = seq_length
        self._made = time.perf_counter()
        self._to_first_step = 0.0
        self.figures: dict[str, Any] = {}
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._tokens, self._last = 0, 0.0
        self._ends: list[torch.cuda.Event] = []
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the memory of building the model."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._tokens = 0
        self._last = self._now(trainer)
        self._end_on_device(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time and the loss of the step."""
        self._tokens = self._tokens or count_tokens(batch) * count_replicas(trainer)
        logged = trainer.callback_metrics.get("train_loss")
        loss = outputs["loss"] if logged is None else logged
        if self._end_on_device(trainer):
            self._losses.append(loss.detach().clone())
            return
        now = self._now(trainer)
        self._to_first_step = self._to_first_step or now - self._made
        self.seconds.append(now - self._last)
        self.losses.append(float(loss))
        self._last = self._now(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the memory of all ranks and write the file."""
        self._read_device()
        on_gpu = trainer.strategy.root_device.type == "cuda"
        peak = torch.tensor(
            float(torch.cuda.max_memory_allocated() if on_gpu else 0), device=trainer.strategy.root_device
        )
        peak = trainer.strategy.reduce(peak, group=trainer.strategy.mesh.world, reduce_op="max")
        if not trainer.is_global_zero:
            return
        counted = self.counted()
        median = statistics.median(counted)
        rate = self._tokens / median / trainer.world_size
        model: Any = getattr(pl_module, "model", None)
        config: GPTConfig = model.gpt.config if hasattr(model, "gpt") else pl_module.config
        self.figures = {
            "label": self.label,
            "step_ms": round(median * 1e3, 2),
            "fastest_ms": round(min(counted) * 1e3, 2),
            "tokens_per_second_per_rank": round(rate),
            "model_tflops_per_rank": round(
                rate * flops_per_token(config, self.seq_length or config.max_seq_length) / 1e12, 1
            ),
            "peak_gib": round(float(peak) / 2**30, 2),
            "seconds_to_first_step": round(self._to_first_step, 1),
            "losses": self.losses,
        }
        self.path.write_text(json.dumps(self.figures))
        shown = {name: value for name, value in self.figures.items() if name != "losses"}
        print(f"{self.label}: {shown}", flush=True)

    def counted(self) -> list[float]:
        """List the times of the steps that count (s)."""
        stop = None if self.steps is None else self.warmup + self.steps
        return self.seconds[self.warmup : stop] or self.seconds

    def _end_on_device(self, trainer: Trainer) -> bool:
        """Mark the end of a step on the device's compute stream, if nothing waits there."""
        if not self.in_a_row or trainer.strategy.root_device.type != "cuda":
            return False
        self._ends.append(mark_on_device())
        return True

    def _read_device(self) -> None:
        """Read what was marked on the device, after the last step."""
        if self._ends:
            torch.cuda.synchronize()
            self.seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(self._ends, self._ends[1:], strict=False)]
            self.losses = torch.stack(self._losses).tolist()

    @staticmethod
    def _now(trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
