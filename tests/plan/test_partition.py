"""Virtual stages divide all layers in order, and the busiest stage has the least possible cost."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan import (
    LayerCosts,
    ParallelLayout,
    Placement,
    StageCosts,
    TrainingShape,
    build_schedule,
    estimate_memory,
    partition_of,
    simulate,
)

COSTS = st.sampled_from([0.0, 0.3, 1.0, 2.5])


def layout(pp: int, vpp: int = 1, stage_layers: list[int] | str | None = None) -> ParallelLayout:
    return ParallelLayout(pp, pp=pp, vpp=vpp, stage_layers=stage_layers)


def counts(
    num_layers: int, pp: int, vpp: int = 1, embedding: float = 0.0, head: float = 0.0
) -> list[int]:
    costs = LayerCosts((1.0,) * num_layers, embedding, head)
    return list(partition_of(costs, layout(pp, vpp)).counts)


@cache
def compositions(total: int, least: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    parts, spare = len(least), total - sum(least)
    results = []
    for bars in combinations(range(spare + parts - 1), parts - 1):
        edges = (-1, *bars, spare + parts - 1)
        results.append(
            tuple(
                low + right - left - 1
                for low, (left, right) in zip(least, pairwise(edges), strict=True)
            )
        )
    return tuple(results)


@given(st.integers(1, 12), st.integers(2, 5), st.integers(1, 3), COSTS, COSTS)
def test_the_busiest_stage_has_the_least_possible_cost(
    num_layers: int, pp: int, vpp: int, embedding: float, head: float
) -> None:
    costs, parallel_layout = LayerCosts((1.0,) * num_layers, embedding, head), layout(pp, vpp)
    if pp * vpp > num_layers:
        with pytest.raises(ParallelPlanError, match="every virtual stage holds at least one layer"):
            partition_of(costs, parallel_layout)
        return
    partition = partition_of(costs, parallel_layout)
    assert [layer for layers in partition.ranges for layer in layers] == list(range(num_layers))
    assert all(partition.counts[:-1])
    assert partition.counts[-1] or head
    last = vpp - 1 if head else vpp
    best = min(
        max(embedding + totals[0], *totals[1:-1], head + totals[-1])
        for totals in compositions(num_layers, (*(vpp,) * (pp - 1), last))
    )
    assert max(costs.of_stages(partition.counts, parallel_layout.placement)) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_stages_have_equally_many_layers_without_costs_of_embedding_and_head(
    pp: int, vpp: int, per_stage: int
) -> None:
    vpp = vpp if pp > 1 else 1
    assert counts(pp * vpp * per_stage, pp, vpp) == [per_stage] * (pp * vpp)


@given(
    st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=2, max_size=9),
    st.integers(2, 4),
    COSTS,
    COSTS,
)
@example([1.0] * 7 + [4.0, 1.0], 4, 0.0, 1.0)
def test_layers_of_different_costs_are_divided_optimally(
    layers: list[float], pp: int, embedding: float, head: float
) -> None:
    if pp > len(layers):
        return
    costs, parallel_layout = LayerCosts(tuple(layers), embedding, head), layout(pp)
    least = (*(1,) * (pp - 1), 0 if head else 1)
    best = min(
        max(costs.of_virtual_stages(stage_counts))
        for stage_counts in compositions(len(layers), least)
    )
    actual = max(costs.of_virtual_stages(partition_of(costs, parallel_layout).counts))
    assert actual == pytest.approx(best)


def test_dense_layers_of_a_mixture_are_weighted_by_their_cost() -> None:
    experts = {
        "num_experts": 8,
        "top_k": 1,
        "ffn_hidden_size": 64,
        "layers": [False] * 4 + [True] * 8,
    }
    model = GPTConfig.llama(
        num_layers=12,
        hidden_size=64,
        num_heads=4,
        vocab_size=64,
        max_seq_length=16,
        ffn_hidden_size=1024,
        experts=experts,
    )
    costs = model.memory_shape().costs()
    assert costs.layers[0] > 5 * costs.layers[-1]
    assert model.partition(layout(4)).counts == (1, 2, 2, 7)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 4), [2, 3, 3, 2]),
        ((9, 4), [2, 2, 3, 2]),
        ((11, 4), [2, 3, 3, 3]),
        ((8, 4, 1, 1.0, 1.0), [1, 3, 3, 1]),
        ((8, 4, 1, 0.0, 1.0), [2, 2, 3, 1]),
        ((7, 4, 1, 0.0, 1.0), [2, 2, 2, 1]),
        ((4, 4, 1, 9.0, 9.0), [1, 1, 2, 0]),
        ((9, 2, 2), [2, 3, 2, 2]),
        ((16, 4, 2, 0.1, 2.3), [2, 2, 2, 2, 2, 3, 3, 0]),
    ],
)
def test_first_and_last_stage_hold_fewer_layers(
    arguments: tuple[int, ...], expected: list[int]
) -> None:
    assert counts(*arguments) == expected


def test_virtual_stages_follow_a_loop_or_a_v() -> None:
    partition = partition_of(LayerCosts.equal(9), layout(2, 2, [2, 3, 3, 1]))
    assert partition.ranges == (range(2), range(2, 5), range(5, 8), range(8, 9))
    assert partition.by_stage(Placement("loop", 2, 2)) == (
        (range(2), range(5, 8)),
        (range(2, 5), range(8, 9)),
    )
    assert partition.by_stage(Placement("v", 2, 2)) == (
        (range(2), range(8, 9)),
        (range(2, 5), range(5, 8)),
    )


SHAPES = {
    "Llama 3 8B": GPTConfig.llama(),
    "Llama 3 8B with half of the layers": GPTConfig.llama(num_layers=16, vocab_size=131072),
    "Llama 3 70B": GPTConfig.llama(
        num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_hidden_size=28672
    ),
    "GPT-2 XL": GPTConfig.gpt2(num_layers=48, hidden_size=1600, num_heads=25),
    "Mixtral": GPTConfig.llama(
        vocab_size=32000, hidden_size=4096, num_kv_heads=8, ffn_hidden_size=14336,
        experts={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14336},
    ),
    "Qwen3 30B A3B": GPTConfig.llama(
        num_layers=48, vocab_size=151936, hidden_size=2048, num_kv_heads=4, head_dim=128,
        experts={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4)])
def test_a_step_takes_no_longer_than_with_equally_many_layers_per_stage(
    name: str, pp: int, vpp: int
) -> None:
    model = SHAPES[name]
    costs, parallel_layout = model.memory_shape().costs(), layout(pp, vpp)
    even = [model.num_layers // (pp * vpp)] * (pp * vpp)
    schedules = ("interleaved",) if vpp > 1 else ("1f1b", "gpipe", "zb-h1")

    def length(schedule: str, num_microbatches: int, counts: list[int]) -> int:
        ticks = tuple(round(1000 * cost) for cost in costs.of_virtual_stages(counts))
        order = build_schedule(schedule, pp, num_microbatches, vpp)  # type: ignore[arg-type]
        return simulate(order, StageCosts(ticks, ticks, ticks)).length

    by_cost = list(model.partition(parallel_layout).counts)
    for schedule in schedules:
        for num_microbatches in (pp, 2 * pp, 4 * pp):
            even_length = length(schedule, num_microbatches, even)
            assert length(schedule, num_microbatches, by_cost) <= even_length
    if name == "Llama 3 8B with half of the layers" and (pp, vpp) == (4, 2):
        assert by_cost == [2, 2, 2, 2, 2, 3, 3, 0]
        assert length("interleaved", 16, even) > 1.24 * length("interleaved", 16, by_cost)


def test_a_layout_with_stage_layers_gives_that_partition() -> None:
    model = GPTConfig.llama()
    partition = model.partition(layout(4, 1, [10, 10, 8, 4]))
    assert (partition.counts, partition.reason) == ((10, 10, 8, 4), "asked for (stage_layers)")
    assert layout(4, 1, "Et*10|t*10|(t*4)*2|tttt,L") == layout(4, 1, [10, 10, 8, 4])
    assert model.partition(layout(2, 2, [0, 20, 12, 0])).counts == (0, 20, 12, 0)
    assert "the head as 2.2" in model.partition(layout(4)).reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (4, 1, [8, 8, 16]),
            "stage_layers must name the layers of every virtual stage: it names 3 of them ([8, 8, 16]), and pp x "
            "vpp is 4 x 1 = 4. Name 4.",
        ),
        ((2, 1, [8, 8, 8, 8]), "and pp x vpp is 2 x 1 = 2. Name 2, or use vpp=2."),
        (
            (4, 1, [8, 0, 16, 8]),
            "stage_layers must give a layer to every virtual stage except the first and the last: it is [8, 0, 16, "
            "8]. The first one has the embedding and the last one the head, but the others would be empty. Use "
            "numbers of at least 1 between them, and at least one layer.",
        ),
        ((2, 1, [0, 0]), "and at least one layer"),
        ((2, 1, [-1, 33]), "stage_layers[0] must be a whole number of at least 0: it is -1"),
        ((2, 1, 32), "stage_layers must be a list with a whole number of at least 0 for each element or None: it is 32"),
        (
            (4, 1, [8, 8, 8, 9]),
            "stage_layers must give every layer to one virtual stage: [8, 8, 8, 9] are 33 layers, and the model has "
            "32. Use numbers with the sum 32, such as [8, 9, 9, 6].",
        ),
        ((2, 1, "Et|tL"), "[1, 1] are 2 layers, and the model has 32"),
    ],
)  # fmt: skip
def test_stage_layers_that_do_not_fit_the_model_are_refused(
    sizes: tuple[int, int, list[int]], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=re.escape(message)):
        GPTConfig.llama().check_layout(layout(*sizes))


def test_the_first_stage_of_a_v_must_have_a_layer() -> None:
    def v(*counts: int) -> ParallelLayout:
        return ParallelLayout(2, pp=2, vpp=2, shape="v", stage_layers=counts)

    assert v(0, 5, 2, 1).stage_layers == (0, 5, 2, 1)
    assert v(1, 5, 2, 0).stage_layers == (1, 5, 2, 0)
    with pytest.raises(
        ParallelPlanError, match=r"must give the first stage a layer.* \[0, 5, 3, 0\]"
    ):
        v(0, 5, 3, 0)
    assert layout(2, 2, [0, 5, 3, 0]).stage_layers == (0, 5, 3, 0), "each end has its own stage"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (3, 4),
            "num_layers (3) must be at least pp x vpp (4 x 1 = 4), because every virtual stage holds at least one "
            "layer. Use pp of 1, 2 or 3 with vpp 1.",
        ),
        (
            (6, 4, 2),
            "num_layers (6) must be at least pp x vpp (4 x 2 = 8), because every virtual stage holds at least one "
            "layer. Use pp of 1, 2 or 3 with vpp 2, or vpp of 1 with pp 4.",
        ),
        (
            (30, 32),
            "num_layers (30) must be at least pp x vpp (32 x 1 = 32), because every virtual stage holds at least one "
            "layer. Use pp of 1 to 30 with vpp 1.",
        ),
        (
            (4, 2, 1, -1.0),
            "the cost of the embedding must not be negative: it is -1.0. Use 0 or more.",
        ),
        (
            (0, 1),
            (
                "num_layers must be a whole number of at least 1: it is 0. Use num_layers of 1 or "
                "more."
            ),
        ),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(
    arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ParallelPlanError) as error:
        counts(*arguments)
    assert str(error.value) == message


def test_a_loss_in_chunks_gives_the_stage_of_the_head_fewer_layers() -> None:
    model = GPTConfig.llama(
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        max_seq_length=8192,
        ffn_hidden_size=8192,
    )
    shape = model.memory_shape()
    stored, chunked = shape.costs(), shape.costs(2048)
    # The head computes its products four times instead of three, the layers theirs three times.
    assert chunked.head == pytest.approx(stored.head * 4 / 3)
    assert (chunked.layers, chunked.embedding) == (stored.layers, stored.embedding)
    parallel_layout = layout(4)
    counts = model.partition(parallel_layout, 2048).counts
    assert counts[-1] < model.partition(parallel_layout).counts[-1]
    busiest = max(chunked.of_stages(counts, parallel_layout.placement))
    undivided_loss = chunked.of_stages(
        model.partition(parallel_layout).counts, parallel_layout.placement
    )
    assert busiest < max(undivided_loss)
    # Logits of 8,192 tokens take 2.0 GiB; more tokens or more ranks of tp change this size.
    assert shape.costs("auto") == stored
    longer = replace(shape, max_seq_length=16384)
    assert longer.costs("auto").head == chunked.head
    assert longer.costs("auto", tp=2).head == stored.head
    # With gradients in the forward pass, no product runs twice.
    assert longer.costs("forward") == longer.costs()


def test_a_model_and_its_estimate_divide_layers_by_the_same_costs() -> None:
    config = GPTConfig.llama(
        num_layers=8, hidden_size=64, num_heads=4, vocab_size=600, max_seq_length=32
    )
    parallel_layout = layout(4)
    mesh = replace(ParallelMesh.single(), layout=parallel_layout, loss_chunk=8)
    model = GPT(config, mesh)
    assert model.partition == config.partition(parallel_layout, 8)
    assert model.partition != config.partition(parallel_layout)
    training = TrainingShape(seq_length=32, num_microbatches=4, loss_chunk=8)
    shape = config.memory_shape()
    explicit = replace(parallel_layout, stage_layers=model.partition.counts)
    estimate = estimate_memory(shape, parallel_layout, training)
    assert estimate == estimate_memory(shape, explicit, training)
    assert estimate != estimate_memory(shape, parallel_layout, replace(training, loss_chunk=None))
