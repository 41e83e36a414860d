"""User code between and around steps has the same effect as with ordinary Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.checkpoint.load import read_full
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from tests.world import run_world

Act = Callable[[LightningModule], None]


class Net(LightningModule):
    """A generator and its critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)
        self.generator_twin = nn.Linear(6, 6)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(
            self.critic(torch.tanh(self.generator(x) + 0.1 * self.generator_twin(x))), y
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ManualNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Adversaries(ManualNet):
    """A step of one network leaves gradients in the other, which must be cleared."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(-self.critic(torch.tanh(self.generator(x))).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        second.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.critic)
        ]


class RawBackward(ManualNet):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class HalfTrained(Net):
    """Train the critic, until a callback adds the generator."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [weight for weight in self.parameters() if weight.requires_grad], lr=0.05
        )


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.generator)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.generator, optimizer, lr=0.02)


class Writes(Callback):
    """Change weights at one of Lightning's hooks."""

    def __init__(self, hook: str, act: Act) -> None:
        setattr(self, hook, lambda trainer, module, *args: act(module))


def halve(module: LightningModule) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def fill(module: LightningModule) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.25)


def fill_data(module: LightningModule) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(0.25)


def replace_data(module: LightningModule) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def clamp_data(module: LightningModule) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def exchange_data(module: LightningModule) -> None:
    """Exchange the memory of two parameters, and move the values of a third one."""
    first, second = module.generator.weight, module.generator_twin.weight
    first.data, second.data = second.data, first.data
    module.critic.bias.data = module.critic.bias.data + 0.1


def fill_from_vector(module: LightningModule) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * vector, module.parameters())


def fill_in_inference_mode(module: LightningModule) -> None:
    with torch.inference_mode():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def load(module: LightningModule) -> None:
    module.load_state_dict(
        {name: torch.full_like(value, 0.125) for name, value in module.state_dict().items()}
    )


WRITES = {
    "weights halved after every step": ("on_train_batch_end", halve),
    "filled when the fit starts": ("on_fit_start", fill),
    "filled through .data when the training starts": ("on_train_start", fill_data),
    "put under the parameters when the training starts": ("on_train_start", replace_data),
    "loaded when the first epoch starts": ("on_train_epoch_start", load),
    "halved before the optimizer steps": ("on_before_optimizer_step", halve),
    "clipped through .data after every step": ("on_train_batch_end", clamp_data),
    "filled through .data when an epoch starts": ("on_train_epoch_start", fill_data),
    "put under the parameters after every step": ("on_train_batch_end", replace_data),
    "exchanged after every step": ("on_train_batch_end", exchange_data),
    "exchanged before the optimizer steps": ("on_before_optimizer_step", exchange_data),
    "taken from a vector after every epoch": ("on_train_epoch_end", fill_from_vector),
    "clipped through .data before gradients are forgotten": ("on_before_zero_grad", clamp_data),
    "halved in inference mode": ("on_train_batch_start", fill_in_inference_mode),
}


#: Writes that two data ranks test, too.
DATA_WRITES = (
    *(
        "weights halved after every step",
        "filled when the fit starts",
        "clipped through .data after every step",
    ),
    *("put under the parameters after every step", "exchanged after every step"),
)


def make_loader(rank: int = 0, size: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator)
    # Every rank gets its rows of each batch of 8.
    order = torch.arange(32).view(4, size, 8 // size)[:, rank].flatten()
    return DataLoader(TensorDataset(x[order], y[order]), batch_size=8 // size)


def fit(
    module: Net,
    strategy: Any,
    *callbacks: Callback,
    place: tuple[int, int] = (0, 1),
    epochs: int = 2,
    resume_from: Path | None = None,
    weights_only: bool | None = None,
    **options: Any,
) -> Net:
    seed_everything(1, verbose=False)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=place[1],
        strategy=strategy,
        max_epochs=epochs,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **quiet,
        **options,
    )
    trainer.fit(module, make_loader(*place), ckpt_path=resume_from, weights_only=weights_only)
    return module


def distance(module: Net, reference: Net) -> float:
    weights = {name: value.float() for name, value in reference.state_dict().items()}
    return max(
        float((value.float() - weights[name]).abs().max())
        for name, value in module.state_dict().items()
    )


@pytest.mark.parametrize("kind", [Adversaries, RawBackward])
def test_manual_optimization_equals_ordinary_lightning(kind: type[Net]) -> None:
    start = kind()
    plain = fit(kind(), "auto")
    assert distance(start, plain) > 0.01
    assert distance(fit(kind(), MegatronStrategy(microbatch_size=8)), plain) < 1e-6


def test_backward_of_an_unscaled_loss_is_refused_with_float16() -> None:
    options = {"plugins": [MegatronPrecision("16-mixed")]}
    with pytest.raises(UnsupportedError, match="needs self.manual_backward"):
        fit(RawBackward().half(), MegatronStrategy(microbatch_size=8), **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", WRITES)
def test_training_continues_from_weights_that_hooks_write(name: str, precision: str) -> None:
    plain = fit(Net(), "auto", Writes(*WRITES[name]))
    untouched = fit(Net(), "auto")
    assert distance(plain, untouched) > 0.05
    ours = fit(
        Net(), MegatronStrategy(microbatch_size=8), Writes(*WRITES[name]), precision=precision
    )
    assert distance(ours, plain) < (1e-6 if precision == "32-true" else 0.02)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_swapped_weights_are_validated_saved_and_swapped_back(
    precision: str, tmp_path: Path
) -> None:
    """A callback puts other weights under the parameters during validation."""

    class Swaps(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.weights = {name: weight.data for name, weight in pl_module.named_parameters()}
            for parameter in pl_module.parameters():
                parameter.data = torch.full_like(parameter, 0.125)

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")
            for name, parameter in pl_module.named_parameters():
                parameter.data = self.weights[name]

    class Evaluated(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self) -> DataLoader:
            return make_loader()

    options: dict[str, Any] = {"num_sanity_val_steps": 0}
    plain = fit(Evaluated(), "auto", Swaps(), **options)
    expected = plain.trainer.callback_metrics["val_loss"]
    ours = fit(Evaluated(), MegatronStrategy(), Swaps(), precision=precision, **options)
    assert distance(ours, plain) < (1e-6 if precision == "32-true" else 0.02)
    torch.testing.assert_close(
        ours.trainer.callback_metrics["val_loss"].float(), expected, rtol=0.01, atol=0
    )
    saved = {
        name: tensor
        for name, tensor in read_full(tmp_path / "1.ckpt").items()
        if name.startswith("state_dict.")
    }
    assert saved
    assert all(bool((tensor == 0.125).all()) for tensor in saved.values())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda module: setattr(module.critic.bias, "data", torch.zeros(3)),
            r"'critic.bias' was \(1,\) and is \(3,\) after an assignment to parameter.data",
        ),
        (
            lambda module: setattr(
                module.generator.weight, "data", module.generator_twin.weight.data
            ),
            (
                "'generator.weight' and 'generator_twin.weight' share their memory after an assignment "
                "to parameter.data"
            ),
        ),
    ],
)
def test_parameter_data_that_cannot_be_trained_is_refused_by_name(act: Act, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fit(Net(), MegatronStrategy(), Writes("on_train_batch_end", act))
    assert "data" not in vars(nn.Parameter)


def test_small_updates_of_weights_that_hooks_only_read_add_up() -> None:
    """Updates far below the resolution of bfloat16 add up in the main parameters, also if a hook
    reads and copies the parameters.
    """

    class Slow(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    def read_parameters(module: LightningModule) -> None:
        assert all(parameter.clone().isfinite().all() for parameter in module.parameters())

    module = fit(
        Slow(),
        MegatronStrategy(microbatch_size=8),
        Writes("on_train_batch_end", read_parameters),
        precision="bf16-mixed",
    )
    main_parameters = module.trainer.strategy.run.state.main.slices  # type: ignore[union-attr]
    plain = fit(Slow(), "auto").state_dict()
    start = {name: value.to(torch.bfloat16).float() for name, value in Slow().state_dict().items()}
    for name, main_slice in main_parameters.items():
        expected_change = (plain[name] - Slow().state_dict()[name]).norm()
        actual_change = main_slice.main.detach().view_as(start[name]) - start[name]
        assert float(actual_change.norm() / expected_change) == pytest.approx(1, abs=0.1), name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_that_base_finetuning_unfreezes_are_trained_and_resumed(
    precision: str, tmp_path: Path
) -> None:
    def fine_tune(strategy: Any, folder: str, **options: Any) -> Net:
        saves = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}")
        return fit(HalfTrained(), strategy, Finetuning(), saves, epochs=3, **options)

    tolerance = 1e-6 if precision == "32-true" else 0.02
    plain, ours = (
        fine_tune("auto", "plain"),
        fine_tune(MegatronStrategy(microbatch_size=8), "ours", precision=precision),
    )
    assert distance(plain, fit(HalfTrained(), "auto", epochs=3)) > 0.01
    assert distance(ours, plain) < tolerance
    for saved in ("epoch=0.ckpt", "epoch=1.ckpt"):
        # After the generator was added, a resumed Lightning has its group, but freezes it again.
        plain_resumed = fine_tune(
            "auto", "plain again", resume_from=tmp_path / "plain" / saved, weights_only=False
        )
        resumed = fine_tune(
            MegatronStrategy(microbatch_size=8),
            "again",
            precision=precision,
            resume_from=tmp_path / "ours" / saved,
        )
        assert distance(resumed, plain_resumed) < tolerance, saved


def run_two_ranks(rank: int, size: int) -> dict[str, float]:
    distances = {}
    for name in DATA_WRITES:
        ours = fit(
            Net(),
            MegatronStrategy(microbatch_size=4, bucket_size=10),
            Writes(*WRITES[name]),
            place=(rank, size),
            precision="bf16-mixed",
        )
        distances[name] = (
            distance(ours, fit(Net(), "auto", Writes(*WRITES[name]))) if rank == 0 else 0.0
        )
        exact = fit(
            Net(), MegatronStrategy(bucket_size=10), Writes(*WRITES[name]), place=(rank, size)
        )
        distances[f"{name} exactly"] = (
            distance(exact, fit(Net(), "auto", Writes(*WRITES[name]))) if rank == 0 else 0.0
        )
    ours = fit(Adversaries(), MegatronStrategy(microbatch_size=4), place=(rank, size))
    strategy = MegatronStrategy(microbatch_size=4, bucket_size=10)
    tuned = fit(HalfTrained(), strategy, Finetuning(), place=(rank, size), precision="bf16-mixed")
    distances["finetuning"] = (
        distance(tuned, fit(HalfTrained(), "auto", Finetuning())) if rank == 0 else 0.0
    )
    distances["adversaries"] = distance(ours, fit(Adversaries(), "auto")) if rank == 0 else 0.0
    return distances


def test_two_data_ranks_match_one_process() -> None:
    distances = run_world(run_two_ranks, 2)[0]
    assert distances.pop("adversaries") < 1e-6
    assert max(distances.pop(f"{name} exactly") for name in DATA_WRITES) < 1e-6
    assert max(distances.values()) < 0.02, distances
