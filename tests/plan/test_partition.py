"""Virtual stages divide all layers in order, and the busiest stage has the least possible cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan import (
    LayerCosts,
    ParallelLayout,
    TrainingShape,
    partition_of,
    read_stage_string,
)
from tests.refusals import check_refusals

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
    """Return all ways to divide a total into parts with at least these sizes."""
    spare = total - sum(least)
    edges = [
        (-1, *bars, spare + len(least) - 1)
        for bars in combinations(range(spare + len(least) - 1), len(least) - 1)
    ]
    return tuple(
        tuple(low + b - a - 1 for low, (a, b) in zip(least, pairwise(row), strict=True))
        for row in edges
    )


@given(st.integers(1, 12), st.integers(2, 5), st.integers(1, 3), COSTS, COSTS)
@example(4, 4, 1, 9.0, 9.0)
def test_the_busiest_stage_has_the_least_possible_cost(num_layers, pp, vpp, embedding, head):
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
    assert counts(num_layers * pp * vpp, pp, vpp) == [num_layers] * (pp * vpp)


def test_first_and_last_stage_hold_fewer_layers():
    for arguments, expected in (
        ((10, 4), [2, 3, 3, 2]),
        ((11, 4), [2, 3, 3, 3]),
        ((8, 4, 1, 1.0, 1.0), [1, 3, 3, 1]),
        ((4, 4, 1, 9.0, 9.0), [1, 1, 2, 0]),
        ((16, 4, 2, 0.1, 2.3), [2, 2, 2, 2, 2, 3, 3, 0]),
    ):
        assert counts(*arguments) == expected
    experts = {"num_experts": 8, "top_k": 1, "ffn_hidden_size": 64}
    experts["layers"] = [False] * 4 + [True] * 8
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 1024}
    model = GPTConfig.llama(
        num_layers=12, vocab_size=64, max_seq_length=16, **sizes, experts=experts
    )
    costs = model.memory_shape().costs()
    assert costs.layers[0] > 5 * costs.layers[-1], "dense layers are weighted by their cost"
    assert model.partition(layout(4)).counts == (1, 2, 2, 7)


def test_a_layout_with_stage_layers_gives_that_partition():
    model = GPTConfig.llama()
    partition = model.partition(layout(4, 1, [10, 10, 8, 4]))
    assert (partition.counts, partition.reason) == ((10, 10, 8, 4), "asked for (stage_layers)")
    assert layout(4, 1, "Et*10|t*10|(t*4)*2|tttt,L") == layout(4, 1, [10, 10, 8, 4])
    assert model.partition(layout(2, 2, [0, 20, 12, 0])).counts == (0, 20, 12, 0)
    assert "the head as 2.2" in model.partition(layout(4)).reason


def test_stage_layers_that_do_not_fit_the_model_are_refused():
    check_refusals(
        lambda *sizes: GPTConfig.llama().check_layout(layout(*sizes)),
        [
            ((4, 1, [8, 8, 16]), "and pp x vpp is 4 x 1 = 4. Name 4."),
            ((2, 1, [8, 8, 8, 8]), "Name 2, or use vpp=2."),
            ((2, 1, "t)|t"), "must have '(' before ')'"),
            ((4, 1, [8, 0, 16, 8]), "every virtual stage except the first and the last"),
            ((2, 1, [0, 0]), "and at least one layer"),
            ((4, 1, [8, 8, 8, 9]), "Use numbers with the sum 32, such as [8, 9, 9, 6]."),
            ((2, 1, "Et|tL"), "[1, 1] are 2 layers, and the model has 32"),
        ],
    )

    def v(*counts: int) -> ParallelLayout:
        return ParallelLayout(2, pp=2, vpp=2, shape="v", stage_layers=counts)

    assert v(0, 5, 2, 1).stage_layers == (0, 5, 2, 1)
    check_refusals(v, [((0, 5, 3, 0), "must give the first stage a layer")])
    assert layout(2, 2, [0, 5, 3, 0]).stage_layers == (0, 5, 3, 0), "each end has its own stage"


def test_layers_that_cannot_be_divided_are_refused():
    check_refusals(
        counts,
        [
            ((3, 4), "Use pp x vpp of at most 3."),
            ((6, 4, 2), "Use pp x vpp of at most 6."),
            ((4, 2, 1, -1.0), "the cost of the embedding must not be negative: it is -1.0."),
        ],
    )


def test_a_loss_in_chunks_gives_the_stage_of_the_head_fewer_layers():
    sizes = {"hidden_size": 2048, "num_kv_heads": 8, "ffn_hidden_size": 8192}
    model = GPTConfig.llama(num_layers=16, vocab_size=128_256, max_seq_length=8192, **sizes)
    shape = model.memory_shape()
    stored, chunked = shape.costs(), shape.costs(2048)
    # The head computes its products four times instead of three, the layers theirs three times.
    assert chunked.head == pytest.approx(stored.head * 4 / 3)
    assert (chunked.layers, chunked.embedding) == (stored.layers, stored.embedding)
    fewer, more = (model.partition(layout(4), *chunk).counts[-1] for chunk in ((2048,), ()))
    assert fewer < more
    # Logits of 8,192 tokens take 2.0 GiB; more tokens or more ranks of tp change this size.
    assert shape.costs("auto") == stored
    longer = replace(shape, max_seq_length=16384)
    assert longer.costs("auto").head == chunked.head
    assert longer.costs("auto", tp=2).head == stored.head


def test_a_model_and_its_estimate_divide_layers_by_the_same_costs():
    config = GPTConfig.llama(
        num_layers=8, hidden_size=64, num_heads=4, vocab_size=600, max_seq_length=32
    )
    parallel_layout = layout(4)
    model = GPT(config, replace(ParallelMesh.single(), layout=parallel_layout, loss_chunk=8))
    assert model.partition == config.partition(parallel_layout, 8)
    assert model.partition != config.partition(parallel_layout)
    training = TrainingShape(seq_length=32, num_microbatches=4, loss_chunk=8)
    explicit = replace(parallel_layout, stage_layers=model.partition.counts)
    estimate = estimate_memory(config, parallel_layout, training, "cpu")
    assert estimate == estimate_memory(config, explicit, training, "cpu")
    whole = replace(training, loss_chunk=None)
    assert estimate != estimate_memory(config, parallel_layout, whole, "cpu")


def test_stage_strings_have_the_meaning_of_megatron_core():
    for text, layers in {
        "EtL": (1,),
        "Et*3|(tt|)*29t|L": (3, *[2] * 29, 1, 0),
        "E|(t|)*3,t|L": (0, 1, 1, 1, 1, 0),
        "E,t*2 | t (t|t)*2 L": (2, 2, 2, 1),
        "(Et|tL)": (1, 1),
        "Et|*2tL": (1, 0, 1),
    }.items():
        assert read_stage_string(text) == layers


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20), st.text("EtLm|()*, 0123", max_size=30)
)
def test_every_list_has_a_stage_string_and_any_text_is_read_or_refused(layers, text):
    written = "E" + "|".join(f"t*{count}" if count else "" for count in layers) + "L"
    assert read_stage_string(written) == tuple(layers)
    try:
        assert all(count >= 0 for count in read_stage_string(text))
    except (ParallelPlanError, UnsupportedError):
        return


def test_stage_strings_without_a_meaning_are_refused():
    check_refusals(
        read_stage_string,
        [
            (("Et|txL",), "'Et|txL' has 'x' at position 5. Use 'E' (embedding)"),
            (("Et*3|tt,m|L",), "cannot have layers of multi-token prediction"),
            (("Et|t",), "must have 'L' once and last"),
            (("(Et|)*2L",), "'(Et|)*2L' has it 2 times"),
            (("E(t|tL",), "must close every bracket: 'E(t|tL' leaves 1 open"),
            (("E*t|tL",), "'*' only between a repeated part and a number"),
            (("E((t*999)*999)*999L",), "must describe at most 1000000 layers and stages"),
        ],
    )
