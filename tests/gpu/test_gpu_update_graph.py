"""Tests that captured updates on GPUs have the bits of eager updates at changing learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which comes with the CUDA builds of torch")

from lightning_megatron import CudaGraphs  # noqa: E402
from lightning_megatron.graphs.cuda import CudaBackend  # noqa: E402
from lightning_megatron.graphs.update_graph import Update, UpdateGraph  # noqa: E402
from lightning_megatron.groups.mesh import ParallelMesh  # noqa: E402
from lightning_megatron.optimizer.fused_update import GroupNumbers  # noqa: E402
from tests.graphs.jobs import VARIED, differences, run_updates  # noqa: E402
from tests.kernels.adam import CASES, Case, Slices  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = (1, 15, 4096, 100_003)


class UpdatedSlices:
    """Slices whose kernel reads a table of numbers, and gradients at fixed addresses."""

    def __init__(self, case: Case) -> None:
        self.slices = Slices(SIZES, case, "cuda")
        self.numbers = GroupNumbers(torch.device("cuda"))
        self.gradients = next(self.slices.gradients(1))
        self.coefficient = torch.ones((), device="cuda")
        self.is_decoupled = case.make is torch.optim.AdamW

    def prepare(self, number: int) -> None:
        """Draw gradients, and set the numbers of the group for a step."""
        torch._foreach_copy_(self.gradients, next(self.slices.gradients(1)))
        case = self.slices.case
        group = {
            "lr": 0.01 / (1 + number),
            "betas": (case.betas[0] * (1 - 0.01 * number), case.betas[1]),
            "eps": case.eps,
            "weight_decay": case.weight_decay * (1 + number),
            "decoupled_weight_decay": self.is_decoupled,
        }
        self.numbers.fill([group])
        self.coefficient.fill_(0.3 + 0.1 * number)

    def run(self) -> None:
        slices = self.slices
        slices.kernel(
            slices.parameters, self.gradients, slices.averages, slices.squares, slices.steps,
            slices.halves, self.coefficient, self.numbers.rows[0],
            has_decay=slices.case.weight_decay != 0.0, is_decoupled=self.is_decoupled,
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_captured_kernel_reads_the_numbers_of_each_step(case):
    eager, captured = UpdatedSlices(case), UpdatedSlices(case)
    settings = CudaGraphs("full", warmup_steps=2, optimizer=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        mesh = ParallelMesh.single(device=torch.device("cuda"))
        graph: UpdateGraph[None] = UpdateGraph(CudaBackend(), mesh, settings)
        for number in range(8):
            for updated in (eager, captured):
                updated.prepare(number)
            eager.run()
            graph.run(Update("", captured, tuple, (captured.run,)))
        assert graph.num_graphs == 1
        for name in ("parameters", "averages", "squares", "steps"):
            pairs = zip(getattr(eager.slices, name), getattr(captured.slices, name), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), name
        assert [int(step) for step in captured.slices.steps] == [8 + case.past_steps] * len(SIZES)
        graph.close()
        torch.cuda.synchronize()


#: Clipping, and options of the fits.
FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped by norm": ({}, {"precision": "bf16-mixed", "cycles": True}),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "not clipped": ({"gradient_clip_val": None}, {"precision": "bf16-mixed"}),
    "sums in bfloat16": (
        {},
        {"precision": "bf16-mixed", "strategy": {"optimizer.gradient_dtype": "bfloat16"}},
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_with_captured_updates_has_the_bits_of_an_eager_fit(name):
    clipping, settings_of_fit = FITS[name]
    trainer = {"accelerator": "gpu", **clipping}
    options: dict[str, Any] = {"steps": 12, "data": VARIED, "trainer": trainer, **settings_of_fit}
    eager = run_updates(None, **options)
    repeated = differences(run_updates(None, **options), eager)
    for mode in ("segments", "full"):
        settings = CudaGraphs(mode, optimizer=True, on_failure="error")
        captured = run_updates(settings, **options)
        assert captured.graphs[-1] > captured.graphs[2], mode
        assert set(differences(captured, eager)) <= set(repeated), mode
