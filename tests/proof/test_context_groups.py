"""Tests of groups of cp ranks that are chosen by documents: logits, losses, gradients and training
match one process and groups of all ranks, for any groups of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.context_groups import ContextGroups
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.stages import run_pipeline
from tests.models.test_packed_documents import CONFIGS, draw
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.strategy.graph_fits import Fit, Watch
from tests.sweeps import chosen
from tests.world import run_world

pytestmark = pytest.mark.slow

B, S, V = 2, 16, 77
#: Lengths of the documents of both rows, and the size of the groups for cp 2 and 4. The rest of a
#: row is padding.
DOCUMENTS: dict[str, tuple[list[list[int]], dict[int, int]]] = {
    "all short": ([[4, 4, 3, 1, 4], [2, 1, 1, 4, 4, 4]], {2: 1, 4: 1}),
    "one of half a row": ([[8, 3, 1, 4], [1, 3, 4, 0, 8]], {2: 1, 4: 2}),
    "over the borders of quarters": ([[3, 5, 7], [1, 6, 1, 2, 6]], {2: 1, 4: 2}),
    "one long": ([[4, 4, 4, 4], [3, 12, 1]], {2: 2, 4: 4}),
    "ranks of padding alone": ([[5, 3], [8]], {2: 1, 4: 2}),
}
#: Sizes of the layout with the transport, whether sequences are sharded over tp, recomputation and
#: configuration.
LAYOUTS: dict[str, tuple[dict[str, Any], bool, str, str]] = chosen(
    {
        "cp4 ring": ({"cp": 4, "transport": "ring"}, False, "none", "rotary"),
        "cp4 all_gather": (
            {"cp": 4, "transport": "all_gather"},
            False,
            "selective",
            "learned, windows",
        ),
        "cp4 all_to_all": ({"cp": 4, "transport": "all_to_all"}, False, "none", "slopes"),
        "cp4 auto": ({"cp": 4, "transport": "auto"}, False, "full", "learned, windows"),
        "cp2 pp2 ring": ({"cp": 2, "pp": 2, "transport": "ring"}, False, "none", "slopes"),
        "cp2 pp2 all_to_all": (
            {"cp": 2, "pp": 2, "transport": "all_to_all"},
            False,
            "none",
            "rotary",
        ),
        "cp2 tp2+sp": ({"cp": 2, "tp": 2, "transport": "all_gather"}, True, "none", "rotary"),
    },
    "cp4 auto",
    "cp4 all_gather",
    "cp2 pp2 ring",
)


@cache
def train_in_one_process(
    config: str, name: str
) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Return weights, logits, losses and gradients in one process."""
    model = GPT(CONFIGS[config], ParallelMesh.single(), seed=1)
    parameters = model.named_parameters()
    weights = {key: draw(*p.shape, seed=i) for i, (key, p) in enumerate(parameters)}
    load_full_(model, weights)
    tokens, labels, grad = rows_of(name)
    span = AttentionSpan.packed(DOCUMENTS[name][0], S)
    logits = model(tokens, span=span).detach()
    losses = model(tokens, labels, 0.1, span=span)
    losses.backward(grad)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return weights, logits, losses.detach(), gradients


def rows_of(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels, and the gradient of the losses, which is zero for padding."""
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(1))
    counts = torch.arange(S) < torch.tensor([[sum(row)] for row in DOCUMENTS[name][0]])
    return tokens, labels, draw(B, S, seed=2) * counts


def check_layouts(size: int) -> int:
    """Compare logits, losses and gradients of every layout and kind of documents."""
    torch.set_default_dtype(torch.float64)
    checked = 0
    for sizes, is_sharded, recompute, config in LAYOUTS.values():
        sizes = dict(sizes)
        transport = sizes.pop("transport")
        layout = ParallelLayout(size, **sizes)
        links = ContextLinks.of(transport, layout, size, "documents")
        mesh = ParallelMesh.create(layout, seed=5, sequence_parallel=is_sharded, context=links)
        for name, (lengths, _) in DOCUMENTS.items():
            label = f"{config} {sizes} {transport}: {name}"
            weights, logits, losses, gradients = train_in_one_process(config, name)
            model = GPT(CONFIGS[config], mesh, seed=1)
            model.recompute = recompute
            load_full_(model, weights)
            tokens, labels, grad = rows_of(name)
            span = AttentionSpan.packed(lengths, S)
            if mesh.pp.size > 1:
                actual = run_pipeline(model, tokens, labels, grad, span=span)
            else:
                assert_equal(model(tokens, span=span), logits, f"{label}: logits")
                actual = model(tokens, labels, 0.1, span=span)
                actual.backward(grad)
            assert_equal(actual, losses, f"{label}: losses")
            for p in model.parameters():
                # The mean over cp, whose ranks are data ranks.
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=mesh.cp.group)
                    p.grad /= mesh.cp.size
            names = {key for key, _ in model.named_parameters()}
            stage_gradients = {key: gradient for key, gradient in gradients.items() if key in names}
            assert_same_gradients(model, mesh, stage_gradients, label)
            checked += 1
        mesh.destroy()
    torch.set_default_dtype(torch.float32)
    return checked


#: Lengths of the documents of the rows of successive steps; all rows of a step have the same.
STEPS = ([3, 1, 4, 4, 4], [8, 4, 3], [4, 9, 1], [2, 2, 4, 5], [7, 1, 8])


class Packed(Dataset):
    """Give rows whose groups differ from step to step."""

    def __init__(self, rows_of_step: int) -> None:
        self.rows_of_step = rows_of_step

    def __len__(self) -> int:
        return len(STEPS) * self.rows_of_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(V, (S + 1,), generator=generator)
        lengths = STEPS[index // self.rows_of_step]
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "lengths": torch.tensor([*lengths, *[0] * (5 - len(lengths))]),
        }


FITS: dict[str, dict[str, Any]] = chosen(
    {
        "cp4 ring": {"cp": 4, "cp_transport": "ring"},
        "cp4 all_gather": {"cp": 4, "cp_transport": "all_gather"},
        "cp4 all_to_all": {"cp": 4, "cp_transport": "all_to_all"},
        "cp2 pp2 ring": {"cp": 2, "pp": 2, "cp_transport": "ring"},
        "cp2 tp2+sp all_to_all": {"cp": 2, "tp": 2, "cp_transport": "all_to_all"},
        "cp2 dp2 all_gather": {"cp": 2, "cp_transport": "all_gather"},
    },
    "cp4 ring",
    "cp2 tp2+sp all_to_all",
    "cp2 dp2 all_gather",
)


def train(devices: int, layout: dict[str, Any]) -> Fit:
    """Train for five steps of 4 rows, in microbatches of 1 row."""
    seed_everything(3, verbose=False)
    record = Fit("")
    replicas = devices // (layout.get("cp", 1) * layout.get("pp", 1) * layout.get("tp", 1))
    config = GPTConfig.llama(
        vocab_size=V, max_seq_length=S, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2,
        ffn_hidden_size=24, vocab_multiple=1,
    )  # fmt: skip
    Trainer(
        accelerator="cpu", devices=devices, strategy=MegatronStrategy(microbatch_size=1, check_microbatches=False, **layout),
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Watch(record)], max_steps=5,
    ).fit(
        CausalLM(config, learning_rate=0.01, warmup_steps=0),
        DataLoader(Packed(4), batch_size=4 // replicas),
    )  # fmt: skip
    return record


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of four."""

    num_checked: int
    fits: dict[tuple[str, str], Fit]


def run_all(rank: int, size: int) -> RankReport:
    """Train with both kinds of groups, and check all layouts, on four processes."""
    fits = {
        (name, groups): train(size, {**layout, "cp_groups": groups})
        for name, layout in FITS.items()
        for groups in ("all", "documents")
    }
    return RankReport(check_layouts(size), fits)


@pytest.fixture(scope="module")
def ranks() -> list[RankReport]:
    """Run four processes once for all tests."""
    return run_world(run_all, 4)


@pytest.fixture(scope="module")
def twin() -> Fit:
    """Train in this process."""
    return train(1, {})


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_group_sizes_follow_from_the_lengths_of_documents(name):
    lengths, sizes = DOCUMENTS[name]
    of_rows = [[*row, S - sum(row)] for row in lengths]
    borders = [0, *accumulate(sum(of_rows, []))]
    assert {cp: ContextGroups.of(borders, S, cp).size for cp in sizes} == sizes


def test_groups_of_successive_steps_differ_in_size():
    sizes = [
        ContextGroups.of([0, *accumulate([*lengths, S - sum(lengths)])], S, 4).size
        for lengths in STEPS
    ]
    assert sizes == [1, 2, 4, 2, 2]


def test_logits_losses_and_gradients_of_groups_match_one_process(ranks):
    assert [rank.num_checked for rank in ranks] == [len(LAYOUTS) * len(DOCUMENTS)] * 4


@pytest.mark.parametrize("name", list(FITS))
def test_groups_of_documents_train_as_the_full_cp_group_and_as_one_process(name, ranks, twin):
    close = {"rtol": 0, "atol": 1e-10}
    fits, full_fits = (
        [rank.fits[name, groups] for rank in ranks] for groups in ("documents", "all")
    )
    for fit, full_fit in zip(fits, full_fits, strict=True):
        assert len(fit.losses) == len(full_fit.losses)
        losses = torch.tensor(fit.losses), torch.tensor(full_fit.losses)
        torch.testing.assert_close(*losses, **close)
        for key, weight in fit.weights.items():
            torch.testing.assert_close(weight, full_fit.weights[key], **close)
            if has_rows_of_twin(name):
                torch.testing.assert_close(weight, twin.weights[key], **close)
        # Documents within the tokens of a rank need no keys of other ranks.
        assert counts_over_cp(fit) < counts_over_cp(full_fit)
        axes = {axis.split()[0] for axis in fit.counts}
        assert ("cp_of_2" in axes) == (FITS[name]["cp"] == 4)
        if fit.losses and has_rows_of_twin(name):
            losses = torch.tensor(fit.losses), torch.tensor(twin.losses)
            torch.testing.assert_close(*losses, **close)
    assert len(set(twin.losses)) == 5


def has_rows_of_twin(name: str) -> bool:
    """Return whether a step has the same rows as in one process: samplers of data ranks shuffle.

    Data ranks choose groups by different rows.
    """
    return "dp2" not in name


def counts_over_cp(fit: Fit) -> int:
    """Return how often a rank communicated with ranks that share its rows."""
    return sum(number for axis, number in fit.counts.items() if axis.startswith("cp"))
