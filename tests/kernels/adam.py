"""Checks that compare Adam's kernel with torch's optimizers in float64, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels.triton import AdamKernel
from lightning_megatron.optimizer.fused_update import numbers_of

HALF_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Case:
    """Settings of an optimizer, and the dtypes of the tensors that its kernel reads and writes."""

    name: str
    make: type[torch.optim.Adam] = torch.optim.AdamW
    weight_decay: float = 0.1
    coefficient: float | None = 0.3
    half: torch.dtype | None = torch.bfloat16
    gradients: torch.dtype = torch.float32
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    past_steps: int = 0
    first: int = 0


CASES = (
    Case("as in bf16-mixed"),
    Case("without clipping", coefficient=None),
    Case("without decay", weight_decay=0.0),
    Case("decay in the gradient", make=torch.optim.Adam),
    Case("mains are the parameters", half=None),
    Case("float16", half=torch.float16),
    Case("bfloat16 gradients", gradients=torch.bfloat16),
    Case("slow moments", betas=(0.95, 0.9999), eps=1e-5),
    Case("no first moment", betas=(0.0, 0.999)),
    Case("late", past_steps=123_456, betas=(0.9, 0.99999)),
    Case("between the borders of vectors", first=3),
)


class Slices:
    """Slices of flat tensors, as in an optimizer's buffers, which the kernel updates."""

    def __init__(
        self, sizes: Sequence[int], case: Case, device: str, moments: torch.dtype = torch.float32
    ) -> None:
        self.case, self.kernel = case, AdamKernel()
        ends = list(accumulate(sizes))
        self.ranges = [
            slice(case.first + end - size, case.first + end)
            for size, end in zip(sizes, ends, strict=True)
        ]
        self.generator = torch.Generator(device).manual_seed(5)
        self.total, self.device = case.first + ends[-1], device
        self.parameters = self.parts(self.draw())
        self.averages = self.parts(torch.zeros(self.total, dtype=moments, device=device))
        self.squares = self.parts(torch.zeros(self.total, dtype=moments, device=device))
        self.steps = [torch.tensor(float(case.past_steps), device=device) for _ in sizes]
        halves = (
            None if case.half is None else torch.empty(self.total, dtype=case.half, device=device)
        )
        self.halves: list[Any] = [None] * len(sizes) if halves is None else self.parts(halves)

    def draw(self) -> Tensor:
        return torch.randn(self.total, generator=self.generator, device=self.device)

    def parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[part] for part in self.ranges]

    def gradients(self, num_steps: int) -> Iterator[list[Tensor]]:
        for _ in range(num_steps):
            yield self.parts(self.draw().to(self.case.gradients))

    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        case = self.case
        coefficient = (
            None if case.coefficient is None else torch.tensor(case.coefficient, device=self.device)
        )
        is_decoupled = case.make is torch.optim.AdamW
        group = {
            "lr": lr, "betas": case.betas, "eps": case.eps, "weight_decay": case.weight_decay,
            "decoupled_weight_decay": is_decoupled,
        }  # fmt: skip
        self.kernel(
            self.parameters, gradients, self.averages, self.squares, self.steps, self.halves, coefficient,
            torch.tensor(numbers_of(group), device=self.device),
            has_decay=case.weight_decay != 0.0, is_decoupled=is_decoupled,
        )  # fmt: skip


def check_case(
    case: Case, sizes: Sequence[int], device: str, half_roundoff: float | None = None
) -> None:
    """Compare five steps under a changing learning rate with torch's steps in float64.

    The reference is not torch's fused step: on GPUs it computes 1 - beta in float32, which is 2e-4
    off for a beta of 0.9999.
    """
    ours = Slices(sizes, case, device)
    twins = [parameter.double().requires_grad_() for parameter in ours.parameters]
    optimizer = case.make(twins, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay)
    for twin in twins:
        optimizer.state[twin] = {
            "step": torch.tensor(float(case.past_steps)),
            "exp_avg": torch.zeros_like(twin),
            "exp_avg_sq": torch.zeros_like(twin),
        }
    coefficient = 1.0 if case.coefficient is None else float(torch.tensor(case.coefficient))
    for number, gradients in enumerate(ours.gradients(5)):
        lr = optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        before = [gradient.clone() for gradient in gradients]
        ours.step(gradients, lr)
        assert all(map(torch.equal, before, gradients)), f"{case.name}: gradients were changed"
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient.double() * coefficient
        optimizer.step()
    for index, twin in enumerate(twins):
        what, state = f"{case.name}, slice of {sizes[index]}", optimizer.state[twin]
        assert ours.steps[index] == state["step"].to(device), what
        _assert_close(ours.parameters[index], twin.detach(), f"{what}: parameter")
        _assert_close(ours.averages[index], state["exp_avg"], f"{what}: first moment")
        _assert_close(ours.squares[index], state["exp_avg_sq"], f"{what}: second moment")
        if case.half is not None:
            exact = ours.parameters[index]
            allowed = (half_roundoff or HALF_ROUNDOFF[case.half]) * exact.abs() + 2.0**-25
            assert ((ours.halves[index].float() - exact).abs() <= allowed).all(), (
                f"{what}: rounded parameter"
            )


def _assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    # The error is relative to the root mean square of the elements: a single parameter near zero
    # may have a larger relative error.
    distance = float((actual - expected).abs().max() / expected.square().mean().sqrt())
    assert distance < 1e-5, f"{what}: {distance} from torch's"


def check_narrow_moments(sizes: Sequence[int], device: str) -> None:
    """Check that bfloat16 moments decay at the expected rate, that a second run repeats them
    exactly, that elements are rounded independently of each other, and that NaN remains NaN.
    """
    case = replace(CASES[0], betas=(0.9, 0.999), coefficient=None)
    num_steps = 20
    runs = []
    for _ in range(2):
        ours = Slices(sizes, case, device, torch.bfloat16)
        for square in ours.squares:
            square.fill_(1.0)
        for _ in range(num_steps):
            ours.step([torch.zeros_like(parameter) for parameter in ours.parameters], 0.01)
        runs.append(ours)
    first_run, second_run = runs
    assert all(map(torch.equal, first_run.squares, second_run.squares)), (
        "a second run rounds differently"
    )
    squares = torch.cat(first_run.squares).float()
    # With rounding to nearest, all elements would still be 1.
    assert abs(float(squares.mean()) / 0.999**num_steps - 1) < 3e-3, f"mean {float(squares.mean())}"
    assert len(squares.unique()) > 3, "all elements are rounded the same way"
    first_run.step(
        [torch.full_like(parameter, float("nan")) for parameter in first_run.parameters], 0.01
    )
    assert torch.cat(first_run.squares).isnan().all(), "NaN became a number"


def check_narrow_steps(sizes: Sequence[int], device: str) -> None:
    """Compare steps with bfloat16 moments with steps with float32 moments."""
    narrow, wide = (
        Slices(sizes, CASES[0], device, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    start = torch.cat(wide.parameters)
    for slices in (narrow, wide):
        for gradients in slices.gradients(5):
            slices.step(gradients, 0.01)
    moved = torch.cat(wide.parameters) - start
    distance = float((torch.cat(narrow.parameters) - start - moved).norm() / moved.norm())
    assert 1e-6 < distance < 2e-2, f"updates differ by {distance}"


def check_new_addresses(device: str) -> None:
    """Check that the kernel follows slices that move to new addresses or are left out."""
    ours = Slices([700, 33], CASES[0], device)
    twin = Slices([700, 33], CASES[0], device)
    for number, gradients in enumerate(ours.gradients(4)):
        if number == 2:
            ours.parameters = [parameter.clone() for parameter in ours.parameters]
            gradients = [gradient.clone() for gradient in gradients]
        twin.kernel = AdamKernel()
        ours.step(gradients, 0.01)
        twin.step(gradients, 0.01)
    assert all(map(torch.equal, ours.parameters, twin.parameters)), "the parameters differ"
    expected = ours.parameters[1].clone()
    for name in ("averages", "squares", "steps", "halves"):
        setattr(ours, name, getattr(ours, name)[:1])
    ours.parameters, left_out = ours.parameters[:1], ours.parameters[1]
    ours.step([torch.ones_like(ours.parameters[0])], 0.01)
    assert ours.steps[0] == 5, "the step was not counted"
    assert torch.equal(left_out, expected), "a slice without a gradient was changed"
