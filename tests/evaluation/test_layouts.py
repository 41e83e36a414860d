"""Evaluations equal plain transformers code under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import HuggingFaceCausalLM
from lightning_megatron.evaluation.wikitext import count_words, detokenize
from tests.evaluation import oracle
from tests.evaluation.runs import evaluate, evaluate_layouts
from tests.tiny_llama import save_tiny_llama
from tests.world import run_world

LAYOUTS = {
    2: {
        "tp": {"tp": 2},
        "tp in chunks": {"tp": 2, "loss_chunk": 5},
        "pp": {"pp": 2},
        "cp": {"cp": 2},
        "dp": {},
    },
    4: {
        "tp pp": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "vpp dp": {"pp": 2, "vpp": 2},
        "cp tp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    },
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write a model and data, and return them with the results of transformers."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_tiny_llama(folder)
    oracle.write_data(folder)
    model, tokenizer = oracle.load(folder)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    passages = [text.replace("\n", " ").rpartition(" ") for text in oracle.PASSAGES]
    rows = [(encode(context), encode(f" {word}")) for context, _, word in passages]
    drawn, tokens, labels = draw_words(model)
    expected = [
        oracle.perplexities(model, encode(detokenize(oracle.TEXT)), count_words(oracle.TEXT)),
        oracle.cloze(model, rows),
        oracle.cloze(model, drawn),
    ]
    assert expected[2]["accuracy"] == 3 / 5
    return {"folder": folder, "tokens": tokens, "labels": labels, "expected": expected}


def draw_words(model: Any) -> tuple[list[tuple[list[int], list[int]]], Tensor, Tensor]:
    """Draw five contexts with words of two tokens, of which the model would write three."""
    drawn = []
    for number, context in enumerate(torch.randint(256, (5, 9)).tolist()):
        word: list[int] = []
        for _ in range(2):
            logits = model(torch.tensor([context + word])).logits[0, -1]
            word.append(int(logits.argmax()))
        # One word has only its first token right, and one word only its second token.
        if number in (1, 4):
            word[number // 4] = (word[number // 4] + 1) % 256
        drawn.append((context, word))
    sequences = torch.tensor([context + word for context, word in drawn])
    labels = sequences[:, 1:].clone()
    labels[:, :-2] = -100
    return drawn, sequences[:, :-1], labels


def check(results: list[dict[str, float]], case: dict[str, Any]) -> None:
    for actual, expected in zip(results, case["expected"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-7)


def test_an_evaluation_without_the_strategy_matches_transformers(case: dict[str, Any]) -> None:
    folder, tokens, labels = case["folder"], case["tokens"], case["labels"]
    check(evaluate(HuggingFaceCausalLM(str(folder)), folder, tokens, labels, devices=1), case)


@pytest.mark.parametrize("size", LAYOUTS)
def test_an_evaluation_under_every_layout_matches_transformers(
    size: int, case: dict[str, Any]
) -> None:
    arguments = case["folder"], case["tokens"], case["labels"], LAYOUTS[size]
    for results_of_rank in run_world(evaluate_layouts, size, *arguments):
        for layout_results in results_of_rank.values():
            check(layout_results, case)
