"""What is logged for each microbatch reaches loggers once for the batch."""

from __future__ import annotations

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


class LoggingModule(nn.Module):
    """Stand-in for a LightningModule that records the calls of ``log``."""

    def __init__(self, metric: Metric | None = None) -> None:
        super().__init__()
        self.metric = metric
        self.logged: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged[name] = (value, options)


def replay(
    record: Any, extra: Any = (), counts: Any = None, metric: Metric | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    module: Any = LoggingModule(metric)
    log_replay = LogReplay(ParallelMesh.single())
    with log_replay.record(module) as recorder:
        record(module, recorder)
    outcome = log_replay.replay(module, recorder, ("training_step",), extra, counts)
    assert outcome.is_counted == (counts is not None)
    return module.logged, outcome.extra


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 2.5), ("avg", 2.5), (torch.mean, 2.5), ("sum", 4.0), ("max", 3.0), (min, 1.0)],
)
def test_values_of_microbatches_are_merged_with_the_requested_reduction(
    reduce_fx: Any, expected: float
) -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 1), (3.0, 3)):
            recorder.begin(size, is_muted=False)
            module.log("value", torch.tensor(value), reduce_fx=reduce_fx)

    logged, _ = replay(record)
    value, options = logged["value"]
    assert value.item() == expected
    assert options["batch_size"] == 4
    assert options["reduce_fx"] is reduce_fx


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_batch_size_argument_weighs_the_mean(kind: Any) -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 3), (5.0, 1), (torch.nan, 0)):
            if size or kind is torch.tensor:
                module.log("value", value, batch_size=kind(size))

    value, options = replay(record)[0]["value"]
    assert (value.item(), float(options["batch_size"])) == (2.0, 4.0)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_means_are_weighted_by_tokens_if_the_step_counts_them(
    as_tensors: bool, batch_size: int | None
) -> None:
    """Sums and values logged outside of microbatches ignore the counts; microbatches without tokens
    are left out.
    """

    def record(module: Any, recorder: Recorder) -> None:
        module.log("scale", 8.0)
        for value in (2.0, torch.nan, 6.0):
            recorder.begin(2, is_muted=True)
            module.log("value", 1.0)
            recorder.begin(2, is_muted=False)
            module.log("value", torch.tensor(value), batch_size=batch_size)
            module.log("rows", 1.0, reduce_fx="sum")

    counts = [3, 0, 1]
    logged, _ = replay(
        record, counts=[torch.tensor(count) for count in counts] if as_tensors else counts
    )
    assert logged["value"][0].item() == 3.0
    assert float(logged["value"][1]["batch_size"]) == 4.0
    assert logged["rows"][0].item() == 3.0
    assert logged["scale"][0].item() == 8.0


def test_mean_over_zero_tokens_is_zero() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        recorder.begin(1, is_muted=False)
        module.log("value", torch.nan)

    for count in (0, torch.tensor(0)):
        assert replay(record, counts=[count])[0]["value"][0].item() == 0.0


def test_value_of_a_metric_covers_all_microbatches() -> None:
    metric = MeanMetric()

    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 1), (3.0, 3)):
            recorder.begin(size, is_muted=False)
            metric(value)
            module.log("metric", metric)

    replay(record, metric=metric)
    assert metric._forward_cache.item() == 2.5


def test_metric_that_is_not_an_attribute_of_the_module_is_refused() -> None:
    with pytest.raises(
        ValueError, match="MeanMetric is not among its modules. Set it as an attribute"
    ):
        replay(lambda module, recorder: module.log("metric", MeanMetric()))


def test_logged_tensors_keep_their_dtype_and_numbers_become_float32() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        module.log("single", torch.tensor(1.0))
        module.log("double", torch.tensor(1.0, dtype=torch.float64))
        module.log("number", 7)

    logged, extra = replay(record, [torch.tensor(0.5)])
    assert [logged[name][0].dtype for name in logged] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]
    assert extra[0].item() == 0.5


def test_muted_passes_log_nothing() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for is_muted in (True, False, True):
            recorder.begin(1, is_muted=is_muted)
            module.log("count", 2.0, reduce_fx="sum")

    assert replay(record)[0]["count"][0].item() == 2.0


def test_metric_logged_in_every_microbatch_is_logged_once_as_an_object() -> None:
    metric = MeanMetric()

    def record(module: Any, recorder: Recorder) -> None:
        module.log("metric", metric, on_epoch=True)
        module.log("metric", metric, on_epoch=True)

    assert replay(record, metric=metric)[0]["metric"] == (metric, {"on_epoch": True})


@pytest.mark.parametrize(
    ("value", "words"), [(torch.ones(2), "one element"), ("text", "must get a number")]
)
def test_values_that_are_not_scalars_are_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replay(lambda module, recorder: module.log("value", value))


def test_log_method_of_the_module_is_restored_after_an_error() -> None:
    module: Any = LoggingModule()
    with pytest.raises(KeyError), LogReplay(ParallelMesh.single()).record(module):
        raise KeyError
    assert module.log.__self__ is module


def test_a_value_that_differs_between_microbatches_is_averaged_over_their_samples() -> None:
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


def test_an_error_in_code_for_rank_zero_says_which_rank_has_run_it() -> None:
    strategy = MegatronStrategy()
    trainer = SimpleNamespace(strategy=strategy, loggers=[])
    module: Any = SimpleNamespace(trainer=trainer)
    mesh: Any = SimpleNamespace(pp=SimpleNamespace(size=2, ranks=(7, 0)), rank=0)
    executor: Any = SimpleNamespace(is_probe=False, is_repeated=False)

    def fail(error: Exception) -> None:
        with StepOutput(mesh).of(module, Recorder(), executor):
            assert strategy.global_rank == rank_zero_only.rank == 7
            raise error

    def notes_of(error: Exception) -> str:
        with pytest.raises(type(error)):
            fail(error)
        assert strategy.global_rank == rank_zero_only.rank == 0
        return " ".join(error.__notes__)

    assert "Rank 0 counts as rank 7 in this step" in notes_of(AttributeError("writer"))
    assert "Use self.logger.experiment.log(...)" in notes_of(RunError("call init first"))


def test_throughput_counts_the_operations_of_a_replica_once() -> None:
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
    per_second = {name: value for name, value in metrics.items() if name.endswith("_per_sec")}
    assert per_second == {
        "device/batches_per_sec": 1.0,
        "batches_per_sec": 2.0,
        "device/samples_per_sec": 3.0,
        "samples_per_sec": 6.0,
        "device/items_per_sec": 6.0,
        "items_per_sec": 12.0,
        "device/flops_per_sec": 50.0,
        "flops_per_sec": 400.0,
    }
    assert metrics["device/mfu"] == 0.5
