"""Checkpoints have the weights that ``on_save_checkpoint`` leaves in the state dict, and the averages
of Lightning's callback, under every layout.
"""

from __future__ import annotations

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

from lightning_megatron import GPTConfig
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import CURRENT, MODEL, consolidate
from lightning_megatron.errors import UnsupportedError
from tests.fits import (
    GPT2,
    MIXTURE,
    Job,
    Language,
    Report,
    Tokens,
    check_equal,
    loader_of,
    run_job,
    run_jobs_on,
    trainer_of,
)
from tests.oracles import assert_equal
from tests.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Any]
Change = Callable[[Any, State], None]

NAME = "model.layers.0.attention.qkv.weight"
SMALL = replace(GPT2, num_layers=2)


class ChangesState(Language):
    """Change the state dict on its way into the checkpoint."""

    change: Change | None = None

    def on_save_checkpoint(self, checkpoint: State) -> None:
        if self.change is not None:
            self.change(checkpoint["state_dict"])


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


def transposes(module: Any, state: State) -> None:
    state[NAME] = state[NAME].t().contiguous()


def adds_a_shard(module: Any, state: State) -> None:
    state["shard"] = state[NAME].clone()


FOUR: dict[str, tuple[Change, State]] = {
    "tp2 dp2": (halves, {"tp": 2}),
    "dp4 first": (first_rank_halves, {}),
    "tp2 first": (first_rank_halves, {"tp": 2}),
    "tp2 transposed": (transposes, {"tp": 2}),
    "tp2 shard": (adds_a_shard, {"tp": 2}),
}


def save(
    change: Change, path: Path | str, layout: State, size: int = 1, weights_only: bool = False,
    precision: Any = "64-true",
) -> None:  # fmt: skip
    """Train one step, and save with and without the change."""
    trainer = trainer_of(Job(strategy=layout, steps=1, precision=precision), size)
    module: Any = ChangesState(SMALL)
    trainer.fit(module, loader_of(Tokens(8), 8, trainer))
    for name, own in (("changed", partial(change, module)), ("plain", None)):
        module.change = own
        trainer.save_checkpoint(f"{path}/{name}", weights_only)


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


def check_multiples(path: Path, factor: float) -> None:
    changed, plain = changed_and_plain(path)
    assert changed.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(changed[name], value * factor), f"{path}: {name}"


class Tied(pl.LightningModule):
    """One parameter under two names, and a state that is not a tensor."""

    factor = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_save_checkpoint(self, checkpoint: State) -> None:
        weight = self.first.weight.detach()
        checkpoint["state_dict"].update(
            {"first.weight": weight * 3, "second.weight": weight * self.factor}
        )

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no checkpoint has it")


#: Layout and model of each run with averages on two ranks.
AVERAGED: dict[str, tuple[State, GPTConfig]] = {
    "parts": ({}, SMALL),
    "tp": ({"tp": 2}, SMALL),
    "pp": ({"pp": 2}, SMALL),
    "ep": ({"ep": 2}, replace(MIXTURE, num_layers=2)),
}
#: Runs that resume, and the runs whose checkpoints they resume from: ``twin`` is Lightning's file.
RESUMED = (("tp", "pp"), ("parts", "parts"), ("ep", "ep"), ("pp", "twin"))
#: Runs in mixed precision, whose averages must be those of the saved weights in full precision.
HALF = ("parts", "ep")
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


def averagers(folder: Path | str, every: int) -> Sequence[pl.Callback]:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    return [EMAWeightAveraging(decay=0.5), saver]


def averaging(
    folder: Path | str, strategy: Any = None, config: GPTConfig = SMALL, resume: Any = None, every: int = SAVED,
    precision: str = "64-true",
) -> Job:  # fmt: skip
    """Return a fit that averages weights, and saves every ``every`` steps."""
    callbacks = partial(averagers, folder, every)
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


def four_ranks(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Save the cases; return the messages of those that are refused."""
    messages = {}
    for name, (change, layout) in FOUR.items():
        try:
            save(change, folder / name, layout, size)
        except UnsupportedError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, list[Report]]]:
    folder, jobs = tmp_path_factory.mktemp("two"), dict[Any, Job]()
    for name, case in AVERAGED.items():
        jobs[name, ""] = averaging(folder / name, *case)
    for name, source in RESUMED:
        saved = averaged_twin(SMALL)[0] if source == "twin" else folder / source
        path = saved / f"step={SAVED}.ckpt"
        jobs[name, source] = averaging(folder / "rest", *AVERAGED[name], resume=path)
    for name in HALF:
        path, case = folder / f"half {name}", AVERAGED[name]
        jobs["half", name] = averaging(path, *case, every=1, precision="bf16-mixed")
    return folder, run_jobs_on(2, jobs)


def test_changed_values_are_saved_without_optimizers(tmp_path: Path) -> None:
    save(halves, tmp_path, {}, weights_only=True)
    check_multiples(tmp_path, 0.5)


def test_copies_are_saved_in_the_precision_of_the_main_parameters(tmp_path: Path) -> None:
    save(copies, tmp_path, {}, precision="bf16-mixed")
    check_multiples(tmp_path, 1.0)
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
    with pytest.raises(UnsupportedError, match=r"'number' is a int.*key of their own"):
        save(lambda module, state: state.update(number=3), tmp_path, {})


def test_tied_parameters_must_change_equally_and_extra_state_is_named_and_not_saved(tmp_path):
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


def test_first_data_rank_decides_changes_and_unequal_tensor_ranks_are_refused(tmp_path):
    for refused in run_world(four_ranks, 4, tmp_path):
        assert refused.keys() == {"tp2 first", "tp2 transposed", "tp2 shard"}
        assert "alike on all tensor-parallel ranks" in refused["tp2 first"]
        assert "only by one of the same shape" in refused["tp2 transposed"]
        assert "'shard' is not" in refused["tp2 shard"]
    for name in ("tp2 dp2", "dp4 first"):
        check_multiples(tmp_path / name, 0.5)


@pytest.mark.parametrize("name", AVERAGED)
def test_divided_models_average_as_one_process(of_two: Any, name: str) -> None:
    folder, reports = of_two[0], of_two[1][name, ""]
    twin_folder, twin = averaged_twin(AVERAGED[name][1])
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


def test_averages_resume_in_other_layouts(of_two: Any) -> None:
    for name, source in RESUMED:
        _, twin = averaged_twin(AVERAGED[name][1])
        for report in of_two[1][name, source]:
            check_like(report, twin, SAVED)


def test_mixed_precision_averages_in_full_precision(of_two: Any) -> None:
    for name in HALF:
        check_averages(of_two[0] / f"half {name}", STEPS)
        last = weights(of_two[0] / f"half {name}" / f"step={STEPS}.ckpt")
        assert any(not torch.equal(value, value.bfloat16().float()) for value in last.values())


def test_averages_of_one_process_resume_from_single_files_and_in_lightning(tmp_path: Path) -> None:
    twin_folder, twin = averaged_twin(SMALL)
    path = f"step={SAVED}.ckpt"
    check_equal([run_job(averaging(tmp_path / "ours", {}))], twin, 1e-9)
    check_like(run_job(averaging(tmp_path / "here", {}, resume=twin_folder / path)), twin, SAVED)
    consolidate(tmp_path / "ours" / path, tmp_path / "file.ckpt")
    there = run_job(averaging(tmp_path / "there", None, resume=tmp_path / "file.ckpt"))
    # Lightning itself rounds double precision when it resumes such a module.
    again = run_job(averaging(tmp_path / "rest", None, resume=twin_folder / path))
    assert there.losses == pytest.approx(again.losses, abs=1e-9)
    consolidate(tmp_path / "ours" / path, tmp_path / "weights.ckpt", weights_only=True)
    kept = torch.load(tmp_path / "weights.ckpt").keys()
    assert not {"current_model_state", "averaging_state"} & kept
