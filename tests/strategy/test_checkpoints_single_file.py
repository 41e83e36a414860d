"""Training under MegatronStrategy resumes with equal losses from checkpoints of plain Lightning, and
plain Lightning from those of MegatronStrategy.
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
#: Layouts in which each rank has one or two of the four experts.
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


def _losses_and_rates(module: Trained) -> tuple[list[float], list[float]]:
    return module.losses, module.rates


def _assert_equal(actual: list[float], expected: list[float]) -> None:
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(
        torch.tensor(actual, **exact), torch.tensor(expected, **exact), rtol=0.0, atol=1e-10
    )


def _resume_and_save_under_layouts(rank: int, size: int, folder: str, kind: str) -> dict[str, Any]:
    """Resume from a plain file under every layout; save under every layout a checkpoint from which
    plain Lightning resumes.
    """
    config = CONFIGS[kind]
    results = {}
    for name, layout in LAYOUTS_OF[kind].items():
        results[name] = _losses_and_rates(
            train(layout, size, STEPS, resume=f"{folder}/plain.ckpt", config=config)
        )
        train(layout, size, HALF, save=f"{folder}/{name}", config=config)
    return results


@pytest.mark.parametrize("kind", chosen(list(CONFIGS), "gpt2", "experts"))
def test_training_resumes_between_plain_lightning_and_every_layout(
    kind: str, tmp_path: Path
) -> None:
    config = CONFIGS[kind]
    losses, rates = _losses_and_rates(train(None, 1, STEPS, config=config))
    train(None, 1, HALF, save=tmp_path / "plain.ckpt", config=config)
    ranks = run_world(_resume_and_save_under_layouts, 4, str(tmp_path), kind)
    for name in ranks[0]:
        # The last rank is on the last stage, which has the loss in full precision.
        actual_losses, actual_rates = ranks[-1][name]
        _assert_equal(actual_losses, losses[HALF:])
        assert actual_rates == pytest.approx(rates[HALF:], abs=1e-15)
        consolidate(tmp_path / name, tmp_path / "back.ckpt")
        back = train(None, 1, STEPS, resume=tmp_path / "back.ckpt", config=config)
        _assert_equal(back.losses, losses[HALF:])
        assert back.rates == pytest.approx(rates[HALF:], abs=1e-15)
