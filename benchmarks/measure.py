"""Measurements of training steps and of single calls on a GPU."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import FLOP_RULE as FLOP_RULE
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.strategy.callbacks.training_metrics import count_replicas

#: Settings of trainers that only measure.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "default_root_dir": tempfile.gettempdir(),
}
#: Cycles of the GPU in a millisecond.
CYCLES = 1_900_000


def option_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of options that shows a program's description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def heading(*titles: str) -> list[str]:
    """Return the first two lines of a table."""
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]


def strategy_of(trainer: Trainer) -> MegatronStrategy:
    """Return the strategy of a trainer, which has the mesh."""
    assert isinstance(trainer.strategy, MegatronStrategy), "benchmarks train by this package"
    return trainer.strategy


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the strategy; the last values win, field by field in records."""
    result: dict[str, Any] = {}
    for options in settings:
        for name, value in options.items():
            earlier = result.get(name)
            if isinstance(value, dict) and isinstance(earlier, dict):
                result[name] = {**earlier, **value}
            else:
                result[name] = value
    return result


def mark_on_device() -> torch.cuda.Event:
    """Record and return a timing event on the device's compute stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


#: Number of unmeasured steps before the measured steps in a row, because the first steps start on
#: an idle device.
_ROW_STARTS = 3


def seconds_between(begin: Any, end: Any) -> float:
    """Return the time between two events on the device, or between two times of the host (s)."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Measure(Callback):
    """Callback that writes loss and time of every step, and the peak memory of all ranks, as JSON.

    By default, the host waits for the device after every step. With ``in_a_row`` it does not wait,
    as in a training that reads nothing from the device. The time of a step is then the time between
    the ends of two steps on the device's compute stream, and work that overlaps with the next step,
    such as the gathering of parameters, counts in the next step. The median omits the first steps,
    which allocate memory and set up communication.

    Args:
        path: File that rank 0 writes.
        label: Name of the run in the table.
        warmup: Number of first steps that the median omits.
        steps: Number of steps after those that the median includes; None includes all.
        in_a_row: Whether the host does not wait for the device between the steps.
        seq_length: Length of a sample, for FLOPs; None means the maximum of the model (tokens).
        row_steps: Number of measured steps in a row after the steps for which the host waits. Later
            steps are not measured.
    """

    def __init__(
        self,
        path: str,
        label: str,
        warmup: int = 10,
        steps: int | None = None,
        in_a_row: bool = False,
        seq_length: int | None = None,
        row_steps: int = 0,
    ) -> None:
        self.path = Path(path)
        self.label = label
        self.warmup = warmup
        self.steps = steps
        self.in_a_row = in_a_row
        self.seq_length = seq_length
        self.row_steps = row_steps
        #: Times of the steps in a row, which follow the steps for which the host waits (s).
        self.row_seconds: list[float] = []
        self._made = time.perf_counter()
        self._to_first_step = 0.0
        self.figures: dict[str, Any] = {}
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._tokens = 0
        self._last = 0.0
        self._ends: list[torch.cuda.Event] = []
        self._losses: list[torch.Tensor] = []
        self._num_done = 0
        self._row_ends: list[Any] = []

    @property
    def last_step(self) -> int:
        """Number of steps up to the last measured one, if ``row_steps`` follow."""
        return self.warmup + (self.steps or 0) + _ROW_STARTS + self.row_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the peak memory, which includes building the model, and start timing."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._tokens = 0
        self._last = self._now(trainer)
        self._end_on_device(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the time and the loss of the step."""
        if self.row_steps and self._num_done >= self.last_step:
            return
        self._num_done += 1
        self._tokens = self._tokens or count_tokens(batch) * count_replicas(trainer)
        logged = trainer.callback_metrics.get("train_loss")
        loss = outputs["loss"] if logged is None else logged
        if self._ends_in_row(trainer) or self._end_on_device(trainer):
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
        strategy = strategy_of(trainer)
        on_gpu = strategy.root_device.type == "cuda"
        peak = torch.tensor(
            float(torch.cuda.max_memory_allocated() if on_gpu else 0),
            device=strategy.root_device,
        )
        peak = strategy.reduce(peak, group=strategy.mesh.world, reduce_op="max")
        if not trainer.is_global_zero:
            return
        counted = self.counted()
        median = statistics.median(counted)
        rate = self._tokens / median / trainer.world_size
        model: Any = getattr(pl_module, "model", None)
        config: Any = model.gpt.config if hasattr(model, "gpt") else pl_module.config
        self.figures = {
            "label": self.label,
            "step_ms": round(median * 1e3, 2),
            "fastest_ms": round(min(counted) * 1e3, 2),
            "tokens_per_second_per_rank": round(rate),
        }
        # The FLOP rule counts causal attention, which encoders do not have.
        if isinstance(config, GPTConfig):
            flops = config.flops_per_token(self.seq_length or config.max_seq_length)
            self.figures["model_tflops_per_rank"] = round(rate * flops / 1e12, 1)
        self.figures |= {
            "peak_gib": round(float(peak) / 2**30, 2),
            "seconds_to_first_step": round(self._to_first_step, 1),
            "losses": self.losses,
        }
        if self.row_seconds:
            self.figures |= {
                "row_ms": round(statistics.median(self.row_seconds) * 1e3, 2),
                "row_mean_ms": round(statistics.mean(self.row_seconds) * 1e3, 2),
            }
        self.path.write_text(json.dumps(self.figures))
        shown = {name: value for name, value in self.figures.items() if name != "losses"}
        print(f"{self.label}: {shown}", flush=True)

    def counted(self) -> list[float]:
        """Return the times of the steps that the median includes (s)."""
        stop = None if self.steps is None else self.warmup + self.steps
        return self.seconds[self.warmup : stop] or self.seconds

    def _end_on_device(self, trainer: Trainer) -> bool:
        """Record the end of a step on the device if ``in_a_row`` is set; return whether it did."""
        if not self.in_a_row or trainer.strategy.root_device.type != "cuda":
            return False
        self._ends.append(mark_on_device())
        return True

    def _ends_in_row(self, trainer: Trainer) -> bool:
        """Record the end of one of the ``row_steps`` without waiting; return whether it is one."""
        if not self.row_steps or self._num_done <= self.warmup + (self.steps or 0):
            return False
        on_gpu = trainer.strategy.root_device.type == "cuda"
        self._row_ends.append(mark_on_device() if on_gpu else time.perf_counter())
        return True

    def _read_device(self) -> None:
        """Read the times and losses that were recorded on the device."""
        if self._row_ends:
            # Omit the first steps in a row, because the host waited for the device before them.
            self.row_seconds = [
                seconds_between(begin, end)
                for begin, end in zip(self._row_ends, self._row_ends[1:], strict=False)
            ][_ROW_STARTS - 1 :]
            self.losses += torch.stack(self._losses).tolist()
        if self._ends:
            torch.cuda.synchronize()
            self.seconds = [
                begin.elapsed_time(end) / 1e3
                for begin, end in zip(self._ends, self._ends[1:], strict=False)
            ]
            self.losses = torch.stack(self._losses).tolist()

    @staticmethod
    def _now(trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def device_time(call: Callable[[], Any], head_start: int = 4_000_000) -> float:
    """Return the device time of one call with a cold cache (µs).

    Args:
        call: Function to time.
        head_start: Time for the host to queue the call before the device starts (cycles).
    """
    torch.empty(2**28, dtype=torch.int8, device="cuda").zero_()
    torch.cuda.synchronize()
    # The host queues the whole call while the device sleeps, so that launches are not measured.
    torch.cuda._sleep(head_start)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def burst(
    variants: Mapping[str, Callable[[], Any]], guess: float, rounds: int
) -> dict[str, list[float]]:
    """Return the times of single calls of alternating variants (ms).

    Args:
        variants: Functions to time.
        guess: Approximate time of a call (ms); the GPU idles longer than this before each call.
        rounds: Calls of each variant.
    """
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in variants
    }
    gap = int(CYCLES * min(8.0, max(0.8, 1.6 * guess)))
    for call in variants.values():
        call()
    torch.cuda._sleep(60 * CYCLES)
    for number in range(rounds):
        for name in variants if number % 2 else reversed(list(variants)):
            torch.cuda._sleep(gap)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            variants[name]()
            stop.record()
            pairs[name].append((start, stop))
    torch.cuda.synchronize()
    times = {}
    for name, events in pairs.items():
        times[name] = [start.elapsed_time(stop) for start, stop in events]
    return times
