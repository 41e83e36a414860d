"""Steps that need more rows than ``expert_rows`` allows are run again without a limit, with equal
results.
"""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy, ParallelPlanError, UnsupportedError
from tests.strategy.limited_fits import EXPERTS, Excess, Record, Watched, fit
from tests.strategy.tiny import loader
from tests.sweeps import chosen
from tests.world import run_world

AGAIN = "the step was run again without a limit"
#: One row too many, in the first microbatch of the second step.
ONE_ROW: Excess = {("train", 1, 0, 0): 1}
TWICE: Excess = {("train", 1, 0, 0): 1, ("train", 2, 1, 1): 12, ("train", 3, 0, 0): 100}
#: Excess, further options, and words of the warnings, one for each step that is run again.
CASES: dict[str, tuple[Excess, dict[str, Any], list[str]]] = {
    "one row": (
        ONE_ROW,
        {},
        [
            "experts: layer 0 needed 129 rows on rank 0, expert_rows=1 has 128: "
            f"{AGAIN}; 1.01 would be enough."
        ],
    ),
    "exactly full": ({("train", 1, 0, 0): 0}, {}, []),
    "second microbatch, other rank, last layer": (
        {("train", 1, 1, 1): -128},
        {},
        [
            f"experts: layer 1 needed 256 rows on rank 1, expert_rows=1 has 128: {AGAIN}; 2 would be enough."
        ],
    ),
    "the largest counts": (
        {("train", 0, 0, 0): 3, ("train", 0, 1, 1): -7},
        {},
        [
            f"layer 1 needed 135 rows on rank 1, expert_rows=1 has 128: {AGAIN}; 1.06 would be enough."
        ],
    ),
    "twice": (
        TWICE,
        {},
        [
            f"129 rows on rank 0, expert_rows=1 has 128: {AGAIN}; 1.01 would be enough.",
            f"140 rows on rank 0, expert_rows=1 has 128: {AGAIN}; 1.1 would be enough, and expert_rows "
            "is 1.21 from now on.",
        ],
    ),
    "evaluation": ({("val", 0, 1, 0): 2}, {}, ["layer 0 needed 130 rows", "layer 0 needed 130"]),
    "all-gather": (ONE_ROW, {"expert_transport": "all_gather"}, ["layer 0 needed 129 rows"]),
    "everything recomputed": (ONE_ROW, {"recompute": "full"}, ["layer 0 needed 129 rows"]),
    "experts recomputed, zero=0": (
        ONE_ROW,
        {"recompute": "experts", "zero": 0},
        ["layer 0 needed 129 rows"],
    ),
    "inputs of experts again": (
        ONE_ROW,
        {"recompute": "expert_inputs", "expert_transport": "one_sided"},
        ["layer 0 needed 129 rows"],
    ),
}
FEW = chosen(
    CASES,
    "one row",
    "exactly full",
    "the largest counts",
    "twice",
    "evaluation",
    "inputs of experts again",
)
STAGES: dict[str, dict[str, Any]] = chosen(
    {
        "1f1b": {"pp": 2, "microbatch_size": 8},
        "zb-h1": {"pp": 2, "microbatch_size": 8, "schedule": "zb-h1"},
    },
    "zb-h1",
)


def world_of_two(rank: int, size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: (fit(None, excess, **options), fit(1.0, excess, **options))
        for name, (excess, options, _) in FEW.items()
    }
    checkpoint = f"{folder}/half"
    half = {"max_steps": 2}
    fit(1.0, ONE_ROW, saves=checkpoint, trainer=half)
    resumed = fit(1.0, TWICE, ckpt_path=checkpoint)
    fit(None, ONE_ROW, saves=f"{folder}/other", trainer=half)
    results["resumed"] = fit(None, TWICE, ckpt_path=f"{folder}/other"), resumed
    return results


def world_of_four(rank: int, size: int) -> dict[str, tuple[Record, Record]]:
    excess: Excess = {("train", 1, 1, 1): 5, ("val", 0, 0, 0): 5}
    return {
        name: (fit(None, excess, size, **options), fit(1.0, excess, size, **options))
        for name, options in STAGES.items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(world_of_two, 2, str(tmp_path_factory.mktemp("rows")))


@pytest.mark.parametrize("name", list(FEW))
def test_a_step_over_the_row_limit_equals_a_step_without_a_limit(
    ranks: list[dict[str, Any]], name: str
) -> None:
    expected = CASES[name][2]
    for rank, results in enumerate(ranks):
        without, limited = results[name]
        assert limited.differences_from(without) == [], f"rank {rank}"
        assert limited.num_failures == len(expected), f"rank {rank}"
        assert without.num_failures == 0
        assert len(limited.losses) == 4
        assert limited.warnings == [] if rank else len(limited.warnings) == len(expected)
    for words, warning in zip(expected, ranks[0][name][1].warnings, strict=True):
        assert words in warning


def test_the_row_limit_grows_on_all_ranks_after_the_second_failure(
    ranks: list[dict[str, Any]],
) -> None:
    for results in ranks:
        assert results["one row"][1].factor == 1.0
        # The limit is a tenth above 140 rows, and has room for the 228 rows of the next step.
        assert results["twice"][1].factor == 1.21


def test_a_fit_resumes_from_a_checkpoint_after_a_repeated_step(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        without, resumed = results["resumed"]
        assert resumed.differences_from(without) == []
        assert resumed.num_failures == 2
        assert len(resumed.losses) == 2


@pytest.mark.slow
def test_all_pipeline_stages_repeat_a_step_over_the_row_limit() -> None:
    for rank, results in enumerate(run_world(world_of_four, 4)):
        for name, (without, limited) in results.items():
            assert limited.differences_from(without) == [], f"{name}, rank {rank}"
            # The third step over the first limit fits into the grown limit.
            assert limited.num_failures == 2, name


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"expert_rows": 0.99, "ep": 2}, ParallelPlanError, "at least 1"),
        ({"expert_rows": 1.25}, ParallelPlanError, r"expert_rows \(1.25\) needs ep above 1"),
        (
            {"expert_rows": 1.25, "ep": 2, "expert_transport": "all_to_all"},
            ParallelPlanError,
            "needs expert_transport of one_sided, all_gather or auto",
        ),
    ],
)
def test_invalid_expert_rows_options_are_refused(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        MegatronStrategy(**options)


def test_modules_whose_steps_cannot_be_repeated_are_refused_before_a_launch() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False}
    module = Watched(mlp_bias=False, ffn_hidden_size=16, experts=EXPERTS)
    trainer = Trainer(
        **options, strategy=MegatronStrategy(ep=2, expert_rows=1.25), accumulate_grad_batches=3
    )
    with pytest.raises(UnsupportedError, match=r"Watched.on_after_backward, which may change"):
        trainer.fit(module, loader())
    module.automatic_optimization = False
    trainer = Trainer(**options, strategy=MegatronStrategy(ep=2, expert_rows=1.25))
    with pytest.raises(UnsupportedError, match="needs automatic optimization"):
        trainer.fit(module, loader())
