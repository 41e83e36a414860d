"""Checkpoints of Hugging Face models that keep their own code convert to the files that
save_pretrained writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.hugging_face import export_model
from lightning_megatron.cli.main import main
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from tests.world import run_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

V = 53
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
SIZES |= {
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# No family computes this activation, so the model keeps its own code.
KEYS = {"num_key_value_heads": 2, "hidden_act": "tanh"}
T5: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
#: Class, settings and layout of each case. A vocabulary of 53 is padded under tp. Files of OLMoE
#: hold every expert.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "tp": ("Olmo2ForCausalLM", {**SIZES, **KEYS}, {"tp": 2}),
    "tied pp": ("Olmo2ForCausalLM", {**SIZES, **KEYS, "tie_word_embeddings": True}, {"pp": 2}),
    "experts dp": (
        "OlmoeForCausalLM",
        {**SIZES, **KEYS, "num_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "experts tp": (
        "OlmoeForCausalLM",
        {**SIZES, **KEYS, "num_experts": 4, "num_experts_per_tok": 2},
        {"tp": 2},
    ),
    "t5 tp": ("T5ForConditionalGeneration", T5, {"tp": 2, "tensor_parallel_plan": {}}),
    "electra dp": ("ElectraForMaskedLM", {**SIZES, "embedding_size": 16}, {}),
    "adapted": ("Olmo2ForCausalLM", {**SIZES, **KEYS}, {"pp": 2}),
}


class Train(LightningModule):
    """Train the model of a case, with code that does not know this library."""

    def __init__(self, case: str) -> None:
        super().__init__()
        name, settings, _ = CASES[case]
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        self.model: Any = kind(kind.config_class(**settings))
        if case == "adapted":
            self.model = peft.get_peft_model(
                self.model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
            )

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2
        )


class TrainWithoutNorm(Train):
    """Leave a weight out of its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("model.model.norm.weight", None)


def trained(module: LightningModule, layout: dict[str, int], size: int) -> Trainer:
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy=MegatronStrategy(**layout), max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(V, (8, 6), generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(list(tokens), batch_size=4))
    return trainer


def save(rank: int, size: int, folder: Path) -> None:
    for case, (_, _, layout) in CASES.items():
        trained(Train(case), layout, size).save_checkpoint(folder / f"{case}.ckpt")
    trained(TrainWithoutNorm("tp"), {"tp": 2}, size).save_checkpoint(folder / "forgets.ckpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case on two processes and save a checkpoint of each."""
    path = tmp_path_factory.mktemp("own_code")
    run_world(save, 2, path)
    return path


def twin_of(case: str, folder: Path, out: Path) -> Any:
    """Return the model that one process loads from a checkpoint."""
    consolidate(folder / f"{case}.ckpt", out, weights_only=True)
    module = Train(case)
    module.load_state_dict(torch.load(out)["state_dict"])
    return module.model.eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in safetensors.load_file(file).items()
    }


@pytest.mark.parametrize("case", [case for case in CASES if case != "adapted"])
def test_an_exported_checkpoint_equals_save_pretrained_of_one_process(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = twin_of(case, folder, tmp_path / "plain.ckpt")
    twin.save_pretrained(tmp_path / "expected")
    main(
        [
            "convert",
            str(folder / f"{case}.ckpt"),
            str(tmp_path / "found"),
            "--verify",
            "--max-file-bytes",
            "9000",
        ]
    )
    assert "tensors differ by 0.0e+00" in capsys.readouterr().out
    actual, expected = tensors_in(tmp_path / "found"), tensors_in(tmp_path / "expected")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
    reloaded, report = type(twin).from_pretrained(tmp_path / "found", output_loading_info=True)
    assert not any(report.values()), report
    configs = [
        type(twin.config).from_pretrained(tmp_path / name).to_dict()
        for name in ("found", "expected")
    ]
    assert configs[0] == {**configs[1], "_name_or_path": configs[0].get("_name_or_path")}
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(
        reloaded.eval()(input_ids=tokens, labels=tokens).logits,
        twin(input_ids=tokens, labels=tokens).logits,
    )


def test_exported_weights_have_the_requested_dtype(folder: Path, tmp_path: Path) -> None:
    main(["convert", str(folder / "tp.ckpt"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_refuses_incomplete_and_adapted_models(folder: Path, tmp_path: Path) -> None:
    for case, kind, reason in (
        ("forgets", CheckpointMismatchError, "'state_dict.model.model.norm.weight' missing"),
        ("adapted", UnsupportedError, "peft has wrapped layers of this Olmo2ForCausalLM"),
    ):
        with pytest.raises(kind, match=reason):
            export_model(folder / f"{case}.ckpt", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="only an adapter can be merged"):
        export_model(folder / "tp.ckpt", tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
