"""Modules, callbacks and optimizers that log the order of their calls and the gradients at each
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy

#: Name of the called method, and the norms of the gradients of the module's parameters at the call.
Call = tuple[str, tuple[float | None, ...]]


class Log:
    """Log of calls.

    Args:
        module: Module whose gradients are logged.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, list[Call]()

    def add(self, name: str) -> None:
        norms = tuple(
            None if p.grad is None else round(p.grad.norm().item(), 9)
            for p in self.module.parameters()
        )
        self.calls.append((name, norms))


def log_hooks(
    owner: Any, owner_name: str, hooks: tuple[str, ...], log: Callable[[str], None]
) -> None:
    """Replace methods of an object by methods that log their call and then call the original."""
    for hook in hooks:
        original = getattr(owner, hook)

        def logged(*args: Any, _original: Any = original, _hook: str = hook, **kwargs: Any) -> Any:
            log(f"{owner_name}.{_hook}")
            return _original(*args, **kwargs)

        setattr(type(owner), hook, staticmethod(logged))


CALLBACK_HOOKS = tuple(name for name in dir(Callback) if name.startswith("on_")) + (
    "setup",
    "teardown",
)
MODULE_HOOKS = (
    *(
        "on_fit_start",
        "on_fit_end",
        "on_train_start",
        "on_train_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
    ),
    *(
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
    ),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "backward",
        "lr_scheduler_step",
    ),
    *("training_step", "validation_step", "on_validation_batch_start", "on_validation_batch_end"),
    *(
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_validation_start",
        "on_validation_end",
    ),
    *("configure_model", "configure_optimizers", "configure_callbacks", "setup", "teardown"),
)


class Line(LightningModule):
    """Fit two linear layers to the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norms: list[dict[str, float]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class HalfTheLoss(Line):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.25).backward()

    def on_before_backward(self, loss: Tensor) -> None:
        self.norms.append({"loss": loss.item()})


class ReadsNorms(Line):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})
        self.log_dict(grad_norm(self, 2))


class ReadsThroughHelpers(Line):
    """Read gradients after the step in helper functions of a hook."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.note()
        note_norms(self, self.norms)

    def note(self) -> None:
        self.norms.append({"largest": max(float(grad.abs().max()) for grad in gradients_of(self))})


def note_norms(module: nn.Module, norms: list[dict[str, float]]) -> None:
    norms.append({"number": float(len(gradients_of(module)))})


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


class ClipsItself(Line):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.norms.append(
            {"before": norm.item(), **{n: float(v) for n, v in grad_norm(self, 2).items()}}
        )


class ClipsByLightning(Line):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        self.norms.append({n: float(v) for n, v in grad_norm(self, 2).items()})


class DropsAndReplaces(Line):
    """Set the first gradient to None, replace the second, and write into the third."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second, third, _ = self.parameters()
        first.grad = None
        second.grad = torch.ones_like(second)
        assert third.grad is not None
        third.grad.sign_()


class WritesAfterBackward(Line):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)


class ByHand(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ClipsByHand(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.norms.append({"before": nn.utils.clip_grad_norm_(self.parameters(), 0.05).item()})
        optimizer.step()


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
        self.norms.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})
        torch.autograd.backward([0.5 * self.loss(batch)])
        self.norms.append({"before": nn.utils.clip_grad_norm_(self.parameters(), 0.05).item()})
        optimizer.step()


class AddsUpRawly(ByHand):
    """Run backward passes with and without Lightning, and recompute activations by a nested pass."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = checkpoint(self.net[0], batch[0].requires_grad_(), use_reentrant=True)
        return nn.functional.mse_loss(self.net[1:](hidden), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch).backward()
        self.manual_backward(0.1 * self.loss(batch))
        if batch_idx % 2:
            nn.utils.clip_grad_value_(self.parameters(), 0.02)
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
            self.norms.append({n: float(v) for n, v in grad_norm(self, 2).items()})
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.Adam(self.net[2].parameters(), lr=0.01),
        ]


class LeavesOut(Line):
    """Leave a layer out of every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.detour = nn.Linear(8, 8)
        self.is_used = True

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        hidden = self.net[:2](x)
        hidden = hidden + self.detour(hidden) if self.is_used else hidden
        return nn.functional.mse_loss(self.net[2](hidden), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.is_used = batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class LeavesOutOnSomeRanks(LeavesOut):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.is_used = bool(batch[0][0, 0] > 0.5)
        return Line.training_step(self, batch, batch_idx)


class LeavesOutAndKeepsZeros(LeavesOut):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LeavesOutByHand(LeavesOut):
    """Use the layer in one of two backward passes of a batch, or in none."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for self.is_used in (batch_idx % 2 == 0, False):
            self.manual_backward(self.loss(batch))
        self.norms.append({"number": float(len(gradients_of(self)))})
        optimizer.step()


class SharpnessAware(torch.optim.SGD):
    """Step by the gradients at weights that are moved along all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
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

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.data = p.data - 0.05 * p.grad
        return loss


class StepsByAssignment(Line):
    def configure_optimizers(self) -> Any:
        return Assigns(self.parameters())


class StepsBySharpness(Line):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.05, momentum=0.9)


class LooksAhead(Line):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9))


USES: dict[str, tuple[type[Line], dict[str, Any]]] = {
    "backward halves the loss": (HalfTheLoss, {}),
    "backward halves the loss of accumulated batches": (
        HalfTheLoss,
        {"accumulate_grad_batches": 3},
    ),
    "norms are logged": (ReadsNorms, {}),
    "norms of accumulated batches are logged": (ReadsNorms, {"accumulate_grad_batches": 2}),
    "read by helpers after the step": (ReadsThroughHelpers, {}),
    "the module clips": (ClipsItself, {}),
    "the module lets Lightning clip": (ClipsByLightning, {}),
    "gradients are dropped and replaced": (DropsAndReplaces, {}),
    "gradients are written into": (WritesAfterBackward, {}),
    "gradients are written into while they accumulate": (
        WritesAfterBackward,
        {"accumulate_grad_batches": 2},
    ),
    "clipped by hand": (ClipsByHand, {}),
    "added up by hand": (AddsUpByHand, {}),
    "clipped after plain backward passes": (ClipsRawly, {}),
    "added up by plain backward passes": (AddsUpRawly, {}),
    "never forgotten": (NeverForgets, {}),
    "toggled optimizers": (Turns, {}),
    "left out": (LeavesOut, {}),
    "left out of accumulated batches": (LeavesOut, {"accumulate_grad_batches": 3}),
    "left out on some ranks": (LeavesOutOnSomeRanks, {}),
    "left out with zeros": (LeavesOutAndKeepsZeros, {}),
    "left out by hand": (LeavesOutByHand, {}),
    "an optimizer that evaluates the loss twice": (StepsBySharpness, {}),
    "an optimizer around another": (LooksAhead, {}),
    "an optimizer that assigns data": (StepsByAssignment, {}),
}


#: Cases that ``ddp`` cannot run: its buckets expect a single pass of ``manual_backward`` at a time.
NOT_UNDER_DDP = ("clipped after plain backward passes", "added up by plain backward passes")
#: Cases that read norms and also run under tensor parallelism, by the plan below.
IN_PARTS = ("norms are logged", "the module clips", "the module lets Lightning clip", "clipped by hand",
    "clipped after plain backward passes",
)  # fmt: skip
PLAN = {"net.0": "column", "net.2": "row"}


def make_loader(rank: int = 0, size: int = 1) -> DataLoader:
    """Make a loader of 16 samples in batches of 4, of which every rank has its part."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 4, generator=generator)
    order = torch.arange(16).view(4, size, 4 // size)[:, rank].flatten()
    return DataLoader(TensorDataset(x[order], x[order].sum(1, keepdim=True)), batch_size=4 // size)


def fit(module: Line, strategy: Any, place: tuple[int, int] = (0, 1), **options: Any) -> Trainer:
    """Fit for two epochs in float64."""
    seed_everything(1, verbose=False)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 2}
    quiet["devices"] = dist.get_world_size() if dist.is_initialized() else 1
    quiet |= {"precision": "64-true", "use_distributed_sampler": False}
    trainer = Trainer(**{**quiet, **options}, strategy=strategy)
    trainer.fit(module, make_loader(*place), make_loader(*place))
    return trainer


def ours(place: tuple[int, int]) -> MegatronStrategy:
    """Return a MegatronStrategy that gives the module full batches."""
    return MegatronStrategy(microbatch_size=4 // place[1], bucket_size=16)


def order_of_calls(strategy: Any, place: tuple[int, int] = (0, 1), **options: Any) -> list[Call]:
    """Return all calls of the hooks of a module, a callback and an optimizer in their order."""
    module = type("Watched", (Line,), {})()
    log, callback = Log(module), type("Watcher", (Callback,), {})()
    log_hooks(callback, "callback", CALLBACK_HOOKS, log.add)
    configure = module.configure_optimizers

    def configure_optimizers() -> Any:
        configured = configure()
        step = configured[0][0].step

        def logged_step(closure: Any = None) -> Any:
            log.add("optimizer.step")

            def logged_closure() -> Any:
                log.add("closure begins")
                result = closure()
                log.add("closure ends")
                return result

            return step(logged_closure)

        configured[0][0].step = logged_step
        return configured

    type(module).configure_optimizers = staticmethod(configure_optimizers)
    log_hooks(module, "module", MODULE_HOOKS, log.add)
    fit(module, strategy, place, callbacks=[callback], gradient_clip_val=0.05, **options)
    return log.calls


def use(
    name: str, strategy: Any, place: tuple[int, int] = (0, 1)
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Return the weights after a fit, and the norms that the module has read."""
    kind, options = USES[name]
    module = kind()
    fit(module, strategy, place, **options)
    return [parameter.detach().clone() for parameter in module.parameters()], module.norms


def two_ranks(rank: int, size: int) -> dict[str, Any]:
    """Return this rank's results and calls under ``ddp`` and under MegatronStrategy."""
    results: dict[str, Any] = {}
    for kind in ("ddp", "ours"):

        def strategy(kind: str = kind) -> Any:
            return "ddp_find_unused_parameters_true" if kind == "ddp" else ours((rank, size))

        names = [name for name in USES if kind == "ours" or name not in NOT_UNDER_DDP]
        results[kind] = {name: use(name, strategy(), (rank, size)) for name in names}
        results[kind]["calls"] = order_of_calls(strategy(), (rank, size))
    results["tp2"] = {
        name: use(name, MegatronStrategy(tp=2, tensor_parallel_plan=PLAN))[1] for name in IN_PARTS
    }
    return results
