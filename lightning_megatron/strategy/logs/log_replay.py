"""Transfer of log calls from the last stage's microbatches to every rank, once per batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.groups.collectives import all_reduce_, broadcast_, broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.logs.log_record import LogCall, MetricCall, Recorder
from lightning_megatron.strategy.logs.merge import Weight, scalar_on
from lightning_megatron.strategy.logs.output_calls import OutputCall
from lightning_megatron.strategy.modules.serialization import pack, unpack


@dataclass(frozen=True)
class _Form:
    """Message of the last stage: arguments of log calls, and the step's output."""

    calls: tuple[LogCall, ...]
    metrics: tuple[MetricCall, ...]
    is_counted: bool
    returns_more: bool

    @property
    def weighted(self) -> list[int]:
        """Indices of the calls whose weights are sent after all values."""
        return [index for index, call in enumerate(self.calls) if call.has_weight]


@dataclass(frozen=True)
class ReplayedLogs:
    """Values that all stages have received from the last stage.

    Args:
        extra: Additional scalars such as the loss, in float64.
    """

    extra: list[Tensor]
    is_counted: bool
    returns_more: bool


class LogReplay:
    """Broadcast of the loss and recorded values from the last stage to all ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._forms: dict[Any, _Form] = {}
        self._paths: dict[int, str] = {}

    @contextmanager
    def record(
        self, module: LightningModule, recorder: Recorder | None = None
    ) -> Iterator[Recorder]:
        """Redirect ``module.log`` to a recorder inside the block; None creates a new one.

        Blocks may be nested; the inner recorder gets the calls.
        """
        recorder = Recorder() if recorder is None else recorder
        outside = vars(module).get("log")
        module.log = recorder.log  # type: ignore[method-assign]
        try:
            yield recorder
        finally:
            del module.log
            if outside is not None:
                module.log = outside  # type: ignore[method-assign]

    def replay(
        self,
        module: LightningModule,
        recorder: Recorder,
        key: tuple[Any, ...],
        extra: Sequence[Weight] = (),
        counts: Sequence[Weight] | None = None,
        returns_more: bool = False,
        is_repeated: bool = False,
    ) -> ReplayedLogs:
        """Log the merged values on this rank as if the whole batch had run here.

        Args:
            recorder: Log calls of this stage; only those of the last stage are used.
            key: Name of the hook and index of the dataloader. Calls with the same key usually log
                the same names.
            extra: Additional scalars of the last stage, such as the loss. All ranks give the same
                number of scalars.
            counts: Token count of each microbatch on the last stage, the weights of means over
                microbatches, ranks and the batches of an epoch. None means weights in samples
                (tokens).

        Returns:
            The additional scalars and flags of the last stage.

        Communication: one broadcast over pp; one broadcast of flags over pp on the CPU, one of
        the calls' arguments if they changed, and one of the calls of loggers if there are any; one
        all-reduce over the data axis for each kind of
        reduction of the values that are logged by step with ``sync_dist``.
        """
        calls, values, weights = recorder.merged(counts)
        metrics, steps = recorder.merged_metrics(lambda metric: self._path_of(metric, module))
        # A replay of a graph makes no calls.
        outputs = [] if is_repeated else recorder.merged_outputs(counts)
        form = _Form(tuple(calls), tuple(metrics), counts is not None, returns_more)
        form, outputs = self._agree(key, form, outputs, module, is_repeated)
        for output in outputs:
            output.make(module)
        num_calls = len(form.calls)
        weighted = form.weighted
        end = num_calls + len(weighted)
        last = end + sum(call.dtype is not None for call in form.metrics)
        vector = self._from_last_stage([*values, *weights, *steps, *extra], last + len(extra))
        by_index = dict(zip(weighted, vector[num_calls:end], strict=True))
        is_training = key[0] == "training_step"
        reduced = self._reduce_by_step(form.calls, vector, by_index, is_training)
        for index, call in enumerate(form.calls):
            value = vector[index] if call.is_double else vector[index].to(torch.float32)
            options = self._options_of(call, value, module, is_training, index in reduced)
            # Pass a float, because the Trainer would round the mean of integer batch sizes down.
            module.log(
                call.name, value, batch_size=by_index.get(index, float(call.batch_size)), **options
            )
        self._log_metrics(module, form.metrics, iter(vector[end:last]))
        return ReplayedLogs(list(vector[last:]), form.is_counted, form.returns_more)

    def _options_of(
        self,
        call: LogCall,
        value: Tensor,
        module: LightningModule,
        is_training: bool,
        is_reduced: bool,
    ) -> dict[str, Any]:
        """Return the options with which the Trainer logs a value."""
        options = dict(call.options)
        is_shown = options.get("prog_bar") and self._mesh.rank == 0
        if is_reduced:
            # ``sync_dist`` stays set, because the Trainer warns without it; ``rank_zero_only``
            # keeps the Trainer from reducing again.
            options["rank_zero_only"] = True
        if is_shown and is_training and call.times(is_training) == (True, False):
            bar = getattr(getattr(module, "trainer", None), "progress_bar_callback", None)
            # Bars without this method read the value after every batch, for which the host waits.
            keep = getattr(bar, "keep_until_drawn", None)
            if keep is not None:
                keep(call.name, value)
            is_shown = bar is not None and keep is None
        if "prog_bar" in options:
            options["prog_bar"] = bool(is_shown)
        return options

    def _path_of(self, metric: Metric, module: LightningModule) -> str | None:
        if id(metric) not in self._paths:
            self._paths = {
                id(part): path for path, part in module.named_modules() if isinstance(part, Metric)
            }
        return self._paths.get(id(metric))

    def _log_metrics(
        self, module: LightningModule, calls: Sequence[MetricCall], values: Iterator[Tensor]
    ) -> None:
        """Log metrics; their states are equal on all stages when the Trainer reads the results."""
        for call in calls:
            metric = module.get_submodule(call.path)
            options = dict(call.options)
            if call.dtype is not None:
                # The Trainer reads the value of this step from this attribute.
                metric._forward_cache = next(values).to(call.dtype)
            if self._mesh.rank != 0:
                options["prog_bar"] = False
            module.log(call.name, metric, **options)  # type: ignore[arg-type]

    def share_outputs(
        self, module: LightningModule, recorder: Recorder, counts: Sequence[Weight] | None = None
    ) -> None:
        """Make the calls of loggers and of ``self.print`` of a step without other log calls.

        Args:
            recorder: Calls of this stage; only those of the last stage are made.
            counts: Token count of each microbatch; None means weights in samples (tokens).

        Communication: one broadcast of an object over pp on the CPU.
        """
        for output in self._sent(recorder.merged_outputs(counts), module):
            output.make(module)

    def _agree(
        self,
        key: Any,
        form: _Form,
        outputs: list[OutputCall],
        module: LightningModule,
        is_repeated: bool,
    ) -> tuple[_Form, list[OutputCall]]:
        """Return the message and the calls of the last stage."""
        axis = self._mesh.pp_cpu
        if axis.size == 1:
            return form, outputs
        if is_repeated and key in self._forms:
            return self._forms[key], []
        last = self._mesh.layout.loss_stage
        flags = torch.tensor([int(self._forms.get(key) != form), int(bool(outputs))])
        is_changed, has_outputs = broadcast_(flags, axis, last).tolist()
        if is_changed:
            self._forms[key] = broadcast_object(form, axis, last)
        return self._forms[key], self._sent(outputs, module) if has_outputs else []

    def _sent(self, outputs: list[OutputCall], module: LightningModule) -> list[OutputCall]:
        """Return the calls of the last stage."""
        axis = self._mesh.pp_cpu
        if axis.size == 1:
            return outputs
        packed = pack(outputs, module) if self._mesh.has_loss else None
        packed = broadcast_object(packed, axis, self._mesh.layout.loss_stage)
        return unpack(packed, module, torch.device("cpu"))

    def _from_last_stage(self, values: Sequence[Weight], count: int) -> Tensor:
        device = self._mesh.device
        axis = self._mesh.pp
        if self._mesh.has_loss and values:
            vector = torch.stack([scalar_on(value, device) for value in values])
        else:
            vector = torch.zeros(count, dtype=torch.float64, device=device)
        return broadcast_(vector, axis, self._mesh.layout.loss_stage) if count else vector

    def _reduce_by_step(
        self,
        calls: Sequence[LogCall],
        vector: Tensor,
        weights: Mapping[int, Tensor],
        is_training: bool,
    ) -> set[int]:
        """Reduce values over the data axis, one message per kind; return the reduced indices.

        Values that are logged only by step are reduced as the Trainer would reduce them. Weighted
        means by step become means over all ranks, and their weights become sums over all ranks.
        """
        by_reduction: dict[str, list[int]] = {}
        for index, call in enumerate(calls):
            (on_step, on_epoch) = call.times(is_training)
            is_synced = on_step and call.options.get("sync_dist")
            if not is_synced or call.options.get("sync_dist_group") is not None:
                continue
            if index in weights:
                by_reduction.setdefault("weighted mean", []).append(index)
            elif not on_epoch:
                by_reduction.setdefault(call.reduction, []).append(index)
        if self._mesh.dp.size > 1:
            for reduction, indices in by_reduction.items():
                # Indexing with a list would copy the list to the device and block the host.
                values = [vector[index] for index in indices]
                if reduction == "weighted mean":
                    self._average(values, [weights[index] for index in indices])
                    continue
                reduced = all_reduce_(torch.stack(values), self._mesh.dp, reduction)  # type: ignore[arg-type]
                for value, result in zip(values, reduced, strict=True):
                    value.copy_(result)
        return {index for indices in by_reduction.values() for index in indices}

    def _average(self, values: list[Tensor], weights: list[Tensor]) -> None:
        """Replace values by weighted means over the data axis, and weights by sums, in place."""
        pairs = [
            torch.stack([value * weight, weight])
            for value, weight in zip(values, weights, strict=True)
        ]
        sums = all_reduce_(torch.stack(pairs), self._mesh.dp)
        for value, weight, (total, total_weight) in zip(values, weights, sums, strict=True):
            value.copy_(total / torch.where(total_weight > 0, total_weight, 1.0))
            weight.copy_(total_weight)
