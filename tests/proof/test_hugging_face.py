"""Tests that a LightningModule around a Hugging Face model trains in every layout as without this
library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.proof.fine_tuning import BUILDERS, LABELS, FineTune, InOrder, V, trainer_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    # Without stages, two microbatches per step test as much as four, with half of the messages.
    "tp4+sp": {"tp": 4, "microbatch_size": 4},
    "tp2 dp2": {"tp": 2, "sequence_parallel": False},
    "tp2+sp pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "tp2+sp dp2, recomputed": {"tp": 2, "zero": 0, "recompute": "full"},
}
_SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}
_ENCODER = {
    **_SIZES,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
CONFIGS = {
    "llama": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
        | {"sliding_window": 6, "sliding_window_pattern": 2, "pad_token_id": None},
    ),
    "olmo2": ("Olmo2Config", {**_SIZES, "num_key_value_heads": 2, "pad_token_id": None}),
    "bert": ("BertConfig", {**_ENCODER, "num_labels": LABELS}),
    "roberta": ("RobertaConfig", {**_ENCODER, "num_labels": LABELS}),
}
CASES = (
    ("llama", "tokens"),
    ("gpt2", "tokens"),
    ("gemma3", "tokens"),
    ("olmo2", "tokens"),
    ("bert", "masked"),
    ("roberta", "masked"),
    ("bert", "classes"),
    ("roberta", "classes"),
    ("bert", "body"),
)
#: Cases that train. All cases are built, one after the other from one seed.
TRAINED = chosen(
    CASES,
    ("llama", "tokens"),
    ("gpt2", "tokens"),
    ("gemma3", "tokens"),
    ("olmo2", "tokens"),
    ("bert", "masked"),
    ("roberta", "classes"),
    ("bert", "body"),
)


#: Layouts of all cases except the two that train in every layout: with ranks that share every
#: layer, with stages, and with several stages on each rank. A body has a head of the user, and no
#: stages.
LAYOUTS_OF_TASKS = {"body": ("dp4", "tp4+sp", "tp2+sp dp2, recomputed")}
DEFAULT_LAYOUTS = ("tp4+sp", "tp2+sp pp2", "pp2 vpp2 dp2")
CASES_WITH_ALL_LAYOUTS = {("llama", "tokens"), ("bert", "masked")}


def layouts_of(kind: str, task: str) -> Iterable[str]:
    """Return the names of the layouts under which a case trains."""
    if kind in ("gemma3", "olmo2"):
        # Other tests check how these models are cut; here they check the optimizer steps.
        return ("tp2+sp pp2",)
    return (
        LAYOUTS
        if (kind, task) in CASES_WITH_ALL_LAYOUTS
        else LAYOUTS_OF_TASKS.get(task, DEFAULT_LAYOUTS)
    )


#: The few fits contain every case and every layout.
FITS = chosen(
    [(kind, task, name) for kind, task in TRAINED for name in layouts_of(kind, task)],
    ("llama", "tokens", "tp2+sp pp2"),
    ("llama", "tokens", "pp2 zb-v dp2"),
    ("gpt2", "tokens", "pp2 vpp2 dp2"),
    ("gemma3", "tokens", "tp2+sp pp2"),
    ("olmo2", "tokens", "tp2+sp pp2"),
    ("bert", "masked", "tp2 dp2"),
    ("bert", "masked", "tp2+sp dp2, recomputed"),
    ("roberta", "classes", "tp2+sp pp2"),
    ("bert", "body", "dp4"),
    ("bert", "body", "tp4+sp"),
)


@dataclass(frozen=True)
class Report:
    """Results of a training."""

    losses: list[float]
    is_swapped: bool
    num_parameters: int


def train(folder: str, task: str, layout: dict[str, Any] | None, devices: int) -> Report:
    """Train on all data with any number of ranks; without a layout, with ordinary Lightning."""
    seed_everything(1, verbose=False)
    if layout is not None:
        # Models with stages make the trial of microbatches in one layout, and a body in all.
        compares = task == "body" or layout == LAYOUTS["tp2+sp pp2"]
        layout = {**layout, "check_microbatches": compares}
    module = FineTune(folder, task)
    trainer = trainer_of(layout, devices, 2, max_epochs=1)
    trainer.fit(module, InOrder(task))
    return Report(
        module.losses,
        isinstance(module.model, ReplacedModel),
        sum(p.numel() for p in module.parameters()),
    )


def train_all(rank: int, size: int, folder: Path) -> dict[tuple[str, str, str], Report]:
    """Train every case under its layouts."""
    return {
        (kind, task, name): train(str(folder / kind / task), task, LAYOUTS[name], size)
        for kind, task, name in FITS
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model of every case as Hugging Face does."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    for kind, task in CASES:
        name, settings = CONFIGS[kind]
        config = getattr(transformers, name)(**settings)
        getattr(transformers, BUILDERS[task]).from_config(config).save_pretrained(
            path / kind / task
        )
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[tuple[str, str, str], Report]]:
    """Train on four processes."""
    return run_world(train_all, 4, folder)


@pytest.mark.parametrize(("kind", "task"), TRAINED)
def test_every_layout_trains_as_the_code_of_hugging_face(
    kind: str, task: str, folder: Path, ranks: Any
) -> None:
    path = str(folder / kind / task)
    plain, single = train(path, task, None, 1), train(path, task, {}, 1)
    assert not plain.is_swapped
    assert single.is_swapped
    assert plain.losses[-1] < plain.losses[0]
    assert single.losses == pytest.approx(plain.losses, abs=1e-4)
    layouts = [name for *case, name in FITS if case == [kind, task]]
    assert layouts
    for rank, reports in enumerate(ranks):
        for layout in layouts:
            report = reports[kind, task, layout]
            assert report.is_swapped
            assert report.losses == pytest.approx(plain.losses, abs=1e-4), f"{layout}, rank {rank}"
            assert report.num_parameters < single.num_parameters or not LAYOUTS[layout], (
                f"{layout} keeps a part on each rank"
            )
