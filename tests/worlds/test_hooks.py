"""Hooks run in the order of Lightning's own strategies and see the same gradients, and what modules
do with gradients by hand has the effect that it has without the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_megatron.errors import UnsupportedError
from tests.fits import Job, Language, Module, loader_of, run_job, trainer_of
from tests.world import run_world

#: The module gets full batches.
OURS: dict[str, Any] = {"microbatch_size": "batch", "optimizer.bucket_size": 16}
TP: dict[str, Any] = {**OURS, "tp": 2, "tensor_parallel_plan": {"net.0": "column", "net.2": "row"}}
#: Name of the called method, and the norms of the gradients of the module's parameters at the call.
Call = tuple[str, tuple[float | None, ...]]
CALLBACK_HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")]
CALLBACK_HOOKS += ["setup", "teardown"]
MODULE_HOOKS = [
    *(name for name in CALLBACK_HOOKS if hasattr(pl.LightningModule, name)),
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "training_step",
    "validation_step",
    "configure_model",
    "configure_optimizers",
    "configure_callbacks",
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
]


class Line(Module):
    """Fit two linear layers to the sum of the inputs; keep what is read of gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.read: list[dict[str, float]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def read_norms(self) -> None:
        self.read.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class HalvesTheLoss(Line):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.25).backward()

    def on_before_backward(self, loss: Tensor) -> None:
        self.read.append({"loss": loss.item()})


class ReadsNorms(Line):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read_norms()
        self.log_dict(grad_norm(self, 2))


class ReadsThroughHelpers(Line):
    """Read gradients after the step in helper functions of a hook."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.note()
        note_number(self, self.read)

    def note(self) -> None:
        self.read.append({"largest": max(float(grad.abs().max()) for grad in gradients_of(self))})


def note_number(module: nn.Module, read: list[dict[str, float]]) -> None:
    read.append({"number": float(len(gradients_of(module)))})


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


class ClipsItself(Line):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.read.append({"before": norm.item()})
        self.read_norms()


class DropsAndReplaces(Line):
    """Set the first gradient to None, replace the second, and write into the third."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second, third, _ = self.parameters()
        first.grad, second.grad = None, torch.ones_like(second)
        assert third.grad is not None
        third.grad.sign_()


class WritesAfterBackward(Line):
    def on_after_backward(self) -> None:
        for gradient in gradients_of(self):
            gradient.clamp_(-0.01, 0.01)


class ByHand(Line):
    automatic_optimization = False


class AddsUpByHand(ByHand):
    """Step at every second batch, clip the sum of two backward passes a batch, and clear gradients
    by the module's own method.
    """

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.1 * self.loss(batch))
        if batch_idx % 2:
            nn.utils.clip_grad_value_(self.parameters(), 0.02)
            self.optimizers().step()
            self.zero_grad()


class ClipsRawly(ByHand):
    """Run the backward passes without Lightning."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        self.read_norms()
        torch.autograd.backward([0.5 * self.loss(batch)])
        self.read.append({"before": nn.utils.clip_grad_norm_(self.parameters(), 0.05).item()})
        optimizer.step()


class AddsUpRawly(ByHand):
    """Run backward passes with and without Lightning, and recompute activations by a nested pass."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = checkpoint(self.net[0], batch[0].requires_grad_(), use_reentrant=True)
        return F.mse_loss(self.net[1:](hidden), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch).backward()
        self.manual_backward(0.1 * self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class NeverForgets(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Turns(ByHand):
    """Toggle two optimizers, one at a time."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            self.read_norms()
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        layers = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.SGD(layers[0], lr=0.1), torch.optim.Adam(layers[1], lr=0.01)]


class StepsInTurns(ByHand):
    """Clip by Lightning; step the first of two optimizers at every batch, and the other seldom."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[part].parameters(), lr=0.1) for part in (0, 2)]


class LeavesOut(Line):
    """Leave a layer out of every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.detour, self.is_used = nn.Linear(8, 8), True

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.net[:2](batch[0])
        hidden = hidden + self.detour(hidden) if self.is_used else hidden
        return F.mse_loss(self.net[2](hidden), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.is_used = batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class LeavesOutOnSomeRanks(LeavesOut):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.is_used = bool(batch[0][0, 0] > 0.5)
        return Line.training_step(self, batch, batch_idx)


class LeavesOutByHand(LeavesOut):
    """Use the layer in one of two backward passes of a batch, or in none."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for self.is_used in (batch_idx % 2 == 0, False):
            self.manual_backward(self.loss(batch))
        self.read.append({"number": float(len(gradients_of(self)))})
        optimizer.step()


class SharpnessAware(torch.optim.SGD):
    """Step by the gradients at weights that are moved along all gradients."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad.clone() for p in moved if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for p, gradient in zip(moved, gradients, strict=True):
            p.add_(gradient, alpha=0.3 / float(norm))
        with torch.enable_grad():
            closure()
        for p, gradient in zip(moved, gradients, strict=True):
            p.sub_(gradient, alpha=0.3 / float(norm))
        super().step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Move slow weights towards those of another optimizer, which has its own groups."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.slow = {p: p.detach().clone() for group in base.param_groups for p in group["params"]}
        super().__init__(list(self.slow), base.defaults)
        self.base, self.num_steps = base, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p.to(slow.dtype), 0.5)
                p.copy_(slow)
        return loss


class Assigns(torch.optim.Optimizer):
    """Give parameters other memory in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> Any:
        loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.data = p.data - 0.05 * p.grad
        return loss


def steps_by(make: Callable[[Any], torch.optim.Optimizer]) -> type[Line]:
    return type("StepsBy", (Line,), {"configure_optimizers": lambda m: make(m.parameters())})


USES: dict[str, tuple[type[Line], dict[str, Any]]] = {
    "backward halves the loss of accumulated batches": (HalvesTheLoss, {"accumulate_grad_batches": 3}),
    "norms are logged": (ReadsNorms, {}),
    "read by helpers after the step": (ReadsThroughHelpers, {}),
    "the module clips": (ClipsItself, {}),
    "dropped and replaced": (DropsAndReplaces, {}),
    "written into while they accumulate": (WritesAfterBackward, {"accumulate_grad_batches": 2}),
    "added up by hand": (AddsUpByHand, {}),
    "clipped after plain backward passes": (ClipsRawly, {}),
    "added up by plain backward passes": (AddsUpRawly, {}),
    "never forgotten": (NeverForgets, {}),
    "toggled optimizers": (Turns, {}),
    "optimizers that step at different batches": (StepsInTurns, {}),
    "left out of accumulated batches": (LeavesOut, {"accumulate_grad_batches": 3}),
    "left out on some ranks": (LeavesOutOnSomeRanks, {}),
    "left out by hand": (LeavesOutByHand, {}),
    "an optimizer that evaluates the loss twice": (steps_by(lambda p: SharpnessAware(p, lr=0.05, momentum=0.9)), {}),
    "an optimizer around another": (steps_by(lambda p: Lookahead(torch.optim.SGD(p, lr=0.05, momentum=0.9))), {}),
    "an optimizer that assigns data": (steps_by(Assigns), {}),
    "L-BFGS": (steps_by(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)), {}),
}  # fmt: skip
#: Cases that ``ddp`` cannot run: its buckets expect a single pass of ``manual_backward`` at a time.
NOT_UNDER_DDP = ("clipped after plain backward passes", "added up by plain backward passes")
#: Cases that read norms and also run under tensor parallelism.
IN_PARTS = ("norms are logged", "the module clips", "clipped after plain backward passes")


def fit(
    module: Line, strategy: Any, size: int = 1, *callbacks: pl.Callback, precision: Any = "64-true", **options: Any
) -> None:  # fmt: skip
    """Fit for two epochs of four batches."""
    options = {"max_epochs": 2, "gradient_clip_val": None, **options}
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    job = Job(strategy=strategy, steps=-1, precision=precision, trainer=options)
    trainer = trainer_of(job, size, *callbacks)
    loader = loader_of(TensorDataset(x, x.sum(1, keepdim=True)), 4, trainer)
    trainer.fit(module, loader, loader)


def use(name: str, strategy: Any, size: int = 1, **options: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the weights after a fit, and what the module has read of gradients."""
    kind, more = USES[name]
    module = kind()
    fit(module, strategy, size, **options, **more)
    return [parameter.detach().clone() for parameter in module.parameters()], module.read


def log_hooks(owner: Any, owner_name: str, hooks: list[str], add: Callable[[str], None]) -> None:
    """Replace methods of an object by methods that log their call and then call the original."""
    for hook in hooks:
        original = getattr(owner, hook)

        def logged(*args: Any, _original: Any = original, _hook: str = hook, **kwargs: Any) -> Any:
            add(f"{owner_name}.{_hook}")
            return _original(*args, **kwargs)

        setattr(type(owner), hook, staticmethod(logged))


def order_of_calls(strategy: Any, size: int = 1, **options: Any) -> list[Call]:
    """Return all calls of the hooks of a module, a callback and an optimizer in their order."""
    module, callback = type("Watched", (Line,), {})(), type("Watcher", (pl.Callback,), {})()
    calls: list[Call] = []

    def add(name: str) -> None:
        grads = [p.grad for p in module.parameters()]
        calls.append((name, tuple(None if g is None else round(g.norm().item(), 9) for g in grads)))

    log_hooks(callback, "callback", CALLBACK_HOOKS, add)
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        configured = configure()
        step = configured[0][0].step

        def logged_step(closure: Any) -> Any:
            add("optimizer.step")
            result = step(closure)
            add("optimizer.step ends")
            return result

        configured[0][0].step = logged_step
        return configured

    type(module).configure_optimizers = staticmethod(configure_optimizers)
    log_hooks(module, "module", MODULE_HOOKS, add)
    fit(module, strategy, size, callback, gradient_clip_val=0.05, **options)
    return calls


class HalvesInStages(Language):
    backward: Any = HalvesTheLoss.backward


def two_ranks(rank: int, size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind, strategy in (("ddp", "ddp_find_unused_parameters_true"), ("ours", OURS)):
        names = [name for name in USES if kind == "ours" or name not in NOT_UNDER_DDP]
        results[kind] = {name: use(name, strategy, size) for name in names}
        results[kind]["calls"] = order_of_calls(strategy, size)
    results["tp2"] = {name: use(name, TP, size)[1] for name in IN_PARTS}
    with pytest.raises(UnsupportedError) as raised:
        run_job(Job(HalvesInStages, {"pp": 2}), size)
    results["refused"] = str(raised.value)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(two_ranks, 2)


def assert_same_calls(expected: list[Call], actual: list[Call]) -> None:
    assert [hook for hook, _ in actual] == [hook for hook, _ in expected]
    for (hook, expected_norms), (_, actual_norms) in zip(expected, actual, strict=True):
        # Accumulated gradients are hidden while a backward pass adds to them.
        is_hidden = hook == "module.backward" and not any(actual_norms)
        assert is_hidden or actual_norms == expected_norms, hook


def assert_same_use(expected: Any, actual: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-9)
    assert actual[1] == [pytest.approx(values, abs=1e-9) for values in expected[1]]


def test_hooks_run_in_lightnings_order_and_see_the_same_gradients(ranks):
    for accumulated in (1, 3):
        expected = order_of_calls(None, accumulate_grad_batches=accumulated)
        actual = order_of_calls(OURS, accumulate_grad_batches=accumulated)
        assert len({hook for hook, _ in expected}) > 50
        assert_same_calls(expected, actual)
    for results in ranks:
        assert_same_calls(results["ddp"]["calls"], results["ours"]["calls"])


@pytest.mark.parametrize("name", USES)
def test_uses_of_gradients_have_the_effect_that_they_have_without_the_strategy(name, ranks):
    expected = use(name, None)
    assert_same_use(expected, use(name, OURS))
    for results in ranks:
        assert_same_use(
            expected if name in NOT_UNDER_DDP else results["ddp"][name], results["ours"][name]
        )
    if name == "L-BFGS":
        return  # Its line search follows the rounding of a half type.
    half, _ = use(name, OURS, precision="bf16-mixed")
    for actual, weight in zip(half, expected[0], strict=True):
        torch.testing.assert_close(actual.double(), weight, rtol=0, atol=0.02)


def test_norms_of_tensor_parallel_gradients_are_norms_of_full_gradients(ranks):
    for name in IN_PARTS:
        _, expected = use(name, None)
        assert len(expected) in (8, 16)
        for results in ranks:
            assert results["tp2"][name] == [pytest.approx(norms, abs=1e-9) for norms in expected]


def test_each_microbatch_runs_backward_and_on_after_backward_runs_once() -> None:
    hooks = [hook for hook, _ in order_of_calls({"microbatch_size": 2})]
    first = hooks.index("module.training_step")
    step = hooks[first : hooks.index("module.on_before_optimizer_step")]
    per_microbatch = ["training_step", "on_before_backward", "backward"]
    assert [hook.removeprefix("module.") for hook in step if hook.startswith("module.")] == [
        per_microbatch[0],
        "on_before_zero_grad",
        "optimizer_zero_grad",
        *per_microbatch[1:],
        *per_microbatch,
        "on_after_backward",
    ]
    halved, whole = HalvesTheLoss(), HalvesTheLoss()
    fit(halved, {"microbatch_size": 2})
    fit(whole, None)
    torch.testing.assert_close(halved.state_dict(), whole.state_dict())


def test_hooks_that_take_the_loss_are_refused_with_pipeline_stages(ranks):
    for results in ranks:
        words = "HalvesInStages.backward cannot be called with pp (2) above 1, because it gets the"
        assert results["refused"].startswith(words)
