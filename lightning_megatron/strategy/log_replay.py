"""Record what the user logs for each microbatch on the last stage, and log it once per batch on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_reduce_, broadcast_, broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.outputs import weighted_mean

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


@dataclass(frozen=True)
class LogCall:
    """Hold how a value is logged: everything but the value.

    Args:
        name: Name of the value.
        options: Arguments of ``LightningModule.log``, sorted by name.
        is_double: Whether the value is kept in float64.
        batch_size: Samples that the value stands for (samples).
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    is_double: bool = False
    batch_size: int = 0

    @property
    def reduction(self) -> str:
        """How values of several microbatches become one: mean, sum, max or min."""
        fx = dict(self.options).get("reduce_fx", "mean")
        return _REDUCTIONS.get(fx if isinstance(fx, str) else getattr(fx, "__name__", ""), "mean")


@dataclass
class Recorder:
    """Collect the log calls of one batch.

    Args:
        microbatch_size: Samples of the microbatch that runs now (samples).
        is_muted: Whether to drop what is logged now: the step runs only up to the model, and again later.
    """

    microbatch_size: int = 1
    is_muted: bool = False
    calls: dict[str, LogCall] = field(default_factory=dict)
    values: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)
    metrics: dict[str, tuple[Metric, dict[str, Any]]] = field(default_factory=dict)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Keep one call of ``LightningModule.log``."""
        if self.is_muted:
            return
        bound = _log_signature().bind(None, *args, **kwargs)
        options = dict(bound.arguments)
        options.pop("self")
        name, value = options.pop("name"), options.pop("value")
        if isinstance(value, Metric):
            self.metrics[name] = (value, options)
            return
        tensor = _scalar(name, value)
        batch_size = options.pop("batch_size", None) or self.microbatch_size
        call = LogCall(name, tuple(sorted(options.items())), tensor.dtype == torch.float64)
        self.calls.setdefault(name, call)
        self.values.setdefault(name, []).append((tensor, batch_size))

    def merged(self) -> tuple[list[LogCall], list[Tensor]]:
        """Reduce the microbatches of every name to one value."""
        calls, values = [], []
        for name, call in self.calls.items():
            tensors, sizes = zip(*self.values[name], strict=True)
            calls.append(replace(call, batch_size=sum(sizes)))
            values.append(_merge(torch.stack([tensor.double() for tensor in tensors]), sizes, call.reduction))
        return calls, values


class LogReplay:
    """Bring recorded values from the last stage to all ranks, together with the loss, in one broadcast.

    Args:
        mesh: The groups of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._schemas: dict[Any, tuple[LogCall, ...]] = {}

    @contextmanager
    def record(self, module: LightningModule) -> Iterator[Recorder]:
        """Let ``module.log`` write into a recorder inside the block."""
        recorder = Recorder()
        module.log = recorder.log  # type: ignore[method-assign]
        try:
            yield recorder
        finally:
            del module.log

    def replay(
        self, module: LightningModule, recorder: Recorder, key: tuple[Any, ...], extra: list[Tensor]
    ) -> list[Tensor]:
        """Log the merged values on this rank as if the whole batch had run here.

        Args:
            module: The module whose ``log`` is called.
            recorder: What the last stage recorded; the other stages' records are dropped.
            key: Name of the hook, then the dataloader: the calls of one key have one form as a rule.
            extra: Scalars to bring along from the last stage, such as the loss.

        Returns:
            ``extra`` of the last stage, on every rank.

        Communication: one broadcast over pp, one of a flag over pp on the CPU, and one of the calls' form if it
        changed; one all-reduce over the data axis for values that every rank logs by step with ``sync_dist``.
        """
        calls, values = recorder.merged()
        if recorder.metrics and self._mesh.pp.size > 1:
            raise UnsupportedError(
                f"a torchmetrics.Metric cannot be logged with pp ({self._mesh.pp.size}) > 1: "
                f"{', '.join(recorder.metrics)}. Only the "
                "last stage updates it, and its compute() would wait for the others. Log its value instead, as in "
                "self.log(name, self.metric(predictions, targets), on_epoch=True), or use pp=1."
            )
        schema = self._agree(key, tuple(calls))
        vector = self._from_last_stage([*values, *extra], len(schema) + len(extra))
        reduced = self._reduce_by_step(schema, vector, key[0] == "training_step")
        for call, value in zip(schema, vector[: len(schema)], strict=True):
            self._log(module, call, value, is_reduced=call.name in reduced)
        for name, (metric, options) in recorder.metrics.items():
            module.log(name, metric, **self._for_this_rank(options))
        return list(vector[len(schema) :])

    def _agree(self, key: Any, calls: tuple[LogCall, ...]) -> tuple[LogCall, ...]:
        axis = self._mesh.pp_cpu
        if axis.size == 1:
            return calls
        last = axis.size - 1
        changed = torch.tensor([int(self._schemas.get(key) != calls)])
        if broadcast_(changed, axis, last).item():
            self._schemas[key] = broadcast_object(calls, axis, last)
        return self._schemas[key]

    def _from_last_stage(self, values: list[Tensor], count: int) -> Tensor:
        device, axis = self._mesh.device, self._mesh.pp
        if axis.is_last:
            scalars = [_on_device(value.detach(), device) for value in values]
            vector = torch.stack(scalars) if scalars else torch.zeros(0, dtype=torch.float64, device=device)
        else:
            vector = torch.zeros(count, dtype=torch.float64, device=device)
        return broadcast_(vector, axis, axis.size - 1) if count else vector

    def _reduce_by_step(self, schema: tuple[LogCall, ...], vector: Tensor, is_training: bool) -> set[str]:
        """Reduce what is logged by step only over the data axis, all values of one kind at once."""
        by_reduction: dict[str, list[int]] = {}
        for index, call in enumerate(schema):
            options = dict(call.options)
            on_step = is_training if options.get("on_step") is None else options["on_step"]
            on_epoch = not is_training if options.get("on_epoch") is None else options["on_epoch"]
            if on_step and not on_epoch and options.get("sync_dist") and options.get("sync_dist_group") is None:
                by_reduction.setdefault(call.reduction, []).append(index)
        if self._mesh.data.size > 1:
            for reduction, indices in by_reduction.items():
                # A list of indices would be copied to the device, which the host waits for.
                reduced = all_reduce_(torch.stack([vector[i] for i in indices]), self._mesh.data, reduction)  # type: ignore[arg-type]
                for index, value in zip(indices, reduced, strict=True):
                    vector[index].copy_(value)
        return {schema[index].name for indices in by_reduction.values() for index in indices}

    def _log(self, module: LightningModule, call: LogCall, value: Tensor, *, is_reduced: bool) -> None:
        options = self._for_this_rank(dict(call.options))
        if is_reduced:
            options["sync_dist"] = False
        value = value if call.is_double else value.to(torch.float32)
        module.log(call.name, value, batch_size=call.batch_size, **options)

    def _for_this_rank(self, options: dict[str, Any]) -> dict[str, Any]:
        # A value on the progress bar is read from the device after every batch; only rank 0 has a bar.
        return options if self._mesh.rank == 0 else {**options, "prog_bar": False}


def _merge(values: Tensor, sizes: tuple[int, ...], reduction: str) -> Tensor:
    if reduction == "sum":
        return values.sum()
    if reduction == "max":
        return values.max()
    if reduction == "min":
        return values.min()
    return weighted_mean(values, sizes)


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a scalar in float64 on the device; the host does not wait for the device, as it would for a copy."""
    if value.device.type == "cpu" and device.type != "cpu":
        return torch.full((), value.item(), dtype=torch.float64, device=device)
    return value.to(device=device, dtype=torch.float64).reshape(())


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` takes a tensor with one element: shape {tuple(value.shape)}. Only "
                "scalars can be "
                "logged. Reduce it first, as in value.mean()."
            )
        return value.detach().reshape(())
    if isinstance(value, Number):
        return torch.tensor(value)
    raise ValueError(
        f"`self.log({name!r}, ...)` takes a number, a tensor with one element or a torchmetrics.Metric: "
        f"{type(value).__name__}. Use `self.log_dict` for several values."
    )


@cache
def _log_signature() -> inspect.Signature:
    return inspect.signature(LightningModule.log)
