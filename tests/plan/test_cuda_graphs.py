"""Settings of CUDA graphs are checked before any process exists, and their memory is estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan import CudaGraphs
from lightning_megatron.plan.activations import ActivationCosts
from lightning_megatron.plan.budget import TrainingShape, estimate_memory
from lightning_megatron.plan.cuda_graphs import GraphConditions, GraphScope, check_cuda_graphs
from lightning_megatron.plan.graph_memory import GraphMemory, graph_memory
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import Schedule, build_schedule
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
    halves = {"precision": "bf16-mixed", "gradient_dtype": "bfloat16"}
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
        (UPDATES, halves, "Use optimizer.gradient_dtype='float32', or optimizer=False."),
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
        (UPDATES, {"precision": "bf16-mixed", "gradient_dtype": "float32"}),
        (FULL, {"compile_modes": ("default", "max-autotune-no-cudagraphs")}),
        (FULL, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}}),
        (FULL, {"environment": {**growing, "NCCL_GRAPH_REGISTER": "0"}}),
    ]
    for graphs, changes in accepted:
        check_cuda_graphs(graphs, replace(FINE, **changes))


#: A block that keeps 60 of attention and 40 of its MLP, and a head.
BLOCK = ActivationCosts(
    boundary=10, layer=100, kept=100, masks=0, layer_forward=20, layer_backward=30, network=40,
    head=12, head_backward=5, loss_kept=50, loss_forward=70, loss_backward=80, slots=0, waiting=45,
    head_waiting=8, weight_half=3, captured_attention=50, captured_network=25,
)  # fmt: skip
TOKENS = 4
ID = 8 * TOKENS
PLAIN = build_schedule("1f1b", 1, 8)


def memory(
    graphs: CudaGraphs, schedule: Schedule = PLAIN, stage: int = 0, count: int = 2, **changes: Any
) -> GraphMemory:
    block = replace(BLOCK, **changes)
    return graph_memory(
        graphs,
        schedule,
        stage,
        [[block] * count] * schedule.num_chunks,
        block if changes.get("has_experts") else BLOCK,
        num_tokens=TOKENS,
        input_bytes=16,
        transfers=20 if schedule.num_stages > 1 else 0,
    )


def test_every_slot_of_a_stage_has_a_pool_and_inputs():
    # Activations of two blocks, the head and the loss stay until the end of the backward pass. Two
    # sets of graphs have ids and labels; all share the gradients of losses.
    activations = 2 * 100 + 12 + 50
    alone = memory(SEGMENTS)
    assert alone == GraphMemory(activations + (80 + 5), 2 * 2 * ID + 4 * TOKENS)
    assert memory(SEGMENTS, build_schedule("1f1b", 1, 64)) == alone
    two = build_schedule("1f1b", 2, 8)
    assert memory(SEGMENTS, two, 0) == GraphMemory(2 * (2 * 100 + 50), 3 * ID + 10)
    # The first hidden states are received, and lie in the inputs.
    last = GraphMemory(activations + 85 - 10, 2 * (10 + ID) + 4 * TOKENS)
    assert memory(SEGMENTS, two, 1) == last
    # Weight halves have a pool, and read what is kept where the activations were.
    per_slot = activations + 85 + 3 - 10
    halves = memory(SEGMENTS, build_schedule("zb-h1", 2, 8), 1)
    assert halves == GraphMemory(2 * per_slot, 3 * (10 + ID + 4 * TOKENS))
    # A graph of a full step has one pool, and the inputs of all microbatches.
    assert memory(FULL) == GraphMemory(activations + 80 + 5, 8 * TOKENS * 16)
    assert memory(FULL, two).pools == 2 * 200 + 30 + 20


def test_scopes_select_the_counted_memory():
    expected = {
        # Each block's attention reads hidden states that eager code writes.
        ("attention",): (2 * 60 + 50 - 20, 2 * 20 + 10),
        # Each MLP reads the residual stream, and the output of attention that is added to it.
        ("mlp",): (2 * 40 + 25, 2 * 40 + 10),
        # Layers that no graph holds have copies of an output and of a gradient.
        ("head",): (12 + 50 + 85 - 10 + 2 * 10, 2 * (10 + ID) + 4 * TOKENS),
        # The embedding keeps a sum and its terms.
        ("embedding",): (2 * 10 + 2 * 10, 2 * ID),
    }
    for scopes, sizes in expected.items():
        assert memory(CudaGraphs("segments", scopes)) == GraphMemory(*sizes)
    # Recomputed blocks are captured completely or not at all.
    assert memory(CudaGraphs("segments", ("attention",)), is_whole=True) == GraphMemory()
    both = memory(CudaGraphs("segments", ("attention", "mlp")), is_whole=True)
    assert both.pools == 2 * 100 + 50 - 10
    # Experts behind a transport of unknown sizes stay eager.
    mixture = {"has_experts": True, "experts": 30, "returned": 7, "count": 1}
    static, eager = (
        memory(SEGMENTS, **mixture, static_transport=is_static) for is_static in (True, False)
    )
    assert (static.pools - eager.pools, eager.inputs - static.inputs) == (30, 2 * 7)


def test_the_estimate_of_a_stage_has_a_part_for_graphs():
    model = GPTConfig.gpt2(num_layers=4, hidden_size=64, num_heads=4, vocab_size=128).memory_shape()
    layout = ParallelLayout(2, pp=2)
    step = TrainingShape(seq_length=64, num_microbatches=8)
    graphs = replace(step, cuda_graphs=SEGMENTS)
    for eager, captured in zip(
        estimate_memory(model, layout, step), estimate_memory(model, layout, graphs), strict=True
    ):
        assert captured.graphs > eager.graphs == 0
        assert replace(captured, graphs=0) == eager
        assert captured.peak == eager.peak + captured.graphs
    gpipe = (model, layout, replace(graphs, schedule="gpipe"))
    check_refusals(estimate_memory, [(gpipe, "keep a limited number of microbatches")])
