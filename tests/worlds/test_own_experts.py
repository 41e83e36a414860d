"""Mixtures that users wrote as lists of experts train over ep as in one process, and each rank stores
its share of the experts.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.optimizer.user_writes import ShardedGradient
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize
from tests.fits import Job, Report, check_equal, joined, run_job, run_jobs
from tests.refusals import check_refusals
from tests.swap.parts import expert_mesh_of
from tests.world import run_world
from tests.worlds.test_automatic_plans import WIDTH, MiniGPT, Trained

NUM, INNER = 4, 8


class Gated(nn.Module):
    """Expert of Mixtral and DeepSeek, with a weight for every feature between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.act, self.w2 = nn.PReLU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """What the mixtures below share: a router that never chooses the last expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(NUM))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        never = torch.arange(NUM, device=x.device) == NUM - 1
        weights, chosen = self.gate(x).masked_fill(never, -1e9).softmax(-1).topk(2)
        return weights / weights.sum(-1, keepdim=True), chosen


class Looped(Mixture):
    """Loop of picotron's and nanoMoE's kind, which skips experts without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.routed(flat)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            y[rows] += weights[rows, places, None] * expert(flat[rows])
        return y.view_as(x)


class Masked(Mixture):
    """Loop of Mixtral's kind, over a mask of the tokens of each expert."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.routed(flat)
        mask = F.one_hot(chosen, NUM).permute(2, 1, 0)
        y = torch.zeros_like(flat)
        for number in range(NUM):
            places, rows = torch.where(mask[number])
            part = self.experts[number](flat[None, rows].reshape(-1, flat.shape[-1]))
            y.index_add_(0, rows, part * weights[rows, places, None])
        return y.view_as(x)


class Recomputed(nn.Module):
    """Mixture whose activations the backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Dense(Mixture):
    """Mixture that computes all experts at once from their stacked weights, and returns a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.routed(x)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        experts: Any = list(self.experts)
        first, up, down = (
            torch.stack([getattr(one, key).weight for one in experts]) for key in ("w1", "w3", "w2")
        )
        inner = torch.einsum("bth,efh->btef", x, first).relu() * torch.einsum(
            "bth,efh->btef", x, up
        )
        return torch.einsum("btef,ehf,bte->bth", inner, down, share), chosen


class First(nn.Module):
    """The mixture without what else it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Stacked(nn.Module):
    """Mixture whose weights are stacked beside its router, with biases and a norm of one expert."""

    def __init__(self, num: int = NUM) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(WIDTH, num), nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Parameter(torch.randn(num, WIDTH, INNER) / 4)
        self.up_bias = nn.Parameter(torch.randn(num, INNER) / 4)
        self.down = nn.Parameter(torch.randn(num, INNER, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.gate(flat).softmax(-1)
        rows = flat.expand(len(self.up), *flat.shape)
        inner = torch.baddbmm(self.up_bias[:, None], rows, self.up).tanh()
        parts = torch.bmm(inner, self.down) * self.scale
        return torch.einsum("eth,te->th", parts, shares).view_as(x)


class Library(nn.Module):
    """Mixture around the experts of a model of transformers, with the router in this module."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "moe_intermediate_size": INNER, "num_experts": NUM}
        config = Qwen3MoeConfig(**sizes, experts_implementation="eager")
        self.router, self.experts = nn.Linear(WIDTH, NUM), Qwen3MoeExperts(config)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)[:, :-1].softmax(-1).topk(2)
        return self.experts(flat, chosen, weights).view_as(x)


class Mixtures(nn.Module):
    """One mixture after another."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


#: Modules in the place of an attention. Code that reads weights needs whole ones, which tp cuts.
LISTS = (Looped, Recomputed, First)
KINDS = {"all": (*LISTS, Stacked, Library), "loops": (*LISTS[:2], Stacked, Library)}


def fit(kinds: str, strategy: dict[str, Any] | None, **options: Any) -> Job:
    model = partial(MiniGPT, partial(Mixtures, *KINDS[kinds]))
    if strategy is not None:
        strategy = {"job.check_microbatches": True, **strategy}
    return Job(partial(Trained, model), strategy, **options)


@cache
def twin_of(kinds: str, **options: Any) -> Report:
    return run_job(fit(kinds, None, **options))


ON_FOUR = {
    "ep2 pp2": fit("all", {"ep": 2, "pp": 2}),
    "ep2 tp2": fit("loops", {"ep": 2, "tp": 2}),
    "ep2 of dp4": fit("all", {"ep": 2, "microbatch_size": None}, steps=2),
}


@pytest.mark.parametrize("name", ON_FOUR)
def test_lists_of_experts_train_over_several_axes_as_in_one_process(
    name: str, four: list[dict[str, Report]]
) -> None:
    job = ON_FOUR[name]
    kinds = "loops" if "tp" in name else "all"
    check_equal([rank[name] for rank in four], twin_of(kinds, steps=job.steps))


@pytest.fixture(scope="module")
def four() -> list[dict[str, Report]]:
    return run_world(run_jobs, 4, ON_FOUR)


def run_saved(rank: int, size: int, folder: Path) -> dict[str, Report]:
    """Save a fit over ep, and continue it without ep; then the other way."""
    layouts: dict[str, dict[str, Any]] = {"ep": {"ep": 2}, "dp": {}}
    reports = {}
    for first, then in (("ep", "dp"), ("dp", "ep")):
        path = str(folder / f"{first}.ckpt")
        reports[first] = run_job(fit("all", layouts[first], steps=2, save=path), size)
        reports[f"{first} to {then}"] = run_job(
            fit("all", layouts[then], steps=4, resume=path), size
        )
    return reports


def test_experts_of_a_list_are_stored_on_one_rank_and_resume_without_ep(tmp_path: Path) -> None:
    ranks = run_world(run_saved, 2, tmp_path)
    check_equal([rank["ep"] for rank in ranks], twin_of("all", steps=2))
    names = [
        {name for name in rank["ep"].pieces if ".experts." in name and "h.0" in name}
        for rank in ranks
    ]
    of_library = {name for name in names[0] if name.endswith("_proj")}
    assert names[0] & names[1] == of_library
    assert [len(held - of_library) for held in names] == [len(LISTS) * 10] * 2
    for rank in ranks:
        shapes = [tuple(rank["ep"].pieces[name][0].shape) for name in sorted(of_library)]
        assert shapes == [(NUM // 2, WIDTH, INNER), (NUM // 2, 2 * INNER, WIDTH)]
    weights = joined([twin_of("all", steps=4)])
    for way in ("ep to dp", "dp to ep"):
        resumed = joined([rank[way] for rank in ranks])
        assert resumed.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(resumed[name], weight, rtol=1e-10, atol=1e-10)


class Some(Mixture):
    """Mixture that reads the rows marked by ones."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for row in x[:, 0].eq(1.0).nonzero().flatten().tolist():
            y[row] += self.experts[row % NUM](x[row])
        return y


def gradients(rank: int, size: int) -> dict[str, Tensor]:
    """Return the gradients of experts that only the rows of the first rank use."""
    torch.manual_seed(0)
    root = nn.ModuleDict({"mixture": Some()}).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    x[:3, 0] = 1.0 if rank == 0 else 0.0
    if size > 1:
        mesh = ParallelMesh.create(ParallelLayout(size, ep=size))
        parallelize(root, mesh, {"*.experts": "experts"})
    root["mixture"](x).square().sum().backward()
    return {name: p.grad for name, p in root.named_parameters() if p.grad is not None}


def test_a_rank_without_rows_takes_part_and_unused_experts_have_no_gradient() -> None:
    first, second = run_world(gradients, 2)
    expected = gradients(0, 1)
    assert not first.keys() & second.keys()
    assert (first | second).keys() == expected.keys()
    assert not [name for name in expected if ".experts.3." in name]
    for name, grad in (first | second).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def norms(rank: int, size: int) -> dict[str, float]:
    """Return the norms of the gradients of stacks, each rank having one of two samples."""
    torch.manual_seed(0)
    root = nn.ModuleDict({"mixture": Stacked()}).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    mesh = ParallelMesh.single()
    if size > 1:
        mesh = ParallelMesh.create(ParallelLayout(size, ep=size))
        parallelize(root, mesh, {"mixture": "experts"})
    root["mixture"](x[rank : rank + 1] if size > 1 else x).square().sum().backward()
    shown: dict[str, Any] = {
        name: ShardedGradient.of(p.grad, shard_spec_of(p), mesh)
        for name, p in root.named_parameters()
        if p.grad is not None and p.shape[0] in (NUM, NUM // size) and "gate" not in name
    }
    return {name: float(grad.norm()) for name, grad in shown.items()}


def test_norms_of_the_gradient_of_a_stack_cover_the_experts_of_all_ranks() -> None:
    expected = norms(0, 1)
    assert set(expected) == {"mixture.up", "mixture.up_bias", "mixture.down"}
    for actual in run_world(norms, 2):
        assert actual == pytest.approx(expected, rel=1e-12)


class Listed(nn.Module):
    """List of layers, with more settings of what is refused."""

    def __init__(self, *widths: int, shares: bool = False, compiles: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        if shares:
            self.copy = self.experts[0]
        if compiles:
            self.experts[0].compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def test_lists_that_ep_cannot_divide_are_refused_with_a_remedy() -> None:
    def build(inner: nn.Module, etp: int = 1, pattern: str = "*.experts") -> None:
        root = nn.ModuleDict({"inner": inner})
        parallelize(root, expert_mesh_of(2, etp, 0, 0), {pattern: "experts"})

    bare = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((Listed(4, 4, 4),), "(3) must be a multiple of ep. Use ep of 1 or 3"),
        ((Listed(4, 6),), "must have parameters of the same names, shapes and settings"),
        ((Listed(4, 4, shares=True),), "a parameter of it has a second name"),
        ((Listed(4, 4, compiles=True),), "it is in compiled code"),
        ((Listed(4, 4), 2), "etp (2) must cut experts as tp (1) does"),
        ((Stacked(), 2, "inner"), "etp (2) must cut experts as tp (1) does"),
        ((Stacked(3), 1, "inner"), "(3) must be a multiple of ep. Use ep of 1 or 3"),
        ((nn.Conv1d(4, 4, 2), 1, "inner"), "'experts' is for nn.ModuleList of equal experts, or"),
        ((bare,), "no module around it has a forward"),
        ((Listed(4, 4), 1, "*.copy"), "Did you mean 'inner.experts'?"),
    ]
    check_refusals(build, cases)


def run_refused(rank: int, size: int) -> list[str]:
    """Return why ep refuses a module without experts, and calls outside of the mixture."""
    jobs = [
        (Job(partial(Trained, partial(MiniGPT, nn.Identity)), {"ep": 2}), ParallelPlanError),
        (Job(partial(Trained, partial(MiniGPT, Inside)), {"ep": 2}), UnsupportedError),
        (Job(partial(Penalised, partial(MiniGPT, Stacked)), {"ep": 2}), UnsupportedError),
    ]
    texts = []
    for job, kind in jobs:
        with pytest.raises(kind) as caught:
            run_job(job, size)
        texts.append(str(caught.value))
    return texts


class Penalised(Trained):
    """Training whose loss reads all weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + sum(weight.square().sum() for weight in self.parameters())


class Inside(Looped):
    """Mixture that recomputes its experts itself, when its ``forward`` has ended."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_modules_without_experts_and_recomputation_inside_are_refused() -> None:
    for without, inside, penalty in run_world(run_refused, 2):
        assert "give the list the kind 'experts' in tensor_parallel_plan" in without
        assert "as a whole within torch.utils.checkpoint.checkpoint" in inside
        assert "is divided over ep (2), and" in penalty
