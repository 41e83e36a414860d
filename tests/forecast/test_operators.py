"""Tests of the operators that traces record, beside counts by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.forecast.operator_trace import Operator, RecordingDevice
from lightning_megatron.forecast.traced_parts import (
    LayerKind,
    PassTrace,
    kinds_of_layers,
    only_training,
    smallest_layout,
    trace_stage,
    with_layers,
)
from lightning_megatron.memory.lone_stage import LoneStage
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recomputation

LENGTH, WIDTH, LAYERS, VOCABULARY = 512, 256, 2, 1024
LLAMA = GPTConfig.llama(
    vocab_size=VOCABULARY,
    max_seq_length=LENGTH,
    num_layers=LAYERS,
    hidden_size=WIDTH,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=768,
)
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 128}
ALONE = ParallelLayout(world_size=1)


def operators_of(config=LLAMA, layout=ALONE, stage=0, **training):
    shape = TrainingShape(seq_length=LENGTH, **training)
    passes = trace_stage(config, layout, shape, stage, "cuda").later
    return [[one for one in operators if one.kind != "free"] for operators in passes]


def flops_by_kind(passes) -> Counter[str]:
    total = Counter[str]()
    for operators in passes:
        for one in operators:
            total[one.kind] += one.flops
    return total


def test_traced_flops_are_those_of_the_formula():
    config = replace(LLAMA, max_seq_length=LENGTH)
    forward, backward, _ = operators_of(config)
    attention = LENGTH * 2 * LENGTH * WIDTH * LAYERS
    products = config.flops_per_token(LENGTH) * LENGTH / 3 - attention
    assert flops_by_kind([forward]) == {
        "product": products,
        "attention": attention,
        "pass": 0,
        "kernel": 0,
    }
    # The backward pass of attention computes the scores again: five products for two.
    found = flops_by_kind([backward])
    assert found["product"] == 2 * products
    assert found["attention"] == 2.5 * attention


def test_traced_flops_of_a_mixture_are_those_of_an_even_routing_on_every_rank():
    config = replace(LLAMA, experts=EXPERTS)
    for layout in (ALONE, ParallelLayout(world_size=2, ep=2)):
        passes = operators_of(config, layout)
        rows = LENGTH * EXPERTS["top_k"]
        assert flops_by_kind(passes)["grouped"] == 3 * LAYERS * rows * 6 * WIDTH * 128


def test_eight_bit_products_and_recomputation_are_recorded():
    eight_bits = [
        one.sizes
        for operators in operators_of(fp8=FP8("tensorwise"))
        for one in operators
        if one.kind == "product" and one.dtype.itemsize == 1
    ]
    assert len(eight_bits) == 3 * 4 * LAYERS
    whole = flops_by_kind(operators_of(recompute="full"))
    plain = flops_by_kind(operators_of())
    head = 2 * LENGTH * WIDTH * VOCABULARY
    assert whole["product"] - plain["product"] == plain["product"] / 3 - head


def of_one_layer(layout: ParallelLayout, **training) -> list[Counter[tuple[str, str, int]]]:
    """Return what two layers communicate more than one, by pass: kind, axis, and bytes."""
    found = []
    for layers in (1, 2):
        passes = operators_of(replace(LLAMA, num_layers=layers), layout, **training)
        found.append(
            [
                Counter(
                    (one.name, one.axis, one.num_bytes)
                    for one in operators
                    if one.kind == "collective" and one.name != "wait"
                )
                for operators in passes[:2]
            ]
        )
    return [more - less for less, more in zip(*found, strict=True)]


def test_collectives_of_a_layer_are_those_counted_by_hand():
    whole = LENGTH * WIDTH * 2
    summed = {("all_reduce", "tp", whole): 2}
    assert of_one_layer(ParallelLayout(world_size=2, tp=2)) == [summed, summed]
    # A reduce-scatter writes the part of a rank. Backward passes gather both inputs again.
    gathered, scattered = ("all_gather", "tp", whole), ("reduce_scatter", "tp", whole // 2)
    assert of_one_layer(ParallelLayout(world_size=2, tp=2), sequence_parallel=True) == [
        {gathered: 2, scattered: 2},
        {gathered: 4, scattered: 2},
    ]


def test_layers_of_a_kind_are_traced_once_and_as_in_their_model():
    config = replace(
        LLAMA,
        num_layers=6,
        experts={**EXPERTS, "layers": (False, True, True, True, True, True)},
        sliding_window=64,
        window_layers=(False, False, True, False, True, False),
    )
    training = TrainingShape(
        seq_length=LENGTH,
        fp8=FP8("tensorwise", last_bf16=1),
        recompute=Recomputation(("full",), layers=1),
        num_microbatches=4,
    )
    (kinds, other) = kinds_of_layers(config, training, (range(4), range(4, 6)))
    assert [kind.layer for kind in kinds] == [0, 1, 2, 1]
    assert [kind.layer for kind in other] == [4, 5]
    assert kinds[0] == LayerKind(0, True, ("full",))
    assert with_layers(config, [kinds[0].layer] * 2).experts is None
    windowed = with_layers(config, [kinds[2].layer] * 2)
    assert (windowed.window_of(1), windowed.has_experts_in(1)) == (64, True)
    assert only_training(training, kinds[2], splits=False).recompute.is_off
    assert only_training(training, other[1], splits=False).fp8 is None


def test_small_layouts_divide_layers_as_large_ones():
    large = ParallelLayout(world_size=1024, tp=4, cp=2, ep=32, etp=1, pp=4)
    small = smallest_layout(large, (2, 1))
    assert small.world_size == 32 * 2
    assert (small.tp, small.cp, small.ep, small.etp, small.pp) == (4, 2, 32, 1, 2)


def test_collectives_in_flight_have_a_wait_with_their_number():
    passes = operators_of(layout=ParallelLayout(world_size=2, tp=2), sequence_parallel=True)
    started = [one.number for one in passes[1] if one.number and one.name != "wait"]
    waited = [one.number for one in passes[1] if one.name == "wait"]
    assert started
    assert sorted(started) == sorted(waited)


def test_code_that_does_not_run_without_elements_is_refused(monkeypatch):
    monkeypatch.setattr(GPTConfig, "window_of", lambda *_: 1 / 0)
    with pytest.raises(UnsupportedError, match="cannot be estimated.*ZeroDivisionError"):
        operators_of(replace(LLAMA, num_layers=3))


def test_operators_know_their_flops():
    assert Operator("mm", "product", (3, 4, 5, 6)).flops == 2 * 3 * 4 * 5 * 6
    assert Operator("forward", "grouped", (8, 10, 5, 6)).flops == 2 * 10 * 5 * 6
    assert Operator("add", "pass").flops == 0


def test_tokens_are_divided_over_tp_before_they_are_sent_to_experts():
    config = replace(LLAMA, experts=EXPERTS)
    layout = ParallelLayout(world_size=8, tp=2, ep=8, etp=1)
    passes = operators_of(config, layout, sequence_parallel=True, expert_transport="all_to_all")
    rows = LENGTH * EXPERTS["top_k"] // 2
    sent = [one.num_bytes for one in passes[0] if one.name == "all_to_all" and one.axis == "ep"]
    # Tokens go to the experts and come back; the smaller messages are numbers of rows.
    assert sorted(sent)[-2 * LAYERS :] == [rows * WIDTH * 2] * 2 * LAYERS
    assert flops_by_kind(passes)["product"] > 0


@pytest.mark.parametrize("counts", [(1, 1, 1), (1,)])
def test_operators_of_many_samples_follow_from_those_of_one_and_two(counts):
    layout = smallest_layout(ParallelLayout(world_size=4, tp=2, cp=2), counts)
    config = with_layers(LLAMA, [0] * sum(counts))
    shape = TrainingShape(seq_length=LENGTH, microbatch_size=8, sequence_parallel=True)
    stage = len(counts) // 2
    before = trace_stage.cache_info().misses
    grown = trace_stage(config, layout, shape, stage, "cuda")
    trace_stage(config, layout, replace(shape, microbatch_size=5), stage, "cuda")
    assert trace_stage.cache_info().misses - before == 4
    lone = LoneStage.build(config, layout, shape, stage, "cuda", RecordingDevice)
    trace = PassTrace(lone, 0)
    with lone.batch(False), torch.no_grad():
        trace.warm_up()
    with lone.batch(False):
        traced = trace.operators()

    for many, all_traced in zip(grown.first, traced, strict=True):
        products = [one for one in many if one.flops]
        assert products == [one for one in all_traced if one.flops]
        # Kernels leave sums of parts of rows, whose number does not grow for ever.
        passes = sum(one.num_bytes for one in many if one.kind in ("kernel", "pass"))
        of_traced = sum(one.num_bytes for one in all_traced if one.kind in ("kernel", "pass"))
        assert passes == pytest.approx(of_traced, rel=0.2)
