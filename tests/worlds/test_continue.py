"""Four ranks continue checkpoints of ordinary Lightning, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint.consolidate import consolidate
from tests.fits import (
    BATCH,
    GPT2,
    MIXTURE,
    Job,
    Language,
    Module,
    Report,
    Tokens,
    run_job,
    run_jobs_on,
)
from tests.swap.families import exact_twin

peft = pytest.importorskip("peft")


class Grouped(Module):
    """Train with weight decay for some parameters, chosen by name as in many scripts."""

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": 0.3},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in self.named_parameters():
            is_without = any(part in name for part in ("norm", "bias", "ln_"))
            groups[is_without]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class GroupedLanguage(Grouped, Language):
    """Train a GPT."""


def texts() -> Any:
    """Return the same texts for every step, because Lightning's own strategies restart an epoch."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, 53, (BATCH, 8), generator=generator)) * 4


class FineTune(Grouped):
    """Train a model of Hugging Face, or an adapter of it."""

    def __init__(self, case: str) -> None:
        super().__init__()
        name = case.removesuffix(" with an adapter")
        changes = {"num_hidden_layers": 2} if name == "mixtral" else {}
        model: Any = exact_twin(name, **changes)
        if case != name:
            targets = "all-linear" if name == "llama" else ["query_key_value", "dense"]
            config = peft.LoraConfig(
                r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights="gaussian"
            )
            torch.manual_seed(3)
            model = peft.get_peft_model(model, config).double()
        self.model = model.eval()

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.model(input_ids=batch).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())


TP_PP = {"tp": 2, "pp": 2}
#: Modules and layouts. ``gpt2`` stores projections transposed, ``gpt_neox`` stores rows of one head
#: after the other, and ``mixtral`` all experts of a layer in one tensor.
CASES: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "GPT": (partial(GroupedLanguage, GPT2), {"pp": 2, "vpp": 2, "schedule": "zb-v"}),
    "experts": (
        partial(GroupedLanguage, replace(MIXTURE, num_layers=2)),
        {"tp": 2, "ep": 2, "etp": 1},
    ),
    "mixtral": (partial(FineTune, "mixtral"), {**TP_PP, "ep": 2, "etp": 1}),
    **{
        name: (partial(FineTune, name), TP_PP)
        for name in ("gpt2", "llama with an adapter", "gpt_neox with an adapter")
    },
}


def job_of(case: str, is_ours: bool, steps: int, **paths: Path) -> Job:
    (module, layout), places = CASES[case], {name: str(path) for name, path in paths.items()}
    data = partial(Tokens, 4 * BATCH) if case in ("GPT", "experts") else texts
    return Job(module, layout if is_ours else None, steps=steps, data=data, **places)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the first step of every fit in this process."""
    path = tmp_path_factory.mktemp("continued")
    for case in CASES:
        run_job(job_of(case, False, 1, save=path / f"{case}.first"))
    return path


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, list[Report]]:
    jobs = {}
    for case in CASES:
        paths = {"save": folder / f"{case}.world", "resume": folder / f"{case}.first"}
        jobs[case] = job_of(case, True, 2, **paths)
    return run_jobs_on(4, jobs)


@pytest.mark.parametrize("case", CASES)
def test_trainings_continue_from_and_in_ordinary_lightning(case, folder, reports):
    whole = run_job(job_of(case, False, 3)).losses
    assert whole[0] > whole[-1]
    for report in reports[case]:
        assert report.losses == pytest.approx(whole[1:2], abs=1e-9)
    consolidate(folder / f"{case}.world", folder / f"{case}.ckpt")
    resumed = run_job(job_of(case, False, 3, resume=folder / f"{case}.ckpt"))
    assert resumed.losses == pytest.approx(whole[2:], abs=1e-9)
