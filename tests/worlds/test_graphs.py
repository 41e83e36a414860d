"""Jobs by CUDA graphs have the bits of the same jobs without graphs, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.groups.axis import CollectiveLauncher, Work
from lightning_megatron.optimizer import gradient_buckets
from tests.fits import GPT2, LLAMA, Job, Report, Tokens
from tests.graphs.jobs import (
    DROPOUT,
    FULL,
    MODES,
    ROUTED,
    SEGMENTS,
    VALIDATED,
    VARIED,
    differences,
    run_graphs,
)
from tests.optimizer.fused_fits import SMALL, FusedLanguage, fused
from tests.world import run_world

ONE_EXPERT = replace(ROUTED, experts={**vars(ROUTED.experts), "top_k": 1})
WIDE, SHORT = replace(SMALL, hidden_size=64), replace(LLAMA, num_layers=2)
DELAYED = FP8("delayed", history=3, margin=1, emulate=True, parameters="fp8")
LATE = {"optimizer.bucket_size": 2000, "optimizer.overlap_parameters": True}
ONE = {"microbatch_size": 1}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
#: The last batch of an epoch and of a validation has a microbatch of one sample.
SHAPES: dict[str, Any] = {
    "steps": 8,
    "data": partial(Tokens, 37, 37),
    "validation": partial(Tokens, 11, 11),
    "trainer": {"val_check_interval": 2},
}


def job(model: Any, layout: dict[str, Any], **options: Any) -> Job:
    """Return a job of six steps: several ranks compare replicas eagerly in the first two."""
    return Job(model, layout, **{"steps": 6, "data": VARIED, **options})


JOBS: dict[str, tuple[Job, tuple[CudaGraphs, ...]]] = {
    "tp2": (job(DROPOUT, {"tp": 2}, validation=VARIED, trainer=VALIDATED), MODES),
    "dp2, late": (job(SMALL, LATE), MODES),
    "dp2, rows": (job(replace(SHORT, vocab_size=4000), {"optimizer.bucket_size": 500}), MODES),
    "dp2, accumulation": (job(SMALL, {}, trainer={"accumulate_grad_batches": 3}), (FULL,)),
    "cp2": (job(SMALL, {"cp": 2}), (FULL,)),
    "pp2 vpp2": (job(GPT2, {"pp": 2, "vpp": 2, **ONE}), (FULL,)),
    "pp2, recomputed": (job(DROPOUT, {"pp": 2, **ONE, "recompute": "full"}), (SEGMENTS,)),
    "pp2, shapes": (
        job(DROPOUT, {"pp": 2}, **SHAPES),
        (replace(SEGMENTS, evaluation=True, on_new_shape="capture"),),
    ),
    "pp2, mixture": (job(ROUTED, {"pp": 2}), (FULL,)),
    "zb-h1": (job(SMALL, {"pp": 2, "schedule": "zb-h1", **ONE}), MODES),
    "zb-v": (job(GPT2, {"pp": 2, "vpp": 2, "schedule": "zb-v", **ONE}), (SEGMENTS,)),
    "ep2, late": (job(ROUTED, {"ep": 2, "experts.transport": "one_sided", **LATE}), MODES),
    "ep2 all_gather, recomputed": (
        job(ROUTED, {"ep": 2, "experts.transport": "all_gather", "recompute": "full"}),
        (SEGMENTS,),
    ),
    "ep2, clones": (job(ROUTED, {"ep": 2, "experts.clones": 1}), (FULL,)),
    "ep2, one expert": (job(ONE_EXPERT, {"ep": 2}), (FULL,)),
    "fp8 dp2, late": (
        job(
            SMALL,
            {"fp8": DELAYED, "optimizer.overlap_parameters": True, "optimizer.bucket_size": 1000},
            **BF16,
        ),
        MODES,
    ),
    "fp8 tp2": (job(WIDE, {"tp": 2, "fp8": DELAYED, **ONE}, **BF16), (FULL,)),
    "fp8 zb-h1": (
        job(
            WIDE,
            {"pp": 2, "schedule": "zb-h1", "fp8": FP8(emulate=True, parameters="fp8"), **ONE},
            **BF16,
        ),
        (SEGMENTS,),
    ),
    "updates dp2": (
        job(FusedLanguage, {"optimizer.bucket_size": 2000}, precision="32-true", norms=False),
        (replace(FULL, optimizer=True),),
    ),
    "updates pp2": (
        job(FusedLanguage, {"pp": 2, **ONE}, norms=False, **BF16),
        (replace(SEGMENTS, optimizer=True),),
    ),
}
#: What can be captured alone of a mixture. ``preprocess`` needs ``router``.
SCOPES: tuple[tuple[Any, ...], ...] = (
    ("router",),
    ("router", "preprocess"),
    ("experts",),
    ("combine",),
    ("attention", "router", "preprocess"),
    ("router", "preprocess", "experts", "combine"),
)
#: With all_to_all the host reads how many tokens each rank gets, which keeps the transport and the
#: experts eager.
EAGER_EXPERTS = tuple(scopes for scopes in SCOPES if "experts" not in scopes)


def captured_scopes(*scopes: tuple[Any, ...]) -> tuple[CudaGraphs, ...]:
    return tuple(replace(SEGMENTS, scopes=captured) for captured in scopes)


#: Jobs by graphs of each scope.
SCOPED = {
    transport: (
        job(ROUTED, {"ep": 2, "experts.transport": transport}, steps=3),
        captured_scopes(*scopes),
    )
    for transport, scopes in {"one_sided": SCOPES, "all_to_all": EAGER_EXPERTS}.items()
}


class LateWork:
    """Collective that runs in its ``wait``."""

    def __init__(self, collective: Callable[[], Work]) -> None:
        self._collective: Callable[[], Work] | None = collective

    def wait(self) -> None:
        collective, self._collective = self._collective, None
        if collective is not None:
            collective().wait()

    def is_completed(self) -> bool:
        return self._collective is None


def delayed_collectives() -> AbstractContextManager[Any]:
    """Run collectives outside of graphs as late as a separate stream could run them.

    A read of the result without a wait then gets old values, and an early write to the operands
    spoils the result.
    """
    start = CollectiveLauncher.start

    def start_late(
        launcher: CollectiveLauncher, collective: Callable[[], Work], *written: Tensor
    ) -> Work:
        if launcher.recorder is not None:
            return start(launcher, collective, *written)
        return LateWork(collective)

    return patch.object(CollectiveLauncher, "start", start_late)


def compare(
    work: Job, settings: tuple[CudaGraphs, ...], size: int = 1, is_late: bool = False
) -> list[tuple[list[str], Report]]:
    """Train eagerly and with each settings of graphs; return differences and reports on this rank."""
    results = []
    with (
        patch.object(
            gradient_buckets, "start_row_sum", wraps=gradient_buckets.start_row_sum
        ) as exchanged,
        fused(),
    ):
        for graphs in (None, *settings):
            exchanged.reset_mock()
            with delayed_collectives() if graphs and is_late else nullcontext():
                report = run_graphs(work, graphs, size)
            report.outcomes["exchanges"] = exchanged.call_count
            results.append((differences(report, results[0][1]) if results else [], report))
    for _, report in results:
        report.pieces.clear()
    return results


def run_table(rank: int, size: int) -> dict[str, list[tuple[list[str], Report]]]:
    return {
        name: compare(work, settings, size, "late" in name)
        for name, (work, settings) in (JOBS | SCOPED).items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[tuple[list[str], Report]]]]:
    return run_world(run_table, 2)


def check(results: list[tuple[list[str], Report]], case: str) -> None:
    """Check reports by graphs against the first report, without graphs."""
    (_, eager), *captured = results
    assert len(set(eager.losses)) == len(eager.losses) > 2, case
    assert not any(eager.outcomes["graphs"]), case
    for differing, report in captured:
        # A captured step of full mode cannot decide how many rows of an embedding ranks exchange, and
        # its eager steps sum the same whole embeddings.
        is_whole = report.outcomes["exchanges"] < eager.outcomes["exchanges"]
        assert differing == (["counts"] if is_whole else []), case
        assert report.outcomes["graphs"][0] < report.outcomes["graphs"][-1], case


@pytest.mark.parametrize("name", JOBS | SCOPED)
def test_a_job_by_graphs_has_the_bits_of_an_eager_job(name: str, ranks: Any) -> None:
    for rank, results in enumerate(ranks):
        check(results[name], f"{name}, rank {rank}")


def test_ranks_exchange_rows_of_embeddings_beside_segments_and_not_in_full_graphs(
    ranks: Any,
) -> None:
    for results in ranks:
        eager, segments, full = (report.outcomes["exchanges"] for _, report in results["dp2, rows"])
        assert eager == segments > full == 0


def test_each_batch_shape_and_evaluation_of_stages_are_captured(ranks: Any) -> None:
    for results in ranks:
        (_, report) = results["pp2, shapes"][1]
        assert report.outcomes["replays"]["training"] > 6 * 2
        assert report.outcomes["replays"]["evaluation"] > 0
        assert len(report.outcomes["validated"]) > 1


def test_graphs_of_scopes_of_a_mixture_in_one_process_have_eager_bits() -> None:
    check(compare(job(ROUTED, {}, steps=3), captured_scopes(*SCOPES)), "one process")


def test_scopes_that_exclude_each_other_or_that_no_model_has_are_refused() -> None:
    for scopes, words in (
        (("preprocess",), "must name router if it names preprocess"),
        (("router", "router"), "must name each part once"),
        (("all", "router"), "must be all or parts of it"),
        ((), "must name at least one part"),
        (("norm",), "scopes"),
    ):
        with pytest.raises(ParallelPlanError, match=words):
            CudaGraphs("segments", scopes)  # type: ignore[arg-type]
    with pytest.raises(ParallelPlanError, match="must be all with mode full"):
        CudaGraphs("full", ("router",))
