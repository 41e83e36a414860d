"""Arguments that the strategy cannot honour are refused before any process starts."""

from __future__ import annotations

import inspect
import re
import runpy
import types
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron import (
    FP8,
    CudaGraphs,
    ExpertLoad,
    JobOptions,
    MegatronStrategy,
    MemoryReport,
    RunReport,
    TokensProgressBar,
    TrainingMetrics,
)
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan import build_schedule
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.checks.run_checks import check_turns
from lightning_megatron.strategy.options.sizes import (
    check_batch_size,
    check_hosts,
    check_last_batch,
    check_sizes,
)
from lightning_megatron.strategy.options.strategy_options import StrategyOptions, notes_on
from tests.fits import Language, strategy_with


def trainer(devices: int, strategy: Any, **options: Any) -> Trainer:
    options |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    return Trainer(devices=devices, strategy=strategy, **options)


#: Arguments that the constructor refuses, and what the error says.
INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cp": 2, "context.transport": "bus"}, ParallelPlanError, "it is 'bus'"),
    ({"ep": 0}, ParallelPlanError, "ep must be a whole number of at least 1: it is 0"),
    ({"experts.transport": "pigeons"}, ParallelPlanError, "it is 'pigeons'"),
    ({"pp": 2, "vpp": 2, "schedule": "1f1b"}, ParallelPlanError, "Use schedule 'interleaved', 'zb-v'"),
    ({"pp": 2, "schedule": "1f1b", "pipeline.microbatch_group_size": 2}, ParallelPlanError, "belongs to schedule 'interleaved'"),
    ({"pp": 2, "schedule": "interleaved"}, ParallelPlanError, "needs vpp above 1"),
    ({"pp": 2, "pipeline.stage_layers": [1, 2, 3]}, ParallelPlanError, "it names 3 of them"),
    ({"pp": 2, "pipeline.stage_layers": "Et|t,m|L"}, UnsupportedError, "'m' at position 6"),
    ({"pp": 2, "schedule": "zb-v"}, ParallelPlanError, "runs two chunks per stage: vpp is 1"),
    ({"pp": 2, "vpp": 4, "schedule": "auto", "pipeline.microbatch_group_size": 4}, ParallelPlanError, r"\(4\) must be None with schedule 'auto'"),
    ({"pp": 2, "schedule": print, "pipeline.microbatch_group_size": 2}, ParallelPlanError, "must be None with schedule function print"),
    *(({"microbatch_size": size}, ParallelPlanError, "at least 1, batch or None") for size in (True, 1.5, "all")),
    ({"sequence_parallel": True}, ParallelPlanError, "needs tp above 1"),
    ({"linear.overlap": True}, ParallelPlanError, "needs tp above 1 and sequence_parallel: tp is 1"),
    ({"tp": 2, "sequence_parallel": False, "linear.overlap": True}, ParallelPlanError, "sequence_parallel False"),
    ({"experts.overlap": True}, ParallelPlanError, "experts.overlap needs ep above 1"),
    ({"experts.overlap": True, "ep": 2, "pp": 2}, ParallelPlanError, "schedule is '1f1b' with pp 2. Use schedule '1f1b' with pp=1, 'dualpipe-v'"),
    ({"experts.overlap": True, "ep": 2, "pp": 2, "vpp": 2, "schedule": "auto"}, ParallelPlanError, "schedule is 'auto'"),
    *(
        ({"experts.overlap": True, "ep": 2, **more}, UnsupportedError, f"experts.overlap cannot be used with {name}, because two microbatches")
        for name, more in (
            ("cuda_graphs", {"cuda_graphs": "segments"}),
            ("experts.transport of one_sided", {"experts.transport": "one_sided"}),
            ("experts.clones", {"experts.clones": 1}),
            ("linear.overlap", {"tp": 2, "linear.overlap": True}),
            ("linear.backend of te", {"linear.backend": "te"}),
            ("recompute with offload", {"recompute": {"parts": ["full"], "offload": True}}),
        )
    ),
    ({"loss_chunk": "never"}, ParallelPlanError, "auto, forward or None: it is 'never'"),
    ({"cuda_graphs": "parts"}, ParallelPlanError, "cuda_graphs must be segments, full"),
    ({"cuda_graphs": {"mode": "segments", "warmup_steps": 0}}, ParallelPlanError, "cuda_graphs.warmup_steps must be"),
]  # fmt: skip
#: Callbacks, an argument that they refuse, and what they accept.
INVALID_OF_CALLBACKS: list[tuple[Any, str, Any, str]] = [
    (MemoryReport, "after_steps", 0, "a whole number of at least 1"),
    (TokensProgressBar, "refresh_rate", 1.5, "a whole number of at least 0"),
    (RunReport, "train", None, "text"),
    (ExpertLoad, "per_expert", 1, "True or False"),
    (TrainingMetrics, "peak_tflops", 0.0, "a finite number above 0 or None"),
]


def test_invalid_arguments_are_refused_by_constructors():
    for arguments, error, words in INVALID:
        with pytest.raises(error, match=words):
            strategy_with(**arguments)
    for callback, name, value, legal in INVALID_OF_CALLBACKS:
        with pytest.raises(ParallelPlanError, match=f"{name} must be {legal}: it is"):
            callback(**{name: value})


def test_unknown_fields_of_records_are_refused_with_the_nearest_name():
    for name, nearest in (("optimizer.bucketsize", "bucket_size"), ("job.time_out", "timeout")):
        with pytest.raises(
            ParallelPlanError, match=f"Its settings are .* Did you mean {nearest}[?]"
        ):
            strategy_with(**{name: 1})
    assert (
        MegatronStrategy(job=JobOptions(timeout=5)).options
        == strategy_with(**{"job.timeout": 5}).options
    )


def without_ranges(kind: Any) -> Any:
    """Return an annotation without the ranges of its numbers."""
    if get_origin(kind) is Annotated:
        return without_ranges(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(map(without_ranges, get_args(kind)))]  # noqa: UP007
    return kind


def test_constructor_signature_and_option_fields_agree():
    parameters = inspect.signature(MegatronStrategy).parameters
    declared = get_type_hints(MegatronStrategy.__init__)
    kinds = get_type_hints(StrategyOptions, include_extras=True)
    assert list(parameters) == [field.name for field in fields(StrategyOptions)]
    for field in fields(StrategyOptions):
        kind = without_ranges(kinds[field.name])
        # Users may give a record as a mapping.
        given = kind | dict[str, Any] if is_dataclass(kind) else kind
        assert given == declared[field.name], field.name
        # Only the signature has defaults.
        assert field.default is MISSING


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of records by names such as ``job.timeout``."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        if is_dataclass(getattr(MegatronStrategy().options, name)):
            result |= {f"{name}.{field}": part for field, part in value.items()}
        else:
            result[name] = value
    return result


def test_every_argument_reaches_the_options():
    parameters = inspect.signature(MegatronStrategy).parameters
    values = {name: parameter.default for name, parameter in parameters.items()}
    defaults = flat({n: asdict(v) if is_dataclass(v) else v for n, v in values.items()})  # type: ignore[arg-type]
    assert flat(MegatronStrategy().options.as_dict()) == defaults
    changed: dict[str, Any] = {
        "tp": 2, "pp": 2, "vpp": 2, "pipeline.stage_layers": [1, 2, 2, 1], "cp": 2, "context.transport": "ring", "ep": 2, "etp": 1,
        "sequence_parallel": True, "schedule": "interleaved", "microbatch_size": "batch", "pipeline.microbatch_group_size": 4,
        "job.check_microbatches": False, "job.order": "tp-dp-cp-ep-pp", "recompute": "full", "loss_chunk": "auto",
        "experts.transport": "all_gather", "tensor_parallel_plan": {"*.up": "column"}, "pipeline_plan": {"layers": "blocks"},
        "job.timeout": 60.0, "job.backend": "nccl", "job.nccl": {"pp": {"max_ctas": 4}},
        "job.signal_check_interval": 5, "optimizer.zero": 0, "optimizer.bucket_size": 1000, "optimizer.gradient_dtype": "bfloat16",
        "optimizer.overlap_gradients": False, "optimizer.overlap_parameters": True, "linear.overlap": True, "job.check_gradients": True,
        "job.replica_check_interval": 7, "async_save": True, "layout": "auto", "optimizer.moments_dtype": "bfloat16",
        "cuda_graphs": asdict(CudaGraphs("segments", warmup_steps=4)),
    }  # fmt: skip
    # Those that contradict others.
    others = {
        "experts.rows",
        "experts.clones",
        "experts.overlap",
        "fp8",
        "linear.backend",
        "linear.parts",
    }
    assert defaults.keys() - changed.keys() == others
    options = flat(strategy_with(**changed).options.as_dict())
    assert {name: options[name] for name in changed} == changed


def test_what_the_trainer_cannot_run_is_refused():
    layout: dict[str, Any]
    for devices, layout, options, words in (
        (2, {"job.backend": "nccl"}, {}, "'nccl' needs GPUs, .* is cpu"),
        (1, {}, {"plugins": [AsyncCheckpointIO()]}, "CheckpointIO plugin"),
        (1, {}, {"sync_batchnorm": True}, "sync_batchnorm"),
    ):
        with pytest.raises((ParallelPlanError, UnsupportedError), match=words):
            trainer(devices, strategy_with(**layout), **options)


def test_strategy_is_registered_as_megatron():
    assert isinstance(StrategyRegistry.get("megatron"), MegatronStrategy)
    assert isinstance(trainer(1, "megatron").strategy, MegatronStrategy)
    with patch.dict(StrategyRegistry):
        runpy.run_path(inspect.getfile(MegatronStrategy))


def test_defaults_follow_other_options():
    assert MegatronStrategy(tp=2).options.shards_sequence
    assert not MegatronStrategy().options.shards_sequence
    assert not MegatronStrategy(tp=2, sequence_parallel=False).options.shards_sequence
    assert MegatronStrategy(pp=2).options.schedule_name == "1f1b"
    assert MegatronStrategy(pp=2, vpp=2).options.schedule_name == "interleaved"
    delta = MegatronStrategy(job={"timeout": 60}).options.job.timeout_delta
    assert delta is not None
    assert delta.total_seconds() == 60
    for size in (None, "batch", 3):
        options = MegatronStrategy(pp=2, microbatch_size=size).options  # type: ignore[arg-type]
        rule = options.microbatches(ParallelLayout(2, pp=2))
        assert (rule.is_whole, rule.is_chosen) == (size == "batch", size is None)


def test_settings_without_effect_or_with_a_faster_alternative_are_reported():
    def notes(kind, precision="bf16-mixed", **options):
        return " ".join(notes_on(strategy_with(**options).options, precision, kind))

    overlap: dict[str, Any] = {"tp": 2, "linear.overlap": True}
    for precision, kind in (("bf16-mixed", "cpu"), ("32-true", "cuda")):
        assert "has no effect" in notes(kind, precision, **overlap)
    assert "no effect" not in notes("cuda", **overlap)
    assert "cuda_graphs='segments'" in notes("cuda", fp8="tensorwise")
    assert notes("cuda", fp8="tensorwise", cuda_graphs="segments") == notes("cuda") == ""
    assert notes("cpu", fp8=FP8(emulate=True)) == ""


def test_ranks_that_share_memory_must_be_on_one_host():
    for layout, ranks_per_host, spanning_ranks in (
        (ParallelLayout(8, tp=4), 4, None),
        (ParallelLayout(8, tp=8), 4, "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (ParallelLayout(8, tp=4, order="dp-tp-pp"), 4, "[0, 2, 4, 6]"),
        (ParallelLayout(6, tp=2), 3, "[2, 3]"),
    ):
        check_hosts(MegatronStrategy(tp=layout.tp).options, layout, ranks_per_host)
        overlap = MegatronStrategy(tp=layout.tp, linear={"overlap": True}).options
        words = re.escape(f"ranks {spanning_ranks} are not")
        is_refused = spanning_ranks is not None
        with pytest.raises(ParallelPlanError, match=words) if is_refused else nullcontext():
            check_hosts(overlap, layout, ranks_per_host)


def test_turns_need_automatic_optimization_two_microbatches_and_no_compiler():
    options = strategy_with(**{"ep": 2, "experts.overlap": True}).options
    layout = ParallelLayout(2, **options.sizes())
    module = Language()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="needs automatic optimization"):
        check_sizes(module, options, layout, {"train_dataloaders": None})
    with pytest.raises(ParallelPlanError, match="at least two microbatches"):
        check_batch_size(4, options, layout)
    halves = strategy_with(**{"ep": 2, "experts.overlap": True, "microbatch_size": 2}).options
    check_batch_size(4, halves, layout)
    with pytest.raises(UnsupportedError, match="inside of layers: .* is compiled"):
        check_turns(torch.compile(torch.nn.Linear(1, 1)), options)  # type: ignore[arg-type]


def test_layout_places_chunks_in_the_shape_of_the_schedule():
    for schedule in ("zb-v", "dualpipe-v"):
        options = MegatronStrategy(pp=2, vpp=2, schedule=schedule).options
        layout = ParallelLayout(4, **options.sizes())
        assert layout.shape == "v"
        assert layout.embedding_groups() == [[0], [1]]
        assert layout.loss_stage == 0
    assert MegatronStrategy(pp=2, schedule="zb-h1").options.sizes()["shape"] == "loop"


def test_schedule_may_be_a_function():
    def custom_schedule(rank, pp, num_microbatches, vpp):
        return list(build_schedule("1f1b", pp, num_microbatches).actions(rank))

    options = MegatronStrategy(pp=2, schedule=custom_schedule, microbatch_size=1).options
    assert options.pass_order is options.custom_order
    layout = ParallelLayout(2, pp=2)
    assert options.microbatches(layout).count_for(6) == 6
    check_batch_size(6, options, layout)
    named = MegatronStrategy(pp=2, schedule="zb-h1").options
    assert (named.custom_order, named.pass_order) == (None, "zb-h1")


def test_batches_that_a_schedule_cannot_order_are_refused():
    sizes = {"pp": 2, "vpp": 2, "schedule": "dualpipe-v", "microbatch_size": 2}
    options = MegatronStrategy(**sizes).options
    layout = ParallelLayout(2, **options.sizes())
    check_batch_size(8, options, layout)
    check_last_batch(7, options, layout)
    with pytest.raises(ParallelPlanError, match="num_microbatches is 2, pp is 2"):
        check_batch_size(4, options, layout)
    with pytest.raises(ParallelPlanError, match="6 samples, which are 3.*Use drop_last=True"):
        check_last_batch(6, options, layout)
