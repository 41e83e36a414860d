"""Expected values from plain transformers code, calculated one token and one row at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, STRIDE = 24, 8
TEXT = (
    " \n = Valkyria = \n \n It 's a role @-@ playing game with 1 @,@ 200 characters , and the "
    'players \' squad ( of " heroes " ) fights . \n'
)
PASSAGES = ["She gave the ball to him, and he said aaaa", "Ünter the bridge\nran a cat", "x y zzz"]


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write a WikiText file and a LAMBADA file, and return their paths."""
    wikitext, lambada = folder / "wiki.test.tokens", folder / "lambada.jsonl"
    wikitext.write_text(TEXT, encoding="utf-8")
    lambada.write_text("\n".join(json.dumps({"text": text}) for text in PASSAGES), encoding="utf-8")
    return wikitext, lambada


def load(folder: Path) -> tuple[nn.Module, Any]:
    """Return the model of a folder in float64, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def perplexities(
    model: nn.Module, ids: list[int], num_words: int, window: int = WINDOW, stride: int = STRIDE
) -> dict[str, float]:
    """Score each token after the first with the tokens of its window before it."""
    total = 0.0
    for position in range(1, len(ids)):
        # The first window that reads the token before `position` among its last `stride` tokens.
        start = max(0, math.ceil((position - window) / stride)) * stride
        logits = model(torch.tensor([ids[start:position]])).logits[0, -1]
        total -= logits.log_softmax(-1)[ids[position]].item()
    return {
        "word_perplexity": math.exp(total / num_words),
        "token_perplexity": math.exp(total / (len(ids) - 1)),
    }


@torch.no_grad()
def cloze(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Generate the last word of each row token by token, as far as it is right."""
    right, total = 0, 0.0
    for context, word in rows:
        is_right = True
        for number, token in enumerate(word):
            logits: Tensor = model(torch.tensor([context + word[:number]])).logits[0, -1]
            is_right &= int(logits.argmax()) == token
            total -= logits.log_softmax(-1)[token].item()
        right += is_right
    return {"accuracy": right / len(rows), "perplexity": math.exp(total / len(rows))}
