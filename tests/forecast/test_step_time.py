"""Tests of estimated step times: sums, schedules, overlap and messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.chip_speeds import Link
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.operator_trace import Operator
from lightning_megatron.forecast.pass_times import LinkedChip, combined, passes_of
from lightning_megatron.forecast.step_time import estimate_time, links_of, speeds_of, with_transport
from lightning_megatron.forecast.traced_parts import trace_stage
from lightning_megatron.forecast.update_time import Embedding, update_times
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from tests.forecast.speeds import MEMORY, content, round_speeds
from tests.forecast.test_operators import LENGTH, LLAMA, WIDTH

GRAPHS = CudaGraphs("segments")


@pytest.fixture
def cluster(tmp_path):
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps(content()))

    def make(num_gpus, **more):
        settings = {"gpus_per_node": 8, "gpu": "round", "memory": 80, "speeds": str(file)}
        return Cluster(num_gpus=num_gpus, **settings | more)

    return make


def training(**changes):
    return TrainingShape(**{"seq_length": LENGTH, "cuda_graphs": GRAPHS, **changes})


def test_layers_that_are_extended_take_the_time_of_layers_that_are_traced(cluster):
    config = replace(LLAMA, num_layers=5)
    for layout, shape in (
        (ParallelLayout(world_size=1), training(num_microbatches=2)),
        (
            ParallelLayout(world_size=4, tp=2, pp=2),
            training(num_microbatches=4, schedule="zb-h1", sequence_parallel=True),
        ),
    ):
        step = estimate_time(config, layout, shape, cluster(layout.world_size))
        machine = LinkedChip(round_speeds(), links_of(layout, 8), eager=False)
        traced = [
            machine.times_of_stage(
                trace_stage(config, layout, replace(shape, cuda_graphs=None), stage, "cuda")
            )
            for stage in range(layout.pp)
        ]
        for estimated, whole in zip(step.stages, traced, strict=True):
            times = (estimated.forward, estimated.input_half, estimated.weight_half)
            assert times == pytest.approx(passes_of(whole), rel=1e-6)


def test_a_step_is_its_passes_and_its_update(cluster):
    step = estimate_time(
        LLAMA, ParallelLayout(world_size=1), training(num_microbatches=3), cluster(1)
    )
    (stage,) = step.stages
    passes = 3 * (stage.forward + stage.input_half + stage.weight_half)
    assert step.seconds == pytest.approx(passes + step.optimizer, rel=0.02)
    assert step.exposed == {}
    assert step.bubble == 0
    assert step.tokens_per_second == pytest.approx(3 * LENGTH / step.seconds)
    per_token = LLAMA.flops_per_token(LENGTH)
    assert step.flops_per_second == pytest.approx(step.tokens_per_second * per_token)


def test_pipelines_have_the_bubble_of_their_schedule(cluster):
    config = replace(LLAMA, num_layers=8, vocab_size=128)
    layout = ParallelLayout(world_size=4, pp=4)
    step = estimate_time(config, layout, training(num_microbatches=8), cluster(4))
    # Transfers between small stages make it larger.
    assert 3 / 11 - 0.02 < step.bubble < 0.6
    more = estimate_time(config, layout, training(num_microbatches=32), cluster(4))
    assert more.bubble < step.bubble


def test_an_eager_step_of_small_layers_waits_for_the_host(cluster):
    alone = ParallelLayout(world_size=1)
    eager = estimate_time(LLAMA, alone, training(cuda_graphs=None), cluster(1))
    graphs = estimate_time(LLAMA, alone, training(), cluster(1))
    assert eager.seconds == eager.host > 2 * graphs.seconds
    assert graphs.host == 0
    assert eager.stages == graphs.stages


def test_reductions_hide_behind_the_backward_pass_but_for_their_last_bucket():
    layout = ParallelLayout(world_size=2)
    chip = LinkedChip(round_speeds(), links_of(layout, 8), eager=False)
    elements = 120_000_000
    times = {"dense": elements, "dense bytes": 2 * elements, "forward": 0.1, "input_half": 0.2}
    update = update_times(times, training(), chip, None, True)
    bucket = 1e-5 + 0.5 * elements / 3 * 4 / 300e9
    # Three buckets, of which two hide for a quarter of their time.
    assert update.reduction == pytest.approx(bucket + 0.25 * 2 * bucket, rel=1e-3)
    gather = 3 * (1e-5 + 0.5 * elements / 3 * 2 / 300e9)
    assert update.gather == pytest.approx(0.25 * gather, rel=1e-3)
    adam = 30 * elements / 2 / MEMORY
    norm = 4 * elements / 2 / MEMORY
    assert update.optimizer == pytest.approx(adam + norm, rel=0.1)
    short = update_times({**times, "input_half": 0.0}, training(), chip, None, True)
    assert short.reduction == pytest.approx(3 * bucket, rel=1e-3)
    whole = update_times(times, training(zero=0), chip, None, True)
    assert (whole.gather, whole.optimizer) == (0.0, pytest.approx(2 * (adam + norm), rel=0.1))
    # Before the next forward pass, gathers hide behind the rest of the update.
    early = update_times(times, training(), chip, None, False)
    assert early.gather > gather - adam


def test_an_embedding_is_reduced_last_or_exchanged_by_rows():
    layout = ParallelLayout(world_size=2)
    chip = LinkedChip(round_speeds(), links_of(layout, 8), eager=False)
    config = replace(LLAMA, vocab_size=400_000, vocab_multiple=1)
    few = Embedding.of(config, layout, training())
    assert (few.elements, few.exchanged(2)) == (400_000 * WIDTH, 2 * LENGTH * WIDTH)
    many = Embedding.of(config, layout, training(num_microbatches=512))
    assert many.exchanged(2) is None
    assert (
        Embedding.of(replace(config, tie_embeddings=True), layout, training()).exchanged(2) is None
    )
    times = {"dense": 2 * few.elements, "dense bytes": 1, "input_half": 10.0}
    by_rows, whole = (update_times(times, training(), chip, one, True) for one in (few, many))
    of_table = 0.5 * few.elements * 4 / 300e9
    of_rows = 0.5 * 2 * LENGTH * WIDTH * 4 / 300e9
    assert whole.reduction - by_rows.reduction == pytest.approx(of_table - of_rows, rel=0.02)


def test_slow_networks_and_more_nodes_cost_time(cluster):
    layout = ParallelLayout(world_size=16)
    near = estimate_time(LLAMA, layout, training(), cluster(16, gpus_per_node=16))
    far = estimate_time(LLAMA, layout, training(), cluster(16))
    slow = estimate_time(LLAMA, layout, training(), cluster(16, network=1e9))
    assert near.seconds < far.seconds < slow.seconds
    assert slow.exposed["data"] > far.exposed["data"]


def test_experts_of_other_nodes_get_their_tokens_over_the_network(cluster):
    experts = {"num_experts": 16, "top_k": 2, "ffn_hidden_size": 128}
    config = replace(LLAMA, experts=experts)
    layout = ParallelLayout(world_size=16, ep=16)
    far = estimate_time(config, layout, training(), cluster(16))
    slow = estimate_time(config, layout, training(), cluster(16, network=1e9))
    assert slow.exposed["ep"] > 2 * far.exposed["ep"] > 0
    shape = with_transport(config, layout, training(), 8)
    assert shape.expert_transport == "all_to_all"
    limited = with_transport(config, layout, replace(training(), expert_rows=1.25), 8)
    assert limited.expert_transport == "all_gather"
    assert with_transport(config, layout, training(), 16).expert_transport == "auto"
    few = ParallelLayout(world_size=16, ep=2, tp=8, etp=8)
    assert with_transport(config, few, training(), 8).expert_transport == "all_gather"


def test_deep_models_need_no_more_traces_than_flat_ones(cluster):
    layout = ParallelLayout(world_size=2, tp=2)
    before = trace_stage.cache_info().misses
    estimate_time(replace(LLAMA, num_layers=8, init_std=0.5), layout, training(), cluster(2))
    few = trace_stage.cache_info().misses
    estimate_time(replace(LLAMA, num_layers=80, init_std=0.5), layout, training(), cluster(2))
    assert few - before >= 2
    assert trace_stage.cache_info().misses == few


def test_sums_of_times_count_each():
    assert combined([(2, {"forward": 3.0}), (-1, {"forward": 1.0, "dense": 4})]) == {
        "forward": 5.0,
        "dense": -4,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "B900"}, "speeds of the GPU 'B900' are not known.*--calibrate FILE"),
        ({"gpu": "B900", "speeds": "x.json"}, "memory of the GPU 'B900' is not known"),
        ({"num_gpus": 12}, r"num_gpus \(12\) must be a multiple of gpus_per_node \(8\).*Use 16"),
        ({"num_gpus": 0}, "num_gpus"),
    ],
)
def test_clusters_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ParallelPlanError, match=message):
        Cluster(**{"num_gpus": 8, **settings})


def test_a_layout_of_other_ranks_is_refused(cluster):
    with pytest.raises(ParallelPlanError, match="world_size is 1, num_gpus 2"):
        estimate_time(LLAMA, ParallelLayout(world_size=1), training(), cluster(2))


def test_memory_of_a_known_gpu_has_a_margin():
    assert Cluster(num_gpus=8, gpu="h100").usable_memory == 73
    assert Cluster(num_gpus=8, memory=50).usable_memory == 50


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_package_has_the_times_of_known_gpus(gpu):
    speeds = speeds_of(Cluster(num_gpus=8, gpu=gpu))
    large = Operator("mm", "product", (1, 8192, 8192, 8192), 3 * 2 * 8192**2, torch.bfloat16)
    assert 400e12 < large.flops / speeds.seconds_of(large) < 989e12
    copied = 2**30 / speeds.seconds_of_pass(2**30)
    assert 0.7 < copied / Cluster(num_gpus=8, gpu=gpu).chip.memory < 1
    half = 2**28 / speeds.collective("all_reduce", 2**28, Link(2, 2))
    assert 150e9 < half < 450e9
