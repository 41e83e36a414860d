"""Hugging Face encoders whose sequences are cut over cp keep their outputs, losses and gradients, with
padding on either side and every transport.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from tests.swap.encoders import CASES
from tests.swap.test_encoders import check_dropout, compare, exact_encoder, swapped
from tests.sweeps import chosen
from tests.world import run_world

#: Sizes and transports by the number of processes. Attention dropout needs complete rows.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: chosen(
        [
            {"cp": 2, "transport": "all_to_all"},
            {"cp": 2, "transport": "ring"},
            {"cp": 2, "transport": "all_gather"},
        ],
        {"cp": 2, "transport": "all_to_all"},
    ),
    4: chosen(
        [
            {"cp": 4, "transport": "ring"},
            {"cp": 4, "transport": "hierarchical"},
            {"cp": 2, "tp": 2, "transport": "ring", "sequence_parallel": False},
            {"cp": 2, "tp": 2, "transport": "all_to_all", "sequence_parallel": True},
            {"cp": 2, "tp": 2, "transport": "all_gather", "sequence_parallel": True},
        ],
        {"cp": 4, "transport": "hierarchical"},
        {"cp": 2, "tp": 2, "transport": "ring", "sequence_parallel": False},
        {"cp": 2, "tp": 2, "transport": "all_gather", "sequence_parallel": True},
    ),
}
#: Cases with hidden states and a pooler, with logits of tokens, and with a class.
REPRESENTATIVE_CASES = ("bert", "roberta masked", "bert classes")
RING_CASES = chosen(list(CASES), *REPRESENTATIVE_CASES)
OTHER_CASES = chosen(REPRESENTATIVE_CASES, "roberta masked")


def mesh_of(size: int, cp: int, transport: Any, tp: int = 1, **options: Any) -> ParallelMesh:
    layout = ParallelLayout(size, cp=cp, tp=tp)
    links = ContextLinks.of(transport, layout, size)
    return ParallelMesh.create(layout, context=links, **options)


def check_context(rank: int, size: int) -> None:
    for settings in LAYOUTS[size]:
        mesh = mesh_of(size, **settings)
        no_dropout = {"attention_probs_dropout_prob": 0.0}
        assert (
            swapped(exact_encoder("bert", **no_dropout), mesh).layers.context.transport
            == settings["transport"]
        )
        for case in RING_CASES if settings["transport"] == "ring" else OTHER_CASES:
            compare(case, mesh, **no_dropout)
        mesh.destroy()
    mesh = mesh_of(size, size, "auto")
    assert swapped(exact_encoder("bert"), mesh).layers.context.transport == "all_to_all"
    check_dropout(mesh)
    mesh.destroy()


@pytest.mark.parametrize("size", LAYOUTS)
def test_context_parallel_encoders_match_hugging_face(size: int) -> None:
    run_world(check_context, size)
