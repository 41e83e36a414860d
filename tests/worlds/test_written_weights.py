"""Weights that hooks and callbacks write, load, average or unfreeze are those of one process, or the
write is refused with its line.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import MODEL
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.fits import Job, Regress, Report, Vectors, joined, loader_of, run_job, trainer_of
from tests.oracles import assert_equal
from tests.world import run_world

TP: dict[str, Any] = {
    "tp": 2,
    "tensor_parallel_plan": {"*.up": "column", "*.down": "row", "net.last": "column_gather"},
}
PP: dict[str, Any] = {"pp": 2, "pipeline_plan": {"net.blocks": "blocks"}}
LAYOUTS = {"tp": TP, "pp": PP}
Act = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Blocks between modules and a parameter of the first stage and a module of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6).requires_grad_(False).eval())
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, first: Any = None, last: Any = None) -> Tensor:
        return (last or self.last)(self.blocks((first or self.first)(x) + self.shift))


def plain(model: Any, strategy: Any = None, **options: Any) -> Job:
    """Return a fit of two epochs of two batches."""
    trainer = {"max_epochs": 2, "gradient_clip_val": None, **options.pop("trainer", {})}
    data = partial(Vectors, num_samples=16)
    return Job(model, strategy, steps=-1, data=data, trainer=trainer, **options)


# ---- hooks of the module before the training


class WritesOnce(Regress):
    """Write all weights in a hook, and keep a number that is drawn afterwards."""

    def __init__(self, hook: str, act: Act) -> None:
        super().__init__(Net)
        setattr(self, hook, self.write)
        self.act, self.outcomes = act, {"next": 0.0}

    def write(self) -> None:
        torch.manual_seed(5)
        self.act(self)
        self.outcomes["next"] = float(torch.rand(()))


def each(draw: Callable[[Tensor], Any], smallest_dim: int = 1) -> Act:
    """Return a function that draws all weights with as many dimensions."""
    return lambda module: [draw(p) for p in module.parameters() if p.dim() >= smallest_dim]


def load_full(module: nn.Module, **others: Tensor) -> None:
    """Load the state of an undivided network, and other tensors."""
    module.load_state_dict(Net().double().state_dict(prefix="net.") | others)


def load_copy(module: nn.Module) -> None:
    """Load what the module has, from a copy that a hook made."""
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})


def load_part(module: Any) -> None:
    module.net.blocks[1].up.load_state_dict(nn.Linear(8, 12).double().state_dict())


DRAWN: dict[str, tuple[dict[str, Any], str, Act]] = {
    "normal_": (TP, "on_fit_start", each(lambda p: nn.init.normal_(p, std=0.2))),
    "keywords": (TP, "on_fit_start", each(lambda p: nn.init.uniform_(tensor=p, a=-0.2, b=0.2))),
    "kaiming": (TP, "on_train_start", each(nn.init.kaiming_uniform_, 2)),
    "data": (TP, "on_fit_start", each(lambda p: p.data.normal_(0.0, 0.2))),
    "no gradients": (TP, "on_train_start", torch.no_grad()(each(lambda p: p.uniform_(-0.2, 0.2)))),
    "load": (TP, "on_fit_start", load_full),
    "load a part": (TP, "on_train_start", load_part),
    "load into stages": (PP, "on_fit_start", load_full),
    "load a part of a stage": (PP, "on_train_start", load_part),
    "load a copy": (PP, "on_train_start", load_copy),
}
_NOT_DRAWN: dict[str, tuple[dict[str, Any], Act, str]] = {
    "xavier": (TP, each(nn.init.xavier_uniform_, 2), r"'net\S+up.weight' .*cut over tp \(2\)"),
    "orthogonal": (TP, each(nn.init.orthogonal_, 2), r"'net\S+up.weight' .*cut over tp \(2\)"),
    "stages": (PP, each(nn.init.normal_), r"'net\S+' .*with pp \(2\) .*not those of one process"),
}
#: Names that no stage has, each next to a name of one stage.
_WRONG = (
    "net.blocks.0.up.weights",
    "net.blocks.2.up.weight",
    "net.first.0.scale",
    "net.last.scale",
)
REFUSED_DRAWS: dict[str, tuple[dict[str, Any], Act, str]] = {
    **{
        name: (
            layout,
            act,
            rf"test_written_weights.py:\d+ .*{words}.*Initialise weights in __init__",
        )
        for name, (layout, act, words) in _NOT_DRAWN.items()
    },
    **{
        name: (
            PP,
            partial(load_full, **{name: torch.ones(())}),
            rf'Unexpected key\(s\).*: "{name}"',
        )
        for name in _WRONG
    },
}


# ---- averages of parts


class Averaged(Regress):
    """Average a part of the network, validate with the average, and save all at the end.

    Args:
        when: Hook that makes the average.
        part: Name of the part.
        uses: Whether validation calls the average in place of the part.
        updates: Name of the part that updates the average; None means the part itself.
        is_listed: Whether the average is in a list.
    """

    def __init__(
        self, when: str, part: str, uses: bool, updates: str | None = None, is_listed: bool = False
    ) -> None:
        super().__init__(Net)
        self.when, self.part, self.uses, self.updates = when, part, uses, updates or part
        self.is_listed, self.path = is_listed, ""
        self.outcomes: dict[str, list[float]] = {"validated": []}
        self.make("__init__")

    def make(self, when: str) -> None:
        if when == self.when and not hasattr(self, "average"):
            average = AveragedModel(self.named(self.part), avg_fn=get_ema_avg_fn(0.5))
            average.requires_grad_(False)
            self.average = nn.ModuleList([average]) if self.is_listed else average

    def named(self, name: str) -> Any:
        part: Any = self.net
        for key in name.split("."):
            part = part[int(key)] if key.isdigit() else getattr(part, key)
        return part

    @property
    def only_average(self) -> Any:
        return self.average[0] if self.is_listed else self.average

    def configure_model(self) -> None:
        self.make("configure_model")

    def on_fit_start(self) -> None:
        self.make("on_fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.only_average.update_parameters(self.named(self.updates))

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        parts = {self.part: self.only_average} if self.uses else {}
        self.log("validated", F.mse_loss(self.net(batch[0], **parts), batch[1]))

    def on_validation_end(self) -> None:
        self.outcomes["validated"].append(float(self.trainer.callback_metrics["validated"]))

    def on_train_end(self) -> None:
        if self.path:
            self.trainer.save_checkpoint(self.path)


#: Layout and arguments of the modules.
AVERAGED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "sharded": ("tp", ("__init__", "last", True)),
    "sharded later": ("tp", ("on_fit_start", "last", True)),
    "last stage": ("pp", ("__init__", "last", True)),
    "first stage": ("pp", ("configure_model", "first", True)),
    "last stage later": ("pp", ("on_fit_start", "last", False)),
    "first block": ("pp", ("__init__", "blocks.0", False)),
    "in a list": ("pp", ("__init__", "last", True, None, True)),
    "last block": ("pp", ("__init__", "blocks.1", False)),
}
NOT_AVERAGED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "called copy": (
        "pp", ("on_fit_start", "last", True),
        r"copy of 'net.last' cannot be called in a step with pp .*test_written_weights.py:\d+",
    ),
    "blocks": ("pp", ("__init__", "blocks", False), r"AveragedModel 'average' cannot average 'net.blocks' with pp"),
    "other module": ("tp", ("__init__", "last", False, "blocks.0.up"), r"'average' cannot average this module.*\(4, 8\).*\(6, 8\)"),
    "other stage": ("pp", ("__init__", "last", False, "first"), r"cannot average this module.*'average.module'"),
}  # fmt: skip


# ---- callbacks that write during the training


class Writes(pl.Callback):
    """Change weights at one of Lightning's hooks."""

    def __init__(self, hook: str, act: Act) -> None:
        setattr(self, hook, lambda trainer, module, *args: act(module))


def halve(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def halve_in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        halve(module)


def fill_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(0.25)


def replace_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def clamp_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def exchange_data(module: Any) -> None:
    """Exchange the memory of two parameters, and move the values of a third one."""
    first, second = (block.up.weight for block in module.net.blocks)
    first.data, second.data = second.data, first.data
    module.net.last.bias.data = module.net.last.bias.data + 0.1


def fill_from_vector(module: Any) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * vector, module.parameters())


def load_eighths(module: Any) -> None:
    state = module.state_dict()
    module.load_state_dict({name: torch.full_like(value, 0.125) for name, value in state.items()})


WRITES: dict[str, tuple[str, Act]] = {
    "halved after every step": ("on_train_batch_end", halve),
    "put under the parameters when the training starts": ("on_train_start", replace_data),
    "loaded when an epoch starts": ("on_train_epoch_start", load_eighths),
    "halved before the optimizer steps": ("on_before_optimizer_step", halve),
    "clipped through .data after every step": ("on_train_batch_end", clamp_data),
    "filled through .data when an epoch starts": ("on_train_epoch_start", fill_data),
    "put under the parameters after every step": ("on_train_batch_end", replace_data),
    "exchanged after every step": ("on_train_batch_end", exchange_data),
    "exchanged before the optimizer steps": ("on_before_optimizer_step", exchange_data),
    "taken from a vector after every epoch": ("on_train_epoch_end", fill_from_vector),
    "clipped through .data before gradients are forgotten": ("on_before_zero_grad", clamp_data),
    "halved in inference mode": ("on_train_batch_start", halve_in_inference_mode),
}
#: Writes that two data ranks test, too.
ON_DATA_RANKS = (
    *("halved after every step", "clipped through .data after every step"),
    *("put under the parameters after every step", "exchanged after every step"),
)


def writing(name: str, strategy: Any = None, precision: str = "64-true") -> Job:
    callbacks = lambda: [Writes(*WRITES[name])]  # noqa: E731
    return plain(partial(Regress, Net), strategy, callbacks=callbacks, precision=precision)


class HalfTrained(Regress):
    """Train all but the first module, until a callback adds it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.first[0], optimizer, lr=0.02)


def tuning(strategy: Any, precision: Any, folder: Path | None, resume: str | None = None) -> Job:
    """Return a fit of three epochs of which the first does not train all; save after each."""

    def callbacks() -> list[pl.Callback]:
        saver = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        return [Finetuning(), *([saver] if folder else [])]

    trainer = {"max_epochs": 3, "enable_checkpointing": folder is not None}
    return plain(
        partial(HalfTrained, Net), strategy, callbacks=callbacks, precision=precision, trainer=trainer, resume=resume,
    )  # fmt: skip


class Adversaries(Regress):
    """A step of one part leaves gradients in the other, which must be cleared."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(-self.net(batch[0]).mean())
        first.step()
        second.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        second.step()
        return loss

    def configure_optimizers(self) -> Any:
        parts = (self.net.blocks, self.net.last)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


#: Fits on two data ranks.
DATA: dict[str, Job] = {
    **{name: writing(name, {"bucket_size": 10}) for name in ON_DATA_RANKS},
    **{f"{name}, half": writing(name, {"bucket_size": 10}, "bf16-mixed") for name in ON_DATA_RANKS},
    "finetuned": tuning({"bucket_size": 10}, "64-true", None),
    "finetuned, half": tuning({"bucket_size": 10}, "bf16-mixed", None),
    "adversaries": plain(partial(Adversaries, Net), {"microbatch_size": "batch"}),
}


# ---- world


def outcome(job: Job, size: int) -> Report | str:
    try:
        return run_job(job, size)
    except (ValueError, RuntimeError, AssertionError) as error:
        notes = getattr(error, "__notes__", [])
        return " ".join([f"{type(error).__name__}: {error}", *notes])


def averaging(arguments: tuple[Any, ...], path: str, strategy: Any = None) -> tuple[Job, Averaged]:
    module = Averaged(*arguments)
    module.path = path
    validation = partial(Vectors, num_samples=8)
    return plain(lambda: module, strategy, validation=validation), module


def saved_path(folder: Path, name: str, arguments: tuple[Any, ...]) -> str:
    # What a hook creates has no known place in a checkpoint.
    return str(folder / name) if arguments[0] != "on_fit_start" else ""


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    averages = {}
    for name, (layout, arguments, *_) in {**AVERAGED, **NOT_AVERAGED}.items():
        path = saved_path(folder, name, arguments)
        averages[name] = outcome(averaging(arguments, path, LAYOUTS[layout])[0], size)
    return {
        "drawn": {
            name: outcome(plain(partial(WritesOnce, hook, act), layout), size)
            for name, (layout, hook, act) in DRAWN.items()
        },
        "refused": {
            name: outcome(plain(partial(WritesOnce, "on_fit_start", act), layout), size)
            for name, (layout, act, _) in REFUSED_DRAWS.items()
        },
        "averages": averages,
        "data": {name: outcome(job, size) for name, job in DATA.items()},
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, list[Any]]]]:
    folder = tmp_path_factory.mktemp("written")
    ranks = run_world(two_ranks, 2, folder)
    return folder, {
        kind: {name: [rank[kind][name] for rank in ranks] for name in ranks[0][kind]}
        for kind in ranks[0]
    }


def check_refusals(cases: Mapping[str, tuple[Any, ...]], results: Mapping[str, list[Any]]) -> None:
    for name, (*_, words) in cases.items():
        for message in results[name]:
            assert isinstance(message, str), f"{name} is not refused"
            assert re.search(words, message), f"{name}: {message}"


def distance(actual: Any, expected: Report) -> float:
    """Return the largest difference of final weights; one report or those of all ranks."""
    reports = actual if isinstance(actual, list) else [actual]
    weights, others = joined(reports), joined([expected])
    return max(float((weights[name].double() - others[name]).abs().max()) for name in others)


@cache
def untouched() -> Report:
    return run_job(plain(partial(Regress, Net)))


def test_hooks_draw_and_load_sharded_weights_as_in_one_process_or_are_refused(world: Any) -> None:
    results = world[1]
    for name, (_, hook, act) in DRAWN.items():
        twin = run_job(plain(partial(WritesOnce, hook, act)))
        for report in results["drawn"][name]:
            assert isinstance(report, Report), f"{name}: {report}"
            assert report.losses == pytest.approx(twin.losses, rel=1e-10), name
            assert report.outcomes == twin.outcomes, f"{name}: the next random number"
        weights, expected = joined(results["drawn"][name]), joined([twin])
        for key, weight in expected.items():
            assert_equal(weights[key], weight, f"{name}: {key}")
    check_refusals(REFUSED_DRAWS, results["refused"])


def test_averages_of_parts_equal_those_of_one_process_or_are_refused(world: Any) -> None:
    folder, results = world
    for name, (_, arguments) in AVERAGED.items():
        job, module = averaging(arguments, "")
        twin = run_job(job)
        for report in results["averages"][name]:
            assert isinstance(report, Report), f"{name}: {report}"
            assert report.losses == pytest.approx(twin.losses, rel=1e-10), name
            expected = pytest.approx(twin.outcomes["validated"], rel=1e-10)
            assert report.outcomes["validated"] == expected, name
        path = saved_path(folder, name, arguments)
        if path:
            saved = read_full(path)
            saved = {k.removeprefix(MODEL): v for k, v in saved.items() if k.startswith(MODEL)}
            assert saved.keys() == module.state_dict().keys(), name
            for key, tensor in module.state_dict().items():
                assert_equal(saved[key].double(), tensor.double(), f"{name}: {key}")
    check_refusals(NOT_AVERAGED, results["averages"])


@pytest.mark.parametrize("name", WRITES)
def test_training_continues_from_weights_that_callbacks_write(name: str) -> None:
    twin = run_job(writing(name))
    assert distance(twin, untouched()) > 0.05
    whole = {"microbatch_size": "batch"}
    assert distance(run_job(writing(name, whole)), twin) < 1e-10
    assert distance(run_job(writing(name, whole, "bf16-mixed")), twin) < 0.03


def test_two_data_ranks_write_unfreeze_and_clear_gradients_as_one_process(world: Any) -> None:
    for name, job in DATA.items():
        twin = run_job(replace(job.twin(), precision="64-true"))
        assert distance(world[1]["data"][name], twin) < (0.03 if "half" in name else 1e-10), name


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_swapped_weights_are_validated_saved_and_swapped_back(
    precision: Any, tmp_path: Path
) -> None:
    """A callback puts other weights under the parameters during validation."""

    class Swaps(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            self.weights = {name: weight.data for name, weight in pl_module.named_parameters()}
            for parameter in pl_module.parameters():
                parameter.data = torch.full_like(parameter, 0.125)

        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")
            for name, parameter in pl_module.named_parameters():
                parameter.data = self.weights[name]

    job = plain(
        partial(Regress, Net), validation=Vectors, callbacks=lambda: [Swaps()], trainer={"num_sanity_val_steps": 0},
    )  # fmt: skip
    twin, ours = run_job(job), run_job(replace(job, strategy={}, precision=precision))
    assert distance(ours, twin) < (1e-10 if precision == "64-true" else 0.03)
    assert ours.metrics["val_loss"] == pytest.approx(twin.metrics["val_loss"], rel=0.01)
    tensors = read_full(tmp_path / "1.ckpt")
    saved = {
        k: v for k, v in tensors.items() if k.startswith(MODEL) and k.endswith(("weight", "bias"))
    }
    assert saved
    assert all(bool((tensor == 0.125).all()) for tensor in saved.values())


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda net: setattr(net.last.bias, "data", torch.zeros(3)),
            r"'net.last.bias' was \(8,\) and is \(3,\) after an assignment to parameter.data",
        ),
        (
            lambda net: setattr(net.blocks[0].up.weight, "data", net.blocks[1].up.weight.data),
            "share their memory after an assignment to parameter.data",
        ),
    ],
)
def test_parameter_data_that_cannot_be_trained_is_refused_by_name(act: Act, words: str) -> None:
    writes = Writes("on_train_batch_end", lambda module: act(module.net))
    with pytest.raises(UnsupportedError, match=words):
        run_job(plain(partial(Regress, Net), {}, callbacks=lambda: [writes]))
    assert "data" not in vars(nn.Parameter)


def test_small_updates_of_weights_that_hooks_only_read_add_up() -> None:
    """Updates far below the resolution of bfloat16 add up in the main parameters, also if a hook
    reads and copies the parameters.
    """

    class Slow(Regress):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

        def on_train_batch_end(self, *_: Any) -> None:
            assert all(parameter.clone().isfinite().all() for parameter in self.parameters())

    trainer = trainer_of(plain(None, {}, precision="bf16-mixed"))
    trainer.fit(Slow(Net), loader_of(Vectors(num_samples=16), 8, trainer))
    assert isinstance(trainer.strategy, MegatronStrategy)
    start, moved = Regress(Net).state_dict(), joined([run_job(plain(partial(Slow, Net)))])
    for name, main_slice in trainer.strategy.run.state.main.slices.items():
        expected = (moved[name] - start[name]).norm()
        began = start[name].to(torch.bfloat16).float()
        change = main_slice.main.detach().view_as(began) - began
        assert float(change.norm() / expected) == pytest.approx(1, abs=0.1), name


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_parameters_that_base_finetuning_unfreezes_are_trained_and_resumed(
    precision: Any, tmp_path: Path
) -> None:
    twin = run_job(tuning(None, "64-true", tmp_path / "plain"))
    ours = run_job(tuning({}, precision, tmp_path / "ours"))
    tolerance = 1e-10 if precision == "64-true" else 0.03
    assert distance(ours, twin) < tolerance
    assert (
        distance(twin, run_job(plain(partial(HalfTrained, Net), trainer={"max_epochs": 3}))) > 0.01
    )
    for saved in ("epoch=0.ckpt", "epoch=1.ckpt"):
        # After the module was added, a resumed Lightning has its group, but freezes it again.
        again = run_job(tuning(None, "64-true", None, str(tmp_path / "plain" / saved)))
        resumed = run_job(tuning({}, precision, None, str(tmp_path / "ours" / saved)))
        assert distance(resumed, again) < tolerance, saved


def test_backward_of_an_unscaled_loss_is_refused_with_float16() -> None:
    class RawBackward(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss([part.half() for part in batch]).backward()

    options = {"plugins": [MegatronPrecision("16-mixed")]}
    job = plain(lambda: RawBackward(Net).half(), {}, trainer=options, precision=None)
    with pytest.raises(UnsupportedError, match="needs self.manual_backward"):
        run_job(job)
