"""Weights that hooks and callbacks write, load, average or unfreeze are those of one process, or the
write is refused with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_megatron.checkpoint import read_full
from lightning_megatron.checkpoint.consolidate import MODEL
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.fits import Job, Regress, Report, Vectors, joined, run_job
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
    "kaiming": (TP, "on_train_start", each(nn.init.kaiming_uniform_, 2)),
    "no gradients": (TP, "on_train_start", torch.no_grad()(each(lambda p: p.uniform_(-0.2, 0.2)))),
    "load": (TP, "on_fit_start", load_full),
    "load a part": (TP, "on_train_start", load_part),
    "load into stages": (PP, "on_fit_start", load_full),
    "load a copy": (PP, "on_train_start", load_copy),
}
REFUSED_DRAWS: dict[str, tuple[dict[str, Any], Act, str]] = {
    "orthogonal": (
        TP, each(nn.init.orthogonal_, 2),
        r"test_written_weights.py:\d+ .*'net\S+up.weight' .*cut over tp \(2\).*Initialise weights in __init__",
    ),
    "stages": (PP, each(nn.init.normal_), r"'net\S+' .*with pp \(2\) .*not those of one process"),
    # A name that no stage has, next to one of a stage.
    "names": (
        PP, partial(load_full, **{"net.blocks.2.up.weight": torch.ones(())}),
        r'Unexpected key\(s\).*: "net.blocks.2.up.weight"',
    ),
}  # fmt: skip


class Averaged(Regress):
    """Average a part of the network from the hook ``when`` on, validate with the average in its place if
    ``uses``, and save all at the end; the part ``updates`` updates the average.
    """

    def __init__(
        self, when: str, part: str, uses: bool, updates: str | None = None, is_listed: bool = False
    ) -> None:
        super().__init__(Net)
        self.when, self.part, self.uses, self.updates = when, part, uses, updates or part
        self.is_listed, self.path = is_listed, ""
        self.outcomes["validated"] = []
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
    "first stage": ("pp", ("configure_model", "first", True)),
    "first block": ("pp", ("__init__", "blocks.0", False)),
    "in a list": ("pp", ("__init__", "last", True, None, True)),
}
NOT_AVERAGED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "called copy": (
        "pp", ("on_fit_start", "last", True),
        r"copy of 'net.last' cannot be called in a step with pp .*test_written_weights.py:\d+",
    ),
    "blocks": ("pp", ("__init__", "blocks", False), r"AveragedModel 'average' cannot average 'net.blocks' with pp"),
    "other module": ("tp", ("__init__", "last", False, "blocks.0.up"), r"'average' cannot average this module.*\(4, 8\).*\(6, 8\)"),
}  # fmt: skip


class Writes(pl.Callback):
    """Change weights at one of Lightning's hooks."""

    def __init__(self, hook: str, act: Act) -> None:
        setattr(self, hook, lambda trainer, module, *args: act(module))


def halve(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


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


def halve_in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        halve(module)


def load_eighths(module: Any) -> None:
    state = module.state_dict()
    module.load_state_dict({name: torch.full_like(value, 0.125) for name, value in state.items()})


WRITES: dict[str, tuple[str, Act]] = {
    "halved after every step": ("on_train_batch_end", halve),
    "put under the parameters when the training starts": ("on_train_start", replace_data),
    "loaded when an epoch starts": ("on_train_epoch_start", load_eighths),
    "halved before the optimizer steps": ("on_before_optimizer_step", halve),
    "clipped through .data after every step": ("on_train_batch_end", clamp_data),
    "taken from a vector after every epoch": ("on_train_epoch_end", fill_from_vector),
    "halved in inference mode": ("on_train_batch_start", halve_in_inference_mode),
    "exchanged after every step": ("on_train_batch_end", exchange_data),
}
#: Writes that two data ranks test, too.
ON_DATA_RANKS = ("clipped through .data after every step", "exchanged after every step")


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


#: Fits on two data ranks.
DATA: dict[str, Job] = {
    **{name: writing(name, {"optimizer.bucket_size": 10}) for name in ON_DATA_RANKS},
    **{
        f"{name}, half": writing(name, {"optimizer.bucket_size": 10}, "bf16-mixed")
        for name in ON_DATA_RANKS
    },
    "finetuned": tuning({"optimizer.bucket_size": 10}, "64-true", None),
    "finetuned, half": tuning({"optimizer.bucket_size": 10}, "bf16-mixed", None),
}


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


def two_ranks(rank: int, size: int, folder: Path) -> dict[str, Report | str]:
    jobs = dict(DATA)
    for name, (layout, arguments, *_) in {**AVERAGED, **NOT_AVERAGED}.items():
        jobs[name] = averaging(arguments, str(folder / name), LAYOUTS[layout])[0]
    for name, (layout, hook, act) in DRAWN.items():
        jobs[name] = plain(partial(WritesOnce, hook, act), layout)
    for name, (layout, act, _) in REFUSED_DRAWS.items():
        jobs[name] = plain(partial(WritesOnce, "on_fit_start", act), layout)
    return {name: outcome(job, size) for name, job in jobs.items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("written")
    ranks = run_world(two_ranks, 2, folder)
    return folder, {name: [rank[name] for rank in ranks] for name in ranks[0]}


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


def test_hooks_draw_and_load_sharded_weights_as_in_one_process_or_are_refused(world: Any) -> None:
    results = world[1]
    for name, (_, hook, act) in DRAWN.items():
        twin = run_job(plain(partial(WritesOnce, hook, act)))
        for report in results[name]:
            assert isinstance(report, Report), f"{name}: {report}"
            assert report.losses == pytest.approx(twin.losses, rel=1e-10), name
            assert report.outcomes == twin.outcomes, f"{name}: the next random number"
        weights, expected = joined(results[name]), joined([twin])
        for key, weight in expected.items():
            assert_equal(weights[key], weight, f"{name}: {key}")
    check_refusals(REFUSED_DRAWS, results)


def test_averages_of_parts_equal_those_of_one_process_or_are_refused(world: Any) -> None:
    folder, results = world
    for name, (_, arguments) in AVERAGED.items():
        job, module = averaging(arguments, "")
        twin = run_job(job)
        for report in results[name]:
            assert isinstance(report, Report), f"{name}: {report}"
            assert report.losses == pytest.approx(twin.losses, rel=1e-10), name
            torch.testing.assert_close(report.outcomes, twin.outcomes, rtol=1e-10, atol=0.0)
        saved = read_full(str(folder / name))
        saved = {k.removeprefix(MODEL): v for k, v in saved.items() if k.startswith(MODEL)}
        assert saved.keys() == module.state_dict().keys(), name
        for key, tensor in module.state_dict().items():
            assert_equal(saved[key].double(), tensor.double(), f"{name}: {key}")
    check_refusals(NOT_AVERAGED, results)


@pytest.mark.parametrize("name", WRITES)
def test_training_continues_from_weights_that_callbacks_write(name: str) -> None:
    twin = run_job(writing(name))
    assert distance(twin, run_job(plain(partial(Regress, Net)))) > 0.05
    whole = {"microbatch_size": "batch"}
    assert distance(run_job(writing(name, whole)), twin) < 1e-10
    assert distance(run_job(writing(name, whole, "bf16-mixed")), twin) < 0.03


def test_two_data_ranks_write_and_unfreeze_as_one_process(world: Any) -> None:
    for name, job in DATA.items():
        twin = run_job(replace(job.twin(), precision="64-true"))
        assert distance(world[1][name], twin) < (0.03 if "half" in name else 1e-10), name


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_swapped_weights_are_validated_saved_and_swapped_back(precision, tmp_path):
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
    saved = read_full(tmp_path / "1.ckpt")
    for name, _ in Regress(Net).named_parameters():
        assert bool((saved[f"{MODEL}{name}"] == 0.125).all()), name


def test_parameter_data_that_cannot_be_trained_is_refused_by_name() -> None:
    def refuse(act: Act, words: str) -> None:
        writes = Writes("on_train_batch_end", lambda module: act(module.net))
        with pytest.raises(UnsupportedError, match=words):
            run_job(plain(partial(Regress, Net), {}, callbacks=lambda: [writes]))
        assert "data" not in vars(nn.Parameter)

    refuse(
        lambda net: setattr(net.last.bias, "data", torch.zeros(3)),
        r"'net.last.bias' was \(8,\) and is \(3,\) after an assignment to parameter.data",
    )
    refuse(
        lambda net: setattr(net.blocks[0].up.weight, "data", net.blocks[1].up.weight.data),
        "share their memory after an assignment to parameter.data",
    )


def test_parameters_that_base_finetuning_unfreezes_are_trained_and_resumed(tmp_path: Path) -> None:
    twin = run_job(tuning(None, "64-true", tmp_path / "plain"))
    for precision, tolerance in (("64-true", 1e-10), ("bf16-mixed", 0.03)):
        folder = tmp_path / precision
        assert distance(run_job(tuning({}, precision, folder)), twin) < tolerance
        for saved in ("epoch=0.ckpt", "epoch=1.ckpt"):
            # After the module was added, a resumed Lightning has its group, but freezes it again.
            again = run_job(tuning(None, "64-true", None, str(tmp_path / "plain" / saved)))
            resumed = run_job(tuning({}, precision, None, str(folder / saved)))
            assert distance(resumed, again) < tolerance, saved


def test_backward_of_an_unscaled_loss_is_refused_with_float16() -> None:
    class RawBackward(Regress):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss([part.half() for part in batch]).backward()

    options = {"plugins": [MegatronPrecision("16-mixed")]}
    job = plain(lambda: RawBackward(Net).half(), {}, trainer=options, precision=None)
    with pytest.raises(UnsupportedError, match="needs self.manual_backward"):
        run_job(job)
