"""Fits of a module and a callback that log in every way from every hook that may log."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

#: Options of ``log`` by name.
WAYS: dict[str, dict[str, Any]] = {
    "step": {"on_step": True, "on_epoch": False},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True},
    "synced": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "sum": {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True},
    "max": {"on_step": True, "on_epoch": True, "reduce_fx": torch.max, "sync_dist": True},
    "min": {"on_step": True, "on_epoch": True, "reduce_fx": min},
    "weighed": {"on_step": False, "on_epoch": True, "batch_size": 3, "sync_dist": True},
    "of rank 0": {"on_step": True, "on_epoch": False, "rank_zero_only": True},
}
#: Hooks of the module and of a callback; with stages, hooks of the backward pass are refused.
HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_after_backward"),
    *(
        "on_before_optimizer_step",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_batch_start",
    ),
    *(
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_train_start",
        "on_validation_epoch_start",
    ),
)
OF_LOSS = ("on_before_backward",)
BY_EPOCH_ONLY = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_train_start",
)


def log_all(module: Any, prefix: str, value: float | Tensor, is_epoch: bool = False) -> None:
    for way, options in WAYS.items():
        if not (is_epoch and options["on_step"]):
            module.log(f"{prefix}/{way}", value, **options)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Logs(LightningModule):
    """Log the loss in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.first(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(self.last(hidden), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        log_all(self, "training_step", loss)
        self.log_dict({"pair/a": loss, "pair/b": loss * 2}, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        log_all(self, "validation_step", loss)
        self.log("plain", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def add_logging_hooks(owner: Any, hooks: tuple[str, ...], owner_name: str, place: int) -> None:
    """Let an object's hooks log their number of calls times a factor that differs between ranks."""
    counts = dict.fromkeys(hooks, 0)
    for hook in hooks:

        def log_count(*args: Any, _hook: str = hook, **kwargs: Any) -> None:
            counts[_hook] += 1
            module = owner if isinstance(owner, LightningModule) else args[1]
            is_epoch = _hook in BY_EPOCH_ONLY or _hook == "on_validation_epoch_start"
            log_all(module, f"{owner_name}.{_hook}", float(counts[_hook] * (1 + place)), is_epoch)

        setattr(type(owner), hook, staticmethod(log_count))


def make_loader(place: tuple[int, int]) -> DataLoader:
    rank, size = place
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    order = torch.arange(16).view(-1, size, 4 // size)[:, rank].flatten()
    return DataLoader(TensorDataset(x[order], x[order].sum(1, keepdim=True)), 4 // size)


def run(
    strategy: Any, devices: int, place: tuple[int, int], folder: Any, of_loss: bool = True
) -> dict[str, Any]:
    """Fit, and return the metrics of callbacks and the rows of the logger."""
    seed_everything(1, verbose=False)
    hooks = HOOKS + OF_LOSS if of_loss else HOOKS
    module, callback = type("LogsEverywhere", (Logs,), {})(), type("LogsToo", (Callback,), {})()
    add_logging_hooks(module, hooks, "module", place[0])
    add_logging_hooks(callback, hooks, "callback", place[0])
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(folder, "csv", version=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[callback],
        **options,
    )
    trainer.fit(module, make_loader(place), [make_loader(place), make_loader(place)])
    results: dict[str, Any] = {
        "callbacks": {name: float(value) for name, value in trainer.callback_metrics.items()}
    }
    if trainer.is_global_zero:
        rows = (folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
        names = rows[0].split(",")
        results["rows"] = [
            {name: float(value) for name, value in zip(names, row.split(","), strict=True) if value}
            for row in rows[1:]
        ]
    return results
