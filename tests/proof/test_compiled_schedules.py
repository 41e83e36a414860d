"""Compiled blocks keep the promise under schedules that split backward passes: losses, gradient
norms and final weights are one eager process's.
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

    Return the reports, how many products each job left to weight halves, and what the log says.
    """
    # The compiler would trace the checks of shapes.
    config.update("jaxtyping_disable", True)
    left: list[int] = []
    said: list[str] = []
    put = WeightGradientQueue.put

    def counted(self, start, slots):  # type: ignore[no-untyped-def]
        left[-1] += 1
        put(self, start, slots)

    def started(module: Module) -> None:
        left.append(0)
        compile_blocks(module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "on_fit_start", started)
        patch.setattr(WeightGradientQueue, "put", counted)
        patch.setattr(compiled_blocks, "rank_zero_info", said.append)
        reports = train_all(rank, size, JOBS, folder)
    assert counters["stats"]["unique_graphs"], "blocks are compiled"
    return reports, left, said


def test_compiled_blocks_train_as_one_process(tmp_path: Path) -> None:
    ranks = run_world(train_compiled, 2, str(tmp_path))
    for name, job in JOBS.items():
        check(job, [reports[name] for reports, *_ in ranks], train(Job(job.kind), 1, "cpu"))
    for number, (name, of_block) in enumerate(LEFT.items()):
        # Four blocks and the head, which a stage has once.
        expected = (4 * of_block + 1) * NUM_MICROBATCHES
        assert sum(left[number] for _, left, _ in ranks) == expected, name
    note = (
        "backward of model.layers.0.mlp.experts and 3 others: not split into halves, because "
        "compiled experts and fused weights compute the gradients of their inputs and weights at "
        "once, unless they are recomputed"
    )
    assert [said for *_, said in ranks] == [[note]] * 2, "dense layers split"
