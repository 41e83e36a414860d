"""What a rank whose memory is full says would help is what a run with that option estimates itself."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import MemoryReport
from lightning_megatron.plan.budget import GIB
from lightning_megatron.strategy import out_of_memory
from lightning_megatron.strategy.out_of_memory import BEFORE_RUN, DeviceMemory
from tests.fits import GPT2, Job, Language, Regress, Vectors, run_job

SAVINGS: dict[str, dict[str, Any]] = {
    "microbatch_size=2": {"microbatch_size": 2},
    "recompute='full_except_core'": {"recompute": "full_except_core"},
    "recompute='full'": {"recompute": "full"},
    "optimizer.gradient_dtype='bfloat16'": {"optimizer.gradient_dtype": "bfloat16"},
}


class FullMemory(Language):
    """A GPT whose second step finds no memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("no room")
        return super().training_step(batch, batch_idx)


class FullVectors(Regress):
    """A network of the user's own whose second step finds no memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("no room")
        return super().training_step(batch, batch_idx)


class ChosenVectors(FullVectors):
    """A network that chooses elements by their values, and therefore cannot be traced."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].nonzero()
        return super().training_step(batch, batch_idx)


def explanation(job: Job) -> str:
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        run_job(job)
    (note,) = caught.value.__notes__
    return note


def peak(options: dict[str, Any]) -> int:
    memory = MemoryReport(after_steps=1)
    strategy = {"microbatch_size": 4, **options}
    run_job(Job(GPT2, strategy, "bf16-mixed", 1, callbacks=lambda: [memory], norms=False))
    return memory.reports[0].estimate.peak


def test_predicted_savings_are_those_that_a_run_with_the_option_estimates():
    job = Job(partial(FullMemory, GPT2), {"microbatch_size": 4}, "bf16-mixed", norms=False)
    note = explanation(job)
    now = peak({})
    assert f"(MiB of the fullest stage, now {now / 2**20:.2f})" in note
    assert "n/a" in note  # what is held on a CPU besides the static parts
    for name, options in SAVINGS.items():
        size = peak(options)
        row = re.search(rf"^{re.escape(name)} +([\d.]+) +([\d.]+)$", note, re.MULTILINE)
        assert row is not None, (name, note)
        assert row.groups() == (f"{size / 2**20:.2f}", f"{(now - size) / 2**20:.2f}")


def test_a_module_of_the_users_own_learns_what_would_help():
    make = partial(FullVectors, partial(nn.Linear, 64, 64))
    data = partial(Vectors, (64, 64))
    note = explanation(Job(make, {"microbatch_size": 8}, "32-true", data=data, norms=False))
    row = re.search(r"^microbatch_size=4 +([\d.]+) +([\d.]+)$", note, re.MULTILINE)
    assert row is not None, note
    # The input, the output and what the loss keeps, of half the samples.
    assert float(row[2]) == pytest.approx(3 * 4 * 4 * 64 * 64 / 2**20, rel=0.5)
    assert re.search(r"^activations and all else +0\.\d+ +n/a$", note, re.MULTILINE)


def test_advice_for_modules_without_an_estimate_is_by_what_they_hold(monkeypatch):
    full = DeviceMemory(30 * GIB, 31 * GIB, GIB, 40 * GIB)
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: full)
    make = partial(ChosenVectors, partial(nn.Linear, 8, 8))
    # A view of which autograd refuses to tell the origin.
    base = torch.ones(2, requires_grad=True) * 1
    with torch.no_grad():
        refused = base[:1]
    base.mul_(2)
    note = explanation(Job(make, {}, data=partial(Vectors, (8,)), norms=False))
    with pytest.raises(RuntimeError, match="no_grad mode"):
        refused.grad_fn  # noqa: B018
    assert re.search(r"^activations and all else +n/a +30.00$", note, re.MULTILINE)
    assert "A step has no estimate: " in note
    assert re.search(r"^half the samples of a microbatch +15.00$", note, re.MULTILINE)
    # A gibibyte that is reserved in pieces is no tenth of the capacity.
    assert "expandable_segments" not in note


class FullModel(Language):
    """A model that does not fit."""

    def configure_model(self) -> None:
        raise torch.OutOfMemoryError("no room")


def test_memory_that_is_full_before_the_run_exists_has_its_own_advice():
    assert explanation(Job(FullModel, {}, norms=False)).strip() == BEFORE_RUN
