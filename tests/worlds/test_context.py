"""Context parallelism trains as one process: every transport, rows of documents, groups of ranks
chosen by documents, windows, captured graphs and validation.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import CausalLM, CudaGraphs, GPTConfig, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from tests.fits import (
    GPT2,
    LLAMA,
    LLAMA_SIZES,
    MIXTURE,
    Job,
    Report,
    check_equal,
    run_job,
    run_jobs,
)
from tests.world import run_world
from tests.worlds.test_experts import KINDS as MIXTURES

KINDS = {
    # Learned positions.
    "gpt2": GPT2,
    "llama": LLAMA,
    # A window that ends inside a piece.
    "gemma": GPTConfig.llama(**LLAMA_SIZES, qk_norm=True, sliding_window=5, tie_embeddings=True),
    "experts": MIXTURE,
    "whole step": MIXTURES["whole step"],
}
RING, GATHER = {"context.transport": "ring"}, {"context.transport": "all_gather"}
ALL_TO_ALL = {"context.transport": "all_to_all"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("gpt2", {"cp": 4, **RING}),
    "ring in an interleaved pipeline": (
        "llama",
        {"cp": 2, "pp": 2, "vpp": 2, **RING, "recompute": "full"},
    ),
    "ring with windows": ("gemma", {"cp": 2, **RING, "recompute": "selective"}),
    "all_gather in a pipeline": ("experts", {"cp": 2, "pp": 2, **GATHER}),
    "experts": ("whole step", {"cp": 2, "tp": 2, "ep": 2, "etp": 1}),
}
two_steps = partial(Job, steps=2)
#: Rows of documents.
V, S = 77, 16
SMALL: dict[str, Any] = {
    "vocab_size": V, "max_seq_length": S, "num_layers": 2, "hidden_size": 16, "num_heads": 4,
    "vocab_multiple": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "window_layers": (True, False)}
NUM_STEPS = 4
ROTARY = GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24)
PACKED_KINDS = {
    "rotary": ROTARY,
    "rotary, windows": GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24, **WINDOWS),
    "learned, windows": GPTConfig.gpt2(**SMALL, **WINDOWS, tie_embeddings=False),
    "slopes": GPTConfig.gpt2(**SMALL, position="alibi", embedding_norm=True, tie_embeddings=False),
}


class Rows(Dataset):
    """Give 4 rows for every step; their length of 13 is no multiple of 2 cp."""

    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(V, (14,), generator=torch.Generator().manual_seed(index))
        first = 1 + index % 7
        ends = torch.tensor([first, 8 - first, index % 6])
        return {"tokens": tokens[:-1], "labels": tokens[1:], "lengths": ends}


def packed(kind: str, layout: dict[str, Any], graphs: Any = None) -> Job:
    model = partial(
        CausalLM, PACKED_KINDS[kind], learning_rate=0.01, warmup_steps=0, token_weighted=False
    )
    captured = {"cuda_graphs": CudaGraphs(graphs, warmup_steps=1)} if graphs else {}
    return Job(
        model, {"microbatch_size": 1, **layout, **captured}, data=Rows, batch=4,
        steps=NUM_STEPS, trainer={"gradient_clip_val": None},
    )  # fmt: skip


#: Kind, layout and graphs of rows whose length is no multiple of 2 cp.
PACKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "all_gather": ("rotary, windows", {"cp": 2, "tp": 2, **GATHER}, ""),
    "ring by segments": ("rotary, windows", {"cp": 4, **RING}, "segments"),
    "ring by full graphs": ("rotary, windows", {"cp": 4, **RING}, "full"),
    "all_gather, recomputed": (
        "learned, windows",
        {"cp": 4, **GATHER, "recompute": "selective"},
        "",
    ),
    "ring in a pipeline": ("slopes", {"cp": 2, "pp": 2, **RING}, ""),
    "all_to_all, tp2+sp": ("rotary", {"cp": 2, "tp": 2, **ALL_TO_ALL}, ""),
}
#: Layouts that train on a token file and validate, and options of the data.
ON_FILE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all_to_all": ({"cp": 2, "pp": 2, **ALL_TO_ALL}, {}),
    "ring": ({"cp": 4, **RING}, {}),
    "in order": ({"microbatch_size": 1}, {}),
    "balanced": ({"microbatch_size": 1}, {"balance_attention": True}),
}
VALIDATING = {
    "max_epochs": -1, "val_check_interval": 1, "check_val_every_n_epoch": None,
    "limit_val_batches": 1, "num_sanity_val_steps": 0, "gradient_clip_val": None,
}  # fmt: skip


class Watch(pl.Callback):
    """Record the rows of every step and the validation loss after it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"rows": [], "val": []}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.outcomes["rows"].append(batch["tokens"].sum(1).tolist())

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.outcomes["val"].append(float(trainer.callback_metrics["val_loss"]))


def on_file(corpus: str, layout: dict[str, Any], options: dict[str, Any]) -> Job:
    """Return a job on rows of cut documents."""
    data = partial(
        TokenDataModule, corpus, corpus, tokenizer=None, global_batch_size=8, seq_length=13,
        documents="separate", cache_dir=f"{corpus}.cache", **options,
    )  # fmt: skip
    model = partial(CausalLM, ROTARY, learning_rate=0.01, schedule="constant")
    return Job(model, layout, data=data, trainer=VALIDATING, callbacks=lambda: [Watch()])


def run_all(rank: int, size: int, corpus: str) -> dict[Any, Report]:
    jobs: dict[Any, Job] = {
        name: two_steps(KINDS[kind], layout) for name, (kind, layout) in LAYOUTS.items()
    }
    jobs |= {name: packed(*case) for name, case in PACKED.items()}
    jobs |= {("file", name): on_file(corpus, *case) for name, case in ON_FILE.items()}
    return run_jobs(rank, size, jobs)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write documents of 1 to 40 tokens."""
    path = tmp_path_factory.mktemp("context") / "corpus"
    generator = torch.Generator().manual_seed(1)
    many = [30, 1, 2, 3, 20, 1, 7, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 9, 3, 40] * 4
    with TokenFileWriter(path, vocab_size=61) as writer:
        for length in many:
            writer.add_document(torch.randint(61, (length,), generator=generator).numpy())
    return str(path)


@pytest.fixture(scope="module")
def ranks(corpus: str) -> list[dict[Any, Report]]:
    return run_world(run_all, 4, corpus)


@cache
def packed_twin(kind: str) -> Report:
    return run_job(packed(kind, {}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(name: str, ranks: Any) -> None:
    kind = LAYOUTS[name][0]
    # Only the strategy measures the load of full steps.
    strategy = {"microbatch_size": 8} if kind == "whole step" else None
    check_equal([rank[name] for rank in ranks], run_job(two_steps(KINDS[kind], strategy)))


@pytest.mark.parametrize("name", PACKED)
def test_rows_of_documents_train_as_in_one_process(name: str, ranks: Any) -> None:
    kind, _, graphs = PACKED[name]
    assert all(bool(rank[name].graphs[-1]) == bool(graphs) for rank in ranks)
    check_equal([rank[name] for rank in ranks], packed_twin(kind), learns=False)


def test_rows_of_a_file_train_and_validate_as_in_one_process(corpus: str, ranks: Any) -> None:
    twin = run_job(on_file(corpus, {}, {}))
    assert len(set(twin.losses)) == len(set(twin.outcomes["val"])) == 3
    for rank in ranks:
        for name in ON_FILE:
            report = rank["file", name]
            assert report.losses == pytest.approx(twin.losses, rel=0, abs=1e-10)
            validated = twin.outcomes["val"]
            assert report.outcomes["val"] == pytest.approx(validated, rel=0, abs=1e-10)
    in_order, balanced = (
        [rank["file", name].outcomes["rows"] for rank in ranks] for name in ("in order", "balanced")
    )
    assert balanced != in_order
    for rows, ordered in zip(zip(*balanced, strict=True), zip(*in_order, strict=True), strict=True):
        assert sorted(sum(rows, [])) == sorted(sum(ordered, []))
