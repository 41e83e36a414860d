"""Metrics of a training beside its loss: times, speed, learning rate, gradient norm and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.optimizer.clip import grad_norm
from lightning_megatron.optimizer.main_parameters import names_in
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.plan.budget import GIB
from lightning_megatron.plan.chips import known_chip
from lightning_megatron.plan.settings import Positive, coerced_arguments
from lightning_megatron.strategy.callbacks.model_flops import ModelFlops
from lightning_megatron.strategy.callbacks.step_clock import StepClock, StepTimes
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.loops import (
    accumulates,
    is_logged,
    is_overridden,
    log_step_values,
    replace_method,
    total_batch_index,
)

#: Names of the metrics.
Metric = Literal[
    "train/step_seconds",
    "train/data_seconds",
    "train/tokens_per_second",
    "train/tokens_per_second_per_gpu",
    "train/tflops_per_gpu",
    "train/mfu",
    "train/bubble",
    "train/exposed_communication",
    "train/learning_rate",
    "train/gradient_norm",
    "train/loss_scale",
    "train/skipped_steps",
    "train/peak_memory_gib",
    "train/reserved_memory_gib",
]
#: Metrics that are measured on the device, in logged steps.
_SAMPLED = {"train/bubble", "train/exposed_communication"}


class TrainingMetrics(Callback):
    """Log speed, learning rate, gradient norm and memory of a training beside its loss.

    The values are logged every ``log_every_n_steps`` steps of the Trainer, by all its loggers, as
    ``self.log`` does it. They are equal on all ranks. Rates and times are means over the steps
    since the last logged one, without validations and saves:

    * ``train/step_seconds``: time of a step of the slowest rank, with its wait for data.
    * ``train/data_seconds``: time that a step waits for its batch, on the rank that waits longest.
    * ``train/tokens_per_second``, and ``train/tokens_per_second_per_gpu``: tokens of the global
      batch, padding included, counted as
      :func:`~lightning_megatron.pipeline.microbatch.count_tokens` does, over ``step_seconds``.
    * ``train/tflops_per_gpu``: model TFLOP/s by the rule of :meth:`GPTConfig.flops_per_token`,
      which counts neither recomputation nor the zeros above the diagonal of causal attention.
    * ``train/mfu``: ``tflops_per_gpu`` over ``peak_tflops``, between 0 and 1.
    * ``train/bubble``: share of the time of the schedule, from its beginning to the last pass of
      any stage, in which a stage runs no pass; a mean over ranks, in the logged step alone. It is
      the bubble of ``lightning-megatron schedule`` with true times.
    * ``train/exposed_communication``: share of the logged step in which a rank waits in collectives
      and transfers, which includes bubble and slow ranks; a mean over ranks. On GPUs the compute
      stream waits: what computation hides does not count, as in the table of :class:`Profile`.
    * ``train/learning_rate``: that of the step. Parameter groups whose rate differs from that of
      the first one follow as ``train/learning_rate/1``, numbered over all optimizers.
    * ``train/gradient_norm``: 2-norm of the whole model's gradient before it is clipped, equal to
      that of one process in every layout. If the Trainer does not clip by norm, it is computed at
      logged steps alone.
    * ``train/loss_scale`` and ``train/skipped_steps``: with precision ``16-mixed``.
    * ``train/peak_memory_gib`` and ``train/reserved_memory_gib``: largest allocated memory since
      the start, and memory that torch's allocator holds, on the rank with the most (GiB).

    For modules without one GPT, FLOPs are counted by torch: a copy of the module runs
    ``training_step`` and its backward pass once on meta tensors, and attention counts in full.

    A value that does not exist is left out: tokens of batches without token ids, FLOPs of modules
    whose step cannot run on meta tensors, the MFU of a GPU whose peak is not known, memory on
    CPUs, the bubble without pipeline stages, communication on one rank, and under strategies other
    than :class:`MegatronStrategy` also norm and loss scale. Graphs of whole steps have no bubble,
    and graphs with collectives no exposed communication, because the host sees nothing inside of
    them: a message says so once. :class:`Profile` shows both.

    The device is waited for at logged steps alone, whose values loggers read in any case. A logger
    that raises an error in a step does not end the training: the error is shown once.

    Args:
        metrics: Names of the metrics to log; None logs all.
        peak_tflops: Peak of a GPU for ``train/mfu``, such as the one that ``lightning-megatron
            doctor`` has measured; None takes the published peak of dense products in the dtype of
            the parameters (TFLOP/s).

    Communication: at logged steps, two all-reduces of some numbers over the world on the CPU; one
        of a scalar over the world if a norm is computed.
    """

    def __init__(
        self,
        metrics: list[Metric] | None = None,
        peak_tflops: Positive | None = None,
    ) -> None:
        arguments = coerced_arguments(TrainingMetrics.__init__, locals())
        chosen = arguments["metrics"]
        self.metrics: frozenset[str] = frozenset(get_args(Metric) if chosen is None else chosen)
        self.peak_tflops: float | None = arguments["peak_tflops"]
        #: All values of the last logged step, by name.
        self.values: dict[str, float] = {}
        #: Time of the parts of the last fit.
        self.clock = StepClock()
        #: Paths of the checkpoints that the last fit has written, in order.
        self.saved: dict[str, None] = {}
        self._undo = ExitStack()
        self._model_flops: ModelFlops | None = None
        self._begin()

    def _begin(self) -> None:
        self.values = {}
        self.saved = {}
        self.clock = StepClock()
        self._last_batch = -1
        #: Tokens and FLOPs of this rank's batches since the last logged step.
        self._tokens = 0
        self._flops = 0.0
        self._num_steps = 0
        #: Rates and gradient norm of the optimizers of a logged step, by their ids.
        self._rates: dict[int, list[float]] = {}
        self._norms: dict[int, Tensor | None] = {}
        self._is_told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The module is whole before its first run.
        if self._model_flops is None or self._model_flops.module is not pl_module:
            counts = not self.metrics.isdisjoint(("train/tflops_per_gpu", "train/mfu"))
            self._model_flops = ModelFlops(pl_module, counts)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy) and trainer.world_size > 1:
            executor = strategy.run.executor if strategy.layout.pp > 1 else None
            self.clock = StepClock(strategy.mesh, executor)
        measures = bool(_SAMPLED & self.metrics)
        self.clock.observe(trainer, lambda: measures and is_logged(trainer), self._undo)
        save = partial(self._save, trainer.save_checkpoint)
        replace_method(self._undo, trainer, "save_checkpoint", save)
        for logger in trainer.loggers:
            guard = LoggerGuard(logger)
            for name in ("log_metrics", "save"):
                guarded = partial(guard.call, getattr(logger, name))
                replace_method(self._undo, logger, name, guarded)

    def _save(self, save: Callable[..., Any], filepath: Any, *args: Any, **options: Any) -> None:
        with self.clock.during("saves"):
            save(filepath, *args, **options)
        self.saved[str(filepath)] = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.enter("training")

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if is_logged(trainer):
            # Schedules change the rates before the step ends.
            self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            self._norms[id(optimizer)] = self._norm_of(trainer, optimizer)

    def _norm_of(self, trainer: Trainer, optimizer: Optimizer) -> Tensor | None:
        """Return the norm of an optimizer's gradients; None if it is that of the clipping."""
        module = trainer.lightning_module
        clips = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
        is_own = is_overridden("configure_gradient_clipping", module)
        if not isinstance(trainer.strategy, MegatronStrategy) or (
            clips and module.automatic_optimization and not is_own
        ):
            return None
        main = trainer.strategy.run.state.main
        return grad_norm(main, names_in(main.names_of(optimizer)))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        index = total_batch_index(trainer)
        if index == self._last_batch:
            # A progress bar before this callback has asked for the values.
            return
        self._last_batch = index
        self.clock.end_step()
        self._add(batch)
        if accumulates(trainer):
            return
        self._num_steps += 1
        if is_logged(trainer):
            self.values = self._measure(trainer)
            # Tensors on the CPU, because Lightning keeps numbers on the device and reads them back.
            chosen = {
                name: torch.tensor(value)
                for name, value in self.values.items()
                if name in self.metrics or name.rpartition("/")[0] in self.metrics
            }
            log_step_values(trainer, pl_module, chosen)

    def _add(self, batch: Any) -> None:
        """Add the work of a batch, of which the host knows the shapes alone."""
        self._tokens += count_tokens(batch)
        if self._model_flops is not None:
            self._flops += self._model_flops.of(batch)

    def _measure(self, trainer: Trainer) -> dict[str, float]:
        """Return all values of the steps since the last call.

        Communication: two all-reduces over the world on the CPU.
        """
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        lap = self.clock.lap()
        seconds = [lap["training"] + lap["data"], lap["data"]]
        batches = self.clock.take_steps()
        sampled = StepTimes(*map(sum, zip(*batches, strict=True))) if batches else StepTimes()
        largest = [*seconds, *memory_of(device), sampled.schedule, sampled.num_replayed]
        most = torch.tensor(largest, dtype=torch.float64)
        summed = [self._tokens, self._flops, sampled.passes, sampled.share_of_waits]
        sums = torch.tensor(summed, dtype=torch.float64)
        if isinstance(trainer.strategy, MegatronStrategy):
            mesh = trainer.strategy.mesh
            most = all_reduce_(most, mesh.world_cpu, "max")
            sums = all_reduce_(sums, mesh.world_cpu)
            # Ranks of a replica read the same batch.
            work = sums[:2] / (mesh.world.size // mesh.dp.size)
        else:
            work = sums[:2] * count_replicas(trainer)
        num_steps = self._num_steps
        self._tokens = 0
        self._flops = 0.0
        self._num_steps = 0
        step, data, peak, reserved, schedule, num_replayed = most.tolist()
        values = {"train/step_seconds": step / num_steps, "train/data_seconds": data / num_steps}
        values |= self._rates_of_work(trainer, *(work / step).tolist())
        passes, exposed = (sums[2:] / trainer.world_size).tolist()
        values |= self._sampled(trainer, schedule, passes, exposed, int(num_replayed))
        values |= self._values_of_step(trainer)
        if device.type == "cuda":
            values["train/peak_memory_gib"] = peak
            values["train/reserved_memory_gib"] = reserved
        return values

    def _rates_of_work(self, trainer: Trainer, tokens: float, flops: float) -> dict[str, float]:
        """Return what follows from the tokens and FLOPs per second of all ranks."""
        values = {}
        if tokens:
            values["train/tokens_per_second"] = tokens
            values["train/tokens_per_second_per_gpu"] = tokens / trainer.world_size
        if flops:
            tflops = flops / trainer.world_size / 1e12
            values["train/tflops_per_gpu"] = tflops
            peak = self.peak_tflops or published_peak(trainer)
            if peak:
                values["train/mfu"] = tflops / peak
        return values

    def _sampled(
        self, trainer: Trainer, schedule: float, passes: float, exposed: float, num_replayed: int
    ) -> dict[str, float]:
        """Return bubble and exposed communication of the logged step.

        Args:
            schedule: That of the rank on which it takes longest; see :class:`StepTimes` (seconds).
            passes: Mean over the ranks (seconds).
            exposed: Share of a step in which a rank waits for others; mean over the ranks.
            num_replayed: Collectives that graphs have run, on the rank with the most.
        """
        is_measured = self.metrics & _SAMPLED and trainer.world_size > 1
        if not isinstance(trainer.strategy, MegatronStrategy) or not is_measured:
            return {}
        values = {}
        missing = []
        if schedule:
            values["train/bubble"] = 1 - passes / schedule
        elif trainer.strategy.layout.pp > 1:
            missing.append("train/bubble")
        if num_replayed:
            missing.append("train/exposed_communication")
        else:
            values["train/exposed_communication"] = exposed
        unseen = self.metrics.intersection(missing)
        if unseen and not self._is_told:
            self._is_told = True
            rank_zero_info(
                f"{' and '.join(sorted(unseen))} cannot be logged: CUDA graphs run "
                f"{num_replayed} collectives of a step, in which the host sees no waits. "
                "Profile shows them."
            )
        return values

    def _values_of_step(self, trainer: Trainer) -> dict[str, float]:
        """Return learning rates, gradient norm and loss scale of the step that has ended."""
        values = {}
        rates = [rate for group in self._rates.values() for rate in group]
        for number, rate in enumerate(rates):
            if number == 0 or rate != rates[0]:
                values[f"train/learning_rate/{number}".removesuffix("/0")] = float(rate)
        norms = list(self._norms.values())
        if isinstance(trainer.strategy, MegatronStrategy):
            precision = trainer.strategy.precision_plugin
            norms = [precision.last_grad_norm if norm is None else norm for norm in norms]
            for name, value in precision.values_to_log().items():
                values[f"train/{name}"] = value
        squares = [norm.double().square() for norm in norms if norm is not None]
        if squares:
            values["train/gradient_norm"] = torch.stack(squares).sum().sqrt().item()
        self._rates = {}
        self._norms = {}
        return values

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.lap()
        self._undo.close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._undo.close()


class LoggerGuard:
    """Context in which an error of a logger does not end the training, but is shown once.

    Services of other packages raise errors of any type, of which none changes the training.
    """

    def __init__(self, logger: Logger) -> None:
        self._name = type(logger).__name__
        self._is_told = False

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call a method of the logger."""
        with self:
            method(*args, **options)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._is_told:
            self._is_told = True
            rank_zero_warn(
                f"{self._name} failed to log: {type(error).__name__}: {error}. The training goes "
                "on, and values may be missing there. Later errors of this logger are not shown."
            )
        return True


def count_replicas(trainer: Trainer) -> int:
    """Return the number of data replicas; tensor and pipeline ranks count once."""
    return getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the largest allocated and the reserved memory of a GPU (GiB); 0 on CPUs."""
    if device.type != "cuda":
        return 0.0, 0.0
    allocated = torch.cuda.max_memory_allocated(device)
    return allocated / GIB, torch.cuda.memory_reserved(device) / GIB


def published_peak(trainer: Trainer) -> float | None:
    """Return the published peak of dense products on a GPU of the run (TFLOP/s); None if unknown.

    Lightning's table has more GPUs, and other dtypes, than ours.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    dtype = next(trainer.lightning_module.parameters()).dtype
    chip = known_chip(torch.cuda.get_device_name(device))
    if chip is not None and dtype.itemsize == 2:
        return chip.products / 1e12
    peak = get_available_flops(device, dtype)
    return None if peak is None else peak / 1e12
