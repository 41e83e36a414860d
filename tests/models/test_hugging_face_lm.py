"""HuggingFaceCausalLM trains on shifted labels, with and without MegatronStrategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import HuggingFaceCausalLM
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.swap.hugging_face.causal_lm import HuggingFaceLM
from tests.fits import Job, trainer_of

transformers = pytest.importorskip("transformers")

V, B, S, STEPS = 31, 4, 9, 3
#: The loss of a router has the weight of its microbatch; equal weights of all microbatches make runs
#: comparable.
SETTINGS = {"aux_loss": 0.5, "aux_loss_scope": "global"}
BALANCED: dict[str, Any] = {"expert_settings": SETTINGS, "token_weighted": False}


class Batches(L.LightningDataModule):
    """The same four sequences in every step, distributed over the ranks; rows have unequal numbers
    of ignored labels.
    """

    vocab_size = V

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        rows, batch = range(B)[ranks.get("rank", 0) :: ranks.get("num_replicas", 1)], make_batch()
        samples = [{key: part[row] for key, part in batch.items()} for row in rows] * STEPS
        return DataLoader(samples, batch_size=len(rows))

    val_dataloader = train_dataloader


def make_batch() -> dict[str, Tensor]:
    text = torch.randint(V, (B, S + 1), generator=torch.Generator().manual_seed(4))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 3:] = -100
    return {"tokens": tokens, "labels": labels}


def save_model(folder: Path, kind: str = "llama") -> str:
    more: dict[str, Any] = {
        "llama": {"intermediate_size": 24},
        "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "num_key_value_heads": 2},
        "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    }[kind]
    sizes = {"vocab_size": V, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **more, **tokens)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_model(tmp_path / "model")


def build_module(folder: str, **options: Any) -> HuggingFaceCausalLM:
    return HuggingFaceCausalLM(folder, learning_rate=1e-2, schedule="constant", **options)


def train(module: HuggingFaceCausalLM, layout: Any = None, devices: int = 1) -> float:
    """Train a few steps, without a layout by ordinary Lightning, and return the validation loss: the
    logged training loss is a mean over microbatches with unequal numbers of tokens.
    """
    strategy = None if layout is None else {"microbatch_size": None, **layout}
    more = {"max_epochs": 1, "gradient_clip_val": None}
    job = Job(strategy=strategy, precision="32-true", steps=-1, trainer=more)
    trainer = trainer_of(job, devices)
    trainer.fit(module, Batches())
    return float(trainer.callback_metrics["val_loss"])


def test_the_mean_loss_equals_cross_entropy_of_shifted_labels(folder):
    module, batch = HuggingFaceCausalLM(folder), make_batch()
    module.configure_model()
    count = (batch["labels"] != -100).sum()
    expected = F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    assert torch.allclose(module.mean_loss(batch, count, is_trained=True), expected)
    unlabelled = {"tokens": batch["tokens"], "labels": torch.full((B, S), -100)}
    assert module.mean_loss(unlabelled, torch.tensor(0), is_trained=True).item() == 0.0


def test_the_strategy_trains_like_ordinary_lightning(folder):
    plain, swapped = build_module(folder), build_module(folder)
    expected, actual = train(plain), train(swapped, {})
    assert type(plain.model).__name__ == "LlamaForCausalLM"
    assert isinstance(swapped.model, HuggingFaceLM)
    assert actual == pytest.approx(expected, abs=1e-4)
    # A damaged generation configuration is ignored.
    Path(folder, "generation_config.json").write_text("{")
    assert train(build_module(folder), {}) == actual


def test_weights_have_the_requested_dtype(folder):
    for options, dtype in (
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "auto", "from_scratch": True}, torch.float32),
    ):
        module = HuggingFaceCausalLM(folder, **options)
        module.configure_model()
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        assert module.model.training


# ---- refusals


DAMAGED = (b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b'{"model_type": [1]}', b"{}")
ILLEGAL: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": "2"}, {"rope_parameters": 1.5}, {"vocab_size": 10**30}, {"hidden_act": "none_such"},
    {"model_type": "none_such"}, {"auto_map": {"AutoConfig": "trap.Trap"}, "model_type": "trap"},
)  # fmt: skip


def test_damaged_and_illegal_configurations_are_refused_with_the_name_of_their_folder(folder):
    path = Path(folder, "config.json")
    valid = json.loads(path.read_text())
    Path(folder, "trap.py").write_text("raise AssertionError('code of the folder must not run')")
    for content in (*DAMAGED, *(json.dumps(valid | change).encode() for change in ILLEGAL)):
        path.write_bytes(content)
        for from_scratch in (False, True):
            with pytest.raises((CorruptDataError, CheckpointMismatchError), match=folder):
                HuggingFaceCausalLM(folder, from_scratch=from_scratch).configure_model()


@pytest.mark.parametrize("layout", [None, {}])
def test_missing_and_damaged_weights_of_a_folder_raise(layout, tmp_path):
    folder = save_model(tmp_path / "opt", "opt")
    weights = Path(folder, "model.safetensors")
    tensors = load_file(weights)
    del tensors["model.decoder.layers.1.fc1.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=r"lacks 1 tensor\(s\) of OPTForCausalLM"):
        train(build_module(folder), layout)
    weights.write_bytes(b"\xff" * 64)
    kind = CorruptDataError if layout is not None else CheckpointMismatchError
    with pytest.raises(kind, match="/opt"):
        train(build_module(folder), layout)


def test_expert_settings_need_experts_in_training_mode_and_the_strategy(
    folder, tmp_path, monkeypatch
):
    with pytest.raises(UnsupportedError, match="expert_settings of the configuration must be"):
        train(build_module(folder, expert_settings=SETTINGS), {})
    mixtral = save_model(tmp_path / "mixtral", "mixtral")
    with pytest.raises(UnsupportedError, match="expert_settings .* need MegatronStrategy"):
        train(build_module(mixtral, expert_settings=SETTINGS))
    configure = HuggingFaceCausalLM.configure_model

    def configure_for_evaluation(module: HuggingFaceCausalLM) -> None:
        configure(module)
        module.model.eval()

    monkeypatch.setattr(HuggingFaceCausalLM, "configure_model", configure_for_evaluation)
    with pytest.warns(UserWarning, match=r"experts are in evaluation mode \(0, 1\)"):
        train(build_module(mixtral, **BALANCED), {})
