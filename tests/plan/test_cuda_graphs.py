"""Settings of CUDA graphs are checked before any process exists, and messages name the remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any, get_args

import pytest

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan import CudaGraphs
from lightning_megatron.plan.cuda_graphs import GraphConditions, GraphScope, check_cuda_graphs

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


def test_a_mode_a_mapping_and_a_settings_object_are_equivalent() -> None:
    expected = CudaGraphs("segments")
    assert CudaGraphs.of("segments") == CudaGraphs.of({"mode": "segments"}) == expected
    assert CudaGraphs.of(expected) is expected
    assert CudaGraphs.of(None) is None
    actual = CudaGraphs.of({"mode": "segments", "scopes": ["attention", "mlp"], "warmup_steps": 5})
    assert actual == CudaGraphs("segments", ("attention", "mlp"), 5)
    assert expected == CudaGraphs(
        mode="segments",
        scopes=("all",),
        warmup_steps=3,
        evaluation=False,
        on_new_shape="eager",
        max_shapes=32,
        on_failure="eager",
        fixed_shapes=False,
        optimizer=False,
        check=False,
    )


def test_settings_are_frozen() -> None:
    graphs: Any = CudaGraphs("full")
    with pytest.raises(FrozenInstanceError):
        graphs.mode = "segments"
    assert hash(graphs) == hash(CudaGraphs("full"))


def test_all_captures_every_scope_and_other_scopes_only_themselves() -> None:
    scopes = get_args(GraphScope)
    assert all(CudaGraphs("segments").captures(scope) for scope in scopes)
    selected = CudaGraphs("segments", ("router", "preprocess"))
    assert [scope for scope in scopes if selected.captures(scope)] == ["router", "preprocess"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "partial",
            "cuda_graphs must be segments, full, CudaGraphs or a mapping of its settings or None: "
            "it is 'partial'.",
        ),
        (
            True,
            "cuda_graphs must be segments, full, CudaGraphs or a mapping of its settings or None: "
            "it is True, of type bool.",
        ),
        (
            {"mode": "segment"},
            "cuda_graphs.mode must be segments or full: it is 'segment'.",
        ),
        ({}, "cuda_graphs must have mode: it has nothing."),
        (
            {"mode": "full", "warmup": 3},
            "cuda_graphs has no setting 'warmup'. Its settings are mode, scopes, warmup_steps, "
            "evaluation, on_new_shape, max_shapes, on_failure, fixed_shapes, optimizer, check.",
        ),
        (
            {"mode": "segments", "scopes": ["attention", "moe"]},
            "cuda_graphs.scopes[1] must be embedding, attention, mlp, router, preprocess, experts, "
            "combine, head or all: it is 'moe'.",
        ),
        (
            {"mode": "segments", "scopes": "all"},
            "cuda_graphs.scopes must be a list with embedding, attention, mlp, router, preprocess, "
            "experts, combine, head or all for each element: it is 'all', of type str.",
        ),
        (
            {"mode": "segments", "warmup_steps": -1},
            "cuda_graphs.warmup_steps must be a whole number of at least 1: it is -1.",
        ),
        (
            {"mode": "segments", "warmup_steps": 0},
            "cuda_graphs.warmup_steps must be a whole number of at least 1: it is 0.",
        ),
        (
            {"mode": "full", "on_new_shape": "recapture"},
            "cuda_graphs.on_new_shape must be eager, error or capture: it is 'recapture'.",
        ),
        (
            {"mode": "segments", "on_new_shape": "capture", "max_shapes": 0},
            "cuda_graphs.max_shapes must be a whole number of at least 1: it is 0.",
        ),
        (
            {"mode": "full", "on_failure": "capture"},
            "cuda_graphs.on_failure must be eager or error: it is 'capture'.",
        ),
        (
            {"mode": "full", "optimizer": "yes"},
            "cuda_graphs.optimizer must be True or False: it is 'yes', of type str.",
        ),
        (
            {"mode": "segments", "scopes": []},
            "cuda_graphs.scopes must name at least one part of the model: it is empty, so nothing "
            "would be captured. Use all, or leave cuda_graphs out.",
        ),
        (
            {"mode": "segments", "scopes": ["mlp", "mlp"]},
            "cuda_graphs.scopes must name each part once: it is mlp, mlp. Name each once.",
        ),
        (
            {"mode": "segments", "scopes": ["all", "mlp"]},
            "cuda_graphs.scopes must be all or parts of it: it is all, mlp, and all includes the "
            "others. Use all alone, or leave it out.",
        ),
        (
            {"mode": "full", "scopes": ["attention"]},
            "cuda_graphs.scopes must be all with mode full: it is attention. A graph of a whole "
            "step has no eager parts. Use mode segments, or leave scopes out.",
        ),
        (
            {"mode": "segments", "scopes": ["attention", "preprocess"]},
            "cuda_graphs.scopes must name router if it names preprocess: it is attention, "
            "preprocess. Both are captured in one graph, because preprocess sorts tokens by the "
            "router's choices. Use router and preprocess, or neither.",
        ),
        (
            {"mode": "full", "fixed_shapes": True, "on_new_shape": "capture"},
            "cuda_graphs.on_new_shape must not be capture with fixed_shapes: with fixed_shapes "
            "no other shape may occur, and ranks do not compare their shapes. Use on_new_shape of "
            "error, or leave fixed_shapes out.",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        CudaGraphs.of(value)
    assert str(error.value) == message


SEGMENTS = CudaGraphs("segments")
FULL = CudaGraphs("full")
UPDATES = CudaGraphs("segments", optimizer=True)
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("graphs", "changes", "message"),
    [
        (
            SEGMENTS,
            {"device_type": "cpu"},
            "cuda_graphs (segments) needs GPUs: the device is 'cpu', which has no CUDA graphs. Use "
            "accelerator='gpu', or leave cuda_graphs out.",
        ),
        (
            FULL,
            {"is_automatic": False},
            "cuda_graphs (full) needs automatic optimization: the module uses manual optimization, "
            "in which its own code runs backward passes and updates in every step. Use "
            "automatic_optimization=True, or leave cuda_graphs out.",
        ),
        (
            SEGMENTS,
            {"schedule": "gpipe"},
            "cuda_graphs (segments) cannot be used with schedule 'gpipe', which keeps all "
            "microbatches of a step at once, so that each needs graphs and memory of its own. Use "
            "schedule '1f1b', or 'interleaved' with vpp above 1.",
        ),
        (
            CudaGraphs("segments", ("router", "experts")),
            {"transport": "all_to_all"},
            "cuda_graphs with scope experts needs messages of static size: expert_transport is "
            "all_to_all, for which the host reads in every layer how many tokens each rank gets. "
            "Use expert_transport of one_sided or all_gather, or mode segments without scope "
            "experts.",
        ),
        (
            FULL,
            {"transport": "all_to_all"},
            "cuda_graphs with mode full needs messages of static size: expert_transport is "
            "all_to_all, for which the host reads in every layer how many tokens each rank gets. "
            "Use expert_transport of one_sided or all_gather, or mode segments without scope "
            "experts.",
        ),
        (
            SEGMENTS,
            {"offloads": True},
            "cuda_graphs (segments) cannot be used with recompute.offload, whose copies to the "
            "host run on separate streams and in memory that torch allocates for each copy. Leave "
            "one of them out.",
        ),
        (
            SEGMENTS,
            {"keeps_core": True},
            "cuda_graphs (segments) cannot be used with recompute of full_except_core, whose "
            "results of the attention core are kept between the graphs of two passes over a block. Use "
            "recompute of full or selective, or leave cuda_graphs out.",
        ),
        (
            FULL,
            {"compile_modes": ("default", "reduce-overhead")},
            "cuda_graphs (full) cannot be used with torch.compile(mode='reduce-overhead'), which "
            "captures its own CUDA graphs, and a graph cannot capture another one. Use mode "
            "'default' or 'max-autotune-no-cudagraphs', or leave cuda_graphs out.",
        ),
        (
            SEGMENTS,
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}},
            "cuda_graphs (segments) with expandable_segments needs NCCL_GRAPH_REGISTER=0: "
            "PYTORCH_CUDA_ALLOC_CONF is 'expandable_segments:True', NCCL_GRAPH_REGISTER is not "
            "set. By default NCCL registers the memory of captured messages, which is not safe "
            "with segments that grow. Set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out.",
        ),
        (
            FULL,
            {
                "environment": {
                    "PYTORCH_ALLOC_CONF": f"max_split_size_mb:64, {EXPANDABLE}",
                    "NCCL_GRAPH_REGISTER": "1",
                }
            },
            "cuda_graphs (full) with expandable_segments needs NCCL_GRAPH_REGISTER=0: "
            "PYTORCH_ALLOC_CONF is 'max_split_size_mb:64, expandable_segments:True', "
            "NCCL_GRAPH_REGISTER is '1'. By default NCCL registers the memory of captured "
            "messages, which is not safe with segments that grow. Set NCCL_GRAPH_REGISTER=0, or "
            "leave expandable_segments out.",
        ),
        (
            UPDATES,
            {"precision": "16-mixed"},
            "cuda_graphs.optimizer (True) needs precision 32-true or bf16-mixed: it is '16-mixed', "
            "with which the host reads in every step whether gradients have overflowed. Use one of "
            "them, or optimizer=False.",
        ),
        (
            UPDATES,
            {"precision": "64-true"},
            "cuda_graphs.optimizer (True) needs precision 32-true or bf16-mixed: it is '64-true', "
            "with which the fused kernel updates main parameters in float32 only. Use one of them, "
            "or optimizer=False.",
        ),
        (
            UPDATES,
            {"precision": "bf16-mixed", "gradient_dtype": "bfloat16"},
            "cuda_graphs.optimizer (True) needs sums of gradients in float32: gradient_dtype is "
            "'bfloat16', with which every step converts them into new tensors, and a graph reads "
            "the old ones. Use gradient_dtype='float32', or optimizer=False.",
        ),
        (
            UPDATES,
            {"gradient_reader": "Norms.on_after_backward"},
            "cuda_graphs.optimizer (True) cannot be used with Norms.on_after_backward, which may "
            "read or clip gradients: one graph computes their norm, clips them and updates the "
            "parameters. Remove the hook, set reads_gradients = False in its class if it does not "
            "read gradients and is not configure_gradient_clipping, or use optimizer=False.",
        ),
    ],
)
def test_runs_that_cannot_be_captured_are_refused(
    graphs: CudaGraphs, changes: dict[str, Any], message: str
) -> None:
    check_cuda_graphs(graphs, FINE)
    with pytest.raises(UnsupportedError) as error:
        check_cuda_graphs(graphs, replace(FINE, **changes))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("graphs", "changes"),
    [
        (SEGMENTS, {"transport": "all_to_all"}),
        (CudaGraphs("segments", ("attention", "combine")), {"transport": "all_to_all"}),
        (FULL, {"transport": "auto"}),
        (FULL, {"precision": "16-mixed", "gradient_reader": "Norms.on_after_backward"}),
        (UPDATES, {"precision": "bf16-mixed", "gradient_dtype": "float32"}),
        (FULL, {"transport": "none"}),
        (FULL, {"compile_modes": ("default", "max-autotune-no-cudagraphs")}),
        (FULL, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}),
        (
            FULL,
            {"environment": {"PYTORCH_ALLOC_CONF": EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}},
        ),
    ],
)
def test_supported_runs_are_accepted(graphs: CudaGraphs, changes: dict[str, Any]) -> None:
    conditions = replace(FINE, **changes)
    check_cuda_graphs(graphs, conditions)
    # The same run is refused on a CPU, so the check has looked at it.
    with pytest.raises(UnsupportedError, match="needs GPUs"):
        check_cuda_graphs(graphs, replace(conditions, device_type="cpu"))


def test_max_autotune_is_refused_because_it_captures_graphs_too() -> None:
    with pytest.raises(UnsupportedError, match="mode='max-autotune'"):
        check_cuda_graphs(SEGMENTS, replace(FINE, compile_modes=("max-autotune",)))
