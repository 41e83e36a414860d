"""Detection of configuration fields that Hugging Face's classes ignore."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatron.extras import import_extra

logger = logging.getLogger(__name__)

#: Fields that many folders have, and that do not affect the computation.
HARMLESS = frozenset(
    {
        # Unsloth adds these fields to uploaded models.
        "unsloth_fixed",
        "unsloth_version",
        # Trainers add this noise to embeddings, controlled by training arguments.
        "neftune_noise_alpha",
    }
)
#: Code of all models, which reads fields of their configurations.
_SHARED = tuple(
    """
    masking_utils modeling_utils modeling_rope_utils modeling_layers
    modeling_attn_mask_utils modeling_flash_attention_utils cache_utils
    configuration_utils core_model_loading activations
    """.split()
)


def unknown_fields(names: Iterable[str], model_type: object) -> frozenset[str]:
    """Return the fields that do not affect a Hugging Face model.

    transformers keeps unknown fields as attributes of the configuration. A field that the type's
    configuration does not declare, and that neither the type's code nor the shared code mentions,
    cannot change the computation.

    Args:
        names: Fields of a configuration.
        model_type: Model type, such as ``llama``. Without a model type, or without transformers,
            only fields of ``HARMLESS`` are returned.
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
            (
                "%s of a %s configuration: Hugging Face's class does not read them, and this "
                "package ignores them, too."
            ),
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
