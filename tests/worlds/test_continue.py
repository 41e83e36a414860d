"""A checkpoint of any layout continues in any other with the losses, norms and weights of one process
that was not interrupted; Hugging Face models also continue checkpoints of ordinary Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.checkpoint.consolidate import consolidate
from tests.fits import BATCH, GPT2, MIXTURE, Job, Module, Report, Tokens, check_equal, run_job
from tests.swap.families import exact_twin
from tests.sweeps import chosen
from tests.world import run_world
from tests.worlds.test_experts import KINDS as MIXTURES

peft = pytest.importorskip("peft")

KINDS = {"gpt2": GPT2, "experts": MIXTURE, **MIXTURES}
SMALL = {"bucket_size": 500}
#: Layouts that continue from each other, one step each, between a process at the start and one at
#: the end.
CHAINS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": False},
        "pp4, none at both ends": {"pp": 4, "stage_layers": "E|(tt|)*2L"},
        "zb-v dp2": SMALL | {"pp": 2, "vpp": 2, "schedule": "zb-v"},
        "dp4, whole parameters": {"optimizer_slices": "parameters"},
        "cp2 tp2+sp": {"cp": 2, "tp": 2, "cp_transport": "ring"},
        "dp4, zero 0": SMALL | {"zero": 0},
        "pp2 vpp2, uneven": {"pp": 2, "vpp": 2, "stage_layers": [0, 1, 2, 1]},
    },
    "experts": {
        "ep4, clones": {"ep": 4, "expert_clones": 1},
        "tp2 ep2": {"tp": 2, "ep": 2, "etp": 1},
        "zb-h1 ep2, clones": {"pp": 2, "ep": 2, "schedule": "zb-h1", "expert_clones": 2},
        "edp4, zero 0": {"zero": 0},
    },
    "biases": {"tp2+sp ep2": {"tp": 2, "ep": 2, "etp": 1}},
    "latent": {"tp2+sp dp2": {"tp": 2}},
}
#: The nightly run also goes through the layouts from the last to the first.
WAYS = chosen(
    {f"{kind}, forward": (kind, [*chain]) for kind, chain in CHAINS.items()}
    | {f"{kind}, backward": (kind, [*reversed(chain)]) for kind, chain in CHAINS.items()},
    *(f"{kind}, forward" for kind in CHAINS),
)
#: Models of Hugging Face: ``gpt2`` stores projections transposed, ``gpt_neox`` stores rows of one
#: head after the other, and ``mixtral`` all experts of a layer in one tensor.
TP_PP = {"tp": 2, "pp": 2}
THEIRS: dict[str, dict[str, Any]] = chosen(
    {
        "llama": TP_PP,
        "gpt2": TP_PP,
        "gpt_neox": TP_PP,
        "mixtral": {**TP_PP, "ep": 2, "etp": 1},
        "llama with an adapter": TP_PP,
        "gpt_neox with an adapter": TP_PP,
    },
    "gpt2",
    "mixtral",
    "llama with an adapter",
    "gpt_neox with an adapter",
)
FIRST, LAST = "first", "last"


class Texts(Dataset):
    """The same texts in every step, because Lightning's own strategies restart an epoch."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 53, (8,), generator=torch.Generator().manual_seed(index % BATCH))


class FineTune(Module):
    """Train with weight decay for some parameters, chosen by name as in Hugging Face's scripts."""

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

    def configure_optimizers(self) -> Any:
        without_decay = ("norm", "bias", "ln_")
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in self.named_parameters():
            groups[any(part in name for part in without_decay)].append(parameter)
        return torch.optim.AdamW(
            [
                {"params": groups[False], "weight_decay": 0.3},
                {"params": groups[True], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )


def job_of(
    kind: str, layout: Mapping[str, Any] | None, step: int, save: Any = None, resume: Any = None
) -> Job:
    return Job(
        KINDS[kind], layout, steps=step, data=partial(Tokens, 12 * BATCH),
        save=save and str(save), resume=resume and str(resume),
    )  # fmt: skip


def their_job(
    case: str, layout: Mapping[str, Any] | None, step: int, save: Any = None, resume: Any = None
) -> Job:
    return Job(
        partial(FineTune, case), layout, steps=step, data=Texts,
        save=save and str(save), resume=resume and str(resume),
    )  # fmt: skip


def run_all(rank: int, size: int, folder: Path) -> dict[Any, Report]:
    found: dict[Any, Report] = {}
    for way, (kind, names) in WAYS.items():
        last = folder / f"{way}.{FIRST}"
        for step, name in enumerate(names, 2):
            saved = folder / f"{way}.{name}"
            found[way, name] = run_job(job_of(kind, CHAINS[kind][name], step, saved, last), size)
            last = saved
    for case, layout in THEIRS.items():
        job = their_job(case, layout, 2, folder / f"{case}.world", folder / f"{case}.{FIRST}")
        found[case] = run_job(job, size)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the first step of every fit in this process."""
    path = tmp_path_factory.mktemp("chains")
    for way, (kind, _) in WAYS.items():
        run_job(job_of(kind, {}, 1, path / f"{way}.{FIRST}"))
    for case in THEIRS:
        run_job(their_job(case, None, 1, path / f"{case}.{FIRST}"))
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Report]]:
    return run_world(run_all, 4, folder)


@pytest.mark.parametrize("way", WAYS)
def test_training_continues_in_every_layout(way: str, folder: Path, ranks: Any) -> None:
    kind, names = WAYS[way]
    steps = len(names) + 2
    # Only the strategy changes the router's bias.
    whole = run_job(job_of(kind, {}, steps))
    for rank in ranks:
        for step, name in enumerate(names, 1):
            report = rank[way, name]
            assert report.losses == pytest.approx(whole.losses[step : step + 1], abs=1e-10), name
            assert report.norms == pytest.approx(whole.norms[step : step + 1], abs=1e-10), name
    end = run_job(job_of(kind, {}, steps, None, folder / f"{way}.{names[-1]}"))
    assert end.losses == pytest.approx(whole.losses[-1:], abs=1e-10)
    check_equal([replace(end, losses=whole.losses, norms=whole.norms)], whole, 1e-9)


@pytest.mark.parametrize("case", THEIRS)
def test_hugging_face_models_continue_from_and_in_ordinary_lightning(
    case: str, folder: Path, ranks: Any
) -> None:
    whole = run_job(their_job(case, None, 3)).losses
    assert whole[0] > whole[-1]
    file = folder / f"{case}.ckpt"
    consolidate(folder / f"{case}.world", file)
    for rank in ranks:
        assert rank[case].losses == pytest.approx(whole[1:2], abs=1e-9)
    assert run_job(their_job(case, None, 3, None, file)).losses == pytest.approx(
        whole[2:], abs=1e-9
    )
