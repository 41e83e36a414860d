"""Tests that Hugging Face models with experts are fine-tuned, saved, resumed in other layouts and
converted back, in every grid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightning_megatron.checkpoint.hugging_face import import_model
from lightning_megatron.cli.main import main
from lightning_megatron.models.layered import layered_modules
from tests.proof.fine_tuning import FineTune, InOrder, V, trainer_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

#: Each layout continues from the checkpoint of the layout before it.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4, "expert_transport": "all_to_all"},
    "tp2+sp ep2": {"tp": 2, "ep": 2, "etp": 1, "expert_clones": 1},
    "pp2 ep2": {"pp": 2, "ep": 2, "expert_clones": {"places": 2, "min_rows": 1}},
    "tp2 etp2 ep2": {"tp": 2, "ep": 2, "sequence_parallel": False},
}
_SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
_BALANCE = {"aux_loss": 0.1, "aux_loss_scope": "global", "z_loss": 0.01}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "mixtral, balanced": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "expert_settings": _BALANCE},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
}


#: Models that every grid trains.
TRAINED = chosen(CONFIGS, "mixtral, balanced", "qwen3_moe")


class TrainAtRate(FineTune):
    """Train with a given learning rate; the rate 0 changes no weight."""

    rate = 3e-3

    def configure_model(self) -> None:
        super().configure_model()
        # Router losses need training mode, and from_pretrained returns a model in evaluation mode.
        self.model.train()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-4)


def train(
    folder: Path,
    layout: dict[str, Any] | None,
    devices: int,
    steps: int,
    save_path: Path | None = None,
    **options: Any,
) -> list[float]:
    """Train up to a step, if given from a checkpoint, and save; return the losses of the steps."""
    seed_everything(1, verbose=False)
    module, trainer = TrainAtRate(str(folder)), trainer_of(layout, devices, 2, max_steps=steps)
    module.rate = options.pop("rate", module.rate)
    trainer.fit(module, InOrder("tokens"), **options)
    for model in layered_modules(module):
        for layer in model.mixtures().values():
            assert (layer.clones is not None) == ("expert_clones" in (layout or {}))
    if save_path is not None:
        trainer.save_checkpoint(save_path)
    return module.losses


def train_all(rank: int, size: int, path: Path) -> dict[str, dict[str, list[float]]]:
    reports: dict[str, dict[str, list[float]]] = {}
    for kind in TRAINED:
        folder, last_saved, losses = path / kind, None, {}
        for steps, (name, layout) in enumerate(LAYOUTS.items(), 1):
            losses[name] = train(
                folder, layout, size, steps, folder / f"{name}.ckpt", ckpt_path=last_saved
            )
            last_saved = folder / f"{name}.ckpt"
        reports[kind] = losses
    train(path / "mixtral", LAYOUTS["tp2 etp2 ep2"], size, 1, path / "kept.ckpt", rate=0.0)
    return reports


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model of every kind as Hugging Face does."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    for kind, (name, settings) in CONFIGS.items():
        config = getattr(transformers, name)(**settings)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / kind)
    return path


@pytest.fixture(scope="module")
def ranks(path: Path) -> list[dict[str, dict[str, list[float]]]]:
    """Train on four processes."""
    return run_world(train_all, 4, path)


@pytest.mark.parametrize("kind", TRAINED)
def test_every_expert_grid_trains_and_resumes_as_one_process(
    kind: str, path: Path, ranks: Any
) -> None:
    expected = train(path / kind, {}, 1, 4)
    if "balanced" not in kind:
        plain = train(path / kind, None, 1, 4)
        assert expected == pytest.approx(plain, abs=1e-4)
    assert expected[-1] < expected[0]
    for losses in ranks:
        assert [loss for name in LAYOUTS for loss in losses[kind][name]] == pytest.approx(
            expected, abs=1e-4
        )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_an_unchanged_checkpoint_is_converted_back_to_its_folder(
    path: Path, ranks: Any, tmp_path: Path
) -> None:
    import_model(path / "mixtral", tmp_path / "imported.ckpt")
    expected = tensors_of(path / "mixtral")
    for number, checkpoint in enumerate((path / "kept.ckpt", tmp_path / "imported.ckpt")):
        main(["convert", str(checkpoint), str(tmp_path / f"{number}"), "--verify"])
        actual = tensors_of(tmp_path / f"{number}")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.parametrize("kind", TRAINED)
def test_transformers_loads_the_weights_that_an_expert_grid_has_trained(
    kind: str, path: Path, ranks: Any, tmp_path: Path
) -> None:
    main(["convert", str(path / kind / "tp2 etp2 ep2.ckpt"), str(tmp_path / "folder"), "--verify"])
    before, after = tensors_of(path / kind), tensors_of(tmp_path / "folder")
    assert before.keys() == after.keys()
    assert not any(
        torch.equal(after[name], before[name])
        for name in before
        if "experts" in name or "proj" in name
    )
    main(["convert", str(tmp_path / "folder"), str(tmp_path / "again.ckpt"), "--verify"])
