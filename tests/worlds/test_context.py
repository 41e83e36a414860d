"""Context parallelism trains as one process: every transport, rows of documents, groups of ranks
chosen by documents, windows, captured graphs and validation.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
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
ALL_TO_ALL, NESTED = {"context.transport": "all_to_all"}, {"context.transport": "hierarchical"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hierarchical": ("gpt2", {"cp": 4, **NESTED}),
    "ring in an interleaved pipeline": (
        "llama",
        {"cp": 2, "pp": 2, "vpp": 2, **RING, "recompute": "full"},
    ),
    "ring with windows": ("gemma", {"cp": 2, **RING, "recompute": "selective"}),
    "all_gather in a pipeline": ("experts", {"cp": 2, "pp": 2, **GATHER}),
    "experts": ("whole step", {"cp": 2, "tp": 2, "ep": 2, "etp": 1}),
}
two_steps = partial(Job, steps=2)
#: Rows of documents, and their groups for the documents alone.
V, S = 77, 16
SMALL: dict[str, Any] = {
    "vocab_size": V, "max_seq_length": S, "num_layers": 2, "hidden_size": 16, "num_heads": 4,
    "vocab_multiple": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "window_layers": (True, False)}
#: Lengths of the documents of the rows of successive steps: all are short; the last ranks have
#: padding alone; one document needs all ranks; one needs half of four.
STEPS = ([3, 1, 4, 4, 4], [5, 3], [4, 9, 1], [7, 1, 8])
ROTARY = GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24)
PACKED_KINDS = {
    "rotary": ROTARY,
    "rotary, windows": GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24, **WINDOWS),
    "learned, windows": GPTConfig.gpt2(**SMALL, **WINDOWS, tie_embeddings=False),
    "slopes": GPTConfig.gpt2(**SMALL, position="alibi", embedding_norm=True, tie_embeddings=False),
}


class Rows(Dataset):
    """Give 4 rows for every step; their length may be no multiple of 2 cp."""

    def __init__(self, length: int = S) -> None:
        self.length = length

    def __len__(self) -> int:
        return 4 * len(STEPS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(
            V, (self.length + 1,), generator=torch.Generator().manual_seed(index)
        )
        lengths, first = STEPS[index // 4], 1 + index % 7
        if self.length < S:
            lengths = [first, 8 - first, index % 6]
        ends = torch.tensor([*lengths, *[0] * (5 - len(lengths))])
        return {"tokens": tokens[:-1], "labels": tokens[1:], "lengths": ends}


class CountOverContext(pl.Callback):
    """Record how often a rank communicated with ranks that share its rows, by axis."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        counts = trainer.strategy.mesh.journal.counts  # type: ignore[attr-defined]
        self.outcomes["counts"] = {
            axis: n for axis, n in counts.items() if axis.startswith("cp") and "_cpu" not in axis
        }


def packed(
    kind: str, layout: dict[str, Any], graphs: Any = None, length: int = 13, **options: Any
) -> Job:
    model = partial(
        CausalLM, PACKED_KINDS[kind], learning_rate=0.01, warmup_steps=0, token_weighted=False
    )
    captured = {"cuda_graphs": CudaGraphs(graphs, warmup_steps=1)} if graphs else {}
    return Job(
        model, {"microbatch_size": 1, **layout, **captured}, data=partial(Rows, length), batch=4,
        steps=len(STEPS), trainer={"gradient_clip_val": None},
        callbacks=lambda: [CountOverContext()], **options,
    )  # fmt: skip


#: Kind, layout and graphs of rows whose length is no multiple of 2 cp.
PACKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "all_gather": ("rotary, windows", {"cp": 2, "tp": 2, **GATHER}, ""),
    "ring by segments": ("rotary, windows", {"cp": 4, **RING}, "segments"),
    "hierarchical by full graphs": ("rotary, windows", {"cp": 4, **NESTED}, "full"),
}
#: Fits by groups of ranks that share documents.
GROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "cp4 ring": ("rotary", {"cp": 4, **RING}),
    "cp4 all_gather": ("learned, windows", {"cp": 4, **GATHER, "recompute": "selective"}),
    "cp2 pp2 ring": ("slopes", {"cp": 2, "pp": 2, **RING}),
    "cp2 tp2+sp all_to_all": ("rotary", {"cp": 2, "tp": 2, **ALL_TO_ALL}),
}
#: Windows of a row that no document crosses, and groups.
WINDOWED = ((2, "documents"), (2, "all"), (1, "documents"))
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


def in_windows(corpus: str, layout: dict[str, Any], windows: int) -> Job:
    """Return a job on whole documents in windows, which no document crosses."""
    data = partial(
        TokenDataModule, f"{corpus}.short", tokenizer=None, seq_length=S, batch_size=3,
        documents="whole", context_windows=windows,
    )  # fmt: skip
    return Job(
        partial(CausalLM, ROTARY, learning_rate=0.01, warmup_steps=0),
        {"microbatch_size": 1, **layout}, data=data, trainer={"gradient_clip_val": None},
        callbacks=lambda: [CountOverContext()],
    )  # fmt: skip


def run_all(rank: int, size: int, corpus: str) -> dict[Any, Report]:
    jobs: dict[Any, Job] = {
        name: two_steps(KINDS[kind], layout) for name, (kind, layout) in LAYOUTS.items()
    }
    jobs |= {name: packed(*case) for name, case in PACKED.items()}
    for name, (kind, layout) in GROUPED.items():
        jobs[name] = packed(kind, {**layout, "context.groups": "documents"}, length=S)
    for windows, groups in WINDOWED:
        layout = {"cp": 2, "pp": 2, **RING, "context.groups": groups}
        jobs[windows, groups] = in_windows(corpus, layout, windows)
    jobs |= {("file", name): on_file(corpus, *case) for name, case in ON_FILE.items()}
    return run_jobs(rank, size, jobs)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write documents of 1 to 40 tokens, and beside them short documents."""
    path = tmp_path_factory.mktemp("context") / "corpus"
    generator = torch.Generator().manual_seed(1)
    many = [30, 1, 2, 3, 20, 1, 7, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 9, 3, 40] * 4
    for name, lengths in (("", many), (".short", [7, 3, 6, 5, 8, 4, 2, 5, 7, 3, 6, 8])):
        with TokenFileWriter(Path(f"{path}{name}"), vocab_size=61) as writer:
            for length in lengths:
                writer.add_document(torch.randint(61, (length,), generator=generator).numpy())
    return str(path)


@pytest.fixture(scope="module")
def ranks(corpus: str) -> list[dict[Any, Report]]:
    return run_world(run_all, 4, corpus)


@cache
def packed_twin(kind: str, length: int) -> Report:
    return run_job(packed(kind, {}, length=length))


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
    check_equal([rank[name] for rank in ranks], packed_twin(kind, 13), learns=False)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_documents_train_as_one_process(name: str, ranks: Any) -> None:
    kind, layout = GROUPED[name]
    check_equal([rank[name] for rank in ranks], packed_twin(kind, S), learns=False)
    for rank in ranks:
        axes = {axis.split()[0] for axis in rank[name].outcomes["counts"]}
        assert ("cp_of_2" in axes) == (layout["cp"] == 4)


def test_documents_in_windows_need_no_keys_of_other_ranks(corpus: str, ranks: Any) -> None:
    twin = run_job(in_windows(corpus, {}, 2))
    for groups in ("documents", "all"):
        check_equal([rank[2, groups] for rank in ranks], twin, learns=False)
    for rank in ranks:
        windows, of_all, crossing = (
            sum(rank[case].outcomes["counts"].values()) for case in WINDOWED
        )
        assert windows < crossing <= of_all


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
