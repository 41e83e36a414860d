"""Tests of the subcommand `generate`: its tokens, its output and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_megatron import GenerationSettings, HuggingFaceCausalLM, MegatronStrategy, generate
from lightning_megatron.cli.main import main
from lightning_megatron.cli.text_generation import seed_of_batch
from lightning_megatron.data.tokenizer import load_tokenizer
from tests.forked_script import run_python
from tests.sweeps import chosen
from tests.test_cli_evaluate import small_causal_lm, train_and_save
from tests.tiny_llama import save_tiny_llama

PRECISE = ("--precision", "64-true", "--accelerator", "cpu")
PROMPTS = ["The state", "Wé"]
MAX_NEW_TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate")
    save_tiny_llama(path)
    return path


def arguments(model: Path, *more: str, prompts: list[str] = PROMPTS) -> list[str]:
    options = [part for prompt in prompts for part in ("--prompt", prompt)]
    return [
        "generate",
        "--ckpt",
        str(model),
        *options,
        "--max-new-tokens",
        str(MAX_NEW_TOKENS),
        *PRECISE,
        *more,
    ]


def rows_of(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    """Run the command in this process, and return the objects that it prints."""
    capsys.readouterr()
    main([*args, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def tokens_by_transformers(folder: Path, prompt: str, **options: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    generated = model.generate(tokens, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, **options)
    return generated[0, tokens.shape[1] :].tolist()


def test_tokens_and_texts_match_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = rows_of(capsys, *arguments(folder, "--batch-size", "2"))
    expected = [tokens_by_transformers(folder, prompt) for prompt in PROMPTS]
    assert [row["prompt"] for row in actual] == PROMPTS
    assert [row["tokens"] for row in actual] == expected
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [row["text"] for row in actual] == [tokenizer.decode(row) for row in expected]
    assert {row["finish_reason"] for row in actual} == {"length"}
    beams = rows_of(capsys, *arguments(folder, "--beams", "3"))
    expected = [tokens_by_transformers(folder, prompt, num_beams=3) for prompt in PROMPTS]
    assert [row["tokens"] for row in beams] == expected


def test_text_ends_before_a_stop_string_and_is_written_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some tokens of its continuation are halves of characters.
    prompt = "Hello"
    tokens = tokens_by_transformers(folder, prompt)
    command = arguments(folder, "--stop-token", str(tokens[4]), prompts=[prompt])
    (row,) = rows_of(capsys, *command)
    assert row["tokens"] == tokens[: tokens.index(tokens[4]) + 1]
    assert row["finish_reason"] == "stop"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = next(sign for sign in tokenizer.decode(tokens) if sign != "\ufffd")
    last = next(n for n in range(1, MAX_NEW_TOKENS + 1) if stop in tokenizer.decode(tokens[:n]))
    (row,) = rows_of(capsys, *arguments(folder, "--stop", stop, prompts=[prompt]))
    assert row["tokens"] == tokens[:last]
    assert row["text"] == tokenizer.decode(tokens).partition(stop)[0]
    assert row["finish_reason"] == "stop"
    written: list[str] = []
    monkeypatch.setattr("lightning_megatron.cli.text_generation._say", written.append)
    main(arguments(folder, prompts=[prompt]))
    assert written[0] == prompt
    assert len(written) == MAX_NEW_TOKENS + 2
    assert "".join(written) == prompt + tokenizer.decode(tokens) + "\n"


def test_a_checkpoint_generates_the_tokens_of_its_module(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causal_lm, hugging_face = tmp_path / "own.ckpt", tmp_path / "other.ckpt"
    module = train_and_save(small_causal_lm(), causal_lm, "auto")
    tokens = [list(prompt.encode()) for prompt in PROMPTS]
    expected = generate(module, tokens, GenerationSettings(MAX_NEW_TOKENS, stop_tokens=(256,)))
    actual = rows_of(capsys, *arguments(causal_lm, "--tokenizer", "bytes"))
    assert [row["tokens"] for row in actual] == expected
    module = train_and_save(
        HuggingFaceCausalLM(str(folder), learning_rate=0.1), hugging_face, MegatronStrategy()
    )
    tokens = [load_tokenizer(folder).encode(prompt) for prompt in PROMPTS]
    expected = generate(module, tokens, GenerationSettings(MAX_NEW_TOKENS, stop_tokens=(256,)))
    actual = rows_of(capsys, *arguments(hugging_face))
    assert [row["tokens"] for row in actual] == expected
    assert expected != [tokens_by_transformers(folder, prompt) for prompt in PROMPTS]


DRAWS = ("--sample", "--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--samples", "3")


@pytest.mark.parametrize("axis", chosen(["pp", "cp", "dp"], "pp", "cp"))
def test_samples_differ_and_are_the_same_in_every_layout(
    axis: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run in this process leaves its rank and port behind, which a launcher would give to ranks.
    environment = dict(os.environ)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    generate_arguments = [
        "generate",
        "--ckpt",
        str(folder),
        "--prompts",
        str(file),
        *PRECISE,
        *DRAWS,
    ]
    generate_arguments += ["--max-new-tokens", "6", "--seed", "5", "--batch-size", "2"]
    expected = rows_of(capsys, *generate_arguments)
    assert [(row["prompt"], row["sample"]) for row in expected] == [
        (prompt, sample) for prompt in PROMPTS for sample in range(3)
    ]
    assert len({tuple(row["tokens"]) for row in expected}) == 6
    assert rows_of(capsys, *generate_arguments) == expected
    assert (
        rows_of(capsys, *generate_arguments[:-4], "--seed", "6", *generate_arguments[-2:])
        != expected
    )
    # Two model copies of one or two ranks; the second copy has no rows in the last round.
    command = ["-m", "lightning_megatron", *generate_arguments, "--json"]
    command += ["--devices", "2"] if axis == "dp" else ["--devices", "4", f"--{axis}", "2"]
    run = run_python(command, tmp_path, environment, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    assert [json.loads(line) for line in run.stdout.splitlines()] == expected


def test_seeds_of_batches_differ() -> None:
    seeds = {seed_of_batch(seed, number) for seed in range(20) for number in range(20)}
    assert len(seeds) == 400
    assert seed_of_batch(7, 0) == 7
    assert all(GenerationSettings(seed=seed).seed == seed for seed in seeds)


def test_unsupported_prompts_and_options_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causal_lm = tmp_path / "own.ckpt"
    train_and_save(small_causal_lm(), causal_lm, "auto")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    file = ["generate", "--ckpt", str(folder), "--prompts"]
    for args, message in (
        (arguments(folder, prompts=[" "]), "--prompt ' ' has none"),
        (arguments(folder, prompts=["a", "b" * 60]), "prompt 2 has 60, and --max-new-tokens is 10"),
        (
            arguments(causal_lm, "--tokenizer", "bytes", prompts=["b" * 30]),
            "longest row (32 tokens)",
        ),
        (arguments(causal_lm), "names no tokenizer"),
        (arguments(causal_lm, "--tokenizer", "nobody"), "tokenizer 'nobody' does not exist"),
        (arguments(folder, "--beams", "2", "--sample"), "a beam search cannot sample tokens"),
        (arguments(folder, "--top-p", "0.5"), "--top-p needs --sample"),
        (arguments(folder, "--length-penalty", "0"), "--length-penalty needs --beams"),
        (arguments(folder, "--samples", "2"), "--samples 2 needs --sample"),
        (arguments(folder, "--sample", "--temperature", "0"), "temperature must be"),
        (arguments(folder, "--stop", ""), "a stop string must have at least one character"),
        (arguments(folder, "--tp", "2"), "tp"),
        (arguments(tmp_path / "none"), "MODEL must be a Hugging Face folder or a checkpoint"),
        ([*file, str(lines)], f"{lines}:2"),
        ([*file, str(tmp_path / "none.txt")], "the prompts must be a file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
