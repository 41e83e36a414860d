"""Training with clipping, update and rounding in one kernel matches torch's own optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import FP8, MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.training import fused_update
from tests.strategy.tiny import TinyLM, loader
from tests.training.fused_fits import FIND, FITS, Fit, FusedLM, PlainKernel, check_equal, run
from tests.world import run_world


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type[PlainKernel]:
    monkeypatch.setattr(PlainKernel, "num_calls", 0)
    monkeypatch.setattr(FIND, lambda device: (PlainKernel, ""))
    return PlainKernel


@pytest.mark.parametrize("name", FITS)
def test_fused_kernel_gives_losses_weights_and_states_of_torch(
    name: str, kernel: type[PlainKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_equal(FITS[name], monkeypatch, "cpu", 1e-3 if FITS[name].precision != "32-true" else 1e-6)
    assert kernel.num_calls > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda groups, fused, **options: torch.optim.AdamW(groups, **options),
        lambda groups, **options: torch.optim.AdamW(groups, amsgrad=True, **options),
        lambda groups, fused, eps, lr, **options: torch.optim.SGD(groups, lr=1.0, **options),
    ],
    ids=["not fused", "amsgrad", "SGD"],
)
def test_optimizers_without_fused_kernel_use_their_own_step(
    make: Any, kernel: type[PlainKernel]
) -> None:
    module, _ = run(Fit(make=make))
    assert kernel.num_calls == 0
    assert module.losses[-1] < module.losses[0]


def test_moments_dtype_without_fused_kernel_is_refused() -> None:
    strategy = MegatronStrategy(moments_dtype="bfloat16")
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, barebones=True
    )
    with pytest.raises(UnsupportedError, match="moments_dtype .bfloat16. needs the fused kernel"):
        trainer.fit(TinyLM(), loader())


def test_moments_are_stored_in_moments_dtype(kernel: type[PlainKernel]) -> None:
    strategy = MegatronStrategy(moments_dtype="bfloat16")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_epochs=1,
        barebones=True,
    )
    module = FusedLM()
    trainer.fit(module, loader())
    states = trainer.optimizers[0].state.values()
    assert {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {
        torch.bfloat16
    }
    assert module.losses[-1] < module.losses[0]


def test_gathers_of_updated_parameters_start_before_the_last_update() -> None:
    for num_started, hooked, one_piece, many_pieces in run_world(_train_with_piece_sizes, 2):
        # Some gathers of a step start before the last piece is updated.
        assert num_started == {
            "one piece": 0,
            "hooked": 0,
            "many pieces": num_started["many pieces"],
        }
        assert num_started["many pieces"] > 2
        assert many_pieces == one_piece == hooked


def _train_with_piece_sizes(
    rank: int, size: int
) -> tuple[dict[str, int], *tuple[list[float], ...]]:
    num_started, losses = {}, []
    for name, piece in {"hooked": 1, "one piece": 10**9, "many pieces": 1}.items():
        fused_update._PIECE = piece
        module = _CountingLM(is_hooked=name == "hooked")
        fused_update._find_kernel = lambda device, module=module: (module.make_kernel, "")
        trainer = Trainer(
            accelerator="cpu",
            devices=size,
            strategy=MegatronStrategy(bucket_size=500, overlap_parameters=True),
            precision="bf16-mixed",
            gradient_clip_val=0.1,
            max_epochs=1,
            barebones=True,
        )
        trainer.fit(module, loader(batch_size=2))
        num_started[name] = max(counts[-1] - counts[0] for counts in module.started)
        losses.append(module.losses)
    return num_started, *losses


class _CountingLM(FusedLM):
    """Record, for each step, the number of started collectives at each call of the kernel."""

    def __init__(self, is_hooked: bool) -> None:
        super().__init__()
        self.is_hooked = is_hooked
        self.started: list[list[int]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.started.append([])

    def configure_optimizers(self) -> Any:
        configuration = super().configure_optimizers()
        if self.is_hooked:
            configuration["optimizer"].register_step_post_hook(lambda *_: None)
        return configuration

    def make_kernel(self) -> Any:
        kernel = PlainKernel()

        def call(*args: Any, **kwargs: Any) -> None:
            self.started[-1].append(sum(self.device_mesh.journal.counts.values()))
            kernel(*args, **kwargs)

        return call


def test_fp8_weights_gathered_after_fused_updates_give_the_losses_of_torch() -> None:
    for fused, plain in run_world(_train_fp8_weights, 2):
        assert len(fused) == 8
        assert fused == pytest.approx(plain, abs=1e-3)


def _train_fp8_weights(rank: int, size: int) -> list[list[float]]:
    losses = []
    fused_update._PIECE = 1
    for kernel in (PlainKernel, None):
        fused_update._find_kernel = lambda device, kernel=kernel: (kernel, "torch steps by itself")
        trainer = Trainer(
            accelerator="cpu",
            devices=size,
            strategy=MegatronStrategy(
                bucket_size=500,
                overlap_parameters=True,
                fp8=FP8("tensorwise", parameters="fp8", emulate=True),
            ),
            precision="bf16-mixed",
            gradient_clip_val=0.1,
            max_epochs=1,
            barebones=True,
        )
        module = FusedLM()
        trainer.fit(module, loader(batch_size=2))
        losses.append(module.losses)
    return losses
