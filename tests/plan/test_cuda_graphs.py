"""Settings of CUDA graphs are checked before any process exists, and their memory is estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan import CudaGraphs
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.cuda_graphs import GraphConditions, GraphScope, check_cuda_graphs
from lightning_megatron.plan.layout import ParallelLayout
from tests.refusals import check_refusals

FINE = GraphConditions(
    device_type="cuda",
    schedule="interleaved",
    transport="one_sided",
    is_automatic=True,
    offloads=False,
    keeps_core=False,
    compile_modes=(),
    environment={},
)
SEGMENTS, FULL = CudaGraphs("segments"), CudaGraphs("full")
UPDATES = CudaGraphs("segments", optimizer=True)


def test_a_mode_a_mapping_and_a_settings_object_are_equivalent():
    assert CudaGraphs.of("segments") == CudaGraphs.of({"mode": "segments"}) == SEGMENTS
    assert CudaGraphs.of(SEGMENTS) is SEGMENTS
    actual = CudaGraphs.of({"mode": "segments", "scopes": ["attention", "mlp"], "warmup_steps": 5})
    assert actual == CudaGraphs("segments", ("attention", "mlp"), 5)
    scopes = get_args(GraphScope)
    assert all(SEGMENTS.captures(scope) for scope in scopes)
    selected = CudaGraphs("segments", ("router", "preprocess"))
    assert [scope for scope in scopes if selected.captures(scope)] == ["router", "preprocess"]


def test_settings_that_contradict_each_other_are_refused():
    segments: dict[str, Any] = {"mode": "segments"}
    check_refusals(
        CudaGraphs.of,
        [
            (("partial",), "must be segments, full, CudaGraphs or a mapping of its settings or"),
            (({"mode": "segment"},), "cuda_graphs.mode must be segments or full: it is 'segment'."),
            (({},), "cuda_graphs must have mode: it has nothing."),
            (({"mode": "full", "warmup": 3},), "has no setting 'warmup'. Its settings are mode, "),
            (({**segments, "scopes": ["attention", "moe"]},), "scopes[1] must be embedding, "),
            (({**segments, "scopes": []},), "it is empty, so nothing would be captured."),
            (({**segments, "scopes": ["all", "mlp"]},), "and all includes the others."),
            (({"mode": "full", "scopes": ["attention"]},), "must be all with mode full"),
            (({**segments, "scopes": ["attention", "preprocess"]},), "Use router and preprocess"),
            (({**segments, "warmup_steps": 0},), "must be a whole number of at least 1: it is 0."),
            (
                ({**segments, "fixed_shapes": True, "on_new_shape": "capture"},),
                "Use on_new_shape of",
            ),
        ],
        ParallelPlanError,
    )


def test_runs_that_cannot_be_captured_are_refused():
    experts = CudaGraphs("segments", ("router", "experts"))
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}
    reader = {"gradient_reader": "Norms.on_after_backward"}
    refused: list[tuple[CudaGraphs, dict[str, Any], str]] = [
        (SEGMENTS, {"device_type": "cpu"}, "Use accelerator='gpu', or leave cuda_graphs out."),
        (FULL, {"is_automatic": False}, "Use automatic_optimization=True"),
        (SEGMENTS, {"schedule": "gpipe"}, "keeps all microbatches of a step at once"),
        (experts, {"transport": "all_to_all"}, "with scope experts needs messages of static size"),
        (FULL, {"transport": "all_to_all"}, "with mode full needs messages of static size"),
        (SEGMENTS, {"offloads": True}, "cannot be used with recompute.offload"),
        (SEGMENTS, {"keeps_core": True}, "cannot be used with recompute of full_except_core"),
        (FULL, {"compile_modes": ("default", "reduce-overhead")}, "mode='reduce-overhead'"),
        (SEGMENTS, {"environment": growing}, "Set NCCL_GRAPH_REGISTER=0"),
        (FULL, {"environment": {**both, "NCCL_GRAPH_REGISTER": "1"}}, "NCCL_GRAPH_REGISTER is '1'"),
        (UPDATES, {"precision": "16-mixed"}, "it is '16-mixed', with which the host reads"),
        (UPDATES, reader, "cannot be used with Norms.on_after_backward"),
    ]
    for graphs, changes, phrase in refused:
        check_cuda_graphs(graphs, FINE)
        given = graphs, replace(FINE, **changes)
        check_refusals(check_cuda_graphs, [(given, phrase)], UnsupportedError)
    accepted: list[tuple[CudaGraphs, dict[str, Any]]] = [
        (SEGMENTS, {"transport": "all_to_all"}),
        (CudaGraphs("segments", ("attention", "combine")), {"transport": "all_to_all"}),
        (FULL, {"transport": "auto"}),
        (FULL, {"precision": "16-mixed", **reader}),
        (UPDATES, {"precision": "bf16-mixed"}),
        (FULL, {"compile_modes": ("default", "max-autotune-no-cudagraphs")}),
        (FULL, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}),
        (FULL, {"environment": {**growing, "NCCL_GRAPH_REGISTER": "0"}}),
    ]
    for graphs, changes in accepted:
        check_cuda_graphs(graphs, replace(FINE, **changes))


def test_the_estimate_of_a_stage_has_a_part_for_graphs():
    model = GPTConfig.gpt2(num_layers=4, hidden_size=64, num_heads=4, vocab_size=128)
    layout = ParallelLayout(2, pp=2)
    step = TrainingShape(seq_length=64, num_microbatches=8)
    graphs = replace(step, cuda_graphs=SEGMENTS)
    for eager, captured in zip(
        estimate_memory(model, layout, step, "cpu"),
        estimate_memory(model, layout, graphs, "cpu"),
        strict=True,
    ):
        assert captured.graphs > eager.graphs == 0
        assert replace(captured, graphs=0) == eager
        assert captured.peak == eager.peak + captured.graphs
    gpipe = (model, layout, replace(graphs, schedule="gpipe"))
    check_refusals(estimate_memory, [(gpipe, "keep a limited number of microbatches")])
