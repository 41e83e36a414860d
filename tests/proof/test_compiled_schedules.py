"""Tests that compiled blocks under schedules that split backward passes train as one eager process:
same losses, gradient norms and final weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jaxtyping import config
from torch._dynamo.utils import counters

from lightning_megatron.layers.weight_gradient_queue import WeightGradientQueue
from lightning_megatron.strategy.logs import compiled_blocks
from tests.proof.test_layouts_equal import check
from tests.proof.training import STEPS, Job, Module, Report, train, train_all
from tests.world import run_world

pytestmark = pytest.mark.slow

JOBS = {
    "zb-h1": Job("gpt2-tied", layout={"pp": 2, "schedule": "zb-h1", "recompute": "full"}),
    "zb-v": Job("experts", layout={"pp": 2, "vpp": 2, "schedule": "zb-v"}),
}
#: Microbatches of all steps.
NUM_MICROBATCHES = 4 * STEPS
#: Products that a block leaves to weight halves: two of attention, and two of a dense MLP.
LEFT = {"zb-h1": 4, "zb-v": 2}

Compiled = tuple[dict[str, Report], list[int], list[str]]


def compile_blocks(module: Module) -> None:
    """Compile every block by itself; refuse to run a block uncompiled."""
    assert module.model is not None, "configure_model ran"
    torch.compiler.reset()
    # The wrappers of the tests' shape checks share one code object.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for block in module.model.layers.values():
        block.compile(backend="aot_eager")


def train_compiled(rank: int, size: int, folder: str) -> Compiled:
    """Run the jobs with blocks that are compiled when the fit starts.

    Return the reports, the number of products that each job left to weight halves, and the log.
    """
    # The compiler would trace the checks of shapes.
    config.update("jaxtyping_disable", True)
    counts: list[int] = []
    messages: list[str] = []
    put = WeightGradientQueue.put

    def put_and_count(self, start, slots):  # type: ignore[no-untyped-def]
        counts[-1] += 1
        put(self, start, slots)

    def start_and_compile(module: Module) -> None:
        counts.append(0)
        compile_blocks(module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "on_fit_start", start_and_compile)
        patch.setattr(WeightGradientQueue, "put", put_and_count)
        patch.setattr(compiled_blocks, "rank_zero_info", messages.append)
        reports = train_all(rank, size, JOBS, folder)
    assert counters["stats"]["unique_graphs"], "blocks are compiled"
    return reports, counts, messages


def test_compiled_blocks_train_as_one_process(tmp_path: Path) -> None:
    ranks = run_world(train_compiled, 2, str(tmp_path))
    for name, job in JOBS.items():
        check(job, [reports[name] for reports, *_ in ranks], train(Job(job.kind), 1, "cpu"))
    for number, (name, num_products) in enumerate(LEFT.items()):
        # Four blocks and one head.
        expected = (4 * num_products + 1) * NUM_MICROBATCHES
        assert sum(counts[number] for _, counts, _ in ranks) == expected, name
    note = (
        "backward of model.layers.0.mlp.experts and 3 others: not split into halves, because "
        "compiled experts and fused weights compute the gradients of their inputs and weights at "
        "once, unless they are recomputed"
    )
    assert [messages for *_, messages in ranks] == [[note]] * 2, "dense layers split"
