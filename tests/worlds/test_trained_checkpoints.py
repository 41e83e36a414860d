"""Checkpoints of Hugging Face models that several ranks trained convert to folders that from_pretrained
reads, and back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.hugging_face import export_model, import_model
from lightning_megatron.cli.main import main
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from tests.fits import Job, Module, run_job, run_jobs_on, trainer_of
from tests.swap.families import V, transformers, twin_of
from tests.world import run_world

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

#: Case of a model that is replaced, and the layouts of four ranks in which it is trained and
#: evaluated.
REPLACED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama with one key head": ({"tp": 2, "pp": 2}, {"tp": 2}),
    "mixtral": ({"pp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}),
}
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
# No family computes this activation, so the model keeps its own code.
KEYS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "hidden_act": "tanh"}
MIXTURE = {**KEYS, "num_experts": 4, "num_experts_per_tok": 2}
T5: dict[str, Any] = {"vocab_size": V, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2}
T5 |= {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
#: Class, settings and layout of two ranks of models that keep their own code. A vocabulary of 53 is
#: padded under tp; files of OLMoE hold every expert.
OWN_CODE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied pp": ("Olmo2ForCausalLM", {**KEYS, "tie_word_embeddings": True}, {"pp": 2}),
    "experts tp": ("OlmoeForCausalLM", MIXTURE, {"tp": 2}),
    "t5 tp": ("T5ForConditionalGeneration", T5, {"tp": 2, "tensor_parallel_plan": {}}),
    "adapted": ("Olmo2ForCausalLM", KEYS, {"pp": 2}),
    "forgets": ("Olmo2ForCausalLM", KEYS, {"tp": 2}),
}


def texts() -> Any:
    tokens = torch.randint(4, V, (8, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Train(Module):
    """Train a model with code that does not know this library."""

    model: Any

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class FineTune(Train):
    """Train the model of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder)


class TrainOwnCode(Train):
    """Train a model that keeps its own code; one case leaves a weight out of its checkpoints."""

    def __init__(self, case: str) -> None:
        super().__init__()
        name, settings, _ = OWN_CODE[case]
        torch.manual_seed(0)
        kind, self.case = getattr(transformers, name), case
        self.model = kind(kind.config_class(**settings))
        if case == "adapted":
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
            self.model = peft.get_peft_model(self.model, adapter)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.case == "forgets":
            checkpoint["state_dict"].pop("model.model.norm.weight", None)


def job_of(model: Any, layout: dict[str, Any] | None, path: Path) -> Job:
    trainer = {"gradient_clip_val": None}
    return Job(model, layout, "32-true", 2, trainer, texts, batch=4, save=str(path), norms=False)


def loss_of(layout: Any, devices: int, folder: Path, path: Path | None = None) -> float:
    """Return the loss of the weights of a checkpoint or a folder."""
    trainer, loader = trainer_of(job_of(None, layout, folder), devices), DataLoader(texts(), 4)
    (metrics,) = trainer.validate(FineTune(folder), loader, ckpt_path=path, verbose=False)
    return float(metrics["val_loss"])


def save_twin(case: str, folder: Path) -> Path:
    changes = {"num_local_experts": 4, "num_attention_heads": 4} if case == "mixtral" else {}
    twin = twin_of(case, **changes)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.1)
    twin.save_pretrained(folder)
    return folder


def train_replaced(rank: int, size: int, folder: Path) -> dict[str, list[float]]:
    losses = {}
    for case, (layout, other) in REPLACED.items():
        given, trained = folder / case / "given", folder / case / "trained.ckpt"
        run_job(job_of(partial(FineTune, given), layout, trained), size)
        paths = (trained, folder / case / "imported.ckpt")
        losses[case] = [loss_of(other, size, given, path) for path in paths]
        if case == "mixtral":
            if rank == 0:
                consolidate(trained, folder / "plain.ckpt", weights_only=True)
            torch.distributed.barrier()
            loss = loss_of(other, size, given, folder / "plain.ckpt")
            assert loss == pytest.approx(losses[case][0], abs=1e-6)
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case that keeps its own code."""
    path = tmp_path_factory.mktemp("trained")
    jobs = {
        case: job_of(partial(TrainOwnCode, case), layout, path / f"{case}.ckpt")
        for case, (_, _, layout) in OWN_CODE.items()
    }
    run_jobs_on(2, jobs)
    return path


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    """Save and import every case, and train it; return the folder and the losses of all ranks."""
    path = tmp_path_factory.mktemp("replaced")
    for case in REPLACED:
        import_model(save_twin(case, path / case / "given"), path / case / "imported.ckpt")
    return path, run_world(train_replaced, 4, path)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = [safetensors.load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("case", REPLACED)
def test_transformers_loads_the_weights_that_four_ranks_trained(case, replaced, tmp_path):
    given, trained = replaced[0] / case / "given", replaced[0] / case / "trained.ckpt"
    export_model(replaced[0] / case / "imported.ckpt", tmp_path / "again")
    main(["convert", str(trained), str(tmp_path / "exported"), "--verify"])
    paths = (given, tmp_path / "again", tmp_path / "exported")
    before, again, after = (tensors_of(path) for path in paths)
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.items())
    assert before.keys() == after.keys()
    blocks = [name for name in before if name.endswith(("proj.weight", "dense.weight"))]
    assert blocks
    assert not any(torch.equal(after[name], before[name]) for name in blocks), "trained"
    expected = [loss_of(None, 1, path) for path in (tmp_path / "exported", given)]
    for losses in replaced[1]:
        assert losses[case] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", list(OWN_CODE)[:3])
def test_an_exported_checkpoint_equals_save_pretrained_of_one_process(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    consolidate(folder / f"{case}.ckpt", tmp_path / "plain.ckpt", weights_only=True)
    module = TrainOwnCode(case)
    module.load_state_dict(torch.load(tmp_path / "plain.ckpt")["state_dict"])
    twin = module.model.eval()
    twin.save_pretrained(tmp_path / "expected")
    arguments = [str(folder / f"{case}.ckpt"), str(tmp_path / "found"), "--max-file-bytes", "9000"]
    main(["convert", "--verify", *arguments])
    assert "tensors differ by 0.0e+00" in capsys.readouterr().out
    actual, expected = tensors_in(tmp_path / "found"), tensors_in(tmp_path / "expected")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
    reloaded, report = type(twin).from_pretrained(tmp_path / "found", output_loading_info=True)
    assert not any(report.values()), report
    kind = type(twin.config)
    ours, theirs = (kind.from_pretrained(tmp_path / n).to_dict() for n in ("found", "expected"))
    assert ours == {**theirs, "_name_or_path": ours.get("_name_or_path")}
    tokens = torch.arange(12).view(2, 6)
    logits = [net(input_ids=tokens, labels=tokens).logits for net in (reloaded.eval(), twin)]
    assert torch.equal(*logits)


def test_export_refuses_incomplete_adapted_and_other_models(folder: Path, tmp_path: Path) -> None:
    for case, kind, reason in (
        ("forgets", CheckpointMismatchError, "'state_dict.model.model.norm.weight' missing"),
        ("adapted", UnsupportedError, "peft has wrapped layers of this Olmo2ForCausalLM"),
    ):
        with pytest.raises(kind, match=reason):
            export_model(folder / f"{case}.ckpt", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="only an adapter can be merged"):
        export_model(folder / "tied pp.ckpt", tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
