"""Models that generate: Hugging Face's, the same models in this package, and the logits of their rows
with and without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.generation.decoding import gpt_of
from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import TokenPass
from lightning_megatron.graphs.backend import CaptureBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.key_value_cache import KeyValueCache
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap import parallelize
from tests.swap import families

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34, 35]]
NEW_TOKENS = 10
#: Tokens that follow the prompts in comparisons of logits; more than a window.
NEXT = torch.randint(1, families.V, (3, 8), generator=torch.Generator().manual_seed(0))


def small_twin(case: str, **changes: Any) -> nn.Module:
    """Return Hugging Face's model of a case in float64."""
    twin: nn.Module = families.exact_twin(case, **changes)
    return twin


def twin_of(case: str) -> nn.Module:
    """Return a model of four layers whose generated tokens depend on the prompt."""
    changes: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None}
    if case in families.EXPERTS:
        return small_twin(case, **changes)
    depth = "n_layer" if case in ("gpt2", "bloom") else "num_hidden_layers"
    changes |= {} if case == "gemma3" else {depth: 4}
    twin = small_twin(case, **changes)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            # With a bias in the last norm, the model would always predict the same token.
            parameter.mul_(0.0 if name.endswith("ln_f.bias") else 5.0)
    return twin


def on_mesh(twin: nn.Module, mesh: ParallelMesh | None = None) -> Any:
    """Return a model with this package's layers in place of its own."""
    root = nn.ModuleDict({"model": twin})
    parallelize(root, mesh or ParallelMesh.single())
    return root["model"].eval()


def replaced(case: str, mesh: ParallelMesh | None = None) -> Any:
    """Return the model of :func:`twin_of` in this package's layers."""
    return on_mesh(twin_of(case), mesh)


def small_gpt(case: str, mesh: ParallelMesh | None = None) -> GPT:
    """Return the GPT inside the replaced model of :func:`small_twin`."""
    return gpt_of(on_mesh(small_twin(case), mesh))


def padded(prompts: list[list[int]] = PROMPTS) -> dict[str, Any]:
    """Return arguments of transformers' ``generate`` with prompts padded on the left."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    pairs = list(zip(padding, prompts, strict=True))
    return {
        "input_ids": torch.tensor([[0] * count + prompt for count, prompt in pairs]),
        "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
        "max_new_tokens": NEW_TOKENS,
    }


def full_logits(gpt: GPT, prompts: Sequence[list[int]]) -> list[list[Tensor]]:
    """Return, for each prompt, the logits after it and after each of its next tokens, from a pass
    over the full row in one process.
    """
    expected = []
    for prompt, following in zip(prompts, NEXT.tolist(), strict=False):
        # The logits are sequence-first, and the vocabulary is padded.
        _, logits = gpt(torch.tensor([prompt + following]))
        expected.append(list(logits[len(prompt) - 1 :, 0, : families.V]))
    return expected


def check_logits(actual: Tensor, expected: list[list[Tensor]], number: int) -> None:
    """Compare logits of rows after a number of next tokens."""
    for logits, of_row in zip(actual, expected, strict=True):
        torch.testing.assert_close(logits, of_row[number], rtol=0, atol=1e-10)


@torch.no_grad()
def check_rows(
    gpt: GPT, prompts: list[list[int]], multiple: int = 1, twin: GPT | None = None, later: int = 0
) -> KeyValueCache:
    """Compare a twin's logits of each full row alone with the logits of all rows with the cache.

    Lengths are multiples of ``multiple`` in the first call, and of ``later`` in later calls.
    """
    expected = full_logits(twin or gpt, prompts)
    length = max(map(len, prompts))
    cache = KeyValueCache(length + NEXT.shape[1])
    rows = PromptRows.of(prompts, torch.device("cpu"), num_rows=len(prompts), length=length)
    tokens, span = rows.prefill_inputs(cache, multiple)
    check_logits(gpt.logits_at(tokens, length - 1, span), expected, 0)
    cache.advance(length)
    for number in range(NEXT.shape[1]):
        rows = rows.appended(NEXT[: len(prompts), number])
        tokens, span = rows.decode_inputs(cache, later or multiple)
        check_logits(gpt.logits_at(tokens, 0, span), expected, number + 1)
        cache.advance(1)
    return cache


@torch.no_grad()
def check_passes(
    gpt: GPT,
    prompts: list[list[int]],
    backend: CaptureBackend | None = None,
    twin: GPT | None = None,
) -> tuple[KeyValueCache, TokenPass]:
    """Compare the logits of passes over one token at a position on the device with the logits of
    passes over full rows, of a twin in one process.
    """
    expected = full_logits(twin or gpt, prompts)
    length = max(map(len, prompts))
    cache = KeyValueCache(length + NEXT.shape[1])
    rows = PromptRows.of(prompts, torch.device("cpu"), num_rows=len(prompts), length=length)
    tokens, span = rows.prefill_inputs(cache)
    gpt.logits_at(tokens, length - 1, span)
    cache.advance(length)
    token_pass = TokenPass(gpt, cache, rows.padding, len(prompts), backend)
    for number in range(NEXT.shape[1]):
        check_logits(token_pass(NEXT[: len(prompts), number]), expected, number + 1)
        cache.advance(1)
    return cache, token_pass


def bytes_of(cache: KeyValueCache) -> int:
    """Return the memory of the keys and values of all layers on this rank (bytes)."""
    caches = [cache] if cache.held is None else [cache, cache.held.cache]
    return sum(part.nbytes for kept in caches for pair in kept._layers.values() for part in pair)
