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


class Module(nn.Module):
    """Stand in for a LightningModule: keep what reaches ``log``."""

    def __init__(self, metric: Metric | None = None) -> None:
        super().__init__()
        self.metric = metric
        self.logged: dict[str, tuple[Any, dict[str, Any]]] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged[name] = (value, options)


def replay(
    record: Any, extra: Any = (), counts: Any = None, metric: Metric | None = None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    module: Any = Module(metric)
    tool = LogReplay(ParallelMesh.single())
    with tool.record(module) as recorder:
        record(module, recorder)
    found = tool.replay(module, recorder, ("training_step",), extra, counts)
    assert found.is_counted == (counts is not None)
    return module.logged, found.extra


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 2.5), ("avg", 2.5), (torch.mean, 2.5), ("sum", 4.0), ("max", 3.0), (min, 1.0)],
)
def test_microbatches_are_merged_as_the_user_says(reduce_fx: Any, expected: float) -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 1), (3.0, 3)):
            recorder.begin(size, is_muted=False)
            module.log("value", torch.tensor(value), reduce_fx=reduce_fx)

    logged, _ = replay(record)
    value, options = logged["value"]
    assert value.item() == expected
    assert options["batch_size"] == 4
    assert options["reduce_fx"] is reduce_fx


def test_a_given_batch_size_is_the_weight() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        module.log("value", 1.0, batch_size=3)
        module.log("value", 5.0, batch_size=1)

    value, options = replay(record)[0]["value"]
    assert (value.item(), options["batch_size"]) == (2.0, 4)


def test_a_batch_size_may_be_a_tensor() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 3), (5.0, 1), (torch.nan, 0)):
            module.log("value", value, batch_size=torch.tensor(size))

    value, options = replay(record)[0]["value"]
    assert (value.item(), float(options["batch_size"])) == (2.0, 4.0)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_means_weigh_by_tokens_where_the_step_counts_them(
    as_tensors: bool, batch_size: int | None
) -> None:
    """Nothing else does, and a microbatch without a token takes no part."""

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


def test_the_mean_over_no_token_is_zero() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        recorder.begin(1, is_muted=False)
        module.log("value", torch.nan)

    for count in (0, torch.tensor(0)):
        assert replay(record, counts=[count])[0]["value"][0].item() == 0.0


def test_the_value_of_a_metric_is_that_of_all_microbatches() -> None:
    metric = MeanMetric()

    def record(module: Any, recorder: Recorder) -> None:
        for value, size in ((1.0, 1), (3.0, 3)):
            recorder.begin(size, is_muted=False)
            metric(value)
            module.log("metric", metric)

    replay(record, metric=metric)
    assert metric._forward_cache.item() == 2.5


def test_a_metric_that_the_module_does_not_hold_is_refused() -> None:
    with pytest.raises(
        ValueError, match="MeanMetric is not among its modules. Set it as an attribute"
    ):
        replay(lambda module, recorder: module.log("metric", MeanMetric()))


def test_the_kind_of_a_value_is_kept() -> None:
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


def test_a_pass_that_ends_at_the_model_logs_nothing() -> None:
    def record(module: Any, recorder: Recorder) -> None:
        for is_muted in (True, False, True):
            recorder.begin(1, is_muted=is_muted)
            module.log("count", 2.0, reduce_fx="sum")

    assert replay(record)[0]["count"][0].item() == 2.0


def test_a_metric_is_logged_once_as_it_is() -> None:
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


def test_the_modules_own_log_is_back_afterwards() -> None:
    module: Any = Module()
    with pytest.raises(KeyError), LogReplay(ParallelMesh.single()).record(module):
        raise KeyError
    assert module.log.__self__ is module
