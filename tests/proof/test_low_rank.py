"""Tests that a LightningModule around peft's LoRA trains in every layout as without this library,
and that its adapter is exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.cli.main import main
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.proof.fine_tuning import FineTune, InOrder, V, trainer_of
from tests.swap.encoders import encoder_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"tp2+sp pp2": {"tp": 2, "pp": 2}, "pp2 vpp2 dp2": {"pp": 2, "vpp": 2}},
    "mixtral": chosen(
        {"pp2 ep2": {"pp": 2, "ep": 2}, "tp2+sp ep2": {"tp": 2, "ep": 2, "etp": 1}}, "tp2+sp ep2"
    ),
}
ADAPTED = {
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}
OPTIONS: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}


class Adapt(FineTune):
    """Fine-tune a given adapter, without code for this library."""

    def __init__(self, folder: str, adapter: str) -> None:
        super().__init__(folder)
        self.adapter = adapter

    def configure_model(self) -> None:
        super().configure_model()
        self.model = peft.PeftModel.from_pretrained(self.model, self.adapter, is_trainable=True)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


class ValidatedInOrder(InOrder):
    """Validate on the training data."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def train(
    layout: dict[str, Any] | None, devices: int, folder: str, adapter: str, out: str = ""
) -> list[float]:
    """Return the losses of all steps."""
    seed_everything(1, verbose=False)
    module, trainer = Adapt(folder, adapter), trainer_of(layout, devices, 1, **OPTIONS)
    trainer.fit(module, ValidatedInOrder())
    if layout is not None:
        assert isinstance(module.model.get_base_model(), ReplacedModel)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        main_parameters = trainer.strategy.run.state.main
        held = sum(piece.main.numel() for piece in main_parameters.slices.values())
        assert 0 < held <= trained, "frozen parameters have no main parameter and no state"
    if out:
        trainer.save_checkpoint(out)
    return module.losses


def evaluate(
    layout: dict[str, Any] | None, devices: int, folder: str, adapter: str, path: str | None
) -> float:
    module = Adapt(folder, adapter)
    (metrics,) = trainer_of(layout, devices, 1, **OPTIONS).validate(
        module, ValidatedInOrder(), ckpt_path=path, verbose=False
    )
    return float(metrics["val_loss"])


def train_all(
    rank: int, size: int, kind: str, folder: str, adapter: str, out: str
) -> tuple[dict[str, list[float]], float]:
    """Train in every layout; save the model of the first layout and load it in the last layout."""
    layouts = LAYOUTS[kind]
    names = list(layouts)
    losses = {
        name: train(layouts[name], size, folder, adapter, out if name == names[0] else "")
        for name in names
    }
    return losses, evaluate(layouts[names[-1]], size, folder, adapter, out)


def save_model_and_adapter(kind: str, path: Path) -> tuple[str, str]:
    """Save a small model and an adapter of random numbers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    base, adapter = path / "base", path / "given"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    settings = peft.LoraConfig(r=4, target_modules=ADAPTED[kind], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(adapter)
    return str(base), str(adapter)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_trains_as_peft_and_exports_the_adapter(kind: str, tmp_path: Path) -> None:
    base, initial = save_model_and_adapter(kind, tmp_path)
    plain, out = train(None, 1, base, initial), str(tmp_path / "trained.ckpt")
    assert plain[-1] < plain[0]
    for rank, (losses, val_loss) in enumerate(run_world(train_all, 4, kind, base, initial, out)):
        for layout, layout_losses in losses.items():
            assert layout_losses == pytest.approx(plain, abs=1e-4), f"{layout}, rank {rank}"
        expected = val_loss
    exported, merged, file = tmp_path / "adapter", tmp_path / "merged", tmp_path / "file.ckpt"
    with pytest.raises(SystemExit):
        main(["convert", out, str(exported), "--verify"])
    main(["convert", out, str(exported)])
    main(["convert", out, str(merged), "--merge", "--verify"])
    consolidate(out, file, weights_only=True)
    before, after = (
        safetensors.load_file(Path(folder, "adapter_model.safetensors"))
        for folder in (initial, exported)
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert peft.LoraConfig.from_pretrained(exported) == peft.LoraConfig.from_pretrained(initial)
    reloaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), exported
    )
    theirs = peft.get_peft_model_state_dict(reloaded)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in after.items())
    losses = [
        evaluate(None, 1, base, str(exported), None),
        evaluate(None, 1, base, initial, str(file)),
    ]
    losses += [evaluate({}, 1, base, initial, str(file)), evaluate({}, 1, base, initial, out)]
    assert losses == pytest.approx([expected] * 4, abs=1e-5)


class Classify(LightningModule):
    """Train an adapter and a head."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(self.folder)
        self.model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def test_fully_trained_heads_are_exported_with_the_adapter(tmp_path: Path) -> None:
    base = encoder_of("bert classes")
    base.save_pretrained(tmp_path / "base")
    tokens, labels = torch.arange(48).view(4, 12), torch.arange(4)
    module, trainer = Classify(str(tmp_path / "base")), trainer_of({}, 1, 1, **OPTIONS)
    trainer.fit(module, DataLoader(TensorDataset(tokens, labels), batch_size=2))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    main(["convert", str(tmp_path / "trained.ckpt"), str(tmp_path / "adapter")])
    reloaded = peft.PeftModel.from_pretrained(base.eval(), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(
            reloaded(tokens).logits, module.model.eval()(tokens).logits, atol=1e-5
        )
        with (
            pytest.raises(UnsupportedError, match="modules_to_save cannot be switched off"),
            module.model.disable_adapter(),
        ):
            pass
