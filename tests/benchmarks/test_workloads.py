"""Workloads of experts have their defined rows, and clones change rows, but not losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import expert_layer
from benchmarks.routing import WORKLOADS, Workload, workload_of
from benchmarks.shapes import Trained
from benchmarks.step import WORKLOAD_COLUMNS, workload_cases, workload_rows
from benchmarks.train_shapes import parser, training_line
from benchmarks.workload_figures import COSTS, WorkloadFigures
from lightning_megatron import GPTConfig
from tests.clone_oracle import plan_clones
from tests.fits import BATCH, LLAMA_SIZES, SEQUENCE, Job, Tokens, run_job
from tests.world import run_world

TOKENS, TOP_K, EXPERTS, RANKS = 512, 2, 16, 4
#: Rows of each expert: what 3/4 of the tokens give to each of 4 hot ones, and the others to all.
HOT, COLD = 512 * 3 // 4 * 2 // 4 + 512 // 4 * 2 // 16, 512 // 4 * 2 // 16
EVEN = 512 * 2 // 16
#: Rows of every expert by workload and step; the hot experts of W1 are drawn.
ROWS: dict[tuple[str, int], list[int]] = {
    ("W0", 5): [EVEN] * 16,
    ("W2", 5): [HOT] * 4 + [COLD] * 12,
    ("W3", 5): ([HOT] + [COLD] * 3) * 4,
    ("W4", 5): [36] * 16,
    ("W5", 5): [0] * 8 + [2 * EVEN] * 8,
    ("W6", 2): [HOT] * 4 + [COLD] * 12,
    ("W6", 3): [COLD] * 4 + [HOT] * 4 + [COLD] * 8,
    ("W6", 11): [COLD] * 12 + [HOT] * 4,
    ("W6", 12): [HOT] * 4 + [COLD] * 12,
    ("W7", 2): [EVEN] * 16,
    ("W7", 3): [512 // 2 * 2 // 4 + 512 // 2 * 2 // 16] * 4 + [512 // 2 * 2 // 16] * 12,
}


def choices(name: str, step: int = 0, seed: int = 0) -> Tensor:
    workload = workload_of(name)
    assert workload is not None
    return workload.choices(TOKENS, TOP_K, EXPERTS, seed=seed, step=step, device="cpu")


def rows_of(chosen: Tensor, num_experts: int = EXPERTS) -> list[int]:
    return (chosen[chosen >= 0]).bincount(minlength=num_experts).tolist()


@pytest.mark.parametrize(("name", "step"), ROWS)
def test_every_expert_has_the_rows_of_the_definition(name, step):
    assert rows_of(choices(name, step)) == ROWS[name, step]


def test_ranks_have_the_rows_and_send_the_tokens_that_a_workload_isolates():
    def by_rank(name: str, step: int = 0) -> list[int]:
        rows = rows_of(choices(name, step))
        return [sum(rows[first : first + 4]) for first in range(0, EXPERTS, 4)]

    assert by_rank("W2") == [4 * HOT, 4 * COLD, 4 * COLD, 4 * COLD]
    assert by_rank("W3") == by_rank("W0") == [TOKENS * TOP_K // RANKS] * 4
    assert by_rank("W5") == [0, 0, 512, 512]
    assert by_rank("W6", 3) == [4 * COLD, 4 * HOT, 4 * COLD, 4 * COLD]
    sent = [len(part[part[:, 0] >= 0]) for part in choices("W4").chunk(RANKS)]
    assert sent == [64 + 56, 48 + 40, 32 + 24, 16 + 8]
    drawn = rows_of(choices("W1", seed=3))
    assert sorted(drawn) == [COLD] * 12 + [HOT] * 4
    assert drawn != rows_of(choices("W2"))
    assert rows_of(choices("W2:2"))[:3] == [TOKENS * 3 // 4 + COLD] * 2 + [COLD]


def test_workloads_follow_from_name_seed_and_step_and_select_no_expert_twice():
    for name in WORKLOADS:
        for step in (0, 3):
            chosen = choices(name, step, seed=1)
            assert torch.equal(chosen, choices(name, step, seed=1)), name
            both_or_none = (chosen >= 0).sum(1)
            assert set(both_or_none.tolist()) <= {0, TOP_K}, name
            assert (chosen[:, 0] != chosen[:, 1])[both_or_none > 0].all(), name
    for name, seeds, steps in (
        ("W1", (1, 2), (0, 0)),
        ("W6", (1, 1), (2, 3)),
        ("W7", (1, 1), (2, 3)),
    ):
        first, second = (choices(name, step, seed) for seed, step in zip(seeds, steps, strict=True))
        assert not torch.equal(first, second), name
    assert torch.equal(choices("balanced"), choices("W0"))
    assert workload_of("natural") is None
    with pytest.raises(ValueError, match="one of W0, W1"):
        workload_of("W8")


def test_a_case_of_workloads_is_a_training_of_all_of_them():
    cases = workload_cases()
    assert len(cases) == len({str(options) for _, options in cases}) == 27
    args = parser().parse_args(["--layout", "ep2", "--workloads"])
    given = parser().parse_args(training_line(args, cases[-1][1]))
    assert given.workloads == ",".join(WORKLOADS)


def test_the_experts_of_the_busiest_rank_have_the_planned_rows(monkeypatch):
    for name, value in (("HIDDEN_SIZE", 16), ("FFN_SIZE", 8), ("MIN_ROWS_ON_GPUS", 8)):
        monkeypatch.setattr(expert_layer, name, value)
    sizes = TOKENS // 2, TOP_K, EXPERTS
    calls: list[Callable[[], Any]] = []

    def time_of(step: Callable[[], Any]) -> float:
        calls.append(step)
        return 0.0

    names = ("W0", "W2", "W5")
    lines = expert_layer.workload_lines(names, sizes, 2, torch.device("cpu"), time_of)
    expected = []
    for name in names:
        counts = [rows_of(part) for part in choices(name).chunk(2)]
        totals = [sum(column) for column in zip(*counts, strict=True)]
        plain, even = max(sum(totals[:8]), sum(totals[8:])), TOKENS * TOP_K // 2
        rows = [plain, *(max(plan_clones(counts, places, 8).rows) for places in (1, 2))]
        expected += [
            f"| {name} | {number} | {even:,} | {most:,} |" for number, most in enumerate(rows)
        ]
    assert len(calls) == len(expected) == len(lines) - 2
    assert all(map(str.startswith, lines[2:], expected))


# A training with W6.

MODEL = GPTConfig.llama(
    **LLAMA_SIZES, experts={"num_experts": EXPERTS, "top_k": TOP_K, "ffn_hidden_size": 8}
)
PLACES = (0, 1)
MICROBATCH = BATCH // 2
#: Measured steps of the workload: hot experts of the first rank, then of the next experts.
STEPS = 6


def train(rank: int, size: int) -> dict[int, tuple[list[float], dict[str, float]]]:
    """Return the losses and the figures of W6 by places for clones."""
    results = {}
    for places in PLACES:
        figures = WorkloadFigures(["W6"], 1, STEPS)
        steps = 1 + STEPS + 4
        module = partial(Trained, MODEL, "W6", MICROBATCH * SEQUENCE, steps)
        options: dict[str, Any] = {
            "ep": size,
            "microbatch_size": MICROBATCH,
            "experts.clones": places,
        }
        job = Job(module, options, steps=steps, data=partial(Tokens, steps * BATCH, steps * BATCH),
                  callbacks=lambda figures=figures: [figures])  # fmt: skip
        results[places] = run_job(job, size).losses, figures.result["W6"]
    return results


def planned(places: int, step: int, size: int) -> tuple[int, int]:
    """Return the rows of the busiest rank without clones, and by the plan in Python numbers."""
    tokens = size * MICROBATCH * SEQUENCE
    chosen = Workload("W6").choices(tokens, TOP_K, EXPERTS, seed=0, step=step, device="cpu")
    counts = [rows_of(part) for part in chosen.chunk(size)]
    totals = torch.tensor(counts).sum(0).view(size, -1).sum(1)
    before = int(totals.max())
    return before, max(plan_clones(counts, places).rows) if places else before


def test_clones_move_the_planned_rows_of_a_rotating_hot_spot_and_keep_all_losses():
    for results in run_world(train, 2):
        plain, _ = results[0]
        assert len(set(plain)) == len(plain) == 1 + STEPS + 4
        for places, (losses, figures) in results.items():
            assert losses == pytest.approx(plain, rel=1e-10, abs=0), places
            before, after = max(planned(places, step, 2) for step in range(1, 1 + STEPS))
            assert (figures["before"], figures["after"]) == (before, after), places
            assert (figures["clones"] > 0) == (places > 0)
            assert figures["weights"] > 0 if places else figures["weights"] == 0.0
            (row,) = workload_rows("eager", {"WorkloadFigures": {"W6": figures}})
            assert row.count("|") == len(WORKLOAD_COLUMNS) + len(COSTS) + 1
        afters = [results[places][1]["after"] for places in PLACES]
        assert afters[0] > afters[1]
