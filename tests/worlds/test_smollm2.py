"""SmolLM2-135M, a real model with nine heads, has the loss and continuation of transformers on three ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import build_on_meta, parallelize
from tests.corpora import SPEECHES, need
from tests.smollm2 import save_smollm2
from tests.swap.families import transformers
from tests.world import run_world

tokenizers = pytest.importorskip("tokenizers")
WINDOW = 256


def text_and_prompt(folder: Path) -> tuple[Tensor, Tensor]:
    """Return two windows of the latest speech, and the beginning of a sentence."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    speech = max((need(SPEECHES) / "speeches").glob("2026*")).read_text(encoding="utf-8")
    tokens = tokenizer.encode(speech).ids[: 2 * WINDOW]
    prompt = tokenizer.encode("The capital of France is").ids
    return torch.tensor(tokens).view(2, WINDOW), torch.tensor([prompt])


def continuation_of(model: Any, prompt: Tensor) -> list[int]:
    return model.generate(prompt, max_new_tokens=5, do_sample=False)[0].tolist()


@torch.no_grad()
def evaluate(rank: int, size: int, folder: Path) -> tuple[float, list[int], int]:
    """Return the loss, the continuation, and the number of elements that this rank holds."""
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), sequence_parallel=True)
    root: Any = nn.Module()
    with build_on_meta():
        root.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert all(parameter.is_meta for parameter in root.parameters()), "no rank holds the full model"
    parallelize(root, mesh)
    model, (text, prompt) = root.model.eval(), text_and_prompt(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    return float(model(text, labels=text).loss), continuation_of(model, prompt), count


@torch.no_grad()
def test_three_ranks_have_the_loss_and_continuation_of_transformers(tmp_path: Path) -> None:
    folder = save_smollm2(tmp_path)
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    text, prompt = text_and_prompt(folder)
    logits = twin(text).logits
    expected = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()))
    continuation, full = continuation_of(twin, prompt), sum(p.numel() for p in twin.parameters())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert "Paris" in tokenizer.decode(continuation)
    for loss, actual, count in run_world(evaluate, 3, folder):
        assert loss == pytest.approx(expected, abs=1e-4)
        assert actual == continuation
        assert 0.3 < count / full < 0.36
