"""Fine-tuning starts from Hugging Face folders and from checkpoints of BERTPretraining, resumes
exactly, also while batches grow, and refuses sources that it does not support.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import BERTClassifier, BERTQuestionAnswering, GlueDataModule
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from tests.finetuning.folders import save_encoder, write_mnli
from tests.finetuning.tasks import data_of
from tests.fits import Job, run_job, trainer_of
from tests.worlds.test_tasks import RAMP, Segments, pretraining

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")


@pytest.mark.parametrize("strategy", [{}, None])
def test_spans_start_from_either_kind_of_checkpoint(tmp_path, strategy):
    path = str(tmp_path / "pretrained.ckpt")
    run_job(Job(pretraining, strategy, steps=1, data=Segments, batch=4, save=path))
    assert Path(path).is_file() == (strategy is None)
    module = BERTQuestionAnswering(path, dropout=0.0)
    assert module.config.norm_position == "pre"
    assert module.config.hidden_dropout == module.config.attention_dropout == 0.0
    module.configure_model()
    assert module.model is not None
    if strategy is None:
        source = torch.load(path, weights_only=False)["state_dict"]
    else:
        saved = OpenCheckpoint.open(path)
        names = [name for name in saved.tensors if name.startswith("state_dict.model.")]
        source = {
            name.removeprefix("state_dict."): tensor
            for name, tensor in saved.read_full(names).items()
        }
    parameters = dict(module.model.named_parameters())
    heads = {name for name in parameters if name.startswith("head.")}
    assert heads == {"head.output.weight", "head.output.bias"}
    for name in parameters.keys() - heads:
        value = source[f"model.{name}"]
        rows = min(len(value), len(parameters[name]))
        assert torch.equal(parameters[name][:rows], value[:rows].to(parameters[name].dtype)), name


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_a_folder_without_a_head_gets_a_new_head(tmp_path, kind):
    import transformers

    folder = save_encoder(tmp_path / "encoder", f"{kind}Model")
    module = BERTClassifier(str(folder), 3)
    module.configure_model()
    theirs, ours = (
        transformers.AutoModel.from_pretrained(folder),
        dict(module.model.named_parameters()),
    )
    # A RoBERTa that classifies does not take its dense layer from its pooler.
    is_pooler = torch.equal(ours["head.dense.weight"], theirs.pooler.dense.weight)
    assert is_pooler == (kind == "Bert")
    query = theirs.encoder.layer[1].attention.self.query.weight
    assert torch.equal(ours["layers.1.attention.qkv.weight"][:16], query)
    assert ours["head.output.weight"].shape == (3, 16)
    assert float(ours["head.output.weight"].detach().std()) == pytest.approx(0.02, rel=0.4)


class Steps(pl.Callback):
    """Callback that keeps the rates of all steps, and saves checkpoints after some."""

    def __init__(self, folder: Path, saved_after: tuple[int, ...]) -> None:
        self.folder, self.saved_after = folder, saved_after
        self.outcomes: dict[str, list[float]] = {"rates": []}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.outcomes["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.saved_after:
            trainer.save_checkpoint(self.folder / str(trainer.global_step))


def test_a_fit_of_epochs_resumes_exactly_also_while_batches_grow(tmp_path):
    save_encoder(tmp_path / "classes", "BertForSequenceClassification", num_labels=3, dropout=0.1)
    write_mnli(tmp_path / "classes_files")

    def fit(*saved_after: int, resume: str | None = None) -> Any:
        rate = {"learning_rate": 0.01, "schedule": "linear", "min_lr_ratio": 0.0}
        return run_job(
            Job(
                lambda: BERTClassifier(str(tmp_path / "classes"), 3, **rate, warmup_share=0.25),
                {"microbatch_size": 2},
                steps=-1,
                trainer={"max_epochs": 3, "limit_val_batches": 0, "use_distributed_sampler": True},
                data=lambda: data_of("classes", str(tmp_path), ramp_up=RAMP),
                callbacks=lambda: [Steps(tmp_path, saved_after)],
                resume=resume,
            )
        )

    # The first epoch of 40 rows has six batches (4, 4, 6, and three of 8), and each later epoch
    # has five.
    whole = fit(2, 8)
    rates = whole.outcomes["rates"]
    assert len(whole.losses) == 6 + 5 + 5
    assert rates.index(max(rates)) == 0.25 * 16
    assert max(rates) == pytest.approx(0.01)
    # The last step has the rate of one step before zero.
    assert rates[-1] == pytest.approx(0.01 / (16 - 4))
    for stop in (2, 8):
        resumed = fit(resume=str(tmp_path / str(stop)))
        assert resumed.outcomes["rates"] == rates[stop:]
        assert resumed.losses == whole.losses[stop:]


def test_unsupported_sources_and_settings_are_refused(tmp_path):
    with pytest.raises(CheckpointMismatchError, match=r"neither config.json nor the header"):
        BERTClassifier(str(tmp_path))
    folder = save_encoder(tmp_path / "bert")
    with pytest.raises(ParallelPlanError, match=r"warmup_share \(0.1\) must be 0 with warmup"):
        BERTClassifier(str(folder), warmup_share=0.1, warmup_steps=3)
    write_mnli(tmp_path / "mnli")
    data = GlueDataModule("mnli", str(tmp_path / "mnli"), str(folder), seq_length=16)
    with pytest.raises(ParallelPlanError, match=r"num_labels \(2\) must be 3"):
        trainer_of(Job(strategy={})).validate(BERTClassifier(str(folder)), data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "electra"}))
    with pytest.raises(UnsupportedError, match="model_type bert or roberta, .* has 'electra'"):
        BERTClassifier(str(folder))
    # Positions of a RoBERTa start after its padding.
    folder = save_encoder(tmp_path / "roberta", "RobertaModel", num_labels=3)
    data = GlueDataModule("mnli", str(tmp_path / "mnli"), str(folder), seq_length=63)
    with pytest.raises(ParallelPlanError, match=r"seq_length \(63\) must not exceed .* \(62\)"):
        trainer_of(Job(strategy={})).validate(BERTClassifier(str(folder), 3), data)
