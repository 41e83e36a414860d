"""Base class of LightningModules that train on tokens, with logging, optimizer and schedulers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.evaluated_set import EvaluatedSet, log_means_of_all_sets
from lightning_megatron.models.layered import LayeredModule, advance_streams, single_mesh
from lightning_megatron.models.lr_schedules import WarmupSchedule
from lightning_megatron.models.scheduler_settings import SchedulerSettings
from lightning_megatron.plan.settings import (
    Count,
    Index,
    NotNegative,
    Positive,
    Probability,
    Range,
    coerced_arguments,
)
from lightning_megatron.shapes import Float, Int, Shaped

#: Label of positions without a target token.
IGNORED = -100


class TokenModule(LightningModule):
    """Train, validate and test on batches of ``{"tokens": (batch, seq), "labels": (batch, seq)}``.

    The loss ignores labels of -100. The module logs ``train_loss``, ``val_loss`` and ``test_loss``
    (nats per token), and ``val_bits_per_byte`` and ``test_bits_per_byte`` if the mean number of
    bytes per token is known. A subclass provides the vocabulary size and the mean loss.

    The module logs each of several validation sets as ``val_loss/NAME``, with a name from the data
    module, or else ``dataloader_idx_0`` and so on. ``val_loss`` is then the mean over all tokens of
    all sets, which is logged at the end of the epoch. The same holds for test sets.

    Args:
        learning_rate: Peak of the learning rate, reached after the warm-up.
        weight_decay: Weight decay of matrices; one-dimensional parameters (biases, norms) have
            none.
        betas: Decay rates of AdamW's moments.
        warmup_steps: Length of the linear warm-up of the learning rate (optimizer steps).
        max_steps: Step at which the learning rate reaches its minimum; None means the end of the
            training (optimizer steps).
        schedule: Shape of the decay after the warm-up: ``cosine``, ``linear`` or ``constant``.
        min_lr_ratio: Minimum of the learning rate as a fraction of its peak.
        bytes_per_token: Mean number of bytes per token, for bits per byte; None uses that of the
            data module (bytes).
        lr_schedule: Class of the learning rate scheduler with its arguments, such as
            ``CosineSchedule``, which advances after each optimizer step. It replaces ``schedule``,
            ``warmup_steps``, ``max_steps`` and ``min_lr_ratio``, which must keep their defaults.
            The peak is ``learning_rate``.
        weight_decay_schedule: Class of a scheduler of the weight decay with its arguments, such as
            ``WeightDecaySchedule``; None keeps ``weight_decay``.
        token_weighted: Whether a step under MegatronStrategy computes the gradient of the mean over
            all its tokens, on all ranks and in all microbatches. Otherwise microbatches and ranks
            are weighted by their number of samples, like ranks under other strategies. The results
            differ if samples have ignored labels.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    #: Names of the means of an evaluation, each with the unit that weights the sets.
    weights_of_means: tuple[tuple[str, str], ...] = (("loss", "tokens"), ("bits_per_byte", "bytes"))

    #: The model that ``configure_model`` of a subclass builds; None before.
    model: nn.Module | None

    def __init__(
        self,
        learning_rate: NotNegative = 3e-4,
        weight_decay: NotNegative = 0.1,
        betas: tuple[Probability, Probability] = (0.9, 0.95),
        warmup_steps: Index = 0,
        max_steps: Count | None = None,
        schedule: Literal["cosine", "linear", "constant"] = "cosine",
        min_lr_ratio: Annotated[float, Range(minimum=0, maximum=1)] = 0.1,
        bytes_per_token: Positive | None = None,
        token_weighted: bool = True,
        lr_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        weight_decay_schedule: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        schedulers = {
            "lr_schedule": SchedulerSettings.of("lr_schedule", lr_schedule),
            "weight_decay_schedule": SchedulerSettings.of(
                "weight_decay_schedule", weight_decay_schedule
            ),
        }
        arguments = coerced_arguments(TokenModule.__init__, locals() | schedulers)
        super().__init__()
        self.learning_rate: float = arguments["learning_rate"]
        self.weight_decay: float = arguments["weight_decay"]
        self.betas: tuple[float, float] = arguments["betas"]
        self.warmup_steps: int = arguments["warmup_steps"]
        self.max_steps: int | None = arguments["max_steps"]
        self.schedule: Literal["cosine", "linear", "constant"] = arguments["schedule"]
        self.min_lr_ratio: float = arguments["min_lr_ratio"]
        self.bytes_per_token: float | None = arguments["bytes_per_token"]
        self.token_weighted: bool = arguments["token_weighted"]
        self.lr_schedule = schedulers["lr_schedule"]
        self.weight_decay_schedule = schedulers["weight_decay_schedule"]
        self._check_schedulers()
        plain = {name: settings and settings.plain() for name, settings in schedulers.items()}
        self.save_hyperparameters(arguments | plain)

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Self:
        """Build the module from the hyperparameters in a file and load its weights.

        It equals Lightning's method, but no file makes it run or import other code: None stands for
        ``weights_only=True`` also behind a URL, and Lightning's parser, which imports each class
        that it reads, does not receive the hyperparameters of a module of this package.

        Args:
            checkpoint_path: Path, URL or stream of the file.
            map_location: Devices of the tensors, as for ``torch.load``.
            hparams_file: File of hyperparameters that replace those in the checkpoint.
            strict: Whether the names of weights must match.
            weights_only: False unpickles objects of any type, which can run code from the file.
            options: Hyperparameters that replace single ones in the checkpoint.
        """
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            options["_instantiator"] = None
        is_safe = weights_only is not False
        return super().load_from_checkpoint(
            checkpoint_path, map_location, hparams_file, strict, is_safe, **options
        )

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""

    @abstractmethod
    def mean_loss(
        self,
        batch: Mapping[str, Int[Tensor, "batch _"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        """Return the mean loss over the labels of a batch that are not ignored; 0 without any.

        Args:
            batch: Tokens and labels.
            num_tokens: Number of labels that are not ignored, as a tensor on the device.
            is_trained: Whether the loss is for training; otherwise it is for evaluation.
        """

    def provide_model(self, mesh: Any) -> nn.Module:
        """Build the model with ``configure_model``, and return it without keeping it.

        Another module that runs the model, such as ``EvaluatedLM``, calls this method with its own
        ``device_mesh``; None without MegatronStrategy.
        """
        self._device_mesh = mesh
        self.configure_model()
        model = self.model
        assert isinstance(model, nn.Module), "configure_model builds the model"
        self.model = None
        return model

    def parallel_mesh(self) -> ParallelMesh:
        """Return the process groups that MegatronStrategy set, or those of a single process.

        Raises:
            UnsupportedError: If another strategy has set a device mesh of another kind.
        """
        mesh: Any = self.device_mesh
        if isinstance(mesh, ParallelMesh):
            return mesh
        if mesh is not None:
            raise UnsupportedError(
                f"{type(self).__name__} cannot be sharded over a {type(mesh).__name__}, because it "
                "is built from layers of lightning_megatron. Use MegatronStrategy, ddp or one "
                "device."
            )
        return single_mesh(torch.initial_seed() % 2**63)

    def steps_of_training(self) -> int | None:
        """Return the number of optimizer steps of the whole training; None if it has no end."""
        known = total_steps(self.trainer)
        return int(known) if math.isfinite(known) and known > 0 else None

    def setup(self, stage: str) -> None:
        """Check that the vocabulary of the model includes that of the data module.

        Lightning calls ``setup`` of the data module first.
        """
        vocab_size = _vocab_size_of(getattr(self.trainer, "datamodule", None))
        if vocab_size is not None and vocab_size > self.vocab_size:
            raise ParallelPlanError(
                f"vocab_size ({self.vocab_size}) of the model must be at least the vocab_size of "
                f"the data ({vocab_size}), because every token id selects a row of the embedding. "
                f"Use a vocab_size of {vocab_size} or more, or the tokenizer of the model."
            )

    def training_step(
        self, batch: Mapping[str, Shaped[Tensor, "batch *_"]], batch_idx: int
    ) -> Float[Tensor, ""] | dict[str, Shaped[Tensor, ""]]:
        """Return the mean loss of the batch's tokens and, if ``token_weighted``, their number."""
        if isinstance(self.model, LayeredModule):
            advance_streams(self, self.model)
        num_tokens = self._count(batch)
        means = self._means(batch, num_tokens, "train")
        for name, value in means.items():
            self.log(
                f"train_{name}",
                value.detach(),
                on_step=True,
                prog_bar=name == "loss",
                sync_dist=True,
                batch_size=len(batch["tokens"]),
            )
        loss = means["loss"]
        return {"loss": loss, "num_tokens": num_tokens} if self.token_weighted else loss

    def validation_step(
        self,
        batch: Mapping[str, Shaped[Tensor, "batch ..."]],
        batch_idx: int,
        dataloader_idx: int | None = None,
    ) -> None:
        """Log the means over the tokens of the batch."""
        self._evaluate(batch, "val", dataloader_idx)

    def test_step(
        self,
        batch: Mapping[str, Shaped[Tensor, "batch ..."]],
        batch_idx: int,
        dataloader_idx: int | None = None,
    ) -> None:
        """Log the means over the tokens of the batch."""
        self._evaluate(batch, "test", dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the means over all validation sets if there are several."""
        log_means_of_all_sets(self, "val", self.weights_of_means)

    def on_test_epoch_end(self) -> None:
        """Log the means over all test sets if there are several."""
        log_means_of_all_sets(self, "test", self.weights_of_means)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW and its schedulers, which advance with each optimizer step."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        decayed = [parameter for parameter in trained if parameter.dim() > 1]
        undecayed = [parameter for parameter in trained if parameter.dim() <= 1]
        # Both groups exist on every rank, even if they are empty, so that the optimizer checkpoints
        # of all ranks match.
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
            fused=self._is_fused() or None,
        )
        rate = self._stepped_per_batch(self._lr_scheduler(optimizer))
        if self.weight_decay_schedule is None:
            return {"optimizer": optimizer, "lr_scheduler": rate}
        schedulers: list[Any] = [
            rate,
            self._stepped_per_batch(self.weight_decay_schedule(optimizer)),
        ]
        return [optimizer], schedulers

    @staticmethod
    def _stepped_per_batch(scheduler: LRScheduler) -> LRSchedulerConfigType:
        # By default, Lightning advances a scheduler after each epoch.
        return {"scheduler": scheduler, "interval": "step"}

    def _check_schedulers(self) -> None:
        """Raise if schedulers reject their arguments, or two settings describe the rate."""
        for name in ("lr_schedule", "weight_decay_schedule"):
            settings: SchedulerSettings | None = getattr(self, name)
            if settings is not None:
                settings.check(name, self.learning_rate, self.weight_decay)
        if self.lr_schedule is None:
            return
        defaults = {"schedule": "cosine", "warmup_steps": 0, "max_steps": None, "min_lr_ratio": 0.1}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ParallelPlanError(
                    f"{name} ({getattr(self, name)}) must be {default} with lr_schedule, because "
                    f"{self.lr_schedule.kind.__name__} determines the learning rate of all steps. "
                    f"Leave {name} or lr_schedule out."
                )

    def _lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        if self.lr_schedule is not None:
            return self.lr_schedule(optimizer)
        schedule = WarmupSchedule(
            self.schedule, self.warmup_steps, self._num_steps(), self.min_lr_ratio
        )
        # LambdaLR does not save a lambda, so a resumed training uses the current settings.
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.factor(step))

    def _is_fused(self) -> bool:
        """Return whether to use fused AdamW: on GPUs under MegatronStrategy.

        The precision plugins of other strategies cannot clip gradients for a fused optimizer.
        """
        on_gpu = all(parameter.is_cuda for parameter in self.parameters())
        return on_gpu and isinstance(self.device_mesh, ParallelMesh)

    def _count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of labels of a batch that are not ignored."""
        return (batch["labels"] != IGNORED).sum()

    def _means(
        self, batch: Mapping[str, Tensor], num_tokens: Tensor, set_name: str
    ) -> dict[str, Tensor]:
        """Return the means over a batch to log, by name; ``loss`` is the one that is trained.

        Args:
            set_name: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
        """
        return {"loss": self.mean_loss(batch, num_tokens, set_name == "train")}

    def _evaluate(self, batch: Mapping[str, Tensor], part: str, index: int | None) -> None:
        evaluated = EvaluatedSet.of(self, part, index)
        num_tokens = self._count(batch)
        means = self._means(batch, num_tokens, evaluated.set_name)
        loss = means["loss"]
        # The weight of this batch in the mean over batches and ranks. It is a tensor, because an
        # int would make the host wait for the device.
        weight = num_tokens.to(loss.dtype)
        units = dict(self.weights_of_means)
        evaluated.log(means, weight, units["loss"])
        if "bits_per_byte" not in units:
            return
        length = self.bytes_per_token or evaluated.bytes_per_token()
        if length:
            evaluated.log(
                {"bits_per_byte": loss / (math.log(2.0) * length)}, weight, "bytes", length
            )

    def _num_steps(self) -> int | None:
        """Return the step at which the decay ends; None if the training has no known end."""
        if self.max_steps is not None:
            return self.max_steps
        return None if self.schedule == "constant" else self.steps_of_training()


def _vocab_size_of(data: Any) -> int | None:
    """Return the vocabulary size of a data module; None if it is not known."""
    with suppress(UnsupportedError):
        size = getattr(data, "vocab_size", None)
        return size if isinstance(size, int) else None
    return None


def total_steps(trainer: Any) -> float:
    """Return the number of optimizer steps of a whole training; infinite if it has no end (steps).

    A data module whose epochs differ in their number of batches counts them. Otherwise it is the
    estimate of the Trainer, which multiplies the batches of one epoch.

    Args:
        trainer: Trainer of the training.
    """
    # Look the method up by name, because models do not import data modules.
    count = getattr(getattr(trainer, "datamodule", None), "steps_of_epochs", None)
    # The Trainer's estimate builds the training loader, which the data module counts.
    known = trainer.estimated_stepping_batches
    counted = None if count is None else count()
    return known if counted is None else counted
