"""Context parallelism trains as one process: every transport, rows of documents, groups of ranks
chosen by documents, windows, captured graphs, checkpoints, validation and generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron import CausalLM, CudaGraphs, GPTConfig, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.plan.context_groups import ContextGroups
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from tests.fits import (
    GPT2,
    LLAMA,
    LLAMA_SIZES,
    MIXTURE,
    Job,
    Record,
    Report,
    check_equal,
    differences,
    loader_of,
    run_job,
    trainer_of,
)
from tests.sweeps import chosen
from tests.world import run_world
from tests.worlds.test_experts import KINDS as MIXTURES

transformers = pytest.importorskip("transformers")

KINDS = {
    # Learned positions.
    "gpt2": GPT2,
    "llama": LLAMA,
    # A window that ends inside a piece.
    "gemma": GPTConfig.llama(**LLAMA_SIZES, qk_norm=True, sliding_window=5, tie_embeddings=True),
    "experts": MIXTURE,
    "whole step": MIXTURES["whole step"],
}
RING, GATHER = {"cp_transport": "ring"}, {"cp_transport": "all_gather"}
ALL_TO_ALL, NESTED = {"cp_transport": "all_to_all"}, {"cp_transport": "hierarchical"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp2 dp2": {"cp": 2},
    "cp4, zero 0": {"cp": 4, "zero": 0},
    "cp4 hierarchical": {"cp": 4, **NESTED},
    "cp2 dp2 ring": {"cp": 2, **RING, "recompute": "selective"},
    "cp2 tp2+sp ring": {"cp": 2, "tp": 2, **RING},
    "cp2 pp2 all_gather": {"cp": 2, "pp": 2, **GATHER},
    "cp2 pp2 vpp2 ring": {"cp": 2, "pp": 2, "vpp": 2, **RING, "recompute": "full"},
    "cp2 ep2": {"cp": 2, "ep": 2},
    "cp4 ep4 ring": {"cp": 4, "ep": 4, **RING},
    "cp2 tp2+sp ep2": {"cp": 2, "tp": 2, "ep": 2, "etp": 1},
}
two_steps = partial(Job, steps=2)
JOBS: dict[str, Job] = chosen(
    {
        f"{kind}: {name}": two_steps(KINDS[kind], layout)
        for kind in KINDS
        for name, layout in LAYOUTS.items()
        if "ep" not in layout or kind in ("experts", "whole step")
    }
    | {"gpt2: compared": two_steps(GPT2, {"cp": 2, "tp": 2, "check_microbatches": True})},
    "gpt2: cp4 hierarchical",
    "llama: cp2 pp2 vpp2 ring",
    "gemma: cp2 dp2 ring",
    "experts: cp2 pp2 all_gather",
    "whole step: cp2 tp2+sp ep2",
)
#: Rows of documents, and their groups for the documents alone.
V, S = 77, 16
SMALL: dict[str, Any] = {
    "vocab_size": V, "max_seq_length": S, "num_layers": 2, "hidden_size": 16, "num_heads": 4,
    "vocab_multiple": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "window_layers": (True, False)}
ROTARY = GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24)
PACKED_KINDS = {
    "rotary": ROTARY,
    "rotary, windows": GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=24, **WINDOWS),
    "learned, windows": GPTConfig.gpt2(**SMALL, **WINDOWS, tie_embeddings=False),
    "slopes": GPTConfig.gpt2(**SMALL, position="alibi", embedding_norm=True, tie_embeddings=False),
}
#: Lengths of the documents of the rows of successive steps, and the size of the groups of cp 2 and
#: 4: all are short; the last ranks have padding alone; one needs all ranks; one needs half of them.
STEPS: tuple[tuple[list[int], int, int], ...] = (
    ([3, 1, 4, 4, 4], 1, 1),
    ([5, 3], 1, 2),
    ([4, 9, 1], 2, 4),
    ([7, 1, 8], 1, 2),
)


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
        lengths, first = STEPS[index // 4][0], 1 + index % 7
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


def counting() -> Sequence[pl.Callback]:
    return [CountOverContext()]


def packed(
    kind: str, layout: dict[str, Any], graphs: str = "", length: int = 13, **options: Any
) -> Job:
    model = partial(
        CausalLM, PACKED_KINDS[kind], learning_rate=0.01, warmup_steps=0, token_weighted=False
    )
    captured = {"cuda_graphs": CudaGraphs(graphs, warmup_steps=1)} if graphs else {}  # type: ignore[arg-type]
    return Job(
        model, {"microbatch_size": 1, **layout, **captured}, data=partial(Rows, length),
        batch=4, steps=len(STEPS), callbacks=counting, trainer={"gradient_clip_val": None}, **options,
    )  # fmt: skip


PACKED: dict[str, tuple[str, Job]] = chosen(
    {
        name: (kind, packed(kind, layout, mode))
        for name, (kind, mode, layout) in {
            "cp4": ("rotary, windows", "", {"cp": 4}),
            "cp4 ring": ("rotary, windows", "", {"cp": 4, **RING}),
            "cp2 pp2 ring": ("slopes", "", {"cp": 2, "pp": 2, **RING}),
            "cp2 tp2+sp all_gather": ("rotary, windows", "", {"cp": 2, "tp": 2, **GATHER}),
            "cp4 ring, segments": ("rotary, windows", "segments", {"cp": 4, **RING}),
            "cp4 hierarchical, full": ("rotary, windows", "full", {"cp": 4, **NESTED}),
        }.items()
    },
    "cp2 tp2+sp all_gather",
    "cp4 ring, segments",
    "cp4 hierarchical, full",
)
#: Fits by groups of ranks that share documents.
GROUPED: dict[str, tuple[str, dict[str, Any]]] = chosen(
    {
        "cp4 ring": ("rotary", {"cp": 4, **RING}),
        "cp4 all_gather": ("learned, windows", {"cp": 4, **GATHER, "recompute": "selective"}),
        "cp4 all_to_all": ("slopes", {"cp": 4, **ALL_TO_ALL}),
        "cp4 auto": ("learned, windows", {"cp": 4, "recompute": "full"}),
        "cp2 pp2 ring": ("slopes", {"cp": 2, "pp": 2, **RING}),
        "cp2 pp2 all_to_all": ("rotary", {"cp": 2, "pp": 2, **ALL_TO_ALL}),
        "cp2 tp2+sp all_to_all": ("rotary", {"cp": 2, "tp": 2, **ALL_TO_ALL}),
        "cp2 dp2 all_gather": ("rotary", {"cp": 2, **GATHER}),
    },
    "cp4 ring",
    "cp4 all_gather",
    "cp2 pp2 ring",
    "cp2 tp2+sp all_to_all",
)
#: Fits that also run with all ranks of cp in one group.
COMPARED = ("cp4 ring", "cp2 pp2 ring")
#: Windows of a row that no document crosses, and groups.
WINDOWED = ((2, "documents"), (2, "all"), (1, "documents"))
#: Fits by graphs, which are captured in the third step.
GRAPHS: dict[str, dict[str, Any]] = chosen(
    {
        "segments, ring": {"cp": 4, **RING},
        "segments, pp2": {"cp": 2, "pp": 2, **GATHER},
        "full, all_to_all": {"cp": 2},
    },
    "segments, pp2",
)


def graph_job(name: str, captures: bool) -> Job:
    mode: Any = name.split(",")[0]
    graphs = {"cuda_graphs": CudaGraphs(mode, warmup_steps=2)} if captures else {}
    return Job(GPT2, GRAPHS[name] | graphs, steps=4)


# ---- rows of token files


#: Layout that begins, and layouts that continue from its checkpoint.
SAVES = {"cp": 2, **RING}
CONTINUES: dict[str, dict[str, Any]] = chosen(
    {
        "cp1": {},
        "cp2 all_to_all, pp2": {"cp": 2, **ALL_TO_ALL, "pp": 2},
        "cp2 all_gather, tp2": {"cp": 2, **GATHER, "tp": 2},
        "cp4 ring": {"cp": 4, **RING},
    },
    "cp2 all_to_all, pp2",
    "cp4 ring",
)
GENERATING: dict[str, dict[str, Any]] = {"cp4 ring": {"cp": 4, **RING}, "cp4": {"cp": 4, **GATHER}}
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


def train_on_file(
    corpus: str, layout: dict[str, Any], size: int = 1, steps: int = 3, save: str = "",
    resume: str | None = None, **data: Any,
) -> Report:  # fmt: skip
    """Train on rows of documents, which are whole with windows and cut without, and validate."""
    record, watch = Record(), Watch()
    job = Job(strategy=layout, steps=steps, trainer=VALIDATING)
    trainer = trainer_of(job, size, record, watch)
    replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]  # type: ignore[attr-defined]
    module = CausalLM(ROTARY, learning_rate=0.01, schedule="constant")
    options = {"seq_length": 13, "documents": "separate", **data}
    rows = TokenDataModule(
        corpus, corpus, tokenizer=None, batch_size=8 // replicas,
        cache_dir=str(Path(corpus).parent / "cache"), **options,
    )  # fmt: skip
    trainer.fit(module, rows, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return replace(record.report, outcomes=watch.outcomes)


class Generate(pl.LightningModule):
    """Validate a Hugging Face model on packed rows, and continue prompts of several lengths."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float64")

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        prompts = torch.arange(2, 16).view(2, 7)
        mask = (torch.arange(7) >= torch.tensor([[0], [3]])).long()
        self.continued = self.model.generate(
            prompts * mask + (1 - mask), attention_mask=mask, max_new_tokens=6, do_sample=False,
            pad_token_id=1,
        ).tolist()  # fmt: skip


def generate(folder: str, layout: dict[str, Any] | None, size: int) -> tuple[float, Any, bool]:
    """Return the validation loss, the continued prompts, and whether the model was replaced."""
    generator = torch.Generator().manual_seed(2)
    rows: Any = []
    for documents in [[5, 1, 7], [3, 10], [13], [4, 4, 5]] * 2:
        positions = torch.cat([torch.arange(length) for length in documents])
        tokens = torch.randint(2, 61, (13,), generator=generator)
        labels = tokens.masked_fill(positions == 0, -100)
        rows.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    trainer = trainer_of(Job(strategy=layout and {"microbatch_size": 1, **layout}), size)
    module = Generate(folder)
    [metrics] = trainer.validate(module, loader_of(rows, 1, trainer), verbose=False)
    return metrics["val_loss"], module.continued, isinstance(module.model, ReplacedModel)


def run_all(rank: int, size: int, corpus: str, model: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: run_job(job, size) for name, job in JOBS.items()}
    found |= {("packed", name): run_job(job, size) for name, (_, job) in PACKED.items()}
    for name, (kind, layout) in GROUPED.items():
        for groups in ("all", "documents"):
            if groups == "documents" or name in COMPARED:
                job = packed(kind, {**layout, "cp_groups": groups}, length=S)
                found["groups", name, groups] = run_job(job, size)
    for name in GRAPHS:
        found |= {("graphs", name, by): run_job(graph_job(name, by), size) for by in (True, False)}
    for windows, groups in WINDOWED:
        layout = {"cp": 2, "pp": 2, **RING, "cp_groups": groups}
        found["windows", windows, groups] = run_windows(corpus, layout, size, windows)
    saved = f"{corpus}.saved"
    found["begun"] = train_on_file(corpus, SAVES, size, 1, saved)
    for name, layout in CONTINUES.items():
        found["continued", name] = train_on_file(corpus, layout, size, resume=saved)
    for on in (False, True):
        found["balanced", on] = train_on_file(
            corpus, {"microbatch_size": 1}, size, balance_attention=on
        )
    return found | {name: generate(model, GENERATING[name], size) for name in GENERATING}


def run_windows(corpus: str, layout: dict[str, Any], size: int, windows: int) -> Report:
    """Train on whole documents in windows, which no document crosses."""
    record, counts = Record(), CountOverContext()
    job = Job(strategy={"microbatch_size": 1, **layout}, trainer={"gradient_clip_val": None})
    data = TokenDataModule(
        f"{corpus}.short", tokenizer=None, seq_length=S, batch_size=3, documents="whole",
        context_windows=windows,
    )  # fmt: skip
    module = CausalLM(ROTARY, learning_rate=0.01, warmup_steps=0)
    trainer_of(job, size, record, counts).fit(module, data)
    return replace(record.report, outcomes=counts.outcomes)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write documents of 1 to 40 tokens, short documents, and a small Llama."""
    folder = tmp_path_factory.mktemp("context")
    generator = torch.Generator().manual_seed(1)
    many = [30, 1, 2, 3, 20, 1, 7, 2, 5, 25, 3, 2, 1, 4, 18, 2, 2, 9, 3, 40] * 4
    for name, lengths in (("corpus", many), ("corpus.short", [7, 3, 6, 5, 8, 4, 2, 5, 7, 3, 6, 8])):
        with TokenFileWriter(folder / name, vocab_size=61) as writer:
            for length in lengths:
                writer.add_document(torch.randint(61, (length,), generator=generator).numpy())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    return str(folder / "corpus"), str(folder / "llama")


@pytest.fixture(scope="module")
def ranks(paths: tuple[str, str]) -> list[dict[Any, Any]]:
    return run_world(run_all, 4, *paths)


@cache
def twin(kind: str) -> Report:
    """Train in this process; only the strategy measures the load of full steps."""
    return run_job(two_steps(KINDS[kind], {"microbatch_size": 8} if kind == "whole step" else None))


@cache
def packed_twin(kind: str, length: int) -> Report:
    return run_job(packed(kind, {}, length=length))


@pytest.mark.parametrize("name", JOBS)
def test_every_layout_trains_as_one_process(name: str, ranks: Any) -> None:
    check_equal([rank[name] for rank in ranks], twin(name.split(":")[0]))


@pytest.mark.parametrize("name", PACKED)
def test_rows_of_documents_train_as_in_one_process(name: str, ranks: Any) -> None:
    kind, job = PACKED[name]
    found = [rank["packed", name] for rank in ranks]
    assert all(bool(report.graphs[-1]) == ("cuda_graphs" in job.strategy) for report in found)  # type: ignore[operator]
    check_equal(found, packed_twin(kind, 13), learns=False)


def test_sizes_of_groups_follow_from_the_lengths_of_documents() -> None:
    for lengths, of_two, of_four in STEPS:
        borders = [0, *accumulate([*lengths, S - sum(lengths)])]
        assert ContextGroups.of(borders, S, 2).size == of_two, lengths
        assert ContextGroups.of(borders, S, 4).size == of_four, lengths


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_documents_train_as_one_process_with_fewer_messages(
    name: str, ranks: Any
) -> None:
    found = [rank["groups", name, "documents"] for rank in ranks]
    check_equal(found, packed_twin(GROUPED[name][0], S), learns=False)
    for report, rank in zip(found, ranks, strict=True):
        counts = report.outcomes["counts"]
        if name in COMPARED:
            of_all = rank["groups", name, "all"].outcomes["counts"]
            assert sum(counts.values()) < sum(of_all.values())
        axes = {axis.split()[0] for axis in counts}
        assert ("cp_of_2" in axes) == (GROUPED[name][1]["cp"] == 4)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_have_the_bits_of_eager_steps(name: str, ranks: Any) -> None:
    by_graphs, eager = ([rank["graphs", name, by] for rank in ranks] for by in (True, False))
    assert all(report.graphs[-1] for report in by_graphs)
    assert [differences(*pair) for pair in zip(by_graphs, eager, strict=True)] == [[]] * 4


def test_documents_in_windows_need_no_keys_of_other_ranks(paths: Any, ranks: Any) -> None:
    twin = run_windows(paths[0], {}, 1, 2)
    for groups in ("documents", "all"):
        check_equal([rank["windows", 2, groups] for rank in ranks], twin, learns=False)
    for rank in ranks:
        windows, of_all, crossing = (
            sum(rank["windows", number, groups].outcomes["counts"].values())
            for number, groups in WINDOWED
        )
        assert windows < crossing <= of_all


def test_checkpoints_and_validation_are_the_same_under_other_context_parallelism(
    paths: Any, ranks: Any
) -> None:
    whole = train_on_file(paths[0], {})
    assert len(set(whole.losses)) == len(set(whole.outcomes["val"])) == 3
    alone = train_on_file(paths[0], {}, resume=f"{paths[0]}.saved")
    found = [(slice(1, None), alone)]
    for rank in ranks:
        found.append((slice(1), rank["begun"]))
        found += [(slice(1, None), rank["continued", name]) for name in CONTINUES]
    for steps, report in found:
        validated = whole.outcomes["val"][steps]
        assert report.losses == pytest.approx(whole.losses[steps], rel=0, abs=1e-10)
        assert report.outcomes["val"] == pytest.approx(validated, rel=0, abs=1e-10)


def test_balanced_rows_train_as_rows_in_order(ranks: Any) -> None:
    in_order, balanced = (
        [rank["balanced", on].outcomes["rows"] for rank in ranks] for on in (False, True)
    )
    assert balanced != in_order
    for rows, ordered in zip(zip(*balanced, strict=True), zip(*in_order, strict=True), strict=True):
        assert sorted(sum(rows, [])) == sorted(sum(ordered, []))
    for rank in ranks:
        expected, report = (rank["balanced", on] for on in (False, True))
        validated = expected.outcomes["val"]
        assert report.losses == pytest.approx(expected.losses, rel=0, abs=1e-12)
        assert report.outcomes["val"] == pytest.approx(validated, rel=0, abs=1e-12)


@pytest.mark.parametrize("name", GENERATING)
def test_generation_under_context_parallelism_is_that_of_one_process(
    name: str, paths: Any, ranks: Any
) -> None:
    single, plain = (generate(paths[1], layout, 1) for layout in ({"cp": 1}, None))
    # Hugging Face's model computes losses in float32.
    assert (single[0], plain[2]) == (pytest.approx(plain[0], rel=0, abs=1e-5), False)
    for rank in ranks:
        assert rank[name][0] == pytest.approx(single[0], rel=0, abs=1e-10)
        assert rank[name][1:] == (plain[1], True)
