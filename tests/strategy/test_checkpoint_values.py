"""Values in checkpoints: the order of parameters, the state of a rank, and files of other strategies,
whose damaged or edited values are refused by name.
"""

from __future__ import annotations

import copy
import inspect
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.core import saving
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.checkpoint.metadata_checks import check_values
from lightning_megatron.checkpoint.single_file import read_single_file
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import PlacementShape
from lightning_megatron.strategy.checkpoints.name_order import (
    merge_orders,
    named_numbers,
    order_groups,
)
from lightning_megatron.strategy.checkpoints.rank_state_checks import (
    check_rank_state,
    name_damaged_states,
)
from lightning_megatron.strategy.checkpoints.run_checkpoints import RunCheckpoints
from lightning_megatron.strategy.class_loading import install_directory_check
from lightning_megatron.strategy.process.random_states import random_states, restore_random_states
from tests.fits import GPT2, Job, Report, joined, run_job, trainer_of

CPU = torch.device("cpu")
SMALL = replace(GPT2, num_layers=1)
STEPS = 2

# ---- the order of parameters


def _model_and_stage_names(
    pp: int,
    vpp: int,
    stage_layers: Sequence[int] | None = None,
    shape: PlacementShape = "loop",
) -> tuple[list[str], list[list[str]]]:
    """Return the parameter names of a GPT of eight layers, of the full model and of each stage."""
    config = GPTConfig.gpt2(
        vocab_size=32, max_seq_length=8, num_layers=8, hidden_size=8, num_heads=2
    )
    with torch.device("meta"):
        names = [f"net.{name}" for name, _ in GPT(config).named_parameters()]
    stages: list[list[str]] = []
    layout = ParallelLayout(pp, pp=pp, vpp=vpp, stage_layers=stage_layers, shape=shape)
    layers = config.partition(layout).by_stage(layout.placement)
    for number, chunks in enumerate(layers):
        held = {str(layer) for chunk in chunks for layer in chunk}
        first, last = number == 0, number == (0 if shape == "v" else pp - 1)
        parts = {"embedding": first, "final_norm": last, "head": last}
        stages.append(
            [name for name in names if name.split(".")[2] in held or parts.get(name.split(".")[1])]
        )
    return names, stages


@pytest.mark.parametrize(
    ("pp", "vpp", "stage_layers", "shape"),
    [
        *((pp, vpp, None, "loop") for pp, vpp in ((1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (8, 1))),
        (2, 1, [8, 0], "loop"),
        (2, 1, [0, 8], "loop"),
        (4, 1, [0, 5, 3, 0], "loop"),
        (3, 1, [0, 8, 0], "loop"),
        (2, 2, None, "v"),
        (4, 2, None, "v"),
    ],
)
def test_names_of_stages_merge_into_the_order_of_the_full_model(
    pp: int, vpp: int, stage_layers: list[int] | None, shape: PlacementShape
) -> None:
    names, stages = _model_and_stage_names(pp, vpp, stage_layers, shape)
    assert sorted(name for stage in stages for name in stage) == sorted(names)
    assert merge_orders(stages) == names
    decays = [
        [[n for n in stage if "norm" not in n], [n for n in stage if "norm" in n]]
        for stage in stages
    ]
    expected = [[n for n in names if "norm" not in n], [n for n in names if "norm" in n]]
    assert order_groups(decays, names) == expected


def test_names_before_the_blocks_of_the_last_stage_come_before_all_blocks() -> None:
    stages = [["words", "blocks.0"], ["norm", "blocks.1", "head"]]
    assert merge_orders(stages) == ["words", "norm", "blocks.0", "blocks.1", "head"]


def test_groups_not_in_the_models_order_are_refused_on_several_stages() -> None:
    names, stages = _model_and_stage_names(2, 1)
    backwards = [[stage[::-1]] for stage in stages]
    with pytest.raises(
        CheckpointMismatchError, match="must be in the model's order to be numbered"
    ):
        order_groups(backwards, names)
    # One process may have any order.
    assert order_groups([[names[::-1]]], names) == [names[::-1]]


def test_saved_parameter_numbers_map_to_saved_names_or_else_to_the_group_names() -> None:
    assert named_numbers({"params": [0, 1]}, ["a", "b"]) == ["a", "b"]
    assert named_numbers({"params": [0, 1], "param_names": ["b", "a"]}, ["a", "b"]) == ["b", "a"]
    with pytest.raises(CheckpointMismatchError, match="3 were saved, the group has 2"):
        named_numbers({"params": [0, 1, 2]}, ["a", "b"])


def test_random_generators_continue_from_states_that_load_with_weights_only() -> None:
    device = torch.device("cpu")
    for draw in (
        lambda: np.random.standard_normal(),
        lambda: random.gauss(0, 1),
        lambda: torch.randn(3),
    ):
        draw()  # The generator now holds the second number of a pair of normal numbers.
    file = io.BytesIO()
    torch.save(random_states(device), file)
    expected = [
        torch.rand(4).tolist(),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    file.seek(0)
    restore_random_states(torch.load(file, weights_only=True), device)
    actual = [
        torch.rand(4).tolist(),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ]
    assert actual == expected


# ---- the state of a rank


def intact_state() -> dict[str, Any]:
    return {
        "random": RandomStreams(3).state_dict(),
        "generators": random_states(CPU),
        "dataloaders": [None],
    }


def setter_of(value: Any, *keys: str) -> Callable[[dict[str, Any]], Any]:
    def edit(values: dict[str, Any]) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return edit


RANDOM = "random must be a seed and a position of whole numbers: it is"
STATES = "generators must be states of the generators of torch, NumPy and Python: it is"
EDITS: tuple[tuple[Callable[[dict[str, Any]], Any], str], ...] = (
    (lambda values: values.pop("random"), "random is missing"),
    (lambda values: values.pop("generators"), "generators is missing"),
    (lambda values: values.pop("dataloaders"), "dataloaders is missing"),
    (setter_of({}, "dataloaders"), "dataloaders must be a list: it is"),
    (setter_of(7, "random"), RANDOM),
    (setter_of("7", "random", "seed"), RANDOM),
    (setter_of(True, "random", "seed"), RANDOM),
    (setter_of({"step": 0.5}, "random", "position"), RANDOM),
    (setter_of({"place": 1}, "random", "position"), RANDOM),
    (setter_of(-1, "random", "position", "step"), RANDOM),
    (setter_of([], "generators"), STATES),
    (setter_of({}, "generators"), STATES),
    (setter_of(torch.zeros(4), "generators", "torch"), STATES),
    (setter_of(None, "generators", "numpy"), STATES),
    (setter_of(torch.full((624,), -1), "generators", "numpy", "keys"), STATES),
    (setter_of(torch.zeros(3), "generators", "numpy", "keys"), STATES),
    (setter_of(10**30, "generators", "numpy", "position"), STATES),
    (setter_of(float("nan"), "generators", "numpy", "gauss"), STATES),
    (setter_of("2", "generators", "python", "version"), STATES),
    (setter_of(torch.full((625,), 999), "generators", "python", "internal"), STATES),
)


def test_damaged_values_of_a_rank_state_are_refused_by_name() -> None:
    for edit, message in EDITS:
        values = intact_state()
        check_rank_state(values, "rank 0 in a")
        edit(values)
        with pytest.raises(
            CorruptDataError,
            match=f"that of rank 0 in a is damaged: {message}.*Use another checkpoint",
        ):
            check_rank_state(values, "rank 0 in a")


def test_a_fit_does_not_resume_from_a_rank_state_with_missing_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_writer = RunCheckpoints._writer_on

    def writer_on(*args: Any) -> Any:
        writer = make_writer(*args)
        save = writer.save

        def save_without(path: Any, tensors: Any, values: Any, state: Any, *others: Any) -> Any:
            state = {key: value for key, value in state.items() if key != "generators"}
            return save(path, tensors, values, state, *others)

        writer.save = save_without
        return writer

    monkeypatch.setattr(RunCheckpoints, "_writer_on", writer_on)
    job = Job(SMALL, {}, steps=1, save=str(tmp_path / "saved.ckpt"))
    run_job(job)
    monkeypatch.undo()
    words = "rank 0 in .*saved.ckpt is damaged: generators is missing"
    with pytest.raises(CorruptDataError, match=words):
        run_job(replace(job, steps=STEPS, resume=job.save, save=None))


def test_invalid_generator_states_are_refused_and_change_no_generator() -> None:
    before = torch.get_rng_state()
    for state in (torch.zeros(3, dtype=torch.uint8), torch.full_like(before, 255)):
        values = {**intact_state()["generators"], "torch": state}
        message = "rank 0 in a is damaged: a random generator does not accept its state"
        with pytest.raises(CorruptDataError, match=message), name_damaged_states("rank 0 in a"):
            restore_random_states(values, CPU)
    assert torch.equal(torch.get_rng_state(), before)


# ---- files of other strategies


@pytest.fixture(scope="module")
def saved_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.ckpt"
    run_job(Job(SMALL, steps=1, save=str(path)))
    return path


def resumed(path: Path) -> Report:
    return run_job(Job(SMALL, {}, steps=STEPS, resume=str(path)))


REFUSALS = (CheckpointMismatchError, CorruptDataError, UnsupportedError)


@contextmanager
def refused(words: str, case: str) -> Iterator[None]:
    """Check that the block is refused with words."""
    try:
        yield
    except REFUSALS as error:
        found = re.search(words, str(error))
        assert found, f"{case}: {error}"  # noqa: PT017
    else:
        pytest.fail(f"{case} is accepted")


def assert_equal_reports(actual: Report, expected: Report, case: str) -> None:
    assert actual.losses == expected.losses, case
    for name, weight in joined([expected]).items():
        assert torch.equal(joined([actual])[name], weight), case


def with_random_damage(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    variants = [
        content[:start] + bytes([content[start] ^ (1 << draw.randrange(8))]) + content[start + 1 :],
        content[:start] + bytes(64) + content[start + 64 :],
        content[:start] + content[start + 8 :],
        content[:start],
    ]
    return draw.choice(variants)


def test_a_damaged_file_is_refused_by_name_or_gives_the_same_training(
    saved_path: Path, tmp_path: Path
) -> None:
    expected, path, num_refused = resumed(saved_path), tmp_path / "damaged.ckpt", 0
    for seed in range(8):
        path.write_bytes(with_random_damage(saved_path.read_bytes(), random.Random(seed)))
        refusal = ""
        try:
            assert_equal_reports(resumed(path), expected, f"seed {seed}")
        except CorruptDataError as error:
            refusal, num_refused = str(error), num_refused + 1
        assert not refusal or str(path) in refusal, f"seed {seed}: {refusal}"
    assert num_refused > 4


WRONG: tuple[Any, ...] = (None, "x", -1, 1.5, [], {}, b"b", True)


def paths_in(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to every value of a nest of dictionaries and lists."""
    if path:
        yield path
    if isinstance(values, dict):
        for key, value in values.items():
            yield from paths_in(value, (*path, key))
    if isinstance(values, list):
        for number, value in enumerate(values):
            yield from paths_in(value, (*path, number))


def holder_of(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        values = values[key]
    return values


def other_forms(tensor: Tensor) -> list[Tensor]:
    """Return tensors of other shapes or dtypes."""
    forms = [tensor[None], torch.zeros(0), tensor.to(torch.complex128)]
    return [*forms, *([tensor.flatten()[:-1], torch.tensor(1.0)] if tensor.dim() > 1 else [])]


def edit_randomly(values: dict[str, Any], draw: random.Random) -> str:
    """Delete a value, or replace it by one of another kind or shape; return its path.

    States of parameters and of schedulers stay, as Lightning itself allows them to be missing.
    """
    may_be_missing = [("optimizer_states", 0, "state"), ("lr_schedulers",)]
    paths = [path for path in paths_in(values) if path[:-1] not in may_be_missing]
    top = draw.choice(sorted({path[0] for path in paths}))
    path = draw.choice([path for path in paths if path[0] == top])
    holder, key = holder_of(values, path), path[-1]
    if isinstance(holder[key], Tensor):
        holder[key] = draw.choice(other_forms(holder[key]))
    elif draw.random() < 0.5:
        del holder[key]
    else:
        is_number = isinstance(holder[key], (int, float))
        # Another number of the same type may be a valid value.
        holder[key] = draw.choice(WRONG[:2] + WRONG[4:] if is_number else WRONG)
    return str(path)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_random_edits_are_refused_or_change_nothing(saved_path: Path, tmp_path: Path) -> None:
    expected, values = resumed(saved_path), torch.load(saved_path, weights_only=True)
    path, num_refused = tmp_path / "edited.ckpt", 0
    for seed in range(12):
        edited = copy.deepcopy(values)
        case = f"seed {seed}: {edit_randomly(edited, random.Random(seed))}"
        torch.save(edited, path)
        try:
            report = resumed(path)
        except REFUSALS:
            num_refused += 1
        else:
            assert_equal_reports(report, expected, case)
    assert num_refused > 4


def fit_loop_of(values: dict[str, Any]) -> dict[str, Any]:
    loop: dict[str, Any] = values["loops"]["fit_loop"]
    return loop


def first_state(values: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = values["optimizer_states"][0]["state"][0]
    return state


#: Edits that reading refuses, and what the error says.
READ_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "callbacks": (lambda values: values.update(callbacks=b"x"), "callbacks must be a mapping"),
    "schedules": (lambda values: values.update(lr_schedulers=1), "lr_schedulers must be a list"),
    "epoch": (lambda values: values.update(epoch=-1), "epoch must be a whole number"),
    "optimizers": (lambda values: values.update(optimizer_states=[-1]), "a list of torch optimizer states"),
    "state": (lambda values: first_state(values).update(exp_avg=1.5), "optimizer_states must be"),
    "step": (lambda values: first_state(values).update(step=None), "optimizer_states must be"),
    "numbers": (
        lambda values: values["optimizer_states"][0]["param_groups"][0]["params"].append(0), "unique parameter numbers",
    ),
    "count": (lambda values: fit_loop_of(values)["epoch_progress"]["total"].update(completed="x"), "loops must be"),
    "current": (lambda values: fit_loop_of(values)["epoch_progress"].pop("current"), "loops must be"),
    "optimizer of a loop": (
        lambda values: fit_loop_of(values)["epoch_loop.automatic_optimization.optim_progress"].update(optimizer=None),
        "loops must be",
    ),
}  # fmt: skip


def optimizer_of(values: dict[str, Any]) -> dict[str, Any]:
    return values["optimizer_states"][0]


def first_matrix(values: dict[str, Any]) -> dict[str, Any]:
    states = optimizer_of(values)["state"].values()
    return next(state for state in states if state["exp_avg"].dim() == 2)


def replace_moment(values: dict[str, Any], function: Any) -> None:
    state = first_matrix(values)
    state["exp_avg"] = function(state["exp_avg"])


def all_moments(values: dict[str, Any], function: Any) -> None:
    for state in optimizer_of(values)["state"].values():
        state["exp_avg_sq"] = function(state["exp_avg_sq"])


#: Edits that resuming refuses.
RESUME_EDITS: dict[str, tuple[Any, str]] = {
    "a moment is missing": (lambda values: first_matrix(values).pop("exp_avg_sq"), "'exp_avg_sq' of 'model"),
    "a moment is a number": (lambda values: replace_moment(values, torch.sum), "'exp_avg' of 'model.*other parameter"),
    "a moment is flat": (lambda values: replace_moment(values, torch.flatten), "'exp_avg' of 'model.*other parameter"),
    "a moment is of integers": (lambda values: replace_moment(values, Tensor.long), "'exp_avg' of 'model.*other param"),
    "all moments are flat": (
        lambda values: all_moments(values, lambda moment: moment.flatten()[None]), "must be (like|shaped like) its",
    ),
    "a second optimizer": (
        lambda values: values["optimizer_states"].append(copy.deepcopy(optimizer_of(values))), "2 were saved, ",
    ),
    "no base rates": (lambda values: values["lr_schedulers"][0].update(base_lrs=[]), "must be a list of 1 rate"),
    "no count of steps": (lambda values: values["lr_schedulers"][0].pop("last_epoch"), "last_epoch is None and must"),
    "no factors of rates": (lambda values: values["lr_schedulers"][0].pop("lr_lambdas"), "lr_lambdas is None and must"),
    "no version": (lambda values: values.pop("pytorch-lightning_version"), "pytorch-lightning_version is None"),
    "no loops": (lambda values: values.pop("loops"), "loops is None and must be"),
    "no schedules": (lambda values: values.pop("lr_schedulers"), "lr_schedulers is missing"),
    "no loop": (lambda values: values["loops"].pop("fit_loop"), "loops.fit_loop has no complete counts"),
    "no counts of batches": (
        lambda values: fit_loop_of(values).pop("epoch_loop.batch_progress"), "no complete counts 'epoch_loop.batch_progr",
    ),
    "half of the counts": (
        lambda values: fit_loop_of(values)["epoch_progress"]["current"].pop("completed"), "no complete counts 'epoch_pr",
    ),
}  # fmt: skip


def test_edited_values_are_refused_by_name(saved_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "edited.ckpt"
    check_values(torch.load(saved_path, weights_only=True), "sound")
    for read, edits in ((read_single_file, READ_EDITS), (resumed, RESUME_EDITS)):
        for name, (edit, words) in edits.items():
            values = torch.load(saved_path, weights_only=True)
            edit(values)
            torch.save(values, path)
            with refused(words, name):
                read(path)  # type: ignore[operator]


# ---- load_from_checkpoint


class SmallNet(pl.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_loading_a_directory_is_refused_with_a_command_that_makes_it_loadable(
    tmp_path: Path,
) -> None:
    trainer, module = trainer_of(Job(strategy={}, precision="32-true", steps=1)), SmallNet()
    trainer.fit(module, DataLoader(torch.randn(4, 3), batch_size=2))
    best = tmp_path / "best.ckpt"
    trainer.save_checkpoint(best)
    for path in (str(best), best):
        with pytest.raises(CheckpointMismatchError, match="that MegatronStrategy saved") as caught:
            SmallNet.load_from_checkpoint(path)
        assert f"checkpoint consolidate {best} plain.ckpt --weights-only" in str(caught.value)
    consolidate(best, tmp_path / "plain.ckpt", weights_only=True)
    loaded = SmallNet.load_from_checkpoint(tmp_path / "plain.ckpt")
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    with pytest.raises(OSError, match="missing"):
        SmallNet.load_from_checkpoint(tmp_path / "missing.ckpt")
    with pytest.raises(IsADirectoryError):
        SmallNet.load_from_checkpoint(tmp_path)


def test_lightning_loads_by_the_replaced_function_which_is_replaced_once() -> None:
    assert "checkpoint = pl_load(checkpoint_path, " in inspect.getsource(
        saving._load_from_checkpoint
    )
    reader = saving.pl_load
    install_directory_check()
    assert saving.pl_load is reader
