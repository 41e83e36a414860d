"""Modules with the structure of well-known blocks train without a plan, or with the plan that the fit
shows, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.fits import Job, Module, Report, Tokens, check_equal, run_job, run_jobs_on

WORDS, WIDTH, HEADS, LENGTH, DEPTH = 300, 16, 4, 16, 4


class Fused(nn.Module):
    """Attention as nanoGPT has it: one projection, split by the width."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v)
        )
        rate = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=rate, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))


class Explicit(nn.Module):
    """Attention as minGPT has it: three projections, with scores and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.attn_drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        k, q, v = (
            layer(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(scores, dim=-1)) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    """Block of nanoGPT and minGPT."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 4 * WIDTH),
                "c_proj": nn.Linear(4 * WIDTH, WIDTH),
                "act": nn.GELU(),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        m: Any = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln_2(x))))


class MiniGPT(nn.Module):
    """Model of nanoGPT: positions, a head tied to the embedding."""

    def __init__(self, attention: Callable[[], nn.Module], *, is_tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(GPTBlock(attention) for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = parts.drop(parts.wte(tokens) + parts.wpe(places))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(dtype=x.dtype)


def angles(size: int) -> tuple[Tensor, Tensor]:
    theta = 1.0 / (100.0 ** (torch.arange(0, size, 2).double() / size))
    turns = torch.outer(torch.arange(LENGTH).double(), theta).repeat(1, 2)
    return turns.cos(), turns.sin()


class RMSNorm(nn.Module):
    """A norm written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class LitAttention(nn.Module):
    """Attention as litgpt has it: a projection of unequal parts, rotary positions, norms of heads."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        size, self.groups = WIDTH // HEADS, groups
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * groups) * size, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_q, self.norm_k = RMSNorm(size), RMSNorm(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (b, t, _), size = x.size(), WIDTH // HEADS
        q, k, v = self.qkv(x).split((WIDTH, self.groups * size, self.groups * size), dim=-1)
        q = q.view(b, t, HEADS, size).transpose(1, 2)
        k, v = (part.view(b, t, self.groups, size).transpose(1, 2) for part in (k, v))
        q, k = rotated(self.norm_q(q), cos, sin), rotated(self.norm_k(k), cos, sin)
        k, v = (part.repeat_interleave(HEADS // self.groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=size**-0.5)
        return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class PicoAttention(nn.Module):
    """Attention as picotron has it: grouped queries, projections of their own, repeated keys."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, 2 * size, bias=False) for _ in range(2))
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (b, t, _), size = x.size(), WIDTH // HEADS
        q = self.q_proj(x).view(b, t, HEADS, size).transpose(1, 2)
        k, v = (
            layer(x).view(b, t, 2, size).transpose(1, 2) for layer in (self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (
            part[:, :, None].expand(b, 2, 2, t, size).reshape(b, HEADS, t, size) for part in (k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, HEADS * size))


class LlamaBlock(nn.Module):
    """Block of litgpt and picotron, with a gated MLP."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = RMSNorm(WIDTH), attention(), RMSNorm(WIDTH)
        self.mlp = nn.Module()
        self.mlp.up_proj, self.mlp.gate_proj = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.mlp.down_proj = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin)
        m: Any = self.mlp
        hidden = self.norm_2(x)
        return x + m.down_proj(F.silu(m.gate_proj(hidden)) * m.up_proj(hidden))


class LitGPT(nn.Module):
    """Model of litgpt, whose head is defined before its blocks."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "h": nn.ModuleList(LlamaBlock(attention) for _ in range(DEPTH)),
                "ln_f": RMSNorm(WIDTH),
            }
        )
        self.cos, self.sin = map(nn.Buffer, angles(WIDTH // HEADS))

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts.wte(tokens)
        for block in parts.h:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return self.lm_head(parts.ln_f(x))


class ViTAttention(nn.Module):
    """Attention as timm has it: one projection, reshaped and unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        y = ((q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class ViTBlock(nn.Module):
    """Block of timm, with a scale for each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), ViTAttention(), nn.LayerNorm(WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Model of timm, which classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(8, WIDTH)
        self.cls_token = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))
        self.pos_embed = nn.Parameter(torch.randn(1, 7, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(ViTBlock() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Trained(Module):
    """Train one of the models."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make().double()

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


class Patches(Dataset):
    """Random vectors of patches, and classes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % 8)
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        return {"tokens": x, "labels": torch.tensor(index % 8)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": partial(MiniGPT, Fused),
    "minGPT": partial(MiniGPT, Explicit, is_tied=False),
    "litgpt": partial(LitGPT, LitAttention),
    "picotron": partial(LitGPT, PicoAttention),
    "timm": ViT,
}


def fit(name: str, strategy: dict[str, Any] | None, **options: Any) -> Job:
    data = Patches if name == "timm" else Tokens
    if strategy is not None:
        strategy = {"job.check_microbatches": True, **strategy}
    return Job(partial(Trained, MODELS[name]), strategy, data=data, **options)


JOBS = {f"{name} pp2": fit(name, {"pp": 2}) for name in MODELS}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(2, JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_modules_without_a_plan_train_as_in_one_process(
    name: str, reports: dict[str, list[Report]]
) -> None:
    twin = run_job(fit(name.split()[0], None))
    check_equal(reports[name], twin)
