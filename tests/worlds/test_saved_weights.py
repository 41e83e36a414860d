"""Checkpoints have the weights that ``on_save_checkpoint`` leaves in the state dict, and the averages
of Lightning's callback, under every layout.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTConfig, UnsupportedError
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import CURRENT, MODEL, consolidate
from tests.fits import (
    GPT2,
    LLAMA,
    MIXTURE,
    Job,
    Language,
    Report,
    Tokens,
    check_equal,
    loader_of,
    module_of,
    run_job,
    trainer_of,
)
from tests.oracles import assert_equal
from tests.world import run_world

State = dict[str, Any]

# ---- changes by on_save_checkpoint

NAME = "model.layers.0.attention.qkv.weight"
SMALL = replace(GPT2, num_layers=2)
EXPERTS = replace(
    LLAMA,
    num_layers=1,
    experts=replace(MIXTURE.experts, num_experts=4),  # type: ignore[type-var]
)


class ChangesState(Language):
    """Change the state dict on its way into the checkpoint."""

    change: Callable[[Any, State], None] | None = None

    def on_save_checkpoint(self, checkpoint: State) -> None:
        if self.change is not None:
            type(self).change(self, checkpoint["state_dict"])  # type: ignore[misc]


def halves(module: Any, state: State) -> None:
    for name in state:
        state[name] = state[name] / 2


def copies(module: Any, state: State) -> None:
    for name in state:
        state[name] = state[name].clone().float()


def adds(module: Any, state: State) -> None:
    state["extra"] = torch.arange(6.0).view(2, 3)


def removes(module: Any, state: State) -> None:
    del state[NAME]


def first_rank_halves(module: Any, state: State) -> None:
    if module.trainer.global_rank == 0:
        halves(module, state)


def last_rank_halves(module: Any, state: State) -> None:
    if module.trainer.global_rank == module.trainer.world_size - 1:
        halves(module, state)


def removes_the_last_expert(module: Any, state: State) -> None:
    for name in [name for name in state if ".experts.3." in name]:
        del state[name]


def transposes_the_last_expert(module: Any, state: State) -> None:
    for name in [name for name in state if ".experts.3.down." in name]:
        state[name] = state[name].t().contiguous()


def transposes(module: Any, state: State) -> None:
    state[NAME] = state[NAME].t().contiguous()


def adds_a_shard(module: Any, state: State) -> None:
    state["shard"] = state[NAME].clone()


def adds_a_number(module: Any, state: State) -> None:
    state["number"] = 3


FOUR: dict[str, tuple[Callable[[Any, State], None], State]] = {
    "tp2 dp2": (halves, {"tp": 2}),
    "dp4 first": (first_rank_halves, {}),
    "dp4 last": (last_rank_halves, {}),
    "tp2 first": (first_rank_halves, {"tp": 2}),
    "tp2 transposed": (transposes, {"tp": 2}),
    "tp2 shard": (adds_a_shard, {"tp": 2}),
    "tp2 pp2": (adds, {"tp": 2, "pp": 2}),
}
TWO: dict[str, tuple[Callable[[Any, State], None], State]] = {
    "first": (first_rank_halves, {"ep": 2}),
    "last": (last_rank_halves, {"ep": 2}),
    "removed": (removes_the_last_expert, {"ep": 2}),
    "transposed": (transposes_the_last_expert, {"ep": 2}),
    "etp2, first": (first_rank_halves, {"tp": 2}),
}


def save(
    change: Callable[[Any, State], None], path: Path | str, layout: State, size: int = 1,
    config: GPTConfig = SMALL, weights_only: bool = False, precision: Any = "64-true",
) -> None:  # fmt: skip
    """Train one step, and save with and without the change."""
    kind = type("ChangesState", (ChangesState,), {"change": change})
    trainer, module = (
        trainer_of(Job(strategy=layout, steps=1, precision=precision), size),
        kind(config),
    )
    trainer.fit(module, loader_of(Tokens(8), 8, trainer))
    trainer.save_checkpoint(f"{path}/changed", weights_only)
    kind.change = None  # type: ignore[attr-defined]
    trainer.save_checkpoint(f"{path}/plain", weights_only)


def weights(path: Path | str, prefix: str = MODEL) -> dict[str, Tensor]:
    """Return the full weights of a checkpoint by name."""
    tensors = read_full(path)
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def changed_and_plain(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return weights(f"{path}/changed"), weights(f"{path}/plain")


def consolidated(path: Path) -> State:
    consolidate(path, path.parent / "file.ckpt", weights_only=True)
    state: State = torch.load(path.parent / "file.ckpt")["state_dict"]
    return state


def check_multiples(path: Path, factor_of: Callable[[str], float]) -> None:
    changed, plain = changed_and_plain(path)
    assert changed.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(changed[name], value * factor_of(name)), f"{path}: {name}"


class Tied(pl.LightningModule):
    """One parameter under two names, and a state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        self.factor = 3.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_save_checkpoint(self, checkpoint: State) -> None:
        checkpoint["state_dict"]["first.weight"] = self.first.weight.detach() * 3
        checkpoint["state_dict"]["second.weight"] = self.first.weight.detach() * self.factor

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no checkpoint has it")


# ---- averages

#: Layout and model of each run with averages on two ranks.
AVERAGED: dict[str, tuple[State, GPTConfig]] = {
    "parts": ({}, SMALL),
    "whole": ({"zero": 0}, SMALL),
    "whole parameters": ({"optimizer_slices": "parameters"}, SMALL),
    "tp": ({"tp": 2}, SMALL),
    "pp": ({"pp": 2}, SMALL),
    "ep": ({"ep": 2}, replace(MIXTURE, num_layers=2)),
}
#: Runs that resume, and the runs whose checkpoints they resume from: ``twin`` is Lightning's file.
RESUMED = (
    *(("parts", "parts"), ("whole", "parts"), ("tp", "pp"), ("pp", "pp"), ("ep", "ep")),
    *(("tp", "twin"), ("pp", "twin")),
)
#: Runs in mixed precision, whose averages must be those of the saved weights in full precision.
HALF = ("parts", "whole", "whole parameters", "ep")
STEPS, SAVED = 4, 2


class Validated(Language):
    """Keep the losses of validations."""

    def __init__(self, config: GPTConfig = SMALL) -> None:
        super().__init__(config)
        self.outcomes: dict[str, list[float]] = {"validated": []}

    def configure_model(self) -> None:
        super().configure_model()
        if self.trainer.precision == "64-true":
            # Lightning's callback copies the model before Lightning converts it.
            self.double()

    def on_validation_epoch_end(self) -> None:
        self.outcomes["validated"].append(float(self.trainer.callback_metrics["val_loss"]))


def averaging(
    folder: Path | str, strategy: Any = None, config: GPTConfig = SMALL, resume: Any = None, every: int = SAVED,
    precision: str = "64-true",
) -> Job:  # fmt: skip
    """Return a fit that averages weights, and saves every ``every`` steps."""

    def callbacks() -> Sequence[pl.Callback]:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
        return [EMAWeightAveraging(decay=0.5), saver]

    return Job(
        partial(Validated, config), strategy, precision, steps=STEPS, data=partial(Tokens, 16),
        validation=partial(Tokens, 8), callbacks=callbacks, resume=resume and str(resume),
        trainer={"enable_checkpointing": True, "num_sanity_val_steps": 0},
    )  # fmt: skip


@cache
def averaged_twin(config: GPTConfig) -> tuple[Path, Report]:
    """Return the folder and the report of Lightning alone."""
    folder = Path(mkdtemp())
    return folder, run_job(averaging(folder, None, config))


def check_averages(folder: Path, steps: int) -> None:
    """Compare saved averages with averages of the saved weights, in full precision."""
    expected: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        current = weights(folder / f"step={step}.ckpt", CURRENT)
        expected = {
            k: (expected[k] + w.double()) / 2 if expected else w.double()
            for k, w in current.items()
        }
        averages = weights(folder / f"step={step}.ckpt")
        assert averages.keys() == current.keys()
        for name, actual in averages.items():
            torch.testing.assert_close(actual.double(), expected[name], rtol=0, atol=1e-6)


def check_like(report: Report, twin: Report, begin: int = 0) -> None:
    assert report.losses == pytest.approx(twin.losses[begin:], abs=1e-9)
    validated = report.outcomes["validated"]
    assert validated == pytest.approx(twin.outcomes["validated"][-len(validated) :], abs=1e-9)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def refusals(cases: Any, size: int, folder: Path, config: GPTConfig) -> dict[str, str]:
    """Save the cases; return the messages of those that are refused."""
    messages = {}
    for name, (change, layout) in cases.items():
        try:
            save(change, folder / name, layout, size, config)
        except UnsupportedError as error:
            messages[name] = str(error)
    return messages


def four_ranks(rank: int, size: int, folder: Path) -> dict[str, str]:
    quiet()
    return refusals(FOUR, size, folder, SMALL)


def two_ranks(rank: int, size: int, folder: Path, twin: Path) -> tuple[dict[str, str], State]:
    quiet()
    refused = refusals(TWO, size, folder, EXPERTS)
    reports: State = {}
    for name, (layout, config) in AVERAGED.items():
        reports[name, ""] = run_job(averaging(folder / name, layout, config), size)
    for name, source in RESUMED:
        layout, config = AVERAGED[name]
        path = (twin if source == "twin" else folder / source) / f"step={SAVED}.ckpt"
        reports[name, source] = run_job(averaging(folder / "rest", layout, config, path), size)
    for name in HALF:
        layout, config = AVERAGED[name]
        path = folder / f"half {name}"
        run_job(averaging(path, layout, config, every=1, precision="bf16-mixed"), size)
    return refused, reports


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, State]]]:
    quiet()
    folder = tmp_path_factory.mktemp("two")
    return folder, run_world(two_ranks, 2, folder, averaged_twin(SMALL)[0])


@pytest.mark.parametrize("weights_only", [False, True])
def test_changed_values_are_saved(weights_only: bool, tmp_path: Path) -> None:
    save(halves, tmp_path, {}, weights_only=weights_only)
    check_multiples(tmp_path, lambda name: 0.5)


def test_copies_are_saved_in_the_precision_of_the_main_parameters(tmp_path: Path) -> None:
    save(copies, tmp_path, {}, precision="bf16-mixed")
    check_multiples(tmp_path, lambda name: 1.0)
    plain = weights(tmp_path / "plain")
    assert any(not torch.equal(value, value.bfloat16().float()) for value in plain.values())


def test_added_removed_and_transposed_names_reach_the_checkpoint_and_its_consolidated_file(
    tmp_path: Path,
) -> None:
    save(adds, tmp_path / "adds", {})
    changed, plain = changed_and_plain(tmp_path / "adds")
    assert torch.equal(changed.pop("extra"), torch.arange(6.0).view(2, 3))
    assert changed.keys() == plain.keys()
    assert "extra" in consolidated(tmp_path / "adds" / "changed")
    module = Language(SMALL)
    module.strict_loading = False
    trainer_of(Job(strategy={}, steps=2)).fit(module, [], ckpt_path=tmp_path / "adds" / "changed")
    save(removes, tmp_path / "removes", {})
    changed, plain = changed_and_plain(tmp_path / "removes")
    assert plain.keys() - changed.keys() == {NAME}
    assert NAME not in consolidated(tmp_path / "removes" / "changed")
    save(transposes, tmp_path / "transposes", {})
    changed, plain = changed_and_plain(tmp_path / "transposes")
    assert torch.equal(changed[NAME], plain[NAME].t())


def test_values_that_are_not_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'number' is a int.*key of their own"):
        save(adds_a_number, tmp_path, {})


def test_tied_parameters_must_change_equally_and_extra_state_is_named_and_not_saved(
    tmp_path: Path,
) -> None:
    trainer, module = trainer_of(Job(strategy={}, steps=1)), Tied()
    trainer.fit(module, DataLoader(torch.ones(2, 4).double(), batch_size=2))
    with pytest.warns(
        UserWarning, match="_extra_state of the module's state_dict .1 in all. cannot"
    ):
        trainer.save_checkpoint(tmp_path / "checkpoint")
    plain = consolidated(tmp_path / "checkpoint")
    assert set(plain) == {"first.weight", "second.weight"}
    assert all(torch.equal(tensor, module.first.weight * 3) for tensor in plain.values())
    module.factor = 2.0
    words = r"'second\.weight', but not the parameter's first name"
    with pytest.warns(match="_extra_state"), pytest.raises(UnsupportedError, match=words):
        trainer.save_checkpoint(tmp_path / "other")


def test_first_data_rank_decides_changes_and_unequal_tensor_ranks_are_refused(
    tmp_path: Path,
) -> None:
    for refused in run_world(four_ranks, 4, tmp_path):
        assert refused.keys() == {"tp2 first", "tp2 transposed", "tp2 shard"}
        assert "alike on all tensor-parallel ranks" in refused["tp2 first"]
        assert "only by one of the same shape" in refused["tp2 transposed"]
        assert "'shard' is not" in refused["tp2 shard"]
    for name, factor in (("tp2 dp2", 0.5), ("dp4 first", 0.5), ("dp4 last", 1.0)):
        check_multiples(tmp_path / name, lambda name, factor=factor: factor)
    changed, plain = changed_and_plain(tmp_path / "tp2 pp2")
    assert torch.equal(changed.pop("extra"), torch.arange(6.0).view(2, 3))
    assert plain.keys() == changed.keys()


def test_experts_are_saved_as_on_the_first_rank_that_holds_them(of_two: Any) -> None:
    folder, ranks = of_two
    for refused, _ in ranks:
        assert refused.keys() == {"etp2, first"}
        assert "alike on all tensor-parallel ranks" in refused["etp2, first"]

    def is_second(name: str) -> bool:
        return ".experts.2." in name or ".experts.3." in name

    check_multiples(folder / "first", lambda name: 1.0 if is_second(name) else 0.5)
    check_multiples(folder / "last", lambda name: 0.5 if is_second(name) else 1.0)
    changed, plain = changed_and_plain(folder / "removed")
    parts = {f"model.layers.0.mlp.experts.3.{part}.weight" for part in ("gate_up", "down")}
    assert plain.keys() - changed.keys() == parts
    changed, plain = changed_and_plain(folder / "transposed")
    for key, value in plain.items():
        assert torch.equal(changed[key], value.t() if ".experts.3.down." in key else value)


@pytest.mark.parametrize("name", AVERAGED)
def test_divided_models_average_as_one_process(of_two: Any, name: str) -> None:
    folder, ranks = of_two
    twin_folder, twin = averaged_twin(AVERAGED[name][1])
    reports = [rank[1][name, ""] for rank in ranks]
    check_equal(reports, twin, 1e-9)
    for report in reports:
        check_like(report, twin)
    assert len(set(twin.outcomes["validated"])) == 2
    path = f"step={STEPS}.ckpt"
    expected = torch.load(twin_folder / path)["state_dict"]
    for key, average in weights(folder / name / path).items():
        # One process also has the padding rows of the vocabulary.
        full = expected[key][tuple(map(slice, average.shape))]
        assert_equal(average, full, f"{name}: {key}", 1e-9)


@pytest.mark.parametrize(("name", "source"), RESUMED)
def test_averages_resume_in_other_layouts(of_two: Any, name: str, source: str) -> None:
    _, twin = averaged_twin(AVERAGED[name][1])
    for rank in of_two[1]:
        check_like(rank[1][name, source], twin, SAVED)


@pytest.mark.parametrize("name", HALF)
def test_mixed_precision_averages_in_full_precision(of_two: Any, name: str) -> None:
    check_averages(of_two[0] / f"half {name}", STEPS)
    last = weights(of_two[0] / f"half {name}" / f"step={STEPS}.ckpt")
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in last.values())


def test_averages_of_one_process_resume_bit_for_bit_and_from_single_files(tmp_path: Path) -> None:
    quiet()
    twin_folder, twin = averaged_twin(SMALL)
    ours, path = run_job(averaging(tmp_path / "ours", {})), f"step={SAVED}.ckpt"
    check_equal([ours], twin, 1e-9)
    resumed = run_job(averaging(tmp_path / "again", {}, resume=tmp_path / "ours" / path))
    assert resumed.losses == ours.losses[SAVED:]
    assert resumed.outcomes["validated"] == ours.outcomes["validated"][-1:]
    check_like(run_job(averaging(tmp_path / "here", {}, resume=twin_folder / path)), twin, SAVED)
    consolidate(tmp_path / "ours" / path, tmp_path / "file.ckpt")
    there = run_job(averaging(tmp_path / "there", None, resume=tmp_path / "file.ckpt"))
    # Lightning itself rounds double precision when it resumes such a module.
    again = run_job(averaging(tmp_path / "rest", None, resume=twin_folder / path))
    assert there.losses == pytest.approx(again.losses, abs=1e-9)
    consolidate(tmp_path / "ours" / path, tmp_path / "weights.ckpt", weights_only=True)
    kept = torch.load(tmp_path / "weights.ckpt").keys()
    assert not {"current_model_state", "averaging_state"} & kept


def test_averages_begin_at_a_resume_from_a_checkpoint_without_averages(tmp_path: Path) -> None:
    quiet()
    job = Job(SMALL, {}, "32-true", steps=2, data=partial(Tokens, 16), save=str(tmp_path / "start"))
    run_job(job)
    consolidate(tmp_path / "start", tmp_path / "start.ckpt")
    options: State = {"precision": "32-true"}
    ours = run_job(averaging(tmp_path / "a", {}, resume=tmp_path / "start", **options))
    twin = run_job(averaging(tmp_path / "b", resume=tmp_path / "start.ckpt", **options))
    assert ours.losses == pytest.approx(twin.losses, abs=1e-6)
    assert ours.outcomes["validated"] == pytest.approx(twin.outcomes["validated"], abs=1e-6)


def test_a_run_restores_the_averaging_callback(tmp_path: Path) -> None:
    job = averaging(tmp_path, {}, every=9)
    trainer = trainer_of(job)
    trainer.fit(module_of(job), loader_of(Tokens(8), 8, trainer))
    averages = [
        callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging)
    ]
    assert "_swap_models" not in vars(averages[0])
