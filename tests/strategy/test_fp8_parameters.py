"""Fits whose weights are stored in 8 bits: reads, writes, ends of fits, checkpoints, refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import (
    FP8,
    HuggingFaceCausalLM,
    MegatronStrategy,
    MemoryReport,
    ParallelPlanError,
)
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import NonFiniteError, UnsupportedError
from lightning_megatron.graphs.tape import TapeBackend
from lightning_megatron.layers.fp8.eight_bit_parameter import EightBitParameter
from lightning_megatron.strategy.logs.run_table import _cast_choices
from lightning_megatron.training.eight_bit_buffer import EightBitBuffer
from lightning_megatron.training.main_parameters import MainParameters
from tests.fits import BATCH, GPT2, Job, Tokens, run_job
from tests.strategy.graph_fits import fit, strategy_of
from tests.strategy.tiny import TinyLM, loader
from tests.tiny_llama import rows, save_tiny_llama

IN_FP8: dict[str, Any] = {"fp8": FP8(emulate=True, parameters="fp8"), "microbatch_size": 1}
DELAYED = FP8("delayed", history=5, emulate=True, parameters="fp8")
PLAIN: dict[str, Any] = {"microbatch_size": 1}
#: Elements of the weights of the linear layers: queries, keys and values; output; up; down.
ELEMENTS = 2 * 16 * 16 * (3 + 1 + 4 + 4)
NAME = "net.layers.0.mlp.down.weight"


def trainer_of(
    layout: dict[str, Any], steps: int, callbacks: tuple[Callback, ...] = (), **options: Any
) -> Trainer:
    seed_everything(3, verbose=False)
    strategy = MegatronStrategy(**layout, check_microbatches=False)
    if layout.get("cuda_graphs") is not None:
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    return Trainer(
        **{"precision": "bf16-mixed", "accelerator": "cpu", "devices": 1, **options},
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        max_steps=steps,
    )


def trained(
    module: TinyLM,
    layout: dict[str, Any],
    steps: int,
    callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> tuple[list[float], MainParameters]:
    """Fit up to a number of steps; return the losses and the main parameters."""
    losses = Losses()
    trainer = trainer_of(layout, steps, (losses, *callbacks), **options)
    trainer.fit(module, loader(16))
    return losses.losses, strategy_of(trainer).run.state.main


class Losses(Callback):
    """Record the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class InspectAfterStepTwo(Callback):
    """Call a function with the module and the main parameters after the second step."""

    def __init__(self, inspect: Callable[[TinyLM, MainParameters], Any]) -> None:
        self.inspect = inspect
        self.result: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.result = self.inspect(module, strategy_of(trainer).run.state.main)


def inspected(inspect: Callable[[TinyLM, MainParameters], Any], **options: Any) -> Any:
    inspector = InspectAfterStepTwo(inspect)
    trained(TinyLM(), IN_FP8, 3, callbacks=(inspector,), **options)
    return inspector.result


def weight_of(module: TinyLM) -> nn.Parameter:
    return dict(module.named_parameters())[NAME]


# ---- reads and writes of user code


def test_reads_give_the_values_that_matrix_products_use() -> None:
    def inspect(module: TinyLM, main: MainParameters) -> Any:
        weight = weight_of(module)
        assert type(weight) is EightBitParameter
        assert (weight.dtype, weight.shape, weight.requires_grad) == (
            torch.bfloat16,
            (16, 64),
            True,
        )
        with torch.no_grad():
            read = weight.float(), float(weight.norm()), torch._foreach_norm([weight])[0]
        state = module.state_dict()[NAME]
        copied = copy.deepcopy(module)
        assert type(weight_of(copied)) is nn.Parameter
        return (
            *read,
            state.float(),
            weight_of(copied).detach().float(),
            main.main(NAME).detach().clone(),
        )

    values, norm, norms, state, copied, main = inspected(inspect)
    largest = main.abs().max()
    steps = main * (448 / largest)
    expected = (steps.to(torch.float8_e4m3fn).float() * (largest / 448)).bfloat16().float()
    assert torch.equal(values, expected)
    assert torch.equal(state, expected)
    assert torch.equal(copied, expected)
    assert not torch.equal(values, main.bfloat16().float())
    assert norm == pytest.approx(float(expected.norm()), rel=0.01)
    assert float(norms) == pytest.approx(norm)


def _assign_data(weight: nn.Parameter) -> None:
    weight.data = torch.zeros_like(weight)


def _assign_item(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] = 1.0


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: torch.no_grad()(weight.mul_)(0.9),
    "by data": lambda weight: weight.data.mul_(0.9),
    "detached": lambda weight: weight.detach().zero_(),
    "data": _assign_data,
    "item": _assign_item,
    "initialized": nn.init.zeros_,
    "several": lambda weight: torch.no_grad()(torch._foreach_mul_)([weight.data], 2.0),
    "output": lambda weight: torch.add(torch.ones(16, 64), 1.0, out=weight.data),
    "read with gradients": lambda weight: weight.square().sum(),
}


def test_writes_to_weights_and_reads_with_gradients_are_refused() -> None:
    def inspect(module: TinyLM, main: MainParameters) -> dict[str, str]:
        messages = {}
        for name, write in WRITES.items():
            with pytest.raises(UnsupportedError) as error:
                write(weight_of(module))
            messages[name] = str(error.value)
        # The copy cannot be written, so no write is lost.
        with pytest.raises(RuntimeError, match="inference tensor"):
            weight_of(module).detach().view(-1).mul_(2)
        with pytest.raises(RuntimeError, match="fp8.parameters"):
            module.load_state_dict(module.state_dict())
        return messages

    inspector = InspectAfterStepTwo(inspect)
    plain = trained(TinyLM(), IN_FP8, 3)
    losses = trained(TinyLM(), IN_FP8, 3, callbacks=(inspector,))
    assert inspector.result.keys() == WRITES.keys()
    assert all("cannot be written during a fit" in message for message in inspector.result.values())
    assert losses[0] == plain[0], "nothing was written"


def test_a_penalty_on_the_weights_in_the_loss_is_refused() -> None:
    class Penalized(TinyLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] + weight_of(self).square().sum()

    with pytest.raises(UnsupportedError, match="'square' with gradients"):
        trained(Penalized(), IN_FP8, 1)


# ---- ends of fits


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_weights_after_a_fit_are_cast_from_the_main_parameters(precision: Any) -> None:
    module = TinyLM()
    inspector = InspectAfterStepTwo(lambda module, main: StorageWeakRef(_bytes_of(main)))
    _, main = trained(module, IN_FP8, 3, (inspector,), precision=precision)
    assert inspector.result.expired(), "the bytes are freed"
    weight = weight_of(module)
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, main.main(NAME).detach().to(weight.dtype))
    assert not main.eight_bits.buffers


def _bytes_of(main: MainParameters) -> torch.UntypedStorage:
    return main.eight_bits.buffers[0].parameters.untyped_storage()


def test_a_checkpoint_evaluates_the_same_without_a_fit_as_after_the_fit(tmp_path: Path) -> None:
    module = TinyLM()
    trainer = trainer_of(IN_FP8, 2)
    trainer.fit(module, loader(16), loader(8, seed=5))
    trainer.save_checkpoint(tmp_path / "saved")
    (expected,) = trainer.validate(module, loader(8, seed=5), verbose=False)
    path = tmp_path / "saved"
    (actual,) = trainer_of(IN_FP8, 2).validate(
        TinyLM(), loader(8, seed=5), ckpt_path=path, verbose=False, weights_only=False
    )
    assert actual == expected


def test_a_second_fit_continues_from_unrounded_main_parameters() -> None:
    def main_weight(trainer: Trainer) -> Tensor:
        return strategy_of(trainer).run.state.main.main(NAME).detach().clone()

    class RecordStart(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            weights_at_start.append(main_weight(trainer))

    weights_at_start: list[Tensor] = []
    module = TinyLM()
    trainer = trainer_of(IN_FP8, 2, (RecordStart(),))
    trainer.fit(module, loader(16))
    weight_after_first_fit = main_weight(trainer)
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, loader(16))
    assert torch.equal(weights_at_start[1], weight_after_first_fit), (
        "nothing was rounded between the fits"
    )
    assert not torch.equal(weight_after_first_fit, weight_after_first_fit.bfloat16().float())
    assert not torch.equal(main_weight(trainer), weight_after_first_fit)


def test_a_failed_fit_leaves_ordinary_weights() -> None:
    class FailsAtSecondBatch(TinyLM):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise KeyError("stop here")

    module = FailsAtSecondBatch()
    with pytest.raises(KeyError, match="stop here"):
        trained(module, IN_FP8, 3)
    weight = weight_of(module)
    assert type(weight) is nn.Parameter
    with torch.no_grad():
        weight.mul_(2)
    assert bool(weight.isfinite().all())


# ---- checkpoints


def train(
    layout: dict[str, Any],
    steps: int,
    precision: Any,
    save: Path | None = None,
    resume: Path | None = None,
) -> list[float]:
    """Return the losses of a fit that may continue from a checkpoint and save one."""
    paths = {name: str(path) for name, path in (("save", save), ("resume", resume)) if path}
    job = Job(GPT2, layout, precision, steps, data=partial(Tokens, 5 * BATCH), **paths)
    return run_job(job).losses


def test_checkpoints_hold_main_parameters_and_load_with_and_without_fp8(tmp_path: Path) -> None:
    fp8_losses = train(IN_FP8, 3, "bf16-mixed", save=tmp_path / "fp8")
    train(PLAIN, 2, "bf16-mixed", save=tmp_path / "plain")
    losses_from_plain = train(IN_FP8, 3, "bf16-mixed", resume=tmp_path / "plain")
    assert losses_from_plain == pytest.approx(fp8_losses[2:], rel=0.01)
    losses_from_fp8 = train(PLAIN, 4, "bf16-mixed", resume=tmp_path / "fp8")
    assert len(losses_from_fp8) == 1
    assert losses_from_fp8[0] < fp8_losses[0]
    saved = OpenCheckpoint.open(tmp_path / "fp8")
    name = "state_dict.model.layers.0.mlp.down.weight"
    weight = saved.read_full([name])[name]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float()), "full precision"


def test_histories_of_scales_continue_when_the_type_of_weights_changes(tmp_path: Path) -> None:
    """Runs that cast weights resume from the histories of runs that store them, and vice versa."""
    stored = {**IN_FP8, "fp8": DELAYED}
    cast = {**IN_FP8, "fp8": replace(DELAYED, parameters=None)}
    for saved_layout, resumed_layout in ((stored, cast), (cast, stored)):
        name = "stored" if saved_layout is stored else "cast"
        expected = train(saved_layout, 5, "64-true", save=tmp_path / f"{name} 5")
        train(saved_layout, 2, "64-true", save=tmp_path / name)
        paths = {"resume": tmp_path / name, "save": tmp_path / f"{name}, other"}
        actual = train(resumed_layout, 5, "64-true", **paths)
        # Scales of 1 instead of scales from the history would lose most digits of the weights.
        assert actual == pytest.approx(expected[2:], rel=2e-3)
        histories = [histories_in(path) for path in (tmp_path / name, tmp_path / f"{name}, other")]
        assert histories[0].keys() == histories[1].keys() != set()
        for layer, before in histories[0].items():
            after = histories[1][layer]
            assert torch.equal(after[3:], before[:2]), "the steps before the checkpoint"
            assert bool((after[:5] > 0).all())
    actual = train(IN_FP8, 5, "64-true", resume=tmp_path / "stored")
    assert len(actual) == 3


def histories_in(path: Path) -> dict[str, Tensor]:
    """Return the histories of the scales in a checkpoint, by layer."""
    saved = OpenCheckpoint.open(path)
    names = [name for name in saved.tensors if name.startswith("fp8.")]
    return saved.read_full(names)


# ---- evaluation


def test_validation_losses_with_stored_weights_match_those_with_cast_weights() -> None:
    stored = fit(None, layout=IN_FP8, precision="bf16-mixed")
    cast = fit(None, layout={**IN_FP8, "fp8": FP8(emulate=True)}, precision="bf16-mixed")
    assert stored.losses[0] == cast.losses[0], "the first weights are the same in both types"
    assert len(stored.evaluated) == len(cast.evaluated) > 1
    assert stored.evaluated == pytest.approx(cast.evaluated, rel=0.01)
    # Without rounding to 16 bits, stored and cast weights have the same bytes.
    stored_wide = fit(None, layout=IN_FP8)
    cast_wide = fit(None, layout={**IN_FP8, "fp8": FP8(emulate=True)})
    assert stored_wide.evaluated == cast_wide.evaluated
    assert stored_wide.losses == cast_wide.losses


def test_hugging_face_models_generate_during_a_fit_and_are_saved_after_it(tmp_path: Path) -> None:
    class GenerateAndSave(Callback):
        """Generate and try to save during the fit."""

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step != 2:
                return
            prompt = rows[:1, :8]
            with torch.no_grad():
                texts.append(module.model.generate(prompt, max_new_tokens=4, do_sample=False))
                logits.append(module.model(prompt).logits[0, -1].argmax(-1))
            with pytest.raises(UnsupportedError, match="keeps '.*' in 8 bits during the fit"):
                module.model.save_pretrained(tmp_path / "inside")

    texts: list[Tensor] = []
    logits: list[Tensor] = []
    save_tiny_llama(tmp_path / "before")
    module = HuggingFaceCausalLM(str(tmp_path / "before"), learning_rate=1e-2, schedule="constant")
    trainer = trainer_of(IN_FP8, 3, (GenerateAndSave(),))
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]
    trainer.fit(module, DataLoader(samples, batch_size=4))
    assert texts[0].shape == (1, 12)
    assert texts[0][0, 8] == logits[0]
    assert not (tmp_path / "inside").exists()
    module.model.save_pretrained(tmp_path / "after")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    name = "model.layers.0.mlp.down_proj.weight"
    main = strategy_of(trainer).run.state.main
    expected = main.main(f"model.{name}").detach().bfloat16()
    assert torch.equal(loaded.state_dict()[name].bfloat16(), expected)


# ---- ways to step


class ByHand(TinyLM):
    """Module with manual optimization."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self(batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class ByLineSearch(TinyLM):
    """Module whose optimizer evaluates the loss several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("kind", [ByHand, ByLineSearch])
def test_manual_and_line_search_steps_with_stored_weights_match_those_with_casts(
    kind: type[TinyLM],
) -> None:
    """Without rounding to 16 bits, casts give the same results up to the order of sums."""
    losses = [
        trained(
            kind(),
            {**PLAIN, "fp8": FP8(emulate=True, parameters=parameters)},
            3,
            precision="64-true",
        )
        for parameters in ("fp8", None)
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-10, rel=0)
    assert len(set(losses[0][0])) == 3


def test_weights_that_are_not_finite_are_reported_without_reading_them() -> None:
    class InfiniteRate(TinyLM):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=float("inf"))

    with record_reads() as reads:
        with pytest.raises(NonFiniteError, match=r"the weight net.layers.0.attention.*\(nan\)"):
            trained(InfiniteRate(schedule=None), IN_FP8, 3, log_every_n_steps=1)
        # A failed fit computes the values of each weight once, at its end.
        assert sorted(reads) == sorted(set(reads))


def test_saving_during_a_fit_reads_no_weight_in_8_bits(tmp_path: Path) -> None:
    class SaveEveryStep(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")

    with record_reads() as reads:
        _, main = trained(TinyLM(), IN_FP8, 2, (SaveEveryStep(),))
    assert not reads
    saved = OpenCheckpoint.open(tmp_path / "2").read_full([f"state_dict.{NAME}"])
    assert torch.equal(saved[f"state_dict.{NAME}"], main.main(NAME).detach())


@contextmanager
def record_reads() -> Iterator[list[str]]:
    """Record the names of weights in 8 bits whose values are computed in the type of the run."""
    reads: list[str] = []
    compute_values = EightBitBuffer._numbers

    def record(self: EightBitBuffer, name: str) -> Tensor:
        reads.append(name)
        return compute_values(self, name)

    with patch.object(EightBitBuffer, "_numbers", record):
        yield reads


# ---- weights that are not stored in 8 bits


def test_frozen_weights_are_not_stored_in_8_bits() -> None:
    class PartlyFrozen(TinyLM):
        def configure_model(self) -> None:
            super().configure_model()
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("layers.0.attention" not in name and name != NAME)

    def inspect(module: TinyLM, main: MainParameters) -> set[str]:
        return {
            name
            for name, parameter in module.named_parameters()
            if isinstance(parameter, EightBitParameter)
        }

    module = PartlyFrozen()
    inspector = InspectAfterStepTwo(inspect)
    frozen = {
        name: is_trained
        for name, is_trained in requires_gradients(module).items()
        if not is_trained
    }
    losses, _ = trained(module, IN_FP8, 3, callbacks=(inspector,))
    assert frozen
    assert not inspector.result & frozen.keys()
    assert "net.layers.0.mlp.up.weight" in inspector.result
    assert len(set(losses)) == 3


def requires_gradients(module: TinyLM) -> dict[str, bool]:
    """Return whether each parameter requires gradients after the model is built."""
    duplicate = copy.deepcopy(module)
    trained(duplicate, PLAIN, 1)
    return {name: parameter.requires_grad for name, parameter in duplicate.named_parameters()}


# ---- memory report and run table


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_the_memory_report_counts_one_byte_per_weight_in_8_bits(microbatch_size: int) -> None:
    reports = []
    for parameters in ("fp8", None):
        report = MemoryReport(after_steps=1)
        settings = FP8(emulate=True, parameters=parameters)  # type: ignore[arg-type]
        layout = {"microbatch_size": microbatch_size, "fp8": settings}
        options: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 2}
        fit(None, layout=layout, callbacks=(report,), **options)
        reports += report.reports
    stored, cast = reports
    assert cast.held["parameters"] - stored.held["parameters"] == pytest.approx(ELEMENTS, rel=0.05)
    assert cast.estimate.parameters - stored.estimate.parameters == ELEMENTS
    assert stored.estimate.main_parameters == cast.estimate.main_parameters
    shares = microbatch_size == 1
    assert stored.estimate.casts == (ELEMENTS if shares else 0)
    assert cast.estimate.casts == (2 * ELEMENTS + 2 * 4 * 8 if shares else 0)


def test_the_run_table_shows_weights_in_8_bits() -> None:
    strategy = MegatronStrategy(**IN_FP8)
    (choice,) = _cast_choices(TinyLM(), strategy.options)
    assert (choice.subject, choice.value) == (
        "weights in 8 bits",
        "kept and gathered in 1 byte each",
    )
    assert choice.reason.endswith("transposed copies: one for a batch of several microbatches")
    module = TinyLM()
    module.automatic_optimization = False
    (choice,) = _cast_choices(module, strategy.options)
    assert choice.reason.endswith("transposed copies: one for each product")


# ---- refusals


def test_weights_in_8_bits_are_refused_with_other_recipes() -> None:
    recipe: Any = "rowwise"
    message = rf"needs recipe='tensorwise' or 'delayed': it is '{recipe}'"
    with pytest.raises(ParallelPlanError, match=message):
        FP8(recipe, parameters="fp8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 0}, "zero=0, which gathers no parameters"),
        ({"backend": "te"}, "backend 'te', which reads weights"),
    ],
)
def test_weights_in_8_bits_are_refused_with_zero_0_and_transformer_engine(
    options: dict[str, Any], message: str
) -> None:
    settings = FP8(parameters="fp8")
    with pytest.raises(ParallelPlanError, match=rf"fp8.parameters \('fp8'\).* {message}"):
        MegatronStrategy(fp8=settings, **options)


def test_unknown_types_of_weights_are_refused() -> None:
    with pytest.raises(ParallelPlanError, match="fp8.parameters"):
        FP8(parameters="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "callback",
    [WeightAveraging(), ModelPruning("l1_unstructured", amount=0.5)],
    ids=["averages", "pruning"],
)
def test_callbacks_that_write_weights_are_refused(callback: Callback) -> None:
    message = re.escape(
        f"cannot be used with {type(callback).__name__}, because the callback writes weights"
    )
    with pytest.raises(UnsupportedError, match=message):
        trained(TinyLM(), IN_FP8, 1, callbacks=(callback,))


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_parametrized_and_shared_weights_are_refused() -> None:
    class Parametrized(TinyLM):
        def configure_model(self) -> None:
            super().configure_model()
            assert self.net is not None
            nn.utils.parametrize.register_parametrization(
                self.net.layers["0"].mlp.down, "weight", _Doubled()
            )

    class Shared(TinyLM):
        def configure_model(self) -> None:
            super().configure_model()
            assert self.net is not None
            self.net.layers["1"].mlp.down.weight = self.net.layers["0"].mlp.down.weight

    for kind, message in ((Parametrized, "has a parametrization"), (Shared, "is shared by")):
        with pytest.raises(UnsupportedError, match=message):
            trained(kind(), IN_FP8, 1)


def test_compiled_modules_are_refused() -> None:
    class Compiled(TinyLM):
        def on_fit_start(self) -> None:
            assert self.net is not None
            self.net.layers["0"].compile()

    with pytest.raises(UnsupportedError, match="torch.compile"):
        trained(Compiled(), IN_FP8, 1)
