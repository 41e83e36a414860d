"""LightningModule that trains a pretrained or randomly initialised Hugging Face language model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.hub import TOKENIZER, local_folder, tokenizer_files
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.models.hugging_face_folder import (
    CONFIG,
    load_model,
    random_model,
    read_config,
)
from lightning_megatron.models.lora import PEFT, LoraSettings, bare_model
from lightning_megatron.models.token_module import TokenModule
from lightning_megatron.plan.settings import coerced_arguments
from lightning_megatron.shapes import Float, Int


class HuggingFaceCausalLM(TokenModule):
    """Train, validate and test a Hugging Face decoder.

    Under MegatronStrategy a model of a supported family works in any layout, and each rank reads
    only its shards of the weights. Other models need one pipeline stage. Under ``ddp`` or on one
    device the module trains the unchanged Hugging Face model. It logs the same values as
    ``CausalLM``.

    Shapes:
        A batch is {"tokens": (B, S), "labels": (B, S)}. Labels are the next tokens, as
        ``TokenDataModule`` provides them; the loss ignores labels of -100. Attention and positions
        restart in each document if the batch has {"lengths": (B, L)}, the number of tokens of each
        document, or {"position_ids": (B, S)} that restart in each document.

    Args:
        path: Folder with ``config.json`` and, unless ``from_scratch``, the weights in safetensors
            files; or its name on the Hub, such as ``Qwen/Qwen3-0.6B``.
        from_scratch: Whether to start from random weights. Under MegatronStrategy they depend on
            the seed but not on the layout, and differ from the random weights of transformers.
        dtype: Dtype of the weights before the Trainer's ``precision`` converts them; ``auto`` means
            that of the folder.
        expert_settings: Load-balancing settings of a mixture of experts that replace those of
            ``config.json``: any of ``aux_loss``, ``aux_loss_scope``, ``z_loss``, ``jitter`` and
            ``capacity_factor`` of ``ExpertsConfig``. Needs MegatronStrategy.
        lora: Low-rank adapters to train instead of the model's weights; None trains the weights.
        training: Arguments of ``TokenModule``: ``learning_rate``, ``weight_decay``, ``betas``,
            ``warmup_steps``, ``max_steps``, ``schedule``, ``min_lr_ratio``, ``bytes_per_token``,
            ``token_weighted``, ``lr_schedule``, ``weight_decay_schedule``.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
        CorruptDataError: If ``config.json`` is not valid JSON.
        CheckpointMismatchError: If transformers rejects the folder, or the folder lacks weights (in
            ``configure_model``).
        UnsupportedError: If the path is no folder with ``config.json`` or name on the Hub, or
            ``expert_settings`` are used with another strategy.
        MissingExtraError: If transformers, or peft for ``lora``, is not installed.
    """

    def __init__(
        self,
        path: str,
        from_scratch: bool = False,
        dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32",
        expert_settings: dict[str, Any] | None = None,
        lora: LoraSettings | None = None,
        **training: Any,
    ) -> None:
        arguments = coerced_arguments(HuggingFaceCausalLM.__init__, locals())
        super().__init__(**training)
        self.path: str = arguments["path"]
        #: Local folder of the model: the path, or that of its name in the cache of the Hub.
        self.folder = local_folder(self.path, has_weights=not from_scratch)
        self.from_scratch = from_scratch
        self.dtype_name = dtype
        self.expert_settings = expert_settings
        self.lora: LoraSettings | None = arguments["lora"]
        if self.lora is not None:
            # The strategy prepares peft for models without weights, which needs its import before
            # configure_model.
            import_extra(PEFT, "lora")
        # TokenModule saves its arguments itself, as plain values.
        names = ("path", "from_scratch", "dtype", "expert_settings")
        plain = {"lora": None if self.lora is None else asdict(self.lora)}
        self.save_hyperparameters({name: arguments[name] for name in names} | plain)
        # This imports transformers before configure_model, so that the strategy can keep ranks from
        # loading the whole model.
        self.config: Any = read_config(self.folder)
        if expert_settings is not None:
            # The conversion rules of the model's family read the settings from the configuration.
            self.config.expert_settings = expert_settings
        self.model: nn.Module | None = None

    @property
    @override
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def architecture(self) -> str | None:
        """Name of the transformers class of the model; None if transformers has no such class."""
        classes = import_extra(
            "transformers.models.auto.modeling_auto", "hf"
        ).MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        name: str | None = classes.get(self.config.model_type)
        return name

    def configure_model(self) -> None:
        """Build the model, unless it exists."""
        if self.model is None:
            build = random_model if self.from_scratch else load_model
            # `from_pretrained` returns a model in evaluation mode, without dropout.
            model = build(self.folder, self.config, self.dtype_name).train()
            self.model = model if self.lora is None else self.lora.adapted(model)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the configuration, and the files of the tokenizer with the chat template of the data
        if that has one.
        """
        read = getattr(self.trainer.datamodule, "tokenizer_files", None)  # type: ignore[attr-defined]
        files = tokenizer_files(self.folder) if read is None else read()
        checkpoint[TOKENIZER] = {**files, CONFIG: Path(self.folder, CONFIG).read_bytes()}

    @override
    def on_fit_start(self) -> None:
        if self.expert_settings and not isinstance(self.device_mesh, ParallelMesh):
            raise UnsupportedError(
                f"expert_settings ({self.expert_settings}) need MegatronStrategy, because other "
                "strategies train the unchanged Hugging Face model, which does not read them. Use "
                "MegatronStrategy, or leave expert_settings out."
            )

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits."""
        logits: Tensor = self._output({"tokens": tokens}).logits
        return logits

    def _output(self, batch: Mapping[str, Tensor], **arguments: Any) -> Any:
        """Return the output of the model for a batch and further arguments."""
        assert self.model is not None, "configure_model builds the model before its first use"
        return self.model(
            input_ids=batch["tokens"], use_cache=False, **arguments, **self._positions(batch)
        )

    def _positions(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return positions that restart in each document, as an argument of the model."""
        tokens = batch["tokens"]
        if "position_ids" in batch:
            # These positions come from the host. The host would have to read computed ones back
            # from the device.
            positions: Tensor | None = batch["position_ids"]
        elif "lengths" in batch:
            span = AttentionSpan(batch["lengths"])
            positions = span.laid_out(len(tokens), tokens.shape[1], tokens.device).positions
        else:
            return {}
        model: Any = self.model
        kind = type(bare_model(model))
        source = sys.modules[kind.__module__]
        is_plain = not isinstance(self.device_mesh, ParallelMesh)
        if is_plain and not hasattr(source, "create_causal_mask"):
            raise UnsupportedError(
                "packed documents need a model whose attention does not cross their ends: "
                f"{kind.__name__} of transformers is not such a model. Use MegatronStrategy, or "
                "data with one document in each row (packing=False, documents='joined')."
            )
        return {"position_ids": positions}

    def predict_step(
        self, batch: Mapping[str, Int[Tensor, "batch seq"]], batch_idx: int
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits of a batch."""
        logits: Tensor = self._output(batch).logits
        return logits

    @override
    def mean_loss(
        self,
        batch: Mapping[str, Int[Tensor, "batch seq"]],
        num_tokens: Int[Tensor, ""],
        is_trained: bool,
    ) -> Float[Tensor, ""]:
        labels = batch["labels"]
        # `labels` makes Hugging Face models return a loss. `shift_labels` prevents a shift of the
        # labels, which are already shifted by one token.
        count = num_tokens.clamp(min=1)
        loss: Tensor = self._output(
            batch, labels=labels, shift_labels=labels, num_items_in_batch=count
        ).loss
        return loss
