"""LightningModule that trains a Hugging Face language model on preference pairs (DPO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_megatron import HuggingFaceCausalLM, LoraSettings
from lightning_megatron.building_blocks import (
    IGNORED,
    Probability,
    Range,
    coerced_arguments,
    token_losses,
)
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.shapes import Float, Int
from lightning_megatron.tasks.preferences.pair_loss import PairLoss
from lightning_megatron.tasks.preferences.preference_datamodule import PreferenceDataModule
from lightning_megatron.tasks.preferences.reference import ReferenceLogProbs

_ENTRY = "reference_log_probs"
_REWARDS = ("chosen", "rejected", "margins", "accuracies")


class DPO(HuggingFaceCausalLM):
    """Train a Hugging Face decoder to prefer chosen answers to rejected ones.

    This is direct preference optimization (DPO) on batches of ``PreferenceDataModule``. The loss is
    the mean over the pairs of all data-parallel ranks and microbatches. The reference model is the
    model before training. Its log-probabilities of all pairs are computed once, before the first
    step, and saved in checkpoints as two numbers per pair. Memory holds no second copy of the
    model.

    The module logs ``train_loss``, ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``
    and ``rewards/accuracies`` for each step. For an evaluation it logs the same values as
    ``val_loss``, ``val_rewards/chosen`` and so on; for named validation sets those of each set,
    such as ``val_loss/news``, and their means over all pairs. The reward of an answer is ``beta``
    times its log-ratio: its log-probability by the model minus that by the reference model.

    Args:
        path: Folder with ``config.json`` and the weights in safetensors files, or its name on the
            Hub.
        beta: Weight of the log-ratios; smaller values allow larger deviations from the reference
            model.
        loss_type: Loss of a pair; see ``PairLoss``.
        label_smoothing: Probability that a label is wrong, for ``sigmoid`` and ``robust``.
        reference_free: Whether to assume that the reference model gives all answers the same
            probability; no log-probabilities are then computed before the first step.
        dtype: Dtype of the weights, as in ``HuggingFaceCausalLM``.
        lora: Low-rank adapters to train instead of the model's weights; None trains the weights.
        training: Other arguments of ``HuggingFaceCausalLM``, except ``token_weighted`` and
            ``bytes_per_token``, which have no meaning for pairs.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        UnsupportedError: If the data are not preference pairs, or the reference log-probabilities
            are missing and the model has already been trained (raised at the start of training or
            of an evaluation).
        CheckpointMismatchError: If a checkpoint has the reference log-probabilities of other pairs.
        Exception: As for ``HuggingFaceCausalLM``.
    """

    weights_of_means = (("loss", "pairs"), *((f"rewards/{name}", "pairs") for name in _REWARDS))

    def __init__(
        self,
        path: str,
        beta: Annotated[float, Range(above=0)] = 0.1,
        loss_type: Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero"] = "sigmoid",
        label_smoothing: Probability = 0.0,
        reference_free: bool = False,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        lora: LoraSettings | None = None,
        **training: Any,
    ) -> None:
        given = coerced_arguments(DPO.__init__, locals())
        super().__init__(path, dtype=dtype, lora=lora, **training)
        if not self.token_weighted or self.bytes_per_token is not None:
            raise ParallelPlanError(
                "DPO does not accept token_weighted and bytes_per_token, because its loss is a "
                f"mean over pairs: they are {self.token_weighted} and {self.bytes_per_token}. "
                "Leave them out."
            )
        self.pair_loss = PairLoss(given["loss_type"], given["beta"], given["label_smoothing"])
        self.reference_free = reference_free
        self.reference = ReferenceLogProbs()
        self.save_hyperparameters(
            {
                "beta": self.pair_loss.beta,
                "loss_type": loss_type,
                "label_smoothing": self.pair_loss.label_smoothing,
                "reference_free": reference_free,
            }
        )

    def log_probs(self, batch: Mapping[str, Int[Tensor, "pairs ..."]]) -> Float[Tensor, "pairs 2"]:
        """Return the log-probability of each answer, summed over its tokens (nats).

        No rank gathers the logits, which are sharded over tp.

        Args:
            batch: Tokens and labels of pairs, as ``PreferenceDataModule`` describes them.
        """
        assert self.model is not None, "configure_model builds the model before its first use"
        tokens = batch["tokens"].flatten(0, 1)
        losses = token_losses(self.model, tokens, batch["labels"].flatten(0, 1))
        return -losses.sum(1).view(-1, 2)

    @override
    def training_step(
        self, batch: Mapping[str, Int[Tensor, "pairs ..."]], batch_idx: int
    ) -> Float[Tensor, ""]:
        """Return the mean loss of the batch's pairs."""
        size = len(batch["pairs"])
        rewards = self._means(batch, self._count(batch), "train")
        loss = rewards.pop("loss")
        self.log(
            "train_loss",
            loss.detach(),
            on_step=True,
            prog_bar=True,
            sync_dist=True,
            batch_size=size,
        )
        for name, value in rewards.items():
            self.log(name, value, on_step=True, sync_dist=True, batch_size=size)
        return loss

    @override
    def predict_step(
        self, batch: Mapping[str, Int[Tensor, "pairs ..."]], batch_idx: int
    ) -> Float[Tensor, "pairs 2"]:
        """Return the log-probabilities of the chosen and the rejected answers (nats)."""
        return self.log_probs(batch)

    def on_train_start(self) -> None:
        """Compute the reference log-probabilities of the training and validation pairs."""
        self._prepare("train")
        if self.trainer.limit_val_batches:
            self._prepare("val")
        self.reference.was_trained = True

    def on_validation_start(self) -> None:
        """Compute the reference log-probabilities of the validation set, unless they are known."""
        self._prepare("val")

    def on_test_start(self) -> None:
        """Compute the reference log-probabilities of the test set, unless they are known."""
        self._prepare("test")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_ENTRY] = self.reference.state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reference.load_state(checkpoint.get(_ENTRY, {}))
        self.reference.was_trained = True

    @override
    def _count(self, batch: Mapping[str, Tensor]) -> Tensor:
        # Samples that only fill the batch have a negative number, and do not count.
        return (batch["pairs"] >= 0).sum()

    @override
    def _means(
        self, batch: Mapping[str, Tensor], num_tokens: Tensor, set_name: str
    ) -> dict[str, Tensor]:
        """Return the mean loss of a batch's pairs and the means of their rewards, by name."""
        ratios = self.log_probs(batch)
        if not self.reference_free:
            ratios = ratios - self.reference.of(set_name, batch["pairs"])
        is_pair = (batch["pairs"] >= 0).to(ratios.dtype)
        num_pairs = num_tokens.clamp(min=1)
        losses = self.pair_loss.of(ratios, (batch["labels"] != IGNORED).sum(-1))
        rewards = self.pair_loss.beta * ratios.detach()
        chosen = rewards[:, 0]
        rejected = rewards[:, 1]
        values = chosen, rejected, chosen - rejected, (chosen > rejected).to(ratios.dtype)
        means = {"loss": (losses * is_pair).sum() / num_pairs}
        for name, value in zip(_REWARDS, values, strict=True):
            means[f"rewards/{name}"] = (value * is_pair).sum() / num_pairs
        return means

    def _prepare(self, part: str) -> None:
        """Compute the reference log-probabilities of a part of the data if they are missing."""
        if self.reference_free:
            return
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PreferenceDataModule):
            raise UnsupportedError(
                "DPO with a reference model needs the data module PreferenceDataModule, which "
                f"numbers the pairs: the data module of the Trainer is {type(data).__name__}. Use "
                "PreferenceDataModule, or reference_free=True."
            )
        for set_name in data.sets_of(part):
            self.reference.prepare(self, data, set_name)
