"""Recorder of the user's log calls during the microbatches of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.models.remote_tensor import RemoteTensor
from lightning_megatron.strategy.logs.merge import (
    Weight,
    stack_scalars,
    total_weight,
    weighted_mean,
)
from lightning_megatron.strategy.logs.output_calls import OutputCall, OutputCalls, Target

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


@dataclass(frozen=True)
class LogCall:
    """Arguments of a log call except the value.

    Args:
        batch_size: Weight in a mean over batches if ``has_weight`` is false (samples).
    """

    name: str
    options: Mapping[str, Any]
    is_double: bool = False
    batch_size: float = 0
    has_weight: bool = False

    @property
    def reduction(self) -> str:
        """Return the reduction over microbatches: mean, sum, max or min."""
        fx = self.options.get("reduce_fx", "mean")
        return _REDUCTIONS.get(fx if isinstance(fx, str) else getattr(fx, "__name__", ""), "mean")

    def times(self, is_training: bool) -> tuple[bool, bool]:
        """Return whether to log by step and by epoch; the defaults depend on the hook."""
        on_step = self.options.get("on_step")
        on_epoch = self.options.get("on_epoch")
        if on_step is None:
            on_step = is_training
        if on_epoch is None:
            on_epoch = not is_training
        return on_step, on_epoch


@dataclass(frozen=True)
class MetricCall:
    """Arguments of a log call of a metric, and the metric's location in the module.

    Args:
        dtype: Dtype of the value of this step; None if the metric was only updated.
    """

    name: str
    path: str
    options: Mapping[str, Any]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class _LoggedValue:
    """A logged value, its weight, and the index of its microbatch.

    Args:
        run: Index of the microbatch; -1 outside of a step.
    """

    value: Tensor
    weight: Weight
    run: int


@dataclass
class Recorder:
    """Log calls of one batch.

    Args:
        microbatch_size: Size of the current microbatch (samples).
        is_muted: Whether log calls are dropped, because the step runs now only up to the model and
            will run again.
        run: Index of the current run of the step, counting only runs that are not muted.
        calls: First log call of each value, by name.
        metrics: Logged metrics with the arguments of their log calls, by name.
        metric_values: Values of metrics in this step, by name.
        outputs: Calls of loggers and of ``self.print``; None drops them, because this is a trial.
    """

    microbatch_size: int = 1
    is_muted: bool = False
    run: int = -1
    calls: dict[str, LogCall] = field(default_factory=dict)
    values: dict[str, list[_LoggedValue]] = field(default_factory=dict)
    metrics: dict[str, tuple[Metric, dict[str, Any]]] = field(default_factory=dict)
    metric_values: dict[str, list[_LoggedValue]] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    outputs: OutputCalls | None = field(default_factory=OutputCalls)

    @property
    def is_trial(self) -> bool:
        """Return whether calls of loggers are dropped, because this is a trial."""
        return self.outputs is None

    def begin(self, microbatch_size: int, *, is_muted: bool) -> None:
        """Start recording the next microbatch.

        Args:
            microbatch_size: Size of the microbatch (samples).
        """
        self.microbatch_size = microbatch_size
        self.is_muted = is_muted
        self.run += not is_muted

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record one call of ``LightningModule.log``."""
        bound = _log_signature().bind(None, *args, **kwargs)
        options = dict(bound.arguments)
        options.pop("self")
        name = options.pop("name")
        value = options.pop("value")
        if isinstance(value, Metric):
            options.pop("metric_attribute", None)
            self._keep_metric(name, value, options)
            return
        if isinstance(value, RemoteTensor):
            value = value.read_at_end("it is logged")
        if self.is_muted:
            return
        tensor = _scalar(name, value)
        if not isinstance(value, Tensor):
            self.numbers.add(name)
        weight = options.pop("batch_size", None)
        if not isinstance(weight, Tensor):
            weight = weight or self.microbatch_size
        call = LogCall(
            name,
            options,
            is_double=tensor.dtype == torch.float64,
            has_weight=isinstance(weight, Tensor),
        )
        self.calls.setdefault(name, call)
        self.values.setdefault(name, []).append(_LoggedValue(tensor, weight, self.run))

    def keep_call(self, module: LightningModule, target: Target, args: Any, kwargs: Any) -> None:
        """Record one call of a logger or of ``self.print``."""
        arguments = apply_to_collection(
            (args, kwargs), RemoteTensor, lambda value: value.read_at_end("it is written")
        )
        if not self.is_muted and self.outputs is not None:
            self.outputs.keep(target, arguments, module, self.run, self.microbatch_size)

    def adopt(self, recorder: Recorder) -> None:
        """Add the log calls of another recorder after those of this one."""
        if self.outputs is not None and recorder.outputs is not None:
            self.outputs.entries.update(recorder.outputs.entries)
        for name, call in recorder.calls.items():
            self.calls.setdefault(name, call)
            self.values.setdefault(name, []).extend(recorder.values[name])
        for name, metric in recorder.metrics.items():
            self.metrics[name] = metric
            self.metric_values.setdefault(name, []).extend(recorder.metric_values[name])

    def merged(
        self, counts: Sequence[Weight] | None = None
    ) -> tuple[list[LogCall], list[Tensor], list[Weight]]:
        """Reduce the values of each name over the microbatches; means are over samples or tokens.

        Args:
            counts: Token count of each microbatch, the weights of means; None means weights in
                samples (tokens).

        Returns:
            The log calls; the reduced values in float64; and the total weights of the calls with
            ``has_weight``.
        """
        calls = []
        values = []
        totals = []
        for name, call in self.calls.items():
            entries = self.values[name]
            # Values logged outside of the step belong to no microbatch.
            by_tokens = counts is not None and call.reduction == "mean" and entries[0].run >= 0
            weights = [counts[entry.run] if by_tokens else entry.weight for entry in entries]  # type: ignore[index]
            stacked = stack_scalars([entry.value for entry in entries])
            if call.reduction == "mean":
                values.append(weighted_mean(stacked, weights))
            else:
                values.append(getattr(stacked, call.reduction)())
            total = total_weight(weights)
            if by_tokens or isinstance(total, Tensor):
                totals.append(total)
                calls.append(replace(call, has_weight=True))
            else:
                calls.append(replace(call, batch_size=total))
        return calls, values, totals

    def merged_outputs(self, counts: Sequence[Weight] | None = None) -> list[OutputCall]:
        """Return one call of a logger or of ``self.print`` for those of all microbatches.

        Args:
            counts: Token count of each microbatch; None means weights in samples (tokens).
        """
        return [] if self.outputs is None else self.outputs.merged(counts)

    def merged_metrics(
        self, path_of: Callable[[Metric], str | None]
    ) -> tuple[list[MetricCall], list[Tensor]]:
        """Return the log calls of metrics, and their float64 values of this step, if any.

        Args:
            path_of: Function that returns the qualified name of a metric in the module, or None.
        """
        calls = []
        values = []
        for name, (metric, options) in self.metrics.items():
            path = path_of(metric)
            if path is None:
                raise ValueError(
                    f"`self.log({name!r}, metric)` must get a torchmetrics.Metric that is a "
                    f"submodule of the LightningModule: {type(metric).__name__} is not among its "
                    "modules. Set it as an attribute in `__init__`."
                )
            call = MetricCall(name, path, options)
            entries = self.metric_values[name]
            if entries:
                call = replace(call, dtype=entries[0].value.dtype)
                weights = [entry.weight for entry in entries]
                values.append(
                    weighted_mean(stack_scalars([entry.value for entry in entries]), weights)
                )
            calls.append(call)
        return calls, values

    def _keep_metric(self, name: str, metric: Metric, options: dict[str, Any]) -> None:
        if self.is_muted:
            return
        self.metrics[name] = (metric, options)
        entries = self.metric_values.setdefault(name, [])
        value = metric._forward_cache
        if isinstance(value, Tensor) and value.numel() == 1:
            entries.append(_LoggedValue(value.detach().reshape(()), self.microbatch_size, self.run))


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` must get a tensor with one element: its shape is "
                f"{tuple(value.shape)}. Reduce it first, as in value.mean()."
            )
        return value.detach().reshape(())
    if isinstance(value, Number):
        return torch.tensor(value)
    raise ValueError(
        f"`self.log({name!r}, ...)` must get a number, a tensor with one element or a "
        f"torchmetrics.Metric: it got a {type(value).__name__}. Use `self.log_dict` for several "
        "values."
    )


@cache
def _log_signature() -> inspect.Signature:
    return inspect.signature(LightningModule.log)
