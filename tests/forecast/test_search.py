"""The search finds what trying everything finds, and asks for few traces."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_megatron import CudaGraphs, GPTConfig, ParallelLayout
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.layout_plans import ForecastCosts
from lightning_megatron.forecast.search import Choice, LegalChoices, Search, SearchSpace
from lightning_megatron.forecast.traced_layers import TracedLayers
from lightning_megatron.forecast.traced_parts import trace_stage
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.plan.budget import GIB, StageMemory, TrainingShape
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp

SMALL = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 100}
CONFIG = GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=128, max_seq_length=2048)
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=64, layers=2)
MIXTURE = replace(CONFIG, experts=EXPERTS)
STEP = TrainingShape(seq_length=2048)


@dataclass
class Seconds:
    seconds: float


@dataclass
class Drawn:
    """Costs that are drawn from the text of a choice, with bounds below the times.

    The bound of some sizes holds for all their other options.
    """

    seed: int
    num_times: int = 0
    capacity: dict[str, int] = field(default_factory=dict)

    def _draw(self, choice: Choice, what: str) -> float:
        return random.Random(f"{self.seed} {what} {choice}").random()

    def static(self, choice: Choice) -> int:
        axes = str(choice.axes)
        return int(500 * random.Random(f"{self.seed} {axes}").random())

    def least(self, choice: Choice) -> int:
        return int(self.memory(choice).peak * self._draw(choice, "least"))

    def memory(self, choice: Choice) -> StageMemory:
        sizes = {"gradients": 0, "main_parameters": 0, "optimizer": 0}
        one = replace(choice, training=replace(choice.training, microbatch_size=1))
        activations = 300 * self._draw(one, "memory") * choice.training.microbatch_size
        total = self.static(choice) + int(activations)
        return StageMemory(
            stage=0, moment="", in_flight=1, num_parameters=0, parameters=total, **sizes
        )

    def confirmed(self, choice: Choice, memory: StageMemory) -> StageMemory:
        return memory

    def time(self, choice: Choice) -> Seconds:
        self.num_times += 1
        return Seconds(self._seconds(choice))

    def _seconds(self, choice: Choice) -> float:
        return 1 + self._draw(_sizes_of(choice), "sizes") + 0.3 * self._draw(choice, "time")

    def bound(self, choice: Choice) -> float:
        sizes = _sizes_of(choice)
        return (1 + self._draw(sizes, "sizes")) * (0.8 + 0.2 * self._draw(sizes, "bound"))


def _sizes_of(choice: Choice) -> Choice:
    return replace(choice, training=replace(choice.training, recompute="none", cuda_graphs=None))


def space_of(config: GPTConfig, num_ranks: int, **changes: Any) -> SearchSpace:
    return SearchSpace(
        config=config,
        num_ranks=num_ranks,
        ranks_per_node=4,
        batch=GlobalBatch(changes.pop("batch", 8)),
        training=STEP,
        **changes,
    )


def choices_of(legal: LegalChoices) -> list[Choice]:
    sizes = [one for layout in legal.layouts() for one in legal.sizes(layout)]
    return [choice for one in sizes for choice in legal.variants(one)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "space", [space_of(CONFIG, 4), space_of(MIXTURE, 8)], ids=["dense", "experts"]
)
def test_a_search_finds_what_trying_every_choice_finds(space: SearchSpace, seed: int) -> None:
    costs = Drawn(seed)
    best: dict[tuple[int, ...], float] = {}
    legal = LegalChoices(space)
    choices = choices_of(legal)
    for choice in choices:
        if costs.memory(choice).peak <= 600:
            time = costs.time(choice).seconds
            best[choice.axes] = min(time, best.get(choice.axes, time))
    costs.num_times = 0
    found = Search(space, costs, 600, most=3).run()
    assert [one.time.seconds for one in found.fitting] == sorted(best.values())[:3]
    assert not {one.choice.axes for one in found.too_large} & set(best)
    assert len(choices) >= found.num_choices > found.num_timed == costs.num_times


def test_choices_are_legal_and_all_options_occur() -> None:
    legal = LegalChoices(space_of(MIXTURE, 8, allows_fp8=True))
    choices = choices_of(legal)
    seen = {
        name: {str(one.options().get(name)) for one in choices} for name in choices[0].options()
    }
    assert seen["microbatch_size"] == {"1", "2", "4", "8"}
    every = {name for one in choices for name in one.options()}
    assert {"tp", "pp", "vpp", "cp", "ep", "etp", "schedule", "recompute", "cuda_graphs"} <= every
    assert not any(one.layout.dp * one.training.num_microbatches > 8 for one in choices)


def test_given_options_are_kept() -> None:
    given = {"pp": 2, "recompute": "full", "cuda_graphs": None, "microbatch_size": "batch"}
    legal = LegalChoices(space_of(CONFIG, 4, given=given))
    choices = choices_of(legal)
    assert {choice.layout.pp for choice in choices} == {2}
    assert {str(choice.training.recompute) for choice in choices} == {"full"}
    assert {choice.training.num_microbatches for choice in choices} == {1}


def test_each_size_of_a_ramp_up_can_be_divided() -> None:
    space = replace(space_of(CONFIG, 4), batch=GlobalBatch(8, RampUp(4, 2, 100)))
    legal = LegalChoices(space)
    choices = choices_of(legal)
    assert {one.layout.dp * one.training.microbatch_size for one in choices} == {1, 2}


def test_searches_without_a_legal_or_fitting_layout_say_what_is_missing() -> None:
    with pytest.raises(
        ParallelPlanError, match=r"no layout of 4 devices .* global_batch_size must be"
    ):
        Search(space_of(CONFIG, 4, batch=7, given={"tp": 1, "pp": 1, "cp": 1}), Drawn(0), 600).run()
    with pytest.raises(
        UnsupportedError, match=r"no layout of 4 devices fits .*nearest is (.|\n)*Use more"
    ):
        Search(space_of(CONFIG, 4), Drawn(0), -1).run()


LLAMA = GPTConfig.llama(num_layers=8)
CASES: dict[str, tuple[GPTConfig, ParallelLayout, TrainingShape]] = {
    "one stage": (LLAMA, ParallelLayout(1), TrainingShape(seq_length=2048, recompute="full")),
    "tp 2, pp 4": (
        LLAMA,
        ParallelLayout(8, tp=2, pp=4),
        TrainingShape(seq_length=2048, num_microbatches=8, sequence_parallel=True),
    ),
    "zb-v, fp8": (
        LLAMA,
        ParallelLayout(2, pp=2, vpp=2, shape="v"),
        TrainingShape(seq_length=2048, num_microbatches=8, schedule="zb-v", fp8=FP8("tensorwise")),
    ),
    "experts": (
        GPTConfig.llama(
            num_layers=5,
            hidden_size=1024,
            num_heads=8,
            num_kv_heads=4,
            experts=replace(EXPERTS, ffn_hidden_size=512, layers=(False, *[True] * 4)),
        ),
        ParallelLayout(4, tp=2, ep=2, etp=1),
        TrainingShape(seq_length=2048, num_microbatches=4, sequence_parallel=True),
    ),
    "graphs": (
        LLAMA,
        ParallelLayout(2, pp=2),
        TrainingShape(seq_length=2048, num_microbatches=4, cuda_graphs=CudaGraphs("segments")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_memory_of_stages_from_traces_of_single_layers_is_that_of_whole_stages(case: str) -> None:
    config, layout, training = CASES[case]
    traced = TracedLayers(config, "cuda")
    fullest = traced.fullest(layout, training)
    whole = max(estimate_memory(config, layout, training), key=lambda stage: stage.peak)
    assert fullest.stage == whole.stage
    assert fullest.static == whole.static
    assert fullest.peak == pytest.approx(whole.peak, rel=0.005 if case != "graphs" else 0.05)
    before = traced.num_traces
    traced.fullest(layout, replace(training, num_microbatches=64))
    assert before == traced.num_traces <= 5
    assert GIB < fullest.peak < 80 * GIB


def test_a_search_traces_each_part_once() -> None:
    space = SearchSpace(
        config=CONFIG,
        num_ranks=64,
        ranks_per_node=8,
        batch=GlobalBatch(512),
        training=replace(STEP, seq_length=128),
        given={"tp": 1, "ep": 1, "cuda_graphs": None},
    )
    costs = ForecastCosts(space, Cluster(num_gpus=64, gpu="h100"), "cuda")
    before = trace_stage.cache_info().misses
    found = Search(space, costs, 10**9, patience=3).run()
    assert found.num_choices > 100 > found.num_timed > 10
    assert 20 < trace_stage.cache_info().misses - before < 45
    assert 10 < costs.layers.num_traces < 40
