"""Fits whose weights are stored in 8 bits: reads, writes, ends of fits, checkpoints, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import FP8, HuggingFaceCausalLM
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.errors import NonFiniteError, UnsupportedError
from lightning_megatron.layers.parameters.eight_bit_parameter import EightBitParameter
from lightning_megatron.optimizer.eight_bit_weights import EightBitBuffer
from lightning_megatron.optimizer.main_parameters import MainParameters
from tests.fits import GPT2, Job, Language, Report, Tokens, run_job, strategy_with, trainer_of
from tests.graphs.jobs import strategy_of
from tests.optimizer.fused_fits import SMALL
from tests.refusals import check_refusals
from tests.tiny_llama import rows, save_tiny_llama

CAST: dict[str, Any] = {"fp8": FP8(emulate=True), "microbatch_size": 1}
IN_FP8: dict[str, Any] = {**CAST, "fp8": FP8(emulate=True, parameters="fp8")}
DELAYED = FP8("delayed", history=5, emulate=True, parameters="fp8")
PLAIN: dict[str, Any] = {"microbatch_size": 1}
NAME = "model.layers.0.mlp.down.weight"


class Small(Language):
    """Train a small GPT without a schedule."""

    def __init__(self) -> None:
        super().__init__(SMALL)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def trained(
    module: pl.LightningModule,
    callbacks: Sequence[pl.Callback] = (),
    steps: int = 3,
    layout: dict[str, Any] = IN_FP8,
    precision: Any = "bf16-mixed",
    **trainer: Any,
) -> tuple[Report, MainParameters]:
    """Fit a module; return also the main parameters."""
    keep = KeepMain()
    options: dict[str, Any] = {"trainer": {"gradient_clip_val": None, **trainer}, "norms": False}
    callbacks = [keep, *callbacks]
    job = Job(lambda: module, layout, precision, steps, callbacks=lambda: callbacks, **options)
    report = run_job(job)
    return report, keep.main


class KeepMain(pl.Callback):
    main: MainParameters

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.main = strategy_of(trainer).run.state.main


class AtStep(pl.Callback):
    """Call a function with the module and the trainer after a step, or after every step with 0."""

    def __init__(self, function: Callable[[Any, pl.Trainer], Any], step: int = 2) -> None:
        self.function, self.step, self.result = function, step, None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.step in (0, trainer.global_step):
            self.result = self.function(module, trainer)


def weight_of(module: nn.Module) -> nn.Parameter:
    return dict(module.named_parameters())[NAME]


def main_weight(trainer: pl.Trainer) -> Tensor:
    return strategy_of(trainer).run.state.main.main(NAME).detach().clone()


# ---- reads and writes of user code


def test_reads_give_the_values_that_matrix_products_use():
    def inspect(module, trainer):
        weight, copied = weight_of(module), weight_of(copy.deepcopy(module))
        assert type(weight) is EightBitParameter
        assert (weight.dtype, weight.shape) == (torch.bfloat16, (32, 128))
        assert weight.requires_grad
        assert type(copied) is nn.Parameter
        with torch.no_grad():
            norms = float(weight.norm()), float(torch._foreach_norm([weight])[0])
            values = weight.float(), module.state_dict()[NAME].float(), copied.detach().float()
        return values, norms, main_weight(trainer)

    inspector = AtStep(inspect)
    trained(Small(), [inspector])
    values, norms, main = inspector.result
    largest = main.abs().max()
    rounded = (main * (448 / largest)).to(torch.float8_e4m3fn).float()
    expected = (rounded * (largest / 448)).bfloat16().float()
    assert all(torch.equal(value, expected) for value in values)
    assert not torch.equal(expected, main.bfloat16().float())
    assert norms == pytest.approx([float(expected.norm())] * 2, rel=0.01)


def assign_data(weight: nn.Parameter) -> None:
    weight.data = torch.zeros_like(weight)


def assign_item(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] = 1.0


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: torch.no_grad()(weight.mul_)(0.9),
    "by data": lambda weight: weight.data.mul_(0.9),
    "detached": lambda weight: weight.detach().zero_(),
    "data": assign_data,
    "item": assign_item,
    "initialized": nn.init.zeros_,
    "several": lambda weight: torch.no_grad()(torch._foreach_mul_)([weight.data], 2.0),
    "output": lambda weight: torch.add(torch.ones(32, 128), 1.0, out=weight.data),
    "read with gradients": lambda weight: weight.square().sum(),
}


def test_writes_to_weights_and_reads_with_gradients_are_refused():
    def write(module, trainer):
        for name, write in WRITES.items():
            with pytest.raises(UnsupportedError) as error:
                write(weight_of(module))
            assert "cannot be written during a fit" in str(error.value), name
        # The copy cannot be written, so no write is lost.
        with pytest.raises(RuntimeError, match="inference tensor"):
            weight_of(module).detach().view(-1).mul_(2)
        with pytest.raises(RuntimeError, match="fp8.parameters"):
            module.load_state_dict(module.state_dict())

    class Penalized(Small):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + weight_of(self).square().sum()

    assert trained(Small(), [AtStep(write)])[0].losses == trained(Small())[0].losses
    with pytest.raises(UnsupportedError, match="'square' with gradients"):
        trained(Penalized())


# ---- ends of fits


def test_weights_after_a_fit_are_cast_from_the_main_parameters():
    def reference(module, trainer):
        (buffer,) = strategy_of(trainer).run.state.main.eight_bit_buffers[:1]
        return StorageWeakRef(buffer.parameters.untyped_storage())

    module, inspector = Small(), AtStep(reference)
    _, main = trained(module, [inspector])
    assert inspector.result.expired(), "the bytes are freed"
    weight = weight_of(module)
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, main.main(NAME).detach().to(weight.dtype))
    assert not main.eight_bit_buffers


def test_a_checkpoint_evaluates_the_same_without_a_fit_as_after_the_fit(tmp_path):
    trainer, fresh = (trainer_of(Job(SMALL, IN_FP8, "bf16-mixed", 2)) for _ in range(2))
    module, data = Small(), DataLoader(Tokens(8), batch_size=4)
    trainer.fit(module, data, data)
    trainer.save_checkpoint(tmp_path / "saved")
    expected = trainer.validate(module, data, verbose=False)
    assert fresh.validate(Small(), data, ckpt_path=tmp_path / "saved", verbose=False) == expected


def test_a_second_fit_continues_from_unrounded_main_parameters():
    starts: list[Tensor] = []

    class RecordStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            starts.append(main_weight(trainer))

    trainer, module = trainer_of(Job(SMALL, IN_FP8, "bf16-mixed", 2), 1, RecordStart()), Small()
    data = DataLoader(Tokens(8), batch_size=4)
    trainer.fit(module, data)
    after = main_weight(trainer)
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, data)
    assert torch.equal(starts[1], after), "nothing was rounded between the fits"
    assert not torch.equal(after, after.bfloat16().float())
    assert not torch.equal(main_weight(trainer), after)


def test_a_failed_fit_leaves_ordinary_weights():
    def fail(*_):
        raise KeyError("stop here")

    module = Small()
    with pytest.raises(KeyError, match="stop here"):
        trained(module, [AtStep(fail)])
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
    return run_job(Job(GPT2, layout, precision, steps, data=lambda: Tokens(40), **paths)).losses


def test_checkpoints_hold_main_parameters_and_load_with_and_without_fp8(tmp_path):
    fp8_losses = train(IN_FP8, 3, "bf16-mixed", save=tmp_path / "fp8")
    train(PLAIN, 2, "bf16-mixed", save=tmp_path / "plain")
    losses_from_plain = train(IN_FP8, 3, "bf16-mixed", resume=tmp_path / "plain")
    assert losses_from_plain == pytest.approx(fp8_losses[2:], rel=0.01)
    (loss_from_fp8,) = train(PLAIN, 4, "bf16-mixed", resume=tmp_path / "fp8")
    assert loss_from_fp8 < fp8_losses[0]
    name = f"state_dict.{NAME}"
    weight = OpenCheckpoint.open(tmp_path / "fp8").read_full([name])[name]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float()), "full precision"


# ---- evaluation, and ways to step


def test_hugging_face_models_generate_during_a_fit_and_are_saved_after_it(tmp_path):
    def generate_and_save(module, trainer):
        prompt = rows[:1, :8]
        with pytest.raises(UnsupportedError, match="keeps '.*' in 8 bits during the fit"):
            module.model.save_pretrained(tmp_path / "inside")
        with torch.no_grad():
            text = module.model.generate(prompt, max_new_tokens=4, do_sample=False)
            return text, module.model(prompt).logits[0, -1].argmax(-1)

    save_tiny_llama(tmp_path / "before")
    module = HuggingFaceCausalLM(str(tmp_path / "before"), learning_rate=1e-2, schedule="constant")
    generator = AtStep(generate_and_save)
    trainer = trainer_of(Job(SMALL, IN_FP8, "bf16-mixed"), 1, generator)
    trainer.fit(
        module, DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=4)
    )
    text, first = generator.result
    assert text.shape == (1, 12)
    assert text[0, 8] == first
    assert not (tmp_path / "inside").exists()
    module.model.save_pretrained(tmp_path / "after")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = strategy_of(trainer).run.state.main.main(f"model.{name}").detach().bfloat16()
    assert torch.equal(loaded.state_dict()[name].bfloat16(), expected)


class ByHand(Small):
    """Step by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class ByLineSearch(Small):
    """Evaluate the loss several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("kind", [ByHand, ByLineSearch])
def test_manual_and_line_search_steps_with_stored_weights_match_those_with_casts(kind):
    """Without rounding to 16 bits, casts give the same results up to the order of sums."""
    stored, cast = (
        trained(kind(), layout=layout, precision="64-true")[0].losses for layout in (IN_FP8, CAST)
    )
    assert stored == pytest.approx(cast, abs=1e-10, rel=0)
    assert len(set(stored)) == 3


@contextmanager
def record_reads() -> Iterator[list[str]]:
    """Record the names of weights in 8 bits whose values are computed in the type of the run."""
    reads: list[str] = []
    compute_values = EightBitBuffer._numbers

    def record(self, name):
        reads.append(name)
        return compute_values(self, name)

    with patch.object(EightBitBuffer, "_numbers", record):
        yield reads


def test_weights_that_are_not_finite_are_reported_without_reading_them():
    class InfiniteRate(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=float("inf"))

    with record_reads() as reads:
        with pytest.raises(NonFiniteError, match=r"the weight model.layers.0.attention.*\(nan\)"):
            trained(InfiniteRate(), log_every_n_steps=1)
        # A failed fit computes the values of each weight once, at its end.
        assert sorted(reads) == sorted(set(reads))


def test_saving_during_a_fit_reads_no_weight_in_8_bits(tmp_path):
    def save(module, trainer):
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}")
        return list(reads)

    saver = AtStep(save, 0)
    with record_reads() as reads:
        _, main = trained(Small(), [saver], steps=2)
    assert saver.result == []
    saved = OpenCheckpoint.open(tmp_path / "2").read_full([f"state_dict.{NAME}"])
    assert torch.equal(saved[f"state_dict.{NAME}"], main.main(NAME).detach())


# ---- refusals


def test_settings_that_cannot_be_honoured_are_refused():
    rowwise = {"recipe": "rowwise", "parameters": "fp8"}
    needed = "needs recipe='tensorwise' or 'delayed': it is 'rowwise'"
    check_refusals(FP8, [(rowwise, needed), ({"parameters": "int8"}, "fp8.parameters")])
    stored: dict[str, Any] = {"fp8": FP8(parameters="fp8")}
    cases = [({**stored, "optimizer.zero": 0}, "zero=0, which gathers no parameters")]
    check_refusals(strategy_with, cases)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrize(layers: Any) -> None:
    nn.utils.parametrize.register_parametrization(layers["0"].mlp.down, "weight", Doubled())


def share(layers: Any) -> None:
    layers["1"].mlp.down.weight = layers["0"].mlp.down.weight


class Edited(Small):
    """Change the layers of the model."""

    def __init__(self, edit: Callable[[Any], Any]) -> None:
        super().__init__()
        self.edit = edit

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.edit(self.model.layers)


def test_modules_and_callbacks_that_write_or_share_weights_are_refused():
    words = "cannot be used with {}, because the callback writes weights"
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    check_refusals(
        trained,
        [
            ((Small(), [WeightAveraging()]), words.format("WeightAveraging")),
            ((Small(), [pruning]), words.format("ModelPruning")),
            ((Edited(parametrize),), "has a parametrization"),
            ((Edited(share),), "is shared by"),
            ((Edited(lambda layers: layers["0"].compile()),), "torch.compile"),
        ],
    )
