"""Rules for the fields of Hugging Face configurations: each is used, ignored or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getfile
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatron.errors import CheckpointMismatchError, ParallelPlanError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.settings import Positive, Range, coerced, join_or, shown
from lightning_megatron.swap.families.family import ModelConfig
from lightning_megatron.swap.families.layer_names import SETTINGS

logger = logging.getLogger(__name__)

Values: TypeAlias = Mapping[str, Any]
"""Fields of a Hugging Face configuration by name, as from ``config.to_dict()``."""

#: Fields of every Hugging Face configuration that do not affect training: names, files, tokens, how
#: text is generated, what Unsloth adds to uploaded models, and noise that training arguments set.
IRRELEVANT = frozenset(
    """
    model_type architectures auto_map transformers_version transformers.js_config name_or_path
    dtype torch_dtype torchscript attn_implementation gradient_checkpointing use_cache return_dict
    use_return_dict chunk_size_feed_forward is_decoder tokenizer_class prefix num_labels id2label
    label2id problem_type finetuning_task task_specific_params bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id unk_token_id classifier_dropout summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout pretraining_tp
    use_bfloat16 tf_legacy_loss n_ctx is_llama_config

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    temperature top_k top_p typical_p

    unsloth_fixed unsloth_version neftune_noise_alpha
    """.split()
)

#: Code of all models, which reads fields of their configurations.
_SHARED = tuple(
    """
    masking_utils modeling_utils modeling_rope_utils modeling_layers
    modeling_attn_mask_utils modeling_flash_attention_utils cache_utils
    configuration_utils core_model_loading activations
    """.split()
)

#: Activations of MLPs without gates, and their names in this package.
UNGATED = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
#: The maximum prevents that a list of all layers exhausts the memory.
_LAYERS = Annotated[int, Range(minimum=1, maximum=10_000)]
NO_OUTPUTS = "the model returns only loss and logits"
_NO_CROSS_ATTENTION = "cross attention is not implemented"


@dataclass(frozen=True)
class Field:
    """Rule for a field of a Hugging Face configuration.

    Args:
        name: Name in the configuration.
        target: Name of this package's field with the same value, or a function that computes this
            package's fields from all fields of the configuration. None if another field's rule
            reads the field, or if it does not affect training.
        allowed: Supported values, perhaps with their names in this package; None allows all. A
            configuration may lack a field without a target.
        reason: Reason why no other value is supported.
    """

    name: str
    target: str | Callable[[Values], Mapping[str, Any]] | None = None
    allowed: Collection[Any] | None = None
    reason: str = "only these are implemented"

    def check(self, config: Values) -> None:
        """Refuse a value that is not supported."""
        value = config.get(self.name)
        if self.allowed is None or self.name not in config:
            return
        # True equals 1 in Python.
        if (type(value) is bool, value) not in [(type(v) is bool, v) for v in self.allowed]:
            raise refusal(self.name, value, join_or(list(self.allowed)), self.reason)

    def settings(self, config: Values) -> Mapping[str, Any]:
        """Return this package's fields that follow from the field."""
        self.check(config)
        if self.target is None:
            return {}
        if self.name not in config:
            raise CheckpointMismatchError(
                f"a configuration must have all fields of its class: {self.name} is missing. Pass "
                "the result of config.to_dict(); config.json may omit fields with default values."
            )
        if callable(self.target):
            return self.target(config)
        value = config[self.name]
        if self.target == "num_layers":
            # Rules of later fields list all layers.
            coerced(self.name, value, _LAYERS)
        return {self.target: self.allowed[value] if isinstance(self.allowed, Mapping) else value}


def only(name: str, reason: str, *allowed: Any) -> Field:
    """Return the rule for a field that may only have some values, and has no other effect."""
    return Field(name, allowed=allowed, reason=reason)


#: Fields that every Hugging Face configuration may have, and that request unsupported features
#: unless they have these values.
GENERAL = (
    only("is_encoder_decoder", _NO_CROSS_ATTENTION, False, None),
    only("add_cross_attention", _NO_CROSS_ATTENTION, False, None),
    only("cross_attention_hidden_size", _NO_CROSS_ATTENTION, None),
    only("output_hidden_states", NO_OUTPUTS, False, None),
    only("output_attentions", NO_OUTPUTS, False, None),
    only("pruned_heads", "all layers have equally many heads", None, {}),
    only("quantization_config", "weights are floating-point numbers", None),
    only("per_layer_config", "all layers have the same shape", None, {}),
)


@dataclass(frozen=True)
class ConfigTable:
    """Conversion of a family's configurations to those of this package.

    Every field is used, ignored, or refused unless it has a supported value. A field without a rule
    is ignored if Hugging Face's class ignores it, too. Otherwise the field is refused unless its
    value is None or False.

    Args:
        fields: Rules of the fields.
        fixed: Fields of this package that all models of the family share.
        ignored: Names of further fields that do not affect training.
        build: Class of this package's configurations.
    """

    fields: tuple[Field, ...]
    fixed: Mapping[str, Any]
    ignored: str = ""
    build: Callable[..., ModelConfig] = GPTConfig

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all fields that the table has a rule for or ignores."""
        return frozenset(self.ignored.split()).union(rule.name for rule in (*self.fields, *GENERAL))

    def __call__(self, config: Values) -> ModelConfig:
        """Return this package's configuration of a model.

        Args:
            config: All fields of the configuration, as from ``config.to_dict()``.
        """
        try:
            return self.build(**self.settings(config))
        except ParallelPlanError as error:
            raise CheckpointMismatchError(f"{error} Correct the configuration.") from error

    def settings(self, config: Values) -> dict[str, Any]:
        """Return the fields of this package's configuration."""
        for rule in GENERAL:
            rule.check(config)
        settings = dict(self.fixed)
        for rule in self.fields:
            settings |= rule.settings(config)
        known = self.names | IRRELEVANT
        names = sorted(
            name
            for name, value in config.items()
            if name not in known and name[0] != "_" and value is not None and value is not False
        )
        # Settings of this package have an effect, although Hugging Face's class ignores them.
        foreign = [name for name in names if name != SETTINGS]
        overlooked = _overlooked(foreign, config.get("model_type"))
        for name in names:
            if name not in overlooked:
                reason = "this field is not known and may change the model"
                raise refusal(name, config[name], "None or False", reason)
        if overlooked:
            _warn_about(tuple(overlooked), config["model_type"])
        return settings


def refusal(name: str, value: Any, legal: str, reason: str) -> UnsupportedError:
    """Return the error for a field that requests an unsupported feature."""
    return UnsupportedError(
        f"{name} of the configuration must be {legal}: it is {shown(value)}. Here {reason}. Change "
        "it if the model allows it, or keep Hugging Face's own module."
    )


def positive(values: Values, name: str) -> float:
    """Return a field of which a root or the inverse is computed; refuse it unless it is above 0."""
    number: float = coerced(name, values[name], Positive)
    return number


def padding_id(values: Values) -> Mapping[str, Any]:
    """Return the padding token. A negative id counts from the end, as in torch.nn.Embedding."""
    token = values["pad_token_id"]
    return {"padding_id": token if token is None or token >= 0 else values["vocab_size"] + token}


def _overlooked(names: Sequence[str], model_type: object) -> list[str]:
    """Return the fields that do not affect a Hugging Face model.

    transformers keeps unknown fields as attributes of the configuration. A field that the type's
    configuration does not declare, and that neither the type's code nor the shared code mentions,
    cannot change the computation.
    """
    library: Any = import_extra("transformers", "hf") if names else None
    if library is None or model_type not in library.CONFIG_MAPPING:
        return []
    config_class = library.CONFIG_MAPPING[model_type]
    declared = {
        *dir(config_class()),
        *config_class.attribute_map,
        *config_class.attribute_map.values(),
    }
    code = _code_of(config_class)
    return [
        name
        for name in names
        if name not in declared
        and not re.search(rf"\bconfig\.{re.escape(name)}\b|[\"']{re.escape(name)}[\"']", code)
    ]


@cache
def _code_of(config_class: type[Any]) -> str:
    """Return the code that may read fields of a configuration."""
    root = Path(import_extra("transformers", "hf").__file__ or "").parent
    files = [
        *sorted(Path(getfile(config_class)).parent.glob("*.py")),
        *(root / f"{name}.py" for name in _SHARED),
        *sorted((root / "integrations").glob("*attention*.py")),
    ]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@cache
def _warn_about(names: tuple[str, ...], model_type: object) -> None:
    """Log once, on the first rank, the fields of a configuration that are ignored."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        logger.warning(
            "%s of a %s configuration: Hugging Face's class does not read them, and this "
            "package ignores them, too.",
            ", ".join(map(repr, names)),
            model_type,
        )
