"""GPT in every layout of tensors, sequences and layers equals the formulas in plain torch, and keeps
packed documents separate.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel import ring
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.models.stages import run_pipeline
from tests.models.test_recomputation import WITHOUT_CORE, build_model, gradients_of
from tests.models.test_settings import CASES, check_case, draw
from tests.oracles import assert_equal, assert_same_gradients, load_full_
from tests.sweeps import all_run
from tests.world import run_world

#: Layouts of four ranks and whether ranks share sequences; by default every setting runs in one of
#: them, and with --sweeps in all.
LAYOUTS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"tp": 2}, False),
    ({"tp": 2, "pp": 2}, True),
    ({"tp": 4}, True),
    ({"pp": 2}, False),
    ({"tp": 4}, False),
    ({"pp": 2, "tp": 1}, False),
    ({"tp": 2}, True),
)
V, B, S = 77, 2, 16
SIZES: dict[str, Any] = {"vocab_size": V, "max_seq_length": S, "num_layers": 4, "hidden_size": 16}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 24, "vocab_multiple": 1}
#: Odd lengths; the second row ends with 3 tokens of padding.
DOCUMENTS = [[5, 1, 7, 3], [13]]
WINDOWS: dict[str, Any] = {"sliding_window": 4, "window_layers": (True, False, True, False)}
CONFIGS = {
    "rotary": GPTConfig.llama(**SIZES),
    "learned, windows": GPTConfig.gpt2(**SIZES, **WINDOWS, tie_embeddings=False),
    "slopes": GPTConfig.gpt2(**SIZES, position="alibi", embedding_norm=True, tie_embeddings=False),
}
#: Layout with the transport over cp, sequence parallelism, recomputation, and model of documents.
PACKED: list[tuple[dict[str, Any], bool, str, str]] = [
    ({"cp": 4, "transport": "ring"}, False, "none", "slopes"),
    ({"cp": 4, "transport": "all_to_all"}, False, "none", "rotary"),
    ({"cp": 2, "tp": 2, "transport": "ring"}, True, "selective", "slopes"),
    ({"cp": 2, "pp": 2, "vpp": 2, "transport": "ring"}, False, "none", "learned, windows"),
]


def check_settings(size: int) -> None:
    sampled = list(zip(CASES, cycle(LAYOUTS)))
    for layout in LAYOUTS:
        mesh = mesh_of(size, *layout)
        for name in (name for name, own in sampled if own is layout or all_run()):
            check_case(name, mesh)
        mesh.destroy()


def mesh_of(size: int, sizes: dict[str, Any], shares: bool = False) -> ParallelMesh:
    sizes = {"transport": "auto", **sizes}
    transport = sizes.pop("transport")
    layout = ParallelLayout(size, **sizes)
    links = ContextLinks.of(transport, layout, size)
    return ParallelMesh.create(layout, seed=5, sequence_parallel=shares, context=links)


# ---- documents


def make_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, labels, the gradient of the losses, and a mask of tokens that are no padding."""
    tokens, labels = torch.randint(V, (2, B, S), generator=torch.Generator().manual_seed(1))
    counts = torch.arange(S) < torch.tensor([[sum(row)] for row in DOCUMENTS])
    return tokens, labels, draw(B, S, seed=2) * counts, counts


@cache
def results_of_separate_documents(name: str) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """Return weights, losses, logits and summed gradients of documents that run separately."""
    model = GPT(CONFIGS[name], ParallelMesh.single(), seed=1)
    shapes = {key: shard_spec_of(p).full_shape for key, p in model.named_parameters()}
    weights = {key: draw(*shape, seed=i) for i, (key, shape) in enumerate(shapes.items())}
    load_full_(model, weights)
    tokens, labels, grad, _ = make_rows()
    losses, logits = torch.zeros(B, S), torch.zeros(B, S, V)
    for row, lengths in enumerate(DOCUMENTS):
        for end, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
            where = slice(row, row + 1), slice(end - length, end)
            document_losses = model(tokens[where], labels[where], 0.1)
            document_losses.backward(grad[where])
            losses[where], logits[where] = document_losses.detach(), model(tokens[where]).detach()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return weights, losses, logits, gradients


def check_documents(size: int) -> None:
    tokens, labels, grad, counts = make_rows()
    span = AttentionSpan.packed(DOCUMENTS, S, num_documents=6)
    for sizes, shares, recompute, name in PACKED:
        label = f"{name} {sizes} sp={shares} recompute={recompute}"
        weights, losses, logits, gradients = results_of_separate_documents(name)
        mesh = mesh_of(size, sizes, shares)
        model = GPT(CONFIGS[name], mesh, seed=1)
        model.recompute = recompute
        load_full_(model, weights)
        if mesh.pp.size > 1:
            actual = run_pipeline(model, tokens, labels, grad, span=span)
        else:
            actual_logits = model(tokens, span=span)
            assert_equal(actual_logits[counts], logits[counts], f"{label}: logits")
            actual = model(tokens, labels, 0.1, span=span)
            actual.backward(grad)
        assert_equal(actual[counts], losses[counts], f"{label}: losses")
        for parameter in model.parameters():
            # Gradients are averaged over cp, whose ranks are data ranks.
            if parameter.grad is not None:
                all_reduce_(parameter.grad, mesh.cp).div_(mesh.cp.size)
        names = {key for key, _ in model.named_parameters()}
        local = {key: gradient for key, gradient in gradients.items() if key in names}
        assert_same_gradients(model, mesh, local, label)
        mesh.destroy()


# ---- recomputation without the attention core


def check_kept_cores(size: int) -> None:
    """Check gradients, and that keys are sent less often than with recomputation of whole blocks."""
    for transport, kind in (
        ("ring", "soft cap"),
        ("all_gather", "soft cap"),
        ("all_to_all", "window, sinks"),
    ):
        mesh, calls = mesh_of(size, {"cp": 2, "transport": transport}), Counter[str]()
        model, mixed = build_model(WITHOUT_CORE[kind], mesh), ring._mixed
        expected = gradients_of(model, "none", packed=True)

        def count(*args: Any, calls: Any = calls, mixed: Any = mixed, **options: Any) -> Any:
            calls["sent"] += 1
            return mixed(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "_mixed", count)
            gradients_of(model, "full", packed=True)
            with_full = calls["sent"]
            actual = gradients_of(model, "full_except_core", packed=True)
        for pair in zip(actual, expected, strict=True):
            torch.testing.assert_close(*pair, rtol=0, atol=1e-12)
        counts = (with_full, calls["sent"] - with_full)
        layers = model.config.num_layers
        assert counts == ((0, 0) if transport == "all_to_all" else (4 * layers, 2 * layers))
        mesh.destroy()


def check_all(rank: int, size: int) -> None:
    torch.set_default_dtype(torch.float64)
    for check in (check_settings, check_documents, check_kept_cores):
        check(size)


def test_every_layout_matches_one_process() -> None:
    run_world(check_all, 4)
