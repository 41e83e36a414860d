"""What is logged for each microbatch reaches loggers once for the batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric

from lightning_megatron import MegatronStrategy
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.log_replay import LogReplay
from lightning_megatron.strategy.logs.output_calls import OutputCalls, Target
from lightning_megatron.strategy.logs.step_output import StepOutput
from lightning_megatron.strategy.private.callback_patches import count_replicas_once


class Logging(nn.Module):
    """Stand-in for a LightningModule that records the calls of ``log``."""

    def __init__(self, metric: Metric | None = None) -> None:
        super().__init__()
        self.metric = metric
        self.logged: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged[name] = (value, options)


Record = Callable[[Any, Recorder], Any]


def replay(
    record: Record, extra: Any = (), counts: Any = None, metric: Metric | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    module: Any = Logging(metric)
    log_replay = LogReplay(ParallelMesh.single())
    with log_replay.record(module) as recorder:
        record(module, recorder)
    outcome = log_replay.replay(module, recorder, ("training_step",), extra, counts)
    assert outcome.is_counted == (counts is not None)
    return module.logged, outcome.extra


def logging(values: Any, **options: Any) -> Record:
    """Log each value of a microbatch of so many samples; with None as size, outside of one."""

    def record(module, recorder):
        for value, size in values:
            if size is not None:
                recorder.begin(size, is_muted=False)
            module.log("value", value, **options)

    return record


def test_values_of_microbatches_are_merged_with_the_requested_reduction():
    values = [(torch.tensor(1.0), 1), (torch.tensor(3.0), 3)]
    for reduce_fx, expected in (
        ("mean", 2.5), ("avg", 2.5), (torch.mean, 2.5), ("sum", 4.0), ("max", 3.0), (min, 1.0),
    ):  # fmt: skip
        value, options = replay(logging(values, reduce_fx=reduce_fx))[0]["value"]
        assert value.item() == expected
        assert options == {"batch_size": 4, "reduce_fx": reduce_fx}


def test_batch_size_argument_weighs_the_mean():
    for kind in (int, torch.tensor):

        def record(module, recorder, kind=kind):
            for value, size in ((1.0, 3), (5.0, 1), (torch.nan, 0)):
                if size or kind is torch.tensor:
                    module.log("value", value, batch_size=kind(size))

        value, options = replay(record)[0]["value"]
        assert (value.item(), float(options["batch_size"])) == (2.0, 4.0)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_means_are_weighted_by_tokens_if_the_step_counts_them(as_tensors, batch_size):
    """Sums and values logged outside of microbatches ignore the counts; microbatches without tokens
    are left out, as are muted passes.
    """

    def record(module, recorder):
        module.log("scale", 8.0)
        for value in (2.0, torch.nan, 6.0):
            recorder.begin(2, is_muted=True)
            module.log("value", 1.0)
            recorder.begin(2, is_muted=False)
            module.log("value", torch.tensor(value), batch_size=batch_size)
            module.log("rows", 1.0, reduce_fx="sum")

    kind: Any = torch.tensor if as_tensors else int
    logged, _ = replay(record, counts=[kind(count) for count in (3, 0, 1)])
    assert float(logged["value"][1]["batch_size"]) == 4.0
    expected = {"value": 3.0, "rows": 3.0, "scale": 8.0}
    assert {name: value.item() for name, (value, _) in logged.items()} == expected
    nothing, _ = replay(logging([(torch.nan, 1)]), counts=[kind(0)])
    assert nothing["value"][0].item() == 0.0


def test_a_metric_covers_all_microbatches_and_is_logged_once_as_an_object():
    metric = MeanMetric()

    def record(module, recorder):
        for value, size in ((1.0, 1), (3.0, 3)):
            recorder.begin(size, is_muted=False)
            metric(value)
            module.log("metric", metric, on_epoch=True)

    assert replay(record, metric=metric)[0]["metric"] == (metric, {"on_epoch": True})
    assert metric._forward_cache.item() == 2.5


def test_logged_tensors_keep_their_dtype_and_numbers_become_float32():
    for given, dtype in (
        (torch.tensor(1.0), torch.float32),
        (torch.tensor(1.0, dtype=torch.float64), torch.float64),
        (7, torch.float32),
    ):
        logged, extra = replay(logging([(given, None)]), [torch.tensor(0.5)])
        assert logged["value"][0].dtype == dtype
        assert extra[0].item() == 0.5


def test_values_that_cannot_be_merged_are_refused_and_the_log_method_is_restored():
    for value, words in (
        (torch.ones(2), "one element"),
        ("text", "must get a number"),
        (MeanMetric(), "MeanMetric is not among its modules. Set it as an attribute"),
    ):
        with pytest.raises(ValueError, match=words):
            replay(logging([(value, None)]))
    module: Any = Logging()
    with pytest.raises(KeyError), LogReplay(ParallelMesh.single()).record(module):
        raise KeyError
    assert module.log.__self__ is module


def test_a_value_that_differs_between_microbatches_is_averaged_over_their_samples():
    calls = OutputCalls()
    module = LightningModule()
    for run, (size, value) in enumerate([(3, 1.0), (1, 5.0)]):
        metrics = {"value": value, "tensor": torch.tensor([value]), "step": 7, "text": f"{run}"}
        calls.keep(Target(0, ()), ((metrics,), {"step": 7}), module, run, size)
    (merged,) = calls.merged(None)
    assert merged.args == ({"value": 2.0, "tensor": torch.tensor([2.0]), "step": 7, "text": "0"},)
    assert merged.kwargs == {"step": 7}
    (by_tokens,) = calls.merged([1, 3])
    assert by_tokens.args[0]["value"] == 4.0


class RunError(Exception):
    """Error of a package whose run exists on rank 0 only."""

    __module__ = "wandb.errors"


def test_an_error_in_code_for_rank_zero_says_which_rank_has_run_it():
    strategy = MegatronStrategy()
    trainer = SimpleNamespace(strategy=strategy, loggers=[])
    module: Any = SimpleNamespace(trainer=trainer)
    mesh: Any = SimpleNamespace(pp=SimpleNamespace(size=2, ranks=(7, 0)), rank=0)
    executor: Any = SimpleNamespace(is_probe=False, is_repeated=False)

    def fail(error):
        with StepOutput(mesh).of(module, Recorder(), executor):
            assert strategy.global_rank == rank_zero_only.rank == 7
            raise error

    def notes_of(error):
        with pytest.raises(type(error)):
            fail(error)
        assert strategy.global_rank == rank_zero_only.rank == 0
        return " ".join(error.__notes__)

    assert "Rank 0 counts as rank 7 in this step" in notes_of(AttributeError("writer"))
    assert "Use self.logger.experiment.log(...)" in notes_of(RunError("call init first"))


def test_throughput_counts_the_operations_of_a_replica_once():
    monitor = ThroughputMonitor(len)
    monitor._throughputs = {
        RunningStage.TRAINING: Throughput(available_flops=100.0, world_size=8, window_size=2)
    }
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    count_replicas_once(trainer, ranks_per_replica=4)
    for number in range(2):
        monitor._throughputs[RunningStage.TRAINING].update(
            time=float(number), batches=number, samples=3 * number, lengths=6 * number, flops=200
        )
    metrics = monitor._throughputs[RunningStage.TRAINING].compute()
    for name, of_device, of_all in (
        ("batches", 1.0, 2.0), ("samples", 3.0, 6.0), ("items", 6.0, 12.0), ("flops", 50.0, 400.0),
    ):  # fmt: skip
        both = metrics[f"device/{name}_per_sec"], metrics[f"{name}_per_sec"]
        assert both == (of_device, of_all), name
    assert metrics["device/mfu"] == 0.5
