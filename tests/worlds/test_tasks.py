"""Fine-tuning, preference pairs and evaluations in two and four processes equal one process and plain
code of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import (
    BERTPretraining,
    EncoderConfig,
    HuggingFaceCausalLM,
    RampUp,
    Streaming,
)
from lightning_megatron.cli.main import main
from lightning_megatron.swap.weights.load import full_tensors
from lightning_megatron.tasks.evaluation import EvaluatedLM, LambadaData, WikiTextData
from lightning_megatron.tasks.evaluation.wikitext import count_words, detokenize
from lightning_megatron.tasks.finetuning import BERTClassifier, GlueDataModule
from lightning_megatron.tasks.preferences import DPO, PreferenceDataModule
from tests.fits import Job, Report, joined, run_job, run_jobs_on, trainer_of
from tests.oracles import assert_equal
from tests.tasks.chat.chat_folder import preferences, save_chat_llama, write_lines
from tests.tasks.evaluation import oracle
from tests.tasks.evaluation.test_metrics import LARGEST, argmax_of_part
from tests.tasks.finetuning.folders import PIECES, save_tokenizer, write_mnli, write_tasks
from tests.tasks.finetuning.tasks import STEPS, data_of, module_of, train_reference
from tests.tiny_llama import save_tiny_llama
from tests.world import run_world

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Rows of ")

#: Batches of 4 rows up to row 5, of 6 up to row 11, and of 8 after it.
RAMP = RampUp(4, 2, 12)
SP = {"tp": 2, "sequence_parallel": True}
#: Kind of the task, family of the model, and layout of two ranks.
TUNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "classes tp2 sp": ("classes", "Bert", SP),
    "classes pp2 recomputed": ("classes", "Bert", {"pp": 2, "recompute": "full", "microbatch_size": 4}),
    "options pp2": ("options", "Roberta", {"pp": 2}),
    "spans tp2 sp": ("spans", "Roberta", SP),
}  # fmt: skip
#: Layout, options of DPO, and the fit that is continued; names tell which pairs are streamed.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "whole dp2": ({}, {}, None),
    "lora tp2": ({"tp": 2}, {"lora": {"r": 4}, "loss_type": "ipo", "learning_rate": 0.01}, None),
    "streamed dp2": ({}, {}, None),
    "streamed dp2 continues as pp2": ({"pp": 2}, {}, "streamed dp2"),
}
#: Layouts of four ranks that evaluate.
EVALUATED: dict[str, dict[str, Any]] = {
    "tp in chunks, dp": {"tp": 2, "loss_chunk": 5},
    "tp pp vpp": {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
    "cp tp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


class Saver(pl.Callback):
    """Keep the logged values of all steps, and perhaps save after three of them."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.outcomes: dict[str, Any] = {"logged": []}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.outcomes["logged"].append(values)
        if self.path is not None and trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def saver(path: str | None) -> list[pl.Callback]:
    return [Saver(path)]


VALIDATED = {"val_check_interval": STEPS, "check_val_every_n_epoch": None}
COMMON = {"num_sanity_val_steps": 0, "use_distributed_sampler": True, "max_epochs": -1}


def tuning(root: Path, name: str) -> Job:
    kind, family, layout = TUNED[name]
    folder = str(root / family)
    model, data = partial(module_of, kind, folder), partial(data_of, kind, folder)
    return Job(model, layout, steps=STEPS, trainer=COMMON | VALIDATED, data=data)


def pairing(root: Path, name: str) -> Job:
    layout, options, source = PAIRS[name]
    streamed, model = name.startswith("streamed"), str(root / "chat")
    files = [str(root / f"{file}.jsonl") for file in ("a", "b")]
    # Five pairs for validation: the last batch of two data ranks is not full. Sections of a stream
    # are shorter than a pass, and the checkpoint after six pairs is in the middle of one.
    data: dict[str, Any] = (
        {"train": files, "global_batch_size": 2, "streaming": Streaming(4)}
        if streamed
        else {"train": files[0], "val": files[0], "global_batch_size": 4}
    )
    settings = {"beta": 0.3, "learning_rate": 0.003, "schedule": "constant", **options}
    return Job(
        partial(DPO, model, **settings),
        {"microbatch_size": 1, **layout},
        steps=5 if streamed else 3,
        trainer=COMMON if streamed else COMMON | VALIDATED | {"val_check_interval": 3},
        data=partial(PreferenceDataModule, tokenizer=model, seq_length=160, **data),
        callbacks=partial(saver, None if source else str(root / name)),
        resume=str(root / source) if source else None,
    )


class Segments(Dataset):
    """Pairs of segments for pre-training."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(16) % 11 + index
        return {
            "tokens": tokens, "labels": tokens, "token_types": tokens % 2,
            "valid": torch.ones(16, dtype=torch.bool), "lengths": torch.tensor(16), "order": torch.tensor(index % 2),
        }  # fmt: skip


def pretraining() -> BERTPretraining:
    config = EncoderConfig.bert(
        vocab_size=len(PIECES), num_positions=32, num_layers=2, hidden_size=16, num_heads=2,
        init_std=0.3, head="pretraining",
    )  # fmt: skip
    return BERTPretraining(config, learning_rate=0.01, schedule="constant")


def starting(root: Path) -> dict[str, Job]:
    """Return a pre-training under one layout, and fits without a rate that start from it."""
    source = str(root / "pretrained")
    still = {"learning_rate": 0.0, "schedule": "constant", "weight_decay": 0.0}
    files = {"folder": str(root / "mnli"), "tokenizer": str(root / "tokenizer")}
    data = partial(GlueDataModule, "mnli", **files, seq_length=16, global_batch_size=4)
    model = partial(BERTClassifier, source, 3, **still)
    trainer = COMMON | {"limit_val_batches": 0}
    return {
        "pretrained": Job(pretraining, SP, steps=1, data=Segments, batch=4, save=source),
        "starts tp2": Job(model, {"tp": 2}, steps=1, trainer=trainer, data=data),
        "starts pp2": Job(model, {"pp": 2}, steps=1, trainer=trainer, data=data),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models and files."""
    root = tmp_path_factory.mktemp("tasks")
    for family in ("Bert", "Roberta"):
        write_tasks(root / family, family)
    save_tokenizer(root / "tokenizer")
    write_mnli(root / "mnli")
    save_chat_llama(root / "chat")
    rows = preferences(9)
    write_lines(root / "a.jsonl", rows[:5])
    write_lines(root / "b.jsonl", rows[5:])
    return root


@pytest.fixture(scope="module")
def reports(root: Path) -> Mapping[str, list[Report]]:
    jobs = {f"tuned {name}": tuning(root, name) for name in TUNED}
    jobs |= starting(root) | {name: pairing(root, name) for name in PAIRS}
    return run_jobs_on(2, jobs)


#: Parameters that add the same number to all scores of a row, so that their gradient is zero but
#: for rounding errors, which Adam enlarges.
WITHOUT_GRADIENT = {
    "classes": (),
    "options": ("head.output.bias",),
    "spans": ("head.output.bias", "layers.1.mlp_norm.bias"),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_task_trains_like_transformers(name: str, root: Path, reports: Any) -> None:
    kind, family, _ = TUNED[name]
    expected, trained = train_reference(kind, str(root / family))
    module = module_of(kind, str(root / family))
    weights = full_tensors(trained, module.source.family, module.config, torch.float64)
    close = {"rel": 0, "abs": 1e-10}
    for report in reports[f"tuned {name}"]:
        assert report.losses == pytest.approx(expected.losses, **close)
        assert report.norms == pytest.approx(expected.norms, **close)
        results = {key: report.metrics[key] for key in expected.metrics}
        assert results == pytest.approx(expected.metrics, rel=0, abs=1e-6)
    actual = joined(reports[f"tuned {name}"])
    expected_weights = {f"model.{key}": value for key, value in dict(weights).items()}
    assert actual.keys() == expected_weights.keys()
    for key, value in expected_weights.items():
        if key.removeprefix("model.") not in WITHOUT_GRADIENT[kind]:
            assert_equal(actual[key], value, key, 1e-10)


def test_layouts_start_from_the_tensors_of_a_checkpoint(reports: Any) -> None:
    source, tp2, pp2 = (joined(reports[f"{name}"]) for name in starting(Path()))
    expected = {
        name.replace("head.pooler.", "head."): tensor
        for name, tensor in source.items()
        if ".head." not in name or ".head.pooler." in name
    }
    assert len(expected) > 20
    for tensors in (tp2, pp2):
        new = tensors.keys() - expected.keys()
        assert new == {"model.head.output.weight", "model.head.output.bias"}
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
    weight = tp2["model.head.output.weight"]
    assert torch.equal(weight, pp2["model.head.output.weight"])
    assert weight.std() > 0.1


@pytest.fixture(scope="module")
def twins(root: Path) -> dict[str, Report]:
    """Train the kinds of preference pairs in one process."""
    twins = {}
    for name in ("whole dp2", "lora tp2", "streamed dp2"):
        job = replace(pairing(root, name), strategy={}, callbacks=partial(saver, None))
        twins[name.split()[0]] = run_job(job)
    return twins


def check_logged(actual: Report, expected: Report, tolerance: float = 1e-10) -> None:
    num = len(actual.losses)
    pairs = zip(actual.outcomes["logged"], expected.outcomes["logged"][-num:], strict=True)
    for logged, values in [*pairs, (actual.metrics, expected.metrics)]:
        assert logged == pytest.approx(values, rel=0, abs=tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_train_like_one_process(name: str, twins: Any, reports: Any) -> None:
    kind, source = name.split()[0], PAIRS[name][2]
    twin = twins[kind]
    first, *_, last = (values["train_loss"] for values in twin.outcomes["logged"])
    assert first > last + 0.01
    for report in reports[name]:
        assert len(report.losses) == (2 if source else len(twin.losses))
        check_logged(report, twin)
        weights, expected = joined(reports[name]), joined([twin])
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(weights[key], value, key, 1e-10)


def test_plain_lightning_trains_pairs_like_the_strategy(root: Path, twins: Any) -> None:
    whole = twins["whole"].outcomes["logged"]
    assert whole[0]["train_loss"] == pytest.approx(math.log(2), rel=0, abs=1e-12)
    assert twins["whole"].metrics["val_rewards/accuracies"] > 0.5
    # Hugging Face's norms compute in float32.
    check_logged(run_job(pairing(root, "lora tp2").twin()), twins["lora"], 1e-5)


def evaluate(layout: Any, size: int, folder: Path) -> list[dict[str, float]]:
    """Return the results of all tasks."""
    job = Job(strategy=layout, trainer={"use_distributed_sampler": True})
    trainer, tokenizer = trainer_of(job, size), str(folder)
    wikitext, lambada = str(folder / "wiki.test.tokens"), str(folder / "lambada.jsonl")
    results = []
    for data in (
        WikiTextData(wikitext, tokenizer, oracle.WINDOW, oracle.STRIDE, batch_size=3),
        LambadaData(lambada, tokenizer, batch_size=2),
    ):
        trainer.test(EvaluatedLM(HuggingFaceCausalLM(str(folder))), data, verbose=False)
        results.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return results


def evaluate_all(rank: int, size: int, folder: Path) -> Any:
    """Evaluate under all layouts, and by the command."""
    results = {name: evaluate(layout, size, folder) for name, layout in EVALUATED.items()}
    command = f"evaluate lambada {folder} {folder / 'lambada.jsonl'} --tp 2 --json"
    with redirect_stdout(StringIO()) as output:
        main([*command.split(), f"--devices={size}", "--precision=64-true", "--accelerator=cpu"])
    return results, output.getvalue(), argmax_of_part(rank, size)


def test_evaluations_match_transformers_in_every_layout(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    oracle.write_data(tmp_path)
    model, tokenizer = oracle.load(tmp_path)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    passages = [text.replace("\n", " ").rpartition(" ") for text in oracle.PASSAGES]
    rows = [(encode(context), encode(f" {word}")) for context, _, word in passages]
    expected = [
        oracle.perplexities(model, encode(detokenize(oracle.TEXT)), count_words(oracle.TEXT)),
        oracle.cloze(model, rows),
    ]
    plain = evaluate(None, 1, tmp_path)
    ranks = run_world(evaluate_all, 4, tmp_path)
    for results in [plain, *(results for rank in ranks for results in rank[0].values())]:
        for actual, values in zip(results, expected, strict=True):
            assert actual == pytest.approx(values, rel=1e-7)
    printed = json.loads(ranks[0][1])
    expected_print = expected[1] | {"passages": 3, "devices": 4, "tp": 2}
    assert {n: printed[n] for n in expected_print} == pytest.approx(expected_print, rel=1e-7)
    assert not any(output for _, output, _ in ranks[1:])
    assert all(argmax == [LARGEST, LARGEST] for *_, argmax in ranks)
