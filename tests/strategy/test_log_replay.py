"""Values logged for each microbatch are logged once for the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.logs.log_record import Recorder
from lightning_megatron.strategy.logs.log_replay import LogReplay


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


def test_batch_size_argument_weighs_the_mean() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        module.log("value", 1.0, batch_size=3)
        module.log("value", 5.0, batch_size=1)

    value, options = replay(record)[0]["value"]
    assert (value.item(), options["batch_size"]) == (2.0, 4)


def test_batch_size_argument_may_be_a_tensor() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 3), (5.0, 1), (torch.nan, 0)):
            module.log("value", value, batch_size=torch.tensor(size))

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
