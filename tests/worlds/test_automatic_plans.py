"""Modules with the structure of well-known blocks train without a plan, or with the plan that the fit
shows, as in one process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lightning_megatron import GPT
from lightning_megatron.errors import SpeedWarning
from lightning_megatron.groups.shard_spec import num_elements
from tests.fits import (
    MIXTURE,
    Job,
    Module,
    Regress,
    Report,
    Tokens,
    Vectors,
    check_equal,
    run_job,
    run_jobs,
)
from tests.world import run_world

WORDS, WIDTH, HEADS, LENGTH, DEPTH = 300, 16, 4, 16, 4


class Fused(nn.Module):
    """Attention as nanoGPT has it: one projection, split by the width."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(0.0)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, 0.0

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


class Interleaved(nn.Module):
    """Attention of one projection with queries, keys and values of one head after another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        heads = self.qkv(x).view(b, t, HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Summing(nn.Module):
    """Attention by sums of products, which keeps its weights, and drops some by recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS)[:, None, None])
        self.seen: Tensor | None = None

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * (WIDTH // HEADS) ** -0.5 + self.bias
        weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -1e9).softmax(-1)
        self.seen = weights.detach()
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        y = checkpoint(self.mixed, q, k, v, use_reentrant=False)
        return self.to_out(y.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """Attention of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Experts(nn.Module):
    """A mixture written by hand, as a list of MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return y.view_as(x)


class Twice(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Mixing(nn.Module):
    """Code that mixes all features between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 24))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * self.scale
        hidden[..., ::2] = hidden[..., 1::2].tanh()
        hidden = Twice.apply(hidden).relu().cumsum(-1)
        return self.down(hidden / (1 + hidden.amax(-1, keepdim=True)))


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


class Dropped(nn.Module):
    """An MLP that keeps what it has dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        mask = F.dropout(torch.ones_like(hidden), 0.5)
        self.kept = mask[..., list(range(12))].detach()
        return self.down(hidden * mask)


class Drops(Regress):
    """Keep what each step has dropped."""

    def __init__(self) -> None:
        super().__init__(Dropped)
        self.outcomes["kept"] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.outcomes["kept"].append(self.net.kept)


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
    "interleaved": partial(MiniGPT, Interleaved),
    "einsum": partial(MiniGPT, Summing),
    "torch": partial(MiniGPT, TorchAttention),
    "experts": partial(MiniGPT, Experts),
    "mixing": partial(MiniGPT, Mixing),
    "one group": partial(LitGPT, partial(LitAttention, groups=1)),
}
KNOWN = ("nanoGPT", "minGPT", "litgpt", "picotron", "timm")


def fit(name: str, strategy: dict[str, Any] | None, **options: Any) -> Job:
    data = Patches if name == "timm" else Tokens
    if strategy is not None:
        strategy = {"job.check_microbatches": True, **strategy}
    return Job(partial(Trained, MODELS[name]), strategy, data=data, **options)


TP_PP = {"tp": 2, "pp": 2}
#: What a fit of litgpt's model shows, with the true numbers of heads and groups.
SHOWN = {
    "*.attn.qkv": "qkv(4, 2)",
    "*.attn.proj": "row_split",
    "*.gate_proj": "column_full",
    "*.up_proj": "column_full",
    "*.down_proj": "row",
}
ON_TWO = {
    **{f"{name} {axis}2": fit(name, {axis: 2}) for name in KNOWN for axis in ("tp", "pp")},
    "litgpt by a plan": fit("litgpt", {"tp": 2, "tensor_parallel_plan": SHOWN}),
    "torch tp2": fit("torch", {"tp": 2}),
    "experts tp2": fit("experts", {"tp": 2}),
    "einsum tp2": fit("einsum", {"tp": 2, "microbatch_size": None}, validation=Tokens),
    "nanoGPT without a trial": fit("nanoGPT", {"tp": 2, "job.check_microbatches": False}),
}
ON_FOUR = {f"{name} tp2 pp2": fit(name, TP_PP) for name in ("nanoGPT", "litgpt", "timm")}
#: Layers that stay right although their rows are not laid out as the plan says.
GATHERED = {
    "interleaved": fit("interleaved", {"tp": 2}),
    "code that mixes features": fit("mixing", {"tp": 2}),
    "litgpt in groups that do not divide": fit("one group", {"tp": 2}),
}


def run_parts(rank: int, size: int, jobs: dict[str, Job]) -> dict[str, Report]:
    """Run jobs whose attention and MLPs must not gather all features."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="all features of")
        return run_jobs(rank, size, jobs)


def run_gathered(rank: int, size: int) -> dict[str, Report]:
    """Run jobs that gather all features, and say so."""
    reports = {}
    for name, job in GATHERED.items():
        with pytest.warns(SpeedWarning) if rank == 0 else nullcontext() as caught:
            reports[name] = run_job(job, size)
        reports[name].outcomes["warned"] = [str(one.message) for one in caught or ()]
    return reports


@cache
def twin_of(name: str) -> Report:
    return run_job(fit(name, None))


@pytest.fixture(scope="module")
def two() -> list[dict[str, Report]]:
    return run_world(run_parts, 2, ON_TWO)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Report]]:
    return run_world(run_parts, 4, ON_FOUR)


@pytest.mark.parametrize("name", ON_TWO)
def test_modules_without_a_plan_train_as_in_one_process(
    name: str, two: list[dict[str, Report]]
) -> None:
    check_equal([rank[name] for rank in two], twin_of(name.split()[0]))


@pytest.mark.parametrize("name", ON_FOUR)
def test_modules_without_plans_train_as_in_one_process_over_both_axes(
    name: str, four: list[dict[str, Report]]
) -> None:
    check_equal([rank[name] for rank in four], twin_of(name.split()[0]))


def test_each_rank_has_its_heads_of_a_fused_projection(two: list[dict[str, Report]]) -> None:
    weight, spec = two[1]["nanoGPT tp2"].pieces["net.transformer.h.0.attn.c_attn.weight"]
    assert weight.shape == (3 * WIDTH // 2, WIDTH)
    assert [box.offsets[0] for box in spec.boxes()] == [8, 24, 40]
    head, _ = two[1]["nanoGPT tp2"].pieces["net.transformer.wte.weight"]
    assert len(head) < WORDS


def test_what_does_not_fit_the_layout_of_a_plan_is_gathered_with_a_warning() -> None:
    ranks = run_world(run_gathered, 2)
    for name, job in GATHERED.items():
        reports = [rank[name] for rank in ranks]
        texts = [text for text in reports[0].outcomes["warned"] if "features of" in text]
        assert texts
        assert all(".attn." in text and "test_automatic_plans.py" in text for text in texts)
        check_equal(reports, run_job(replace(job, strategy=None)))


class Compiled(Trained):
    """Train nanoGPT's model, of which a block is compiled."""

    def __init__(self) -> None:
        super().__init__(MODELS["nanoGPT"])
        self.net.transformer.h[0].compile(backend="aot_eager")


def run_compiled(rank: int, size: int) -> tuple[Report, int]:
    """Return the report of a fit, and how many graphs were compiled."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    report = run_job(Job(Compiled, {"tp": 2}), size)
    return report, counters["stats"]["unique_graphs"]


def test_compiled_blocks_train_without_a_plan_and_are_compiled_once() -> None:
    ranks = run_world(run_compiled, 2)
    check_equal([report for report, _ in ranks], twin_of("nanoGPT"))
    assert all(0 < num_graphs <= 20 for _, num_graphs in ranks)


class Summed(ModelSummary):
    """Keep what the summary would print."""

    def __init__(self) -> None:
        super().__init__(1)
        self.outcomes: dict[str, Any] = {}

    def summarize(self, data: Any, total: int, trainable: int, *_: Any, **__: Any) -> None:  # type: ignore[override]
        columns = dict(data)
        self.outcomes["whole"] = columns["Name"], columns["Params"], total, trainable
        self.outcomes["here"] = columns.get("Params per Device")


class Frozen(Trained):
    """Train nanoGPT's model without its positions."""

    def __init__(self) -> None:
        super().__init__(MODELS["nanoGPT"])
        self.net.transformer.wpe.requires_grad_(False)


def summed(model: Any, strategy: dict[str, Any] | None) -> Job:
    return Job(model, strategy, callbacks=lambda: [Summed()], steps=1)


def run_summed(rank: int, size: int) -> list[dict[str, Any]]:
    layouts: list[Any] = [
        (Frozen, {"tp": 2}),
        (Frozen, {"pp": 2}),
        (MIXTURE, {"tp": 2, "ep": 2, "etp": 1}),
    ]
    return [run_job(summed(*layout), size).outcomes for layout in layouts]


def test_summaries_count_the_whole_model_and_the_part_of_rank_0() -> None:
    twin = run_job(summed(Frozen, None)).outcomes
    (*first, experts), _ = run_world(run_summed, 2)
    for outcomes in first:
        assert outcomes["whole"] == twin["whole"]
        assert outcomes["here"] not in (None, twin["whole"][1])
    assert twin["here"] is None
    assert twin["whole"][2] - twin["whole"][3] == LENGTH * WIDTH
    # In one process, Lightning counts rows that pad the vocabulary.
    assert experts["whole"][2:] == (num_elements(GPT(MIXTURE)),) * 2


def drawn(rank: int, size: int) -> dict[bool, list[Tensor]]:
    """Return what is dropped in two steps, with and without a trial of the step."""
    jobs = {
        has_trial: Job(
            Drops,
            {"tp": 2, "job.check_microbatches": has_trial},
            data=Vectors,
            steps=2,
            norms=False,
        )
        for has_trial in (True, False)
    }
    return {key: run_job(job, size).outcomes["kept"] for key, job in jobs.items()}


def test_each_rank_drops_other_features_in_every_step() -> None:
    first, second = run_world(drawn, 2)
    for has_trial in (True, False):
        for kept, again in zip(first[has_trial], second[has_trial], strict=True):
            assert torch.equal(kept, again), "all ranks see the same activation"
            parts = kept.chunk(2, dim=-1)
            assert not torch.equal(*parts)
            assert {float(value) for value in kept.unique()} == {0.0, 2.0}
        assert not torch.equal(*first[has_trial])
