"""Fits in 8 bits: how often weights are cast, delayed scales, and weights stored in 8 bits, also by
graphs, which have the bits of eager steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import FP8, MemoryReport
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.layers.parameters.eight_bit_parameter import EightBitParameter
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.strategy.logs.run_table import _cast_choices
from tests import fits
from tests.fits import Job, Language, Report, Tokens, run_job, strategy_with
from tests.graphs.jobs import (
    FULL,
    MODES,
    SEGMENTS,
    VALIDATED,
    VARIED,
    differences,
    run_graphs,
    run_updates,
    strategy_of,
)
from tests.layers.test_weight_casts import bytes_of, counting_casts
from tests.optimizer.fused_fits import SMALL

DELAYED = FP8("delayed", history=3, margin=1, emulate=True)
STORED = FP8(emulate=True, parameters="fp8")
IN_8_BITS = replace(DELAYED, parameters="fp8")
#: Linear layers of a block: fused queries, keys and values; output; up; down.
LINEARS = 4


class Histories(pl.Callback):
    """Record the histories of delayed scales, and the magnitudes of weights before each step."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"history": None, "magnitudes": []}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        largest = {name: float(main.main(name).detach().abs().max()) for name in main.slices}
        self.outcomes["magnitudes"].append(largest)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (model,) = layered_modules(module)
        if model.delayed_scales is not None:
            self.outcomes["names"] = list(model.delayed_scales.names)
            self.outcomes["history"] = model.delayed_scales.history.tolist()


# ---- casts of weights


class CountCasts(pl.Callback):
    """Count the casts of each step, and the bytes that are kept after it."""

    def __init__(self, casts: list[str]) -> None:
        self.casts, self.outcomes = casts, {"casts": list[int](), "kept": 0}

    def on_train_batch_start(self, *_: Any) -> None:
        self.casts.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.outcomes["casts"].append(len(self.casts))  # type: ignore[attr-defined]
        for model in layered_modules(module):
            if model.weight_casts is not None:
                self.outcomes["kept"] += bytes_of(model.weight_casts)


def train_and_count(
    fp8: FP8,
    graphs: Any = None,
    layout: Any = None,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[Report, list[int]]:
    """Train on batches of four microbatches; return also the number of casts in each step."""
    with counting_casts() as casts:
        counting = CountCasts(casts)
        job = Job(
            SMALL,
            {"microbatch_size": 1, "fp8": fp8, **(layout or {})},
            batch=4,
            callbacks=lambda: [counting, *callbacks],
            **options,
        )
        report = run_graphs(job, graphs)
    assert counting.outcomes["kept"] == 0
    return report, report.outcomes.pop("casts")


def test_each_weight_is_cast_once_per_batch():
    options: dict[str, Any] = {
        "layout": {"recompute": "full"},
        "trainer": {"accumulate_grad_batches": 2},
    }
    rowwise = FP8("rowwise", emulate=True)
    shared, counts = train_and_count(rowwise, **options)
    separate, separate_counts = train_and_count(
        replace(rowwise, cast_weights="microbatch"), **options
    )
    # Two layers; rows and columns, and rows again.
    assert set(counts) == {2 * LINEARS * 2}
    assert set(separate_counts) == {2 * LINEARS * 3 * 4}
    assert fits.differences(shared, separate) == []
    layout = {"microbatch_size": "batch", "recompute": "full"}
    shared, counts = train_and_count(FP8(emulate=True, cast_weights="batch"), layout=layout)
    separate, separate_counts = train_and_count(FP8(emulate=True), layout=layout)
    assert (set(counts), set(separate_counts)) == ({2 * LINEARS * 2}, {2 * LINEARS * 3})
    assert fits.differences(shared, separate) == []


def test_graphs_of_full_steps_contain_casts_and_those_of_segments_cast_in_each_microbatch():
    # The first step has no scales of earlier steps, so that "delayed" captures a second time.
    delayed, number = FP8("delayed", emulate=True), 2 * LINEARS * 2
    for fp8, graphs, first, last in (
        (delayed, FULL, number, 0),
        (FP8(emulate=True), SEGMENTS, number * 4, 0),
    ):
        eager, _ = train_and_count(fp8, steps=6)
        captured, counts = train_and_count(fp8, graphs, steps=6)
        assert captured.graphs[-1] > 0
        # Replays run no Python.
        assert (counts[0], counts[-1]) == (first, last)
        assert fits.differences(captured, eager) == []


class Swaps(pl.Callback):
    """Write weights between batches as weight averages do, unnoticed by torch's counters."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for buffer in strategy_of(trainer).run.state.main.buffers:
            buffer.parameters.mul_(0.99)


def test_weights_that_a_callback_writes_between_batches_are_cast_again():
    separate = FP8(emulate=True, cast_weights="microbatch")
    (swapped, _), (expected, _), (plain, _) = (
        train_and_count(fp8, callbacks=callbacks)
        for fp8, callbacks in (
            (FP8(emulate=True), [Swaps()]),
            (separate, [Swaps()]),
            (FP8(emulate=True), []),
        )
    )
    assert fits.differences(swapped, expected) == []
    assert fits.differences(swapped, plain)


def test_table_shows_how_weights_are_cast_or_stored():
    automatic, manual, cast = Language(), Language(), FP8(emulate=True)
    manual.automatic_optimization = False
    each = "for each product"
    by_graphs = {"fp8": cast, "cuda_graphs": SEGMENTS}
    options: Any
    for module, options, value, reason in (
        (automatic, {"fp8": cast}, "once per batch of several microbatches", "kept until its end, 2 b"),
        (automatic, {"fp8": replace(cast, cast_weights="batch")}, "once per batch", "kept until its end, 2 b"),
        (automatic, {"fp8": replace(cast, cast_weights="microbatch")}, each, "asked for (cast_weights)"),
        (automatic, by_graphs, each, "cuda_graphs captures microbatches one by one"),
        (automatic, {"fp8": STORED}, "kept and gathered in 1 byte each", "one for a batch of several microbatches"),
        (manual, {"fp8": cast}, each, ""),
        (automatic, {"fp8": FP8(parameters="fp8"), "linear.backend": "te"}, "kept and gathered in 1 byte each", "one for each product"),
        (manual, {"fp8": STORED}, "kept and gathered in 1 byte each", "one for each product"),
    ):  # fmt: skip
        (choice,) = _cast_choices(module, strategy_with(**options).options)
        assert choice.value == value
        assert reason in choice.reason
    for options in ({}, {"fp8": "tensorwise", "linear.backend": "te"}):
        assert _cast_choices(automatic, strategy_with(**options).options) == []


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_the_memory_report_counts_shared_casts_and_weights_in_8_bits(microbatch_size):
    layout = {"microbatch_size": microbatch_size, "sequence_parallel": False}
    reports = []
    for fp8 in (STORED, FP8(emulate=True)):
        memory = MemoryReport(after_steps=1)
        train_and_count(fp8, layout=layout, callbacks=[memory], precision="bf16-mixed", steps=2)
        reports += memory.reports
    stored, cast = reports
    # Two blocks of queries, keys and values; output; up and down.
    elements = 2 * 32 * 32 * (3 + 1 + 4 + 4)
    assert cast.held["parameters"] - stored.held["parameters"] == pytest.approx(elements, rel=0.05)
    assert cast.estimate.parameters - stored.estimate.parameters == elements
    assert stored.estimate.main_parameters == cast.estimate.main_parameters
    shares = microbatch_size == 1
    assert stored.estimate.shared == pytest.approx(elements if shares else 0, abs=20_000)
    # Both operands have a byte for each weight, and a scale of four bytes for each layer.
    assert cast.estimate.shared == pytest.approx(2 * elements if shares else 0, abs=20_000)
    assert re.search(r"^shared +\d", cast.table(), re.MULTILINE)


# ---- delayed scales


def test_graphs_and_recomputation_have_the_histories_of_eager_steps():
    def train(graphs, recompute):
        layout = {"fp8": DELAYED, "recompute": recompute}
        options: dict[str, Any] = {
            "data": VARIED,
            "validation": VARIED,
            "callbacks": lambda: [Histories()],
        }
        trainer = {**VALIDATED, "accumulate_grad_batches": 3}
        return run_graphs(Job(SMALL, layout, steps=6, trainer=trainer, **options), graphs)

    expected = train(None, None)
    assert float(torch.tensor(expected.outcomes["history"]).min()) > 0
    full = replace(FULL, evaluation=True)
    for graphs, recompute in ((full, None), (full, "full"), (None, "full")):
        actual = train(graphs, recompute)
        assert graphs is None or actual.graphs[-1] > 0
        assert differences(actual, expected) == []


def test_checkpoints_load_under_every_recipe_and_keep_the_history_of_delayed_scales(tmp_path):
    def train(fp8, steps, start=None, save=None):
        paths = {"resume": start and str(tmp_path / start), "save": save and str(tmp_path / save)}
        # Every checkpoint is at the end of an epoch of three steps.
        module = Language(SMALL)
        report = run_job(Job(lambda: module, {"fp8": fp8}, steps=steps, **paths))
        scales = layered_modules(module)[0].delayed_scales
        return report, None if scales is None else scales.history

    def names_in(name):
        saved = OpenCheckpoint.open(tmp_path / name).tensors
        return [tensor for tensor in saved if tensor.startswith("fp8.")]

    train(DELAYED, 3, save="delayed")
    (whole, history), (resumed, resumed_history) = (
        train(DELAYED, 6),
        train(DELAYED, 6, "delayed", "again"),
    )
    assert resumed.losses == whole.losses[3:]
    assert torch.equal(resumed_history, history)
    # Without the history the next step would have other scales.
    assert len(names_in("delayed")) == len(history)
    for recipe in (None, FP8(emulate=True)):
        train(recipe, 6, "delayed", "other")
        assert not names_in("other")
        # The fourth step has its own scales, and the history has the last three steps.
        assert float(train(DELAYED, 9, "other")[1].min()) > 0
    # A longer history begins with the saved steps; layers without a saved history start their own.
    _, longer = train(replace(DELAYED, history=5, margin=0), 6, "again")
    assert torch.equal(longer[:, :3], history)
    assert not bool(longer[:, 3:].any())
    train(replace(DELAYED, margin=0, last_bf16=1), 3, save="fewer")
    assert float(train(DELAYED, 4, "fewer")[1][:, 0].min()) > 0
    # Runs that cast weights resume from the histories of runs that store them, and vice versa.
    for saved, resumed in ((DELAYED, IN_8_BITS), (IN_8_BITS, DELAYED)):
        _, history = train(saved, 3, save="other type")
        assert torch.equal(train(resumed, 4, "other type")[1][:, 1:], history[:, :2])
    # A consolidated file has weights and optimizer states alone.
    consolidate(tmp_path / "delayed", tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert not any(name.startswith("fp8.") for name in saved["state_dict"])


def test_a_second_fit_of_a_module_continues_with_its_delayed_scales():
    module = Language(SMALL)
    jobs = [
        Job(lambda: module, {"fp8": fp8}, steps=steps, callbacks=lambda: [Histories()])
        for fp8, steps in ((DELAYED, 3), (DELAYED, 1), (None, 1))
    ]
    before, after, without = (run_job(job).outcomes["history"] for job in jobs)
    assert [layer[1:] for layer in after] == [layer[:-1] for layer in before]
    assert without is None


# ---- weights that are stored in 8 bits


class Stored(pl.Callback):
    """Record the addresses and the bytes of the weights in 8 bits after each step."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"addresses": [], "bytes": []}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        main = strategy_of(trainer).run.state.main
        main.wait()
        addresses, contents = {}, []
        for names in main.eight_bit_weights:
            stored = main.stored_weight(names)
            assert stored is not None, names
            for name, part in zip(names, stored.parts, strict=True):
                addresses[name] = part.data_ptr(), stored.scale.data_ptr()
            tensors = [*stored.parts, stored.scale]
            contents += [x.detach().cpu().view(torch.uint8).numpy().tobytes() for x in tensors]
        self.outcomes["addresses"].append(addresses)
        self.outcomes["bytes"].append(contents)


def test_captured_updates_equal_eager_updates_and_keep_the_addresses_of_weights():
    options: dict[str, Any] = {
        "strategy": {"fp8": STORED},
        "precision": "bf16-mixed",
        "data": VARIED,
    }
    expected = run_updates(None, callbacks=[Stored()], **options)
    for graphs in MODES:
        actual = run_updates(replace(graphs, optimizer=True), callbacks=[Stored()], **options)
        assert differences(actual, expected) == []
        assert actual.outcomes["calls"][-1] < expected.outcomes["calls"][-1], "updates are replayed"
        addresses, contents = actual.outcomes["addresses"], actual.outcomes["bytes"]
        assert addresses[0]
        assert addresses == addresses[:1] * len(addresses)
        pairs = zip(contents[0], contents[-1], strict=True)
        assert all(first != last for first, last in pairs), "each step writes new values"


class Thawing(Language):
    """Train the attention of the first layer from the second epoch on, and record for every parameter
    whether it is trained and whether it is in 8 bits.
    """

    def freeze(self, is_frozen: bool) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (is_frozen and "layers.0.attention" in name))

    def configure_model(self) -> None:
        super().configure_model()
        self.freeze(True)

    def on_train_epoch_start(self) -> None:
        self.freeze(self.current_epoch == 0)

    def on_train_batch_end(self, *_: Any) -> None:
        kinds = [(p.requires_grad, isinstance(p, EightBitParameter)) for p in self.parameters()]
        self.outcomes.setdefault("kinds", []).append(kinds)


def test_frozen_weights_are_stored_in_8_bits_when_they_are_thawed_and_captured_again():
    # An epoch has four steps.
    data = partial(Tokens, 32, 32)
    job = Job(partial(Thawing, SMALL), {"fp8": STORED}, "bf16-mixed", 10, data=data)
    eager = run_graphs(job)
    first, *_, last = eager.outcomes["kinds"]
    assert {kind for kind in first if not kind[0]} == {(False, False)}
    assert first.count((True, True)) + 2 == last.count((True, True)) == 2 * LINEARS
    for graphs in MODES:
        actual = run_graphs(job, graphs)
        assert differences(actual, eager) == []
        assert actual.graphs[3] > 0 == actual.graphs[4]
        assert actual.graphs[-1] > 0


def test_histories_of_scales_record_the_magnitudes_of_stored_weights():
    layout = {"fp8": IN_8_BITS}
    job = Job(SMALL, layout, steps=6, data=VARIED, callbacks=lambda: [Histories()])
    for graphs in (None, *MODES):
        outcomes = run_graphs(job, graphs).outcomes
        history = torch.tensor(outcomes["history"])
        assert float(history.min()) > 0
        # Histories begin with the last step.
        last = reversed(outcomes["magnitudes"][-3:])
        expected = torch.tensor(
            [[step[f"model.{name}.weight"] for name in outcomes["names"]] for step in last]
        )
        assert torch.equal(history[:, :, 1], expected.T.to(history))
