"""Tests of the subcommand `evaluate`: its inputs, its output and its errors."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import (
    CausalLM,
    GPTConfig,
    HuggingFaceCausalLM,
    LoraSettings,
    MegatronStrategy,
)
from lightning_megatron.cli.main import main
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.evaluation import token_losses
from lightning_megatron.evaluation.wikitext import count_words, detokenize
from tests.evaluation import oracle
from tests.forked_script import run_python
from tests.strategy.tiny import TinyLM, loader
from tests.sweeps import chosen
from tests.tiny_llama import save_tiny_llama

PRECISE = ("--precision", "64-true", "--accelerator", "cpu")
WINDOWS = ("--window", str(oracle.WINDOW), "--stride", str(oracle.STRIDE), "--batch-size", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and the data of both tasks."""
    path = tmp_path_factory.mktemp("evaluate")
    save_tiny_llama(path)
    oracle.write_data(path)
    return path


def arguments(model: Path, folder: Path, *more: str) -> list[str]:
    data = str(folder / "wiki.test.tokens")
    return ["evaluate", str(model), "--task", "wikitext", "--data", data, *PRECISE, *more]


def read_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """Run the command in this process, and return the object that it prints."""
    capsys.readouterr()
    main([*args, "--json"])
    return json.loads(capsys.readouterr().out)


def train_and_save(module: pl.LightningModule, path: Path, strategy: Any) -> pl.LightningModule:
    """Train one step, save, and return the module."""
    rows = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(2))
    data = DataLoader([{"tokens": row, "labels": row} for row in rows], batch_size=2)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(strategy=strategy, precision="64-true", max_steps=1, **quiet)
    trainer.fit(module, data if not isinstance(module, TinyLM) else loader(4))
    trainer.save_checkpoint(path)
    return module


def small_causal_lm() -> CausalLM:
    sizes = {"vocab_size": 257, "max_seq_length": 32, "num_layers": 2, "hidden_size": 16}
    torch.manual_seed(5)
    return CausalLM(GPTConfig.llama(**sizes, num_heads=2), learning_rate=0.1)


def encode(folder: Path, text: str) -> list[int]:
    return load_tokenizer(folder).encode(text)


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: list[int]) -> float:
    """Return the perplexity of a text, one token at a time, each with the window before it."""
    total = 0.0
    for position in range(1, len(ids)):
        start = max(0, -(-(position - oracle.WINDOW) // oracle.STRIDE)) * oracle.STRIDE
        row = torch.tensor([ids[start : position + 1]])
        losses: Tensor = token_losses(model, row[:, :-1], row[:, 1:])
        total += float(losses[0, -1])
    return math.exp(total / (len(ids) - 1))


def test_a_hugging_face_folder_is_evaluated_with_its_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = oracle.load(folder)
    ids = encode(folder, detokenize(oracle.TEXT))
    expected = oracle.perplexities(model, ids, count_words(oracle.TEXT))
    actual = read_json(capsys, *arguments(folder, folder, *WINDOWS))
    sizes = {"window": 24, "stride": 8, "words": 31, "tokens": len(ids), "devices": 1, "tp": 1}
    assert {name: actual[name] for name in sizes} == sizes
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-7)
    main(arguments(folder, folder, *WINDOWS, "--no-progress"))
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(rows["token_perplexity"]) == pytest.approx(actual["token_perplexity"], rel=1e-5)


def test_lambada_on_two_tensor_ranks_matches_one_process(folder: Path, tmp_path: Path) -> None:
    data = str(folder / "lambada.jsonl")
    command = ["-m", "lightning_megatron", "evaluate", str(folder)]
    command += ["--task", "lambada", "--data", data, "--tp", "2", "--devices", "2", "--json"]
    run = run_python([*command, *PRECISE], tmp_path, dict(os.environ), timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    actual = json.loads(run.stdout)
    model, _ = oracle.load(folder)
    passages = [text.replace("\n", " ").rpartition(" ") for text in oracle.PASSAGES]
    rows = [(encode(folder, text), encode(folder, f" {word}")) for text, _, word in passages]
    expected = oracle.cloze(model, rows) | {"passages": 3, "devices": 2, "tp": 2}
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("strategy", chosen(["megatron", "auto"], "auto"))
def test_a_checkpoint_of_a_causal_lm_has_the_perplexity_of_its_module(
    strategy: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "last.ckpt"
    module = train_and_save(
        small_causal_lm(), path, MegatronStrategy() if strategy == "megatron" else "auto"
    )
    assert path.is_dir() == (strategy == "megatron")
    actual = read_json(capsys, *arguments(path, folder, *WINDOWS, "--tokenizer", "bytes"))
    expected = perplexity(module.model.eval(), list(detokenize(oracle.TEXT).encode()))
    assert actual["token_perplexity"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("lora", chosen([None, LoraSettings(r=4)], LoraSettings(r=4)))
def test_a_checkpoint_of_a_hugging_face_model_has_its_trained_weights(
    lora: LoraSettings | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    path = tmp_path / "last.ckpt"
    module = HuggingFaceCausalLM(str(folder), learning_rate=0.1, lora=lora)
    train_and_save(module, path, MegatronStrategy())
    actual = read_json(capsys, *arguments(path, folder, *WINDOWS))
    expected = perplexity(module.model.eval(), encode(folder, detokenize(oracle.TEXT)))
    assert actual["token_perplexity"] == pytest.approx(expected, rel=1e-7)
    untrained = read_json(capsys, *arguments(folder, folder, *WINDOWS))
    assert untrained["token_perplexity"] != pytest.approx(actual["token_perplexity"], rel=1e-2)


def test_unsupported_models_and_options_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causal_lm, tiny_lm = tmp_path / "own.ckpt", tmp_path / "other.ckpt"
    train_and_save(small_causal_lm(), causal_lm, "auto")
    train_and_save(TinyLM(), tiny_lm, MegatronStrategy())
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "one two"}\n{"text": "one"}\n')
    passages = ["--task", "lambada", "--data", str(bad)]
    for args, message in (
        (arguments(causal_lm, folder), "names no tokenizer"),
        (
            arguments(causal_lm, folder, "--tokenizer", "gpt2"),
            "at most as many tokens as the model (257)",
        ),
        (arguments(tiny_lm, folder), "must be that of a CausalLM or a HuggingFaceCausalLM"),
        (arguments(tmp_path / "none", folder), "MODEL must be a Hugging Face folder or a checkp"),
        (["evaluate", str(folder), *passages, "--stride", "3"], "--stride is for long texts alone"),
        (["evaluate", str(folder), *passages], f"{bad}:2 has fewer than two words"),
        (arguments(folder, folder, "--window", "8"), "stride (32) must be at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
