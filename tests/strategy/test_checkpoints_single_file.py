"""Checkpoints of one process and of Lightning's own strategies continue here, and ours there, with
equal losses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.plan.experts import ExpertsConfig
from tests.strategy.checkpoint_runs import GPT2, LLAMA, Trained, train
from tests.sweeps import chosen
from tests.world import run_world

HALF, STEPS = 2, 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
    "pp2 zb-v dp2": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "tp2 dp2": {"tp": 2},
    "dp4": {"zero": 0},
}
#: Where experts are divided among ranks, one by one or two by two.
GRIDS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "pp2 ep2": {"pp": 2, "ep": 2},
    "tp2 +sp ep2": {"tp": 2, "ep": 2, "etp": 1},
}
EXPERTS = replace(
    LLAMA, num_layers=2, experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS}
LAYOUTS_OF = {
    "gpt2": chosen(LAYOUTS, "pp2 zb-v dp2", "dp4"),
    "llama": {"tp2 pp2": LAYOUTS["tp2 pp2"]},
    "experts": chosen(GRIDS, "tp2 +sp ep2"),
}


def _losses(module: Trained) -> tuple[list[float], list[float]]:
    return module.losses, module.rates


def _assert_equal(found: list[float], expected: list[float]) -> None:
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(
        torch.tensor(found, **exact), torch.tensor(expected, **exact), rtol=0.0, atol=1e-10
    )


def _go_on_and_begin(rank: int, size: int, folder: str, kind: str) -> dict[str, Any]:
    """Continue from a plain file under every layout; begin under every layout for ordinary Lightning
    to continue.
    """
    config = CONFIGS[kind]
    found = {}
    for name, layout in LAYOUTS_OF[kind].items():
        found[name] = _losses(
            train(layout, size, STEPS, resume=f"{folder}/plain.ckpt", config=config)
        )
        train(layout, size, HALF, save=f"{folder}/{name}", config=config)
    return found


@pytest.mark.parametrize("kind", chosen(list(CONFIGS), "gpt2", "experts"))
def test_training_continues_between_ordinary_lightning_and_every_layout(
    kind: str, tmp_path: Path
) -> None:
    config = CONFIGS[kind]
    losses, rates = _losses(train(None, 1, STEPS, config=config))
    train(None, 1, HALF, save=tmp_path / "plain.ckpt", config=config)
    ranks = run_world(_go_on_and_begin, 4, str(tmp_path), kind)
    for name in ranks[0]:
        # The last rank is on the last stage, which has the loss in full precision.
        found_losses, found_rates = ranks[-1][name]
        _assert_equal(found_losses, losses[HALF:])
        assert found_rates == pytest.approx(rates[HALF:], abs=1e-15)
        consolidate(tmp_path / name, tmp_path / "back.ckpt")
        back = train(None, 1, STEPS, resume=tmp_path / "back.ckpt", config=config)
        _assert_equal(back.losses, losses[HALF:])
        assert back.rates == pytest.approx(rates[HALF:], abs=1e-15)
