"""Checks of the fused pass over one token against passes over full rows."""

from __future__ import annotations

import torch

from lightning_megatron.generation.prompts import PromptRows
from lightning_megatron.generation.token_pass import TokenPass
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.key_value_cache import KeyValueCache
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from tests.kernels.models import eager

PROMPT = [3, 9, 4, 1, 5]
NEW = [2, 6, 5, 3, 5, 8, 9, 7]
#: Largest distance of the logits, relative to their norm, that rounding to half types explains.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@torch.no_grad()
def check_fused_pass(config: GPTConfig, mesh: ParallelMesh, dtype: torch.dtype) -> TokenPass:
    """Compare the logits of fused passes with those of the same model in float32.

    Args:
        config: Configuration of the model.
        mesh: Process groups of this rank.
        dtype: Half type of the fused passes.

    Returns:
        The pass.
    """
    gpt = GPT(config, mesh, seed=1).to(mesh.device, dtype).eval()
    wide = GPT(config, mesh, seed=1).to(mesh.device).eval()
    for parameter, twin in zip(gpt.parameters(), wide.parameters(), strict=True):
        if parameter.ndim == 2:
            parameter.mul_(4.0)
        twin.copy_(parameter)
    cache = KeyValueCache(len(PROMPT) + len(NEW))
    rows = PromptRows.of([PROMPT], mesh.device, num_rows=1, length=len(PROMPT))
    tokens, span = rows.prefill_inputs(cache)
    gpt.logits_at(tokens, len(PROMPT) - 1, span)
    cache.advance(len(PROMPT))
    token_pass = TokenPass(gpt, cache, rows.padding, 1)
    assert token_pass.is_fused
    row = list(PROMPT)
    for token in NEW:
        row.append(token)
        logits = token_pass(torch.tensor([token], device=mesh.device)).float()
        cache.advance(1)
        with eager():
            expected = wide.logits_at(torch.tensor([row], device=mesh.device), len(row) - 1)
        distance = (logits - expected).norm() / expected.norm()
        assert distance < TOLERANCE[dtype], f"token {len(row)}: {float(distance)}"
    return token_pass
