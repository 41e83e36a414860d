"""Every schedule trains as one process of ordinary Lightning: named ones, a user's own order of
actions, an order chosen by measured times, and any division of layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from jaxtyping import config as shape_checks
from torch._dynamo.utils import counters

from lightning_megatron import GPTConfig
from lightning_megatron.cli.schedule_costs import read_costs
from lightning_megatron.errors import ParallelPlanError, RankMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.pipeline.action_times import measure_transfer
from lightning_megatron.plan import Action, build_schedule
from lightning_megatron.plan.custom_schedule import CustomOrder
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.strategy.logs import run_table
from lightning_megatron.strategy.step import schedule_choice
from lightning_megatron.strategy.step.batch_cuts import BatchCuts
from lightning_megatron.strategy.step.schedule_choice import ScheduleChoice
from tests.fits import (
    BATCH,
    EXPERTS,
    GPT2,
    LLAMA,
    LLAMA_SIZES,
    MIXTURE,
    SIZES,
    Job,
    Language,
    Report,
    Tokens,
    check_equal,
    gpt_twin,
    run_job,
    run_jobs,
)
from tests.world import run_world
from tests.worlds.test_experts import KINDS as MIXTURES

KINDS = {
    "eight layers": GPTConfig.gpt2(**{**SIZES, "num_layers": 8}),
    "untied": GPTConfig.gpt2(**SIZES, tie_embeddings=False),
    "tied llama": GPTConfig.llama(**LLAMA_SIZES, tie_embeddings=True),
    "post-norm": GPTConfig.gpt2(**SIZES, norm_position="post"),
    "some experts": MIXTURES["some layers"],
}
V = {"pp": 2, "vpp": 2}
ONE = {"microbatch_size": 1}
ZBV = {**V, "schedule": "zb-v"}
DUAL = {**V, "schedule": "dualpipe-v", **ONE}


def halves_from_the_last(rank: int, pp: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    """All forwards, all input halves from the last microbatch on, and then all weight halves."""
    numbers = range(num_microbatches)
    yield from (Action("F", 0, number) for number in numbers)
    yield from (Action("I", 0, number) for number in reversed(numbers))
    yield from (Action("W", 0, number) for number in numbers)


def chunk_after_chunk(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Full backward passes, one microbatch after the other, chunk after chunk."""
    forwards = [Action("F", chunk, n) for chunk in range(vpp) for n in range(num_microbatches)]
    return [*forwards, *(Action("B", a.chunk, a.microbatch) for a in reversed(forwards))]


#: The model, and the layout with its schedule.
CASES: dict[str, tuple[GPTConfig, dict[str, Any]]] = {
    "zb-h1 tp2, overlapped": (
        LLAMA,
        {"pp": 2, "schedule": "zb-h1", "tp": 2, "linear.overlap": True},
    ),
    "zb-h1 pp4": (GPT2, {"pp": 4, "schedule": "zb-h1", "job.check_microbatches": True}),
    "zb-v pp4": (KINDS["eight layers"], {**ZBV, "pp": 4, "job.check_microbatches": True}),
    "zb-v tp2, recomputed": (
        GPT2,
        {**ZBV, "tp": 2, "sequence_parallel": False, "recompute": "full"},
    ),
    "zb-v, zero 0": (
        KINDS["tied llama"],
        {**ZBV, "optimizer.zero": 0, "optimizer.overlap_gradients": False},
    ),
    "dualpipe-v": (KINDS["untied"], DUAL),
    "dualpipe-v tp2 ep2": (KINDS["some experts"], {**DUAL, "tp": 2, "ep": 2, "etp": 1}),
    "no layer in the last stage": (GPT2, {"pp": 2, "pipeline.stage_layers": [4, 0]}),
    "no layer at both ends": (LLAMA, {"pp": 4, "pipeline.stage_layers": "E|(tt|)*2L"}),
    "uneven chunks": (KINDS["post-norm"], {**V, "pipeline.stage_layers": [0, 1, 2, 1]}),
    "no layer in the last chunk": (
        KINDS["some experts"],
        {**V, "pipeline.stage_layers": [1, 2, 1, 0]},
    ),
    "function of halves": (GPT2, {"pp": 4, "schedule": halves_from_the_last, **ONE}),
    "function of chunks": (LLAMA, {**V, "schedule": chunk_after_chunk}),
    # Chosen by the times of a step.
    "auto, four stages": (GPT2, {"pp": 4, **ONE, "schedule": "auto"}),
    "auto, in a V": (KINDS["tied llama"], {**V, **ONE, "tp": 2, "schedule": "auto"}),
    "auto, experts": (MIXTURE, {"pp": 2, "ep": 2, **ONE, "schedule": "auto"}),
}


def job_of(name: str) -> Job:
    return Job(*CASES[name], steps=4 if name.startswith("auto") else 2)


def run_all(rank: int, size: int) -> tuple[dict[str, Report], list[Any], list[str]]:
    """Return the reports, the chosen schedules with the measured times, and the log of the choice.

    The time of a transfer follows from the size of the message and the rank.
    """
    choose: Any = ScheduleChoice._choose
    found: list[Any] = []
    messages: list[str] = []

    def choose_and_record(self: ScheduleChoice, *args: Any) -> Schedule:
        found.append((choose(self, *args), self.measured))
        return found[-1][0]

    def slow_transfer(num_bytes: int, mesh: ParallelMesh) -> float:
        measure_transfer(num_bytes, mesh)
        return (num_bytes + mesh.rank) / 1e6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_choice, "WARMUP_STEPS", 1)
        patch.setattr(schedule_choice, "MEASURED_STEPS", 1)
        patch.setattr(ScheduleChoice, "_choose", choose_and_record)
        patch.setattr(schedule_choice, "measure_transfer", slow_transfer)
        patch.setattr(schedule_choice, "rank_zero_info", messages.append)
        reports = {name: run_job(job_of(name), size) for name in CASES}
    return reports, found, messages


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_world(run_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_trains_as_one_process(name: str, ranks: Any) -> None:
    steps = 4 if name.startswith("auto") else 2
    check_equal([reports[name] for reports, *_ in ranks], gpt_twin(CASES[name][0], steps))


def test_all_ranks_choose_one_schedule_by_the_times_of_the_slowest(
    ranks: Any, tmp_path: Path
) -> None:
    _, found, messages = ranks[0]
    assert all(other == found for _, other, _ in ranks)
    shapes = [(s.num_stages, s.num_chunks, s.shape) for s, _ in found]
    assert shapes == [(4, 1, "loop"), (2, 2, "v"), (2, 1, "loop")]
    # A message is one sample of 16 tokens with 32 features in float64, or with tp its half. The
    # slowest rank counts.
    transfers = [measured.costs.transfer for _, measured in found]
    assert transfers == [4096 + 3, 2048 + 3, 4096 + 3]
    for transfer, line in zip(transfers, messages, strict=True):
        assert f"and {transfer / 1e3:.3g} ms for a transfer between stages." in line
    costs = tmp_path / "costs.yaml"
    costs.write_text(yaml.safe_dump(found[0][1].as_dict()))
    assert read_costs(costs, 4).times == found[0][1].costs


# ---- two processes: compiled blocks, evaluation and refusals


class Compiled(Language):
    """Compile every block when the fit starts; refuse to run a block uncompiled."""

    def on_fit_start(self) -> None:
        assert self.model is not None, "configure_model ran"
        torch.compiler.reset()
        # The wrappers of the tests' shape checks share one code object.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in self.model.layers.values():
            block.compile(backend="aot_eager")


#: Dense layers leave four products to weight halves: two of attention, and two of the MLP; layers
#: of experts leave those of attention, and a model that of its head.
HALF_EXPERTS = GPTConfig.llama(
    **LLAMA_SIZES, experts={**EXPERTS, "layers": [False, True, False, True]}
)
COMPILED, PRODUCTS = Job(partial(Compiled, HALF_EXPERTS), ZBV, steps=2), 2 * 4 + 2 * 2 + 1


def other_rows_on_each_rank(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows that are legal, but of a different schedule on process 1 from four microbatches on."""
    is_different = num_microbatches > 3 and os.environ["LOCAL_RANK"] == "1"
    name = "gpipe" if is_different else "1f1b"
    return list(build_schedule(name, pp, num_microbatches, vpp).actions(rank))


def fails_on_one_rank(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows of a function that one process cannot run from four microbatches on."""
    if num_microbatches > 3 and os.environ["LOCAL_RANK"] == "1":
        raise KeyError(num_microbatches)
    return list(build_schedule("1f1b", pp, num_microbatches, vpp).actions(rank))


def forgets_the_last(rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    """Rows of at most three microbatches."""
    return list(build_schedule("1f1b", pp, min(num_microbatches, 3), vpp).actions(rank))


REFUSED: tuple[tuple[Callable[..., Any], type[Exception], str], ...] = (
    (
        other_rows_on_each_rank,
        RankMismatchError,
        "rank 1 has rows of other_rows_on_each_rank for 4",
    ),
    (fails_on_one_rank, RankMismatchError, "it raised KeyError"),
    (forgets_the_last, ParallelPlanError, "'forgets_the_last' is not legal: on stage 0, F of mic"),
)
#: Validation has batches of other sizes than training.
VALIDATED = Job(GPT2, {"pp": 2, **ONE}, validation=partial(Tokens, BATCH + 3))


def run_two(rank: int, size: int) -> tuple[dict[str, Report], int, list[str]]:
    """Return the reports, the number of products that the compiled job left to weight halves, and
    the log.
    """
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2))
    for function, error, message in REFUSED:
        given: Any = SimpleNamespace(schedule=CustomOrder.of(function, 2, 1))
        cuts = BatchCuts(given, mesh, given)
        cuts._check_order(2)
        with pytest.raises(error) as caught:
            cuts._check_order(4)
        assert message in str(caught.value)
    mesh.destroy()
    job = replace(VALIDATED, strategy={"pp": 2, **ONE, "schedule": halves_from_the_last})
    reports = run_jobs(rank, size, {"validated": job})
    # The compiler would trace the checks of shapes.
    shape_checks.update("jaxtyping_disable", True)
    products: list[Any] = []
    messages: list[str] = []
    put = WeightGradientQueue.put

    def put_and_count(self: WeightGradientQueue, start: Any, slots: Any) -> None:
        products.append(start)
        put(self, start, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradientQueue, "put", put_and_count)
        patch.setattr(run_table, "rank_zero_info", messages.append)
        reports["compiled"] = run_job(COMPILED, size)
    assert counters["stats"]["unique_graphs"], "blocks are compiled"
    return reports, len(products), messages


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_world(run_two, 2)


def test_compiled_blocks_split_their_backward_passes_and_train_as_one_process(two: Any) -> None:
    check_equal([reports["compiled"] for reports, *_ in two], gpt_twin(HALF_EXPERTS, 2))
    assert sum(count for _, count, _ in two) == PRODUCTS * 4 * COMPILED.steps
    for *_, (_, note) in two:  # the table of choices comes first
        assert "mlp.experts and 1 others: not split into halves" in note


def test_evaluation_under_an_order_of_training_has_the_metrics_of_one_process(two: Any) -> None:
    expected = run_job(VALIDATED.twin())
    for reports, *_ in two:
        assert reports["validated"].metrics == pytest.approx(expected.metrics, abs=1e-10)
