"""The commands ``evaluate`` and ``generate``: folders and checkpoints, output and errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_megatron import (
    CausalLM,
    GenerationSettings,
    GPTConfig,
    HuggingFaceCausalLM,
    LoraSettings,
    generate,
)
from lightning_megatron.building_blocks import token_losses
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.tasks.evaluation.wikitext import count_words, detokenize
from tests.fits import Job, run_job, trainer_of
from tests.tasks.evaluation import oracle
from tests.tiny_llama import save_tiny_llama

PRECISE = "--precision 64-true --accelerator cpu"
WINDOWS = f"--window {oracle.WINDOW} --stride {oracle.STRIDE} --batch-size 4"
PROMPTS = ["The state", "Wé"]
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and the data of both tasks."""
    path = tmp_path_factory.mktemp("models")
    save_tiny_llama(path)
    oracle.write_data(path)
    return path


def evaluation_of(model: Path, folder: Path, options: str = "") -> str:
    data = folder / "wiki.test.tokens"
    return f"evaluate wikitext {model} {data} {PRECISE} {options}"


def generation_of(model: Path, options: str = "", prompts: list[str] = PROMPTS) -> list[str]:
    command = f"generate {model} --max-new-tokens {NEW_TOKENS} {PRECISE} {options}".split()
    return [*command, *(part for prompt in prompts for part in ("--prompt", prompt))]


def train_and_save(module: pl.LightningModule, path: Path, strategy: Any) -> Any:
    """Train one step, save, and return the module."""
    rows = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(2))
    data = DataLoader([{"tokens": row, "labels": row} for row in rows], batch_size=2)
    trainer = trainer_of(Job(strategy=strategy, steps=1, trainer={"gradient_clip_val": None}))
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return module


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint of Lightning's, and the module that it was saved from."""
    path = tmp_path_factory.mktemp("own") / "own.ckpt"
    torch.manual_seed(5)
    sizes = {"vocab_size": 257, "max_seq_length": 32, "num_layers": 2, "hidden_size": 16}
    module = CausalLM(GPTConfig.llama(**sizes, num_heads=2), learning_rate=0.1)
    return path, train_and_save(module, path, None)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, Any]:
    """Return a sharded checkpoint of a replaced model with adapters, and its module."""
    pytest.importorskip("peft")
    path = tmp_path_factory.mktemp("tuned") / "tuned.ckpt"
    module = HuggingFaceCausalLM(str(folder), learning_rate=0.1, lora=LoraSettings(r=4))
    return path, train_and_save(module, path, {})


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


def test_a_folder_is_evaluated_with_its_tokenizer(folder, printed):
    model, tokenizer = oracle.load(folder)
    ids = tokenizer(detokenize(oracle.TEXT), add_special_tokens=False)["input_ids"]
    expected = oracle.perplexities(model, ids, count_words(oracle.TEXT))
    actual = json.loads(printed(evaluation_of(folder, folder, f"{WINDOWS} --json")))
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-7)
    table = printed(evaluation_of(folder, folder, f"{WINDOWS} --no-progress"))
    rows = dict(line.split() for line in table.splitlines())
    assert float(rows["token_perplexity"]) == pytest.approx(actual["token_perplexity"], rel=1e-5)


def test_checkpoints_are_evaluated_with_their_trained_weights(folder, own, tuned, printed):
    text = detokenize(oracle.TEXT)
    for (path, module), options, ids in (
        (own, "--tokenizer bytes", list(text.encode())),
        (tuned, "", load_tokenizer(folder).encode(text)),
    ):
        actual = json.loads(printed(evaluation_of(path, folder, f"{WINDOWS} --json {options}")))
        expected = perplexity(module.model.eval(), ids)
        assert actual["token_perplexity"] == pytest.approx(expected, rel=1e-7)


def test_unsupported_models_and_options_of_an_evaluation_are_refused(
    folder, own, tmp_path, refused
):
    other, bad = tmp_path / "other.ckpt", tmp_path / "bad.jsonl"
    run_job(Job(strategy={}, steps=1, save=str(other)))
    bad.write_text('{"text": "one two"}\n{"text": "one"}\n')
    passages = f"evaluate lambada {folder} {bad}"
    for command, message in {
        evaluation_of(own[0], folder): "has no tokenizer",
        evaluation_of(own[0], folder, "--tokenizer gpt2"): "as many tokens as the model (257)",
        evaluation_of(other, folder): "must be that of a CausalLM or a HuggingFaceCausalLM",
        f"{passages} --stride 3": "--stride",
        passages: f"{bad}:2 has fewer than two words",
    }.items():
        assert message in refused(command)


def rows_of(printed: Any, command: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed("", *command, "--json").splitlines()]


def tokens_by_transformers(folder: Path, prompt: str, **options: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    generated = model.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return generated[0, tokens.shape[1] :].tolist()


def test_tokens_and_texts_match_transformers(folder, printed):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for command, options in (("--batch-size 2", {}), ("--beams 3", {"num_beams": 3})):
        actual = rows_of(printed, generation_of(folder, command))
        expected = [tokens_by_transformers(folder, prompt, **options) for prompt in PROMPTS]
        assert [row["tokens"] for row in actual] == expected
        assert [row["text"] for row in actual] == [tokenizer.decode(row) for row in expected]


def test_text_ends_before_a_stop_string_and_is_written_token_by_token(folder, printed, monkeypatch):
    # Some tokens of its continuation are halves of characters.
    prompt = "Hello"
    tokens = tokens_by_transformers(folder, prompt)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = next(sign for sign in tokenizer.decode(tokens) if sign != "\ufffd")
    last = next(n for n in range(1, NEW_TOKENS + 1) if stop in tokenizer.decode(tokens[:n]))
    (row,) = rows_of(printed, [*generation_of(folder, prompts=[prompt]), "--stop", stop])
    assert row["tokens"] == tokens[:last]
    assert row["text"] == tokenizer.decode(tokens).partition(stop)[0]
    assert row["finish_reason"] == "stop"
    written: list[str] = []
    monkeypatch.setattr("lightning_megatron.cli.text_generation._say", written.append)
    printed("", *generation_of(folder, prompts=[prompt]))
    assert written[0] == prompt
    assert len(written) == NEW_TOKENS + 2
    assert "".join(written) == prompt + tokenizer.decode(tokens) + "\n"


def test_checkpoints_generate_the_tokens_of_their_modules(folder, own, tuned, printed):
    for (path, module), options, encode in (
        (own, "--tokenizer bytes", lambda text: list(text.encode())),
        (tuned, "", load_tokenizer(folder).encode),
    ):
        settings = GenerationSettings(NEW_TOKENS, stop_tokens=(256,))
        expected = generate(module, [encode(prompt) for prompt in PROMPTS], settings)
        actual = rows_of(printed, generation_of(path, options))
        assert [row["tokens"] for row in actual] == expected


def test_a_checkpoint_made_of_a_folder_is_used_without_it(folder, tmp_path, printed):
    original, made = tmp_path / "original", tmp_path / "made.ckpt"
    shutil.copytree(folder, original)
    printed(f"convert {original} {made}")
    shutil.rmtree(original)
    assert printed("", *generation_of(made)) == printed("", *generation_of(folder))
    results = [
        json.loads(printed(evaluation_of(model, folder, f"{WINDOWS} --json")))
        for model in (made, folder)
    ]
    assert results[0]["token_perplexity"] == results[1]["token_perplexity"]


def test_unsupported_prompts_and_options_of_a_generation_are_refused(
    folder, own, tmp_path, refused
):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    file = f"generate {folder} --prompts".split()
    for command, message in (
        (generation_of(folder, prompts=[" "]), "--prompt ' ' has none"),
        (generation_of(folder, prompts=["a", "b" * 60]), "prompt 2 has 60, and --max_new_tokens"),
        (generation_of(own[0], "--tokenizer bytes", ["b" * 30]), "longest row (32 tokens)"),
        (generation_of(own[0], "--tokenizer nobody"), "tokenizer 'nobody' does not exist"),
        (generation_of(folder, "--beams 2 --sample"), "a beam search cannot sample tokens"),
        (generation_of(folder, "--top-p 0.5"), "need sample: without it"),
        (generation_of(folder, "--length-penalty 0"), "length_penalty (0.0) needs beams"),
        (generation_of(folder, "--samples 2"), "--samples 2 needs --sample"),
        (generation_of(tmp_path), "has neither config.json nor the header of a checkpoint"),
        ([*file, str(tmp_path / "none")], "the prompts must be a file"),
        ([*generation_of(folder), "--stop", ""], "stop string must have at least one character"),
        ([*file, str(lines)], f"{lines}:2"),
    ):
        assert message in refused("", *command)
