"""Packed documents have the results of separate documents in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import CausalLM, CudaGraphs, MegatronStrategy
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.layout import ParallelLayout
from tests.graphs.trained import counted_replays
from tests.models.stages import run_pipeline
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.strategy.graph_fits import Fit, Watch
from tests.world import run_world

B, S, V = 2, 16, 77
SIZES: dict[str, Any] = {
    "vocab_size": V, "max_seq_length": S, "num_layers": 4, "hidden_size": 16, "num_heads": 4,
    "num_kv_heads": 2, "ffn_hidden_size": 24, "vocab_multiple": 1,
}  # fmt: skip
#: Odd lengths; the second row ends with 3 tokens of padding.
DOCUMENTS = [[5, 1, 7, 3], [13]]
CONFIGS = {
    "rotary": GPTConfig.llama(**SIZES),
    "learned, windows": GPTConfig.gpt2(
        **SIZES, sliding_window=4, window_layers=(True, False, True, False), tie_embeddings=False
    ),
    "slopes": GPTConfig.gpt2(**SIZES, position="alibi", embedding_norm=True, tie_embeddings=False),
    "experts": GPTConfig.llama(
        **SIZES, experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
    ),
}
#: Sizes of the layout with the transport over cp, sequence parallelism, recomputation, and name of
#: the configuration.
LAYOUTS: list[tuple[dict[str, Any], bool, str, str]] = [
    ({"pp": 4}, False, "none", "rotary"),
    ({"pp": 4}, False, "full", "learned, windows"),
    ({"pp": 2, "vpp": 2, "tp": 2}, True, "selective", "rotary"),
    ({"tp": 4}, False, "none", "learned, windows"),
    ({"tp": 4}, True, "full", "rotary"),
    ({"ep": 2}, False, "none", "experts"),
    ({"ep": 4}, False, "experts", "experts"),
    ({"cp": 2}, False, "none", "rotary"),
    ({"cp": 4, "transport": "ring"}, False, "selective", "rotary"),
    ({"cp": 4, "transport": "ring"}, False, "none", "learned, windows"),
    ({"cp": 4, "transport": "all_gather"}, False, "full", "learned, windows"),
    ({"cp": 4, "transport": "hierarchical"}, False, "none", "rotary"),
    ({"cp": 4, "transport": "hierarchical"}, False, "none", "slopes"),
    ({"cp": 4, "transport": "all_to_all"}, False, "none", "slopes"),
    ({"cp": 2, "tp": 2, "transport": "ring"}, True, "selective", "slopes"),
    ({"cp": 2, "pp": 2, "transport": "all_gather"}, False, "none", "slopes"),
    ({"cp": 2, "tp": 2, "transport": "ring"}, True, "none", "rotary"),
    ({"cp": 2, "pp": 2, "vpp": 2, "transport": "ring"}, False, "none", "learned, windows"),
]


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5


def make_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, labels, the gradient of the losses, and a mask of tokens that are no padding."""
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(1))
    counts = torch.arange(S) < torch.tensor([[sum(row)] for row in DOCUMENTS])
    return tokens, labels, draw(B, S, seed=2) * counts, counts


@cache
def results_of_separate_documents(
    name: str,
) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Return weights, losses, logits and summed gradients of documents that run separately."""
    model = GPT(CONFIGS[name], ParallelMesh.single(), seed=1)
    shapes = {key: shard_spec_of(p).full_shape for key, p in model.named_parameters()}
    weights = {key: draw(*shape, seed=i) for i, (key, shape) in enumerate(shapes.items())}
    load_full_(model, weights)
    tokens, labels, grad, _ = make_rows()
    losses, logits = torch.zeros(B, S).double(), torch.zeros(B, S, V).double()
    for row, lengths in enumerate(DOCUMENTS):
        for end, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
            where = slice(row, row + 1), slice(end - length, end)
            document_losses = model(tokens[where], labels[where], 0.1)
            document_losses.backward(grad[where])
            losses[where], logits[where] = document_losses.detach(), model(tokens[where]).detach()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return weights, losses, logits, gradients


def check_layouts(rank: int, size: int) -> int:
    torch.set_default_dtype(torch.float64)
    for sizes, is_sharded, recompute, name in LAYOUTS:
        case_name = f"{name} {sizes} sp={is_sharded} recompute={recompute}"
        sizes = {"transport": "auto", **sizes}
        transport = sizes.pop("transport")
        layout = ParallelLayout(size, **sizes)
        links = ContextLinks.of(transport, layout, size)
        mesh = ParallelMesh.create(layout, seed=5, sequence_parallel=is_sharded, context=links)
        weights, losses, logits, gradients = results_of_separate_documents(name)
        model = GPT(CONFIGS[name], mesh, seed=1)
        model.recompute = recompute
        load_full_(model, weights)
        tokens, labels, grad, counts = make_rows()
        span = AttentionSpan.packed(DOCUMENTS, S, num_documents=6)
        if mesh.pp.size > 1:
            actual = run_pipeline(model, tokens, labels, grad, span=span)
        else:
            actual_logits = model(tokens, span=span)
            assert_equal(actual_logits[counts], logits[counts], f"{case_name}: logits")
            actual = model(tokens, labels, 0.1, span=span)
            actual.backward(grad)
        assert_equal(actual[counts], losses[counts], f"{case_name}: losses")
        # Expert-parallel ranks sum the gradients of their equal rows.
        if "ep" not in sizes:
            for parameter in model.parameters():
                # Gradients are averaged over cp, whose ranks are data ranks.
                if mesh.cp.size > 1 and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=mesh.cp.group)
                    parameter.grad /= mesh.cp.size
            names = {key for key, _ in model.named_parameters()}
            local_gradients = {key: gradient for key, gradient in gradients.items() if key in names}
            assert_same_gradients(model, mesh, local_gradients, case_name)
        mesh.destroy()
    return len(LAYOUTS)


def test_packed_documents_in_every_layout_equal_separate_documents() -> None:
    assert run_world(check_layouts, 4) == [len(LAYOUTS)] * 4


class PackedRows(Dataset):
    """Rows with different document lengths, and equal numbers of lengths.

    The length of the rows is not a multiple of the length that cp needs.
    """

    length = 13

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(V, (self.length + 1,), generator=generator)
        first = 1 + index % 7
        lengths = torch.tensor([first, 8 - first, index % 6, 0])
        return {"tokens": tokens[:-1], "labels": tokens[1:], "lengths": lengths}


def trained(
    graphs: CudaGraphs | None,
    recompute: str,
    devices: int = 1,
    layout: dict[str, Any] | None = None,
) -> Fit:
    """Fit a GPT with windows in some layers on packed rows."""
    seed_everything(3, verbose=False)
    fit = Fit("" if graphs is None else graphs.mode)
    options = {
        **{"microbatch_size": 2, "check_microbatches": False},
        **{"recompute": recompute, **(layout or {})},
    }
    strategy = MegatronStrategy(cuda_graphs=graphs, **options)
    if graphs is not None:
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    # Without a GPU the host checks learned positions and reads numbers of tokens.
    config = GPTConfig.llama(**SIZES, sliding_window=4, window_layers=(True, False, True, False))
    module = CausalLM(config, learning_rate=0.01, warmup_steps=0, token_weighted=False)
    with counted_replays() as replays:
        Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, precision="64-true",
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Watch(fit)], max_steps=5,
        ).fit(module, DataLoader(PackedRows(), batch_size=4))  # fmt: skip
    fit.replays = dict(replays)
    return fit


@pytest.mark.parametrize(("mode", "recompute"), [("segments", "none"), ("full", "full")])
def test_graphs_follow_the_lengths_of_each_step(mode: Any, recompute: str) -> None:
    eager = trained(None, recompute)
    graphs = trained(CudaGraphs(mode, warmup_steps=2, on_failure="error"), recompute)
    assert graphs.num_graphs[-1] > 0, "something was captured"
    assert graphs.num_graphs[-1] == graphs.num_graphs[2], "other lengths need no other graph"
    names = ("losses", "logged")
    assert [getattr(graphs, attribute) for attribute in names] == [
        getattr(eager, attribute) for attribute in names
    ]
    for name, weight in graphs.weights.items():
        assert torch.equal(weight, eager.weights[name]), name
    assert len(set(eager.losses)) == 5
