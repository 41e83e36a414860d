"""Rules for the fields of Hugging Face configurations: each is used, ignored or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.extras import import_extra
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.settings import join_or, shown
from lightning_megatron.swap.families.family import ModelConfig
from lightning_megatron.swap.families.field_kinds import KINDS, check_kind
from lightning_megatron.swap.families.layer_names import SETTINGS

logger = logging.getLogger(__name__)

Values: TypeAlias = Mapping[str, Any]
"""Fields of a Hugging Face configuration by name, with the family's defaults for missing ones."""

#: Fields of every Hugging Face configuration that do not affect training: names, files, tokens, and
#: how text is generated.
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
    """.split()
)

#: Fields that many folders have, and that do not affect the computation.
#: Unsloth adds the first two to uploaded models; the last is noise that training arguments control.
HARMLESS = frozenset("unsloth_fixed unsloth_version neftune_noise_alpha".split())
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
NO_OUTPUTS = "the model returns only loss and logits"
_NO_CROSS_ATTENTION = "cross attention is not implemented"


@dataclass(frozen=True)
class Field:
    """Rule for a field of a Hugging Face configuration.

    Args:
        name: Name in the configuration.
        default: Value of a missing field.
        target: Name of this package's field with the same value, or a function that computes this
            package's fields from all values. None if another field's rule reads the field.
        allowed: Supported values; None allows all.
        reason: Reason why no other value is supported.
        aliases: Further names of the field in files.
        kind: Type and range of the value, as in ``KINDS``; None means the entry of ``KINDS`` for
            the field's name.
    """

    name: str
    default: Any = None
    target: str | Callable[[Values], Mapping[str, Any]] | None = None
    allowed: tuple[Any, ...] | None = None
    reason: str = ""
    aliases: tuple[str, ...] = ()
    kind: Any = None

    def value_in(self, config: Values, family: str) -> Any:
        """Return the value of the field in a configuration, or the default."""
        present = {
            name: config[name]
            for name in (self.name, *self.aliases)
            if config.get(name) is not None
        }
        first = next(iter(present), self.name)
        for name, value in present.items():
            if name != first and value != present[first]:
                reason = f"it is another name of {first} ({shown(present[first])})"
                raise refusal(family, name, value, reason, (present[first], None))
        return next(iter(present.values())) if present else config.get(self.name, self.default)


def only(name: str, default: Any, reason: str, *others: Any) -> Field:
    """Return the rule for a field that may only have its default or one of some other values."""
    return Field(name, default, allowed=(default, *others), reason=reason)


#: Fields that every Hugging Face configuration may have, and that request unsupported features
#: unless they have these values.
GENERAL = (
    only("is_encoder_decoder", False, _NO_CROSS_ATTENTION, None),
    only("add_cross_attention", False, _NO_CROSS_ATTENTION, None),
    only("cross_attention_hidden_size", None, _NO_CROSS_ATTENTION),
    only("output_hidden_states", False, NO_OUTPUTS, None),
    only("output_attentions", False, NO_OUTPUTS, None),
    only("pruned_heads", None, "all layers have equally many heads", {}),
    only("quantization_config", None, "weights are floating-point numbers"),
    only("per_layer_config", None, "all layers have the same shape", {}),
)


@dataclass(frozen=True)
class ConfigTable:
    """Conversion of a family's configurations to those of this package.

    Every field is used, ignored, or refused unless it has a supported value. A field without a rule
    is ignored if Hugging Face's class ignores it, too. Otherwise the field is refused unless its
    value is None or False.

    Args:
        family: Name of the family, for messages.
        fields: Rules of the fields.
        fixed: Fields of this package that all models of the family share.
        ignored: Names of further fields that do not affect training.
        build: Function that makes this package's configuration from its fields.
        parts: Fields of this package that are records themselves, with their tables.
    """

    family: str
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any]
    ignored: frozenset[str] = frozenset()
    build: Callable[..., Any] = GPTConfig
    parts: Mapping[str, ConfigTable] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all fields that the table has a rule for or ignores."""
        known = {name for rule in (*self.fields, *GENERAL) for name in (rule.name, *rule.aliases)}
        return self.ignored.union(known, *(part.names for part in self.parts.values()))

    def __call__(self, config: Values) -> ModelConfig:
        """Return this package's configuration of a model.

        Args:
            config: Configuration, as from ``config.to_dict()`` or ``config.json``.
        """
        if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
            raise CheckpointMismatchError(
                f"a {self.family} configuration must be a mapping of fields: it is "
                f"{shown(config)}. Pass the result of config.to_dict(), or the content of "
                "config.json."
            )
        self._values(config, GENERAL)
        result: ModelConfig = self.record(config)
        self._check_known(config)
        return result

    def record(self, config: Values) -> Any:
        """Return a configuration of the fields with rules, regardless of other fields."""
        values = self._values(config, self.fields)
        settings = dict(self.fixed)
        for rule in self.fields:
            if callable(rule.target):
                settings |= rule.target(values)
            elif rule.target is not None:
                settings[rule.target] = values[rule.name]
        return self.build(
            **settings, **{name: part.record(config) for name, part in self.parts.items()}
        )

    def _values(self, config: Values, rules: Iterable[Field]) -> dict[str, Any]:
        values = {}
        for rule in rules:
            value = values[rule.name] = rule.value_in(config, self.family)
            if rule.allowed is None:
                self._check_value(rule, value)
            elif not any(
                value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                for allowed in rule.allowed
            ):
                raise refusal(self.family, rule.name, value, rule.reason, rule.allowed)
        return values

    def _check_value(self, rule: Field, value: Any) -> None:
        kind = KINDS.get(rule.name) if rule.kind is None else rule.kind
        if kind is None and isinstance(rule.target, str) and rule.default is not None:
            # A field of a family that is described elsewhere has the type of its default.
            kind = type(rule.default)
        if kind is not None:
            check_kind(rule.name, value, kind, self.family)

    def _check_known(self, config: Values) -> None:
        known = self.names | IRRELEVANT
        unknown = {name for name in config if name not in known and not name.startswith("_")}
        set_names = sorted(
            name for name in unknown if config[name] is not None and config[name] is not False
        )
        # Settings of this package have an effect, although Hugging Face's class ignores them.
        overlooked = unknown_fields(set_names, config.get("model_type")) - {SETTINGS}
        for name in set_names:
            if name not in overlooked:
                raise refusal(
                    self.family,
                    name,
                    config[name],
                    "this field is not known and may change the model",
                )
        if overlooked - HARMLESS:
            warn_about_fields(self.family, tuple(sorted(overlooked - HARMLESS)))


def refusal(
    family: str, name: str, value: Any, reason: str, allowed: tuple[Any, ...] = (None, False)
) -> UnsupportedError:
    """Return the error for a field that requests an unsupported feature."""
    legal = join_or(allowed)
    return UnsupportedError(
        f"{name} of a {family} configuration must be {legal}: it is {shown(value)}. Here {reason}. "
        f"Set {name} to {join_or(allowed[:1])} if the model allows it, or keep Hugging Face's own "
        "module."
    )


def translate_values(
    name: str, target: str, choices: Mapping[Any, Any]
) -> Callable[[Values], Mapping[str, Any]]:
    """Return a rule that translates a field's values and refuses all others."""

    def rule(values: Values) -> Mapping[str, Any]:
        if values[name] not in list(choices):
            raise UnsupportedError(
                f"{name} must be {join_or(list(choices))}: it is {shown(values[name])}. Only these "
                "are implemented. Keep Hugging Face's own module."
            )
        return {target: choices[values[name]]}

    return rule


def padding_id(values: Values) -> Mapping[str, Any]:
    """Return the padding token. A negative id counts from the end, as in torch.nn.Embedding."""
    token = values["pad_token_id"]
    return {"padding_id": token if token is None or token >= 0 else values["vocab_size"] + token}


def unknown_fields(names: Iterable[str], model_type: object) -> frozenset[str]:
    """Return the fields that do not affect a Hugging Face model.

    transformers keeps unknown fields as attributes of the configuration. A field that the type's
    configuration does not declare, and that neither the type's code nor the shared code mentions,
    cannot change the computation.

    Without a model type, or without transformers, only fields of ``HARMLESS`` are returned.
    """
    others = frozenset(names) - HARMLESS
    declared, code = _known_of(model_type) if others and isinstance(model_type, str) else (None, "")
    if declared is None:
        return frozenset(names) - others
    read = {
        name
        for name in others
        if re.search(rf"\bconfig\.{re.escape(name)}\b|[\"']{re.escape(name)}[\"']", code)
    }
    return frozenset(names) - read - declared


@cache
def warn_about_fields(family: str, names: tuple[str, ...]) -> None:
    """Log once, on the first rank, the fields of a configuration that are ignored."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        logger.warning(
            "%s of a %s configuration: Hugging Face's class does not read them, and this "
            "package ignores them, too.",
            ", ".join(repr(name) for name in names),
            family,
        )


@cache
def _known_of(model_type: str) -> tuple[frozenset[str] | None, str]:
    """Return the fields that a configuration class declares, and code that may read others."""
    if find_spec("transformers") is None:
        return None, ""
    library: Any = import_extra("transformers", "hf")
    if model_type not in library.CONFIG_MAPPING:
        return None, ""
    config_class = library.CONFIG_MAPPING[model_type]
    declared = frozenset(
        {*dir(config_class()), *config_class.attribute_map, *config_class.attribute_map.values()}
    )
    root = Path(library.__file__).parent
    spec = find_spec(config_class.__module__)
    paths = (
        [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.py"))
    )
    files = [
        *paths,
        *(root / f"{name}.py" for name in _SHARED),
        *sorted((root / "integrations").glob("*attention*.py")),
    ]
    return declared, "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
