"""LightningModules that fine-tune a pretrained encoder on a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_megatron import Encoder, EncoderInput
from lightning_megatron.building_blocks import (
    IGNORED,
    Count,
    PretrainedEncoder,
    Probability,
    TokenModule,
    coerced_arguments,
)
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.shapes import Float, Int, Shaped
from lightning_megatron.tasks.finetuning.saved_scores import SavedScores
from lightning_megatron.tasks.finetuning.scores import TaskScores, labelled


class FineTuning(TokenModule):
    """Fine-tune a pretrained BERT or RoBERTa; subclasses define the head and the loss.

    The loss of a step is the mean over its rows. The module logs ``train_loss``, ``val_loss`` and
    ``test_loss`` (nats per row), and the metrics of the data module's task, such as
    ``val_accuracy``.

    Args:
        path: Hugging Face folder of a BERT or RoBERTa, or checkpoint of ``BERTPretraining``.
        from_scratch: Whether to start from random weights instead of the pretrained ones.
        dropout: Probability of all dropout layers; None keeps the probabilities of the encoder.
        warmup_share: Length of the warm-up as a fraction of all steps, in place of
            ``warmup_steps``.
        scores_dir: Folder for the scores of all rows, written after each validation and test; the
            command ``seeds`` computes ensembles from them. None writes no scores.
        training: Arguments of ``TokenModule``: ``learning_rate``, ``weight_decay``, ``betas``,
            ``warmup_steps``, ``max_steps``, ``schedule``, ``min_lr_ratio``, ``token_weighted``,
            ``lr_schedule``, ``weight_decay_schedule``.

    Source: Shoeybi et al. 2019, section 5.3 and table 6; Devlin et al. 2018, section 4.
    """

    #: Kind of the task, which determines the head of the encoder.
    kind: ClassVar[Literal["classes", "choices", "spans"]] = "classes"

    def __init__(
        self,
        path: str,
        num_labels: Count = 2,
        from_scratch: bool = False,
        dropout: Probability | None = None,
        warmup_share: Probability = 0.0,
        scores_dir: str | None = None,
        **training: Any,
    ) -> None:
        arguments = coerced_arguments(FineTuning.__init__, locals())
        super().__init__(**training)
        self.path: str = arguments["path"]
        self.from_scratch = from_scratch
        self.scores_dir: str | None = arguments["scores_dir"]
        self.warmup_share: float = arguments["warmup_share"]
        if self.warmup_share and (self.warmup_steps or self.lr_schedule is not None):
            raise ParallelPlanError(
                f"warmup_share ({self.warmup_share}) must be 0 with warmup_steps or lr_schedule, "
                "because both describe the warm-up. Leave one of them out."
            )
        self.source = PretrainedEncoder.at(self.path, self.kind)
        self.config = self.source.config_with(arguments["num_labels"], arguments["dropout"])
        names = ("path", "from_scratch", "dropout", "warmup_share", "scores_dir")
        self.save_hyperparameters({name: arguments[name] for name in names})
        self.model: Encoder | None = None
        self.scores_of = nn.ModuleDict()

    @property
    @override
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @override
    def setup(self, stage: str) -> None:
        """Create the metrics of the task from the data module, whose ``setup`` must have run."""
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "scores"):
            return
        if data.num_labels != self.config.num_labels:
            raise ParallelPlanError(
                f"num_labels ({self.config.num_labels}) must be {data.num_labels}, the number of "
                "classes of the task. Set num_labels."
            )
        # A RoBERTa counts positions without padding, so it would fail at the first long text.
        self.config.check_seq_length(data.seq_length)
        parts = {"fit": ("val",), "validate": ("val",), "test": ("test",)}.get(stage, ())
        metrics = {part: data.scores(part) for part in parts}
        self.scores_of = nn.ModuleDict({part: scores for part, scores in metrics.items() if scores})

    def configure_model(self) -> None:
        """Build this rank's part of the model, with the pretrained weights."""
        if self.model is not None:
            return
        model = Encoder(self.config, mesh=self.parallel_mesh(), seed=torch.initial_seed())
        if not self.from_scratch:
            drawn = self.source.fill(model)
            if drawn:
                rank_zero_info(f"{self.path} has no {', '.join(drawn)}: initialized at random.")
        self.model = model

    def forward(
        self, batch: Mapping[str, Shaped[Tensor, "batch *_"]]
    ) -> Float[Tensor, "batch *scores"]:
        """Return the logits of each row: of classes, of options, or of span starts and ends.

        Args:
            batch: ``tokens``, ``token_types`` and ``valid``, of the same shape. A model with a
                single token type, such as RoBERTa, does not read ``token_types``. ``lengths``
                replaces ``valid`` if it is there.
        """
        assert self.model is not None, "configure_model builds the model before its first use"
        types = batch["token_types"] if self.config.num_token_types > 1 else None
        lengths = batch.get("lengths")
        valid = batch["valid"] if lengths is None else None
        rows = EncoderInput(batch["tokens"], valid=valid, token_types=types, lengths=lengths)
        logits = self.model(rows).logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide)

    def losses(
        self,
        scores: Float[Tensor, "batch *scores"],
        labels: Int[Tensor, "batch *labels"],
    ) -> Float[Tensor, "batch"]:
        """Return the loss of each row, 0 where its label is -100.

        Args:
            labels: Labels of each row; the loss of a row with several is their mean.
        """
        losses = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none")
        return losses.mean(1) if losses.dim() > 1 else losses

    @override
    def mean_loss(
        self,
        batch: Mapping[str, Shaped[Tensor, "batch *_"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        return self.losses(self(batch), batch["labels"]).sum() / num_tokens.clamp(min=1)

    @override
    def _count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return labelled(batch)

    def predict_step(
        self, batch: Mapping[str, Shaped[Tensor, "batch *_"]], batch_idx: int
    ) -> dict[str, Shaped[Tensor, "batch *_"]]:
        """Return the scores of each row, with the index of the row in the data set."""
        return {"row": batch["row"], "scores": self(batch)}

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_results("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_results("test")

    @override
    def _evaluate(self, batch: Mapping[str, Tensor], part: str, index: int | None) -> None:
        if index is not None:
            raise UnsupportedError(
                f"a task must have one dataloader for {part}, because its metrics cover one data "
                f"set: there is a dataloader with index {index}. Use the data module of the task, "
                "which scores several files as groups of one data set."
            )
        scores = self(batch)
        num_rows = labelled(batch)
        loss = self.losses(scores, batch["labels"]).sum() / num_rows.clamp(min=1)
        weight: Any = num_rows.to(loss.dtype)
        self.log(f"{part}_loss", loss, prog_bar=True, sync_dist=True, batch_size=weight)
        if part in self.scores_of:
            self._scores(part).update(batch["row"], scores)

    def _log_results(self, name: str) -> None:
        """Log the results of an epoch, which are the same on every rank, and reset the metric."""
        if name not in self.scores_of:
            return
        metric = self._scores(name)
        results = metric.compute()
        for key, value in results.items():
            self.log(f"{name}_{key}", value.float(), prog_bar=True, sync_dist=True)
        trainer = self.trainer
        if self.scores_dir is not None and trainer.is_global_zero and not trainer.sanity_checking:
            saved = SavedScores(
                *metric.computed, {key: float(value) for key, value in results.items()}
            )
            saved.write(Path(self.scores_dir), name, trainer.global_step)
        metric.reset()

    def _scores(self, name: str) -> TaskScores:
        metrics = self.scores_of[name]
        assert isinstance(metrics, TaskScores), "the data module returns metrics of its task"
        return metrics

    @override
    def _lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        if self.warmup_share:
            steps = self.max_steps or self.steps_of_training()
            if steps is None:
                raise UnsupportedError(
                    f"warmup_share ({self.warmup_share}) needs a finite number of training steps, "
                    "because it is a fraction of them. Set max_epochs or max_steps, or use "
                    "warmup_steps."
                )
            self.warmup_steps = round(self.warmup_share * steps)
        return super()._lr_scheduler(optimizer)


class BERTClassifier(FineTuning):
    """Fine-tune a BERT or RoBERTa to classify texts or pairs of texts, such as MNLI and QQP.

    Equal to Hugging Face's BertForSequenceClassification or RobertaForSequenceClassification with
    the same weights, in every layout.

    Shapes:
        A batch is {"tokens": (B, S), "token_types": (B, S), "valid": (B, S), "lengths": (B,),
        "labels": (B,), "row": (B,)}. ``valid`` is false at padding. ``lengths``, the number of
        tokens before the padding, is optional: it replaces ``valid`` if all padding is on the
        right, and is faster on GPUs. ``row`` is the index of the row in the data set. Rows that pad
        a batch have the index -1 and the label -100.

    Args:
        path: Hugging Face folder of a BERT or RoBERTa, or checkpoint of ``BERTPretraining``.
        num_labels: Number of classes.
        options: Arguments of ``FineTuning``: ``from_scratch``, ``dropout``, ``warmup_share``,
            ``scores_dir``, and those of ``TokenModule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        CheckpointMismatchError: If the path holds neither a folder nor a checkpoint to start from.
        UnsupportedError: If the model is neither a BERT nor a RoBERTa, or has settings that are not
            supported.
    """

    def __init__(self, path: str, num_labels: Count = 2, **options: Any) -> None:
        super().__init__(path, num_labels, **options)
        self.save_hyperparameters({"num_labels": self.config.num_labels})


class BERTMultipleChoice(FineTuning):
    """Fine-tune a BERT or RoBERTa to choose one of several options, such as RACE.

    Equal to Hugging Face's BertForMultipleChoice or RobertaForMultipleChoice with the same weights,
    in every layout.

    Shapes:
        A batch is {"tokens": (B, C, S), "token_types": (B, C, S), "valid": (B, C, S),
        "lengths": (B, C), "labels": (B,), "row": (B,)} with C options. ``valid`` is false at
        padding. ``lengths``, the number of tokens before the padding, is optional: it replaces
        ``valid`` if all padding is on the right, and is faster on GPUs. ``row`` is the index of the
        row in the data set. Rows that pad a batch have the index -1 and the label -100.

    Args:
        path: Hugging Face folder of a BERT or RoBERTa, or checkpoint of ``BERTPretraining``.
        options: Arguments of ``FineTuning``: ``from_scratch``, ``dropout``, ``warmup_share``,
            ``scores_dir``, and those of ``TokenModule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        CheckpointMismatchError: If the path holds neither a folder nor a checkpoint to start from.
        UnsupportedError: If the model is neither a BERT nor a RoBERTa, or has settings that are not
            supported.
    """

    kind = "choices"

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, 1, **options)

    @override
    def forward(
        self, batch: Mapping[str, Shaped[Tensor, "batch choices seq"]]
    ) -> Float[Tensor, "batch choices"]:
        num_rows, choices = batch["tokens"].shape[:2]
        names = [name for name in ("tokens", "token_types", "valid", "lengths") if name in batch]
        return (
            super()
            .forward({name: batch[name].flatten(0, 1) for name in names})
            .reshape(num_rows, choices)
        )


class BERTQuestionAnswering(FineTuning):
    """Fine-tune a BERT or RoBERTa to find the answer to a question in a text, such as SQuAD.

    Equal to Hugging Face's BertForQuestionAnswering or RobertaForQuestionAnswering with the same
    weights, in every layout. If the text does not contain the answer, its start and end are the
    first token.

    Shapes:
        A batch is {"tokens": (B, S), "token_types": (B, S), "valid": (B, S), "lengths": (B,),
        "labels": (B, 2), "row": (B,)}. Labels are the first and the last token of the answer.
        ``valid`` is false at padding. ``lengths``, the number of tokens before the padding, is
        optional: it replaces ``valid`` if all padding is on the right, and is faster on GPUs.
        ``row`` is the index of the window. Rows that pad a batch have the index -1 and the labels
        -100.

    Args:
        path: Hugging Face folder of a BERT or RoBERTa, or checkpoint of ``BERTPretraining``.
        options: Arguments of ``FineTuning``: ``from_scratch``, ``dropout``, ``warmup_share``,
            ``scores_dir``, and those of ``TokenModule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        CheckpointMismatchError: If the path holds neither a folder nor a checkpoint to start from.
        UnsupportedError: If the model is neither a BERT nor a RoBERTa, or has settings that are not
            supported.
    """

    kind = "spans"

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, 2, **options)
