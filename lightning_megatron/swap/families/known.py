"""Registry of the families in this package and in installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.alibi import BLOOM, MPT
from lightning_megatron.swap.families.bert import (
    BERT,
    BERT_CHOICES,
    BERT_CLASSES,
    BERT_MASKED,
    BERT_SPANS,
    ROBERTA,
    ROBERTA_CHOICES,
    ROBERTA_CLASSES,
    ROBERTA_MASKED,
    ROBERTA_SPANS,
)
from lightning_megatron.swap.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from lightning_megatron.swap.families.experts import MIXTRAL, QWEN3_MOE
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.gemma import GEMMA, GEMMA2, GEMMA3
from lightning_megatron.swap.families.gpt2 import GPT2, GPT_NEOX
from lightning_megatron.swap.families.gpt_oss import GPT_OSS
from lightning_megatron.swap.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from lightning_megatron.swap.families.llama_variants import (
    ERNIE45,
    GLM,
    GLM4,
    GRANITE,
    HELIUM,
    SMOLLM3,
    STARCODER2,
)
from lightning_megatron.swap.families.olmo import OLMO2, OLMO3, OLMOE
from lightning_megatron.swap.families.qwen_moe import QWEN2_MOE

#: Entry points by which packages register their own families.
ENTRY_POINTS = "lightning_megatron.families"

FAMILIES: tuple[Family, ...] = (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    PHI3,
    GPT_NEOX,
    GEMMA2,
    GEMMA3,
    OLMO2,
    OLMO3,
    GRANITE,
    GLM,
    GLM4,
    SMOLLM3,
    STARCODER2,
    ERNIE45,
    HELIUM,
    BLOOM,
    MPT,
    MIXTRAL,
    QWEN3_MOE,
    QWEN2_MOE,
    OLMOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    BERT_MASKED,
    BERT_CLASSES,
    BERT_CHOICES,
    BERT_SPANS,
    BERT,
    ROBERTA_MASKED,
    ROBERTA_CLASSES,
    ROBERTA_CHOICES,
    ROBERTA_SPANS,
    ROBERTA,
)


def families(further: Iterable[Family] = ()) -> tuple[Family, ...]:
    """List all families: ``further`` ones, those of installed packages, and built-in ones.

    A package registers a ``Family`` as an entry point of the group ``lightning_megatron.families``.

    Args:
        further: Families in addition to installed and built-in ones. The first family with a name
            hides later ones.

    Raises:
        UnsupportedError: If an entry point is not a family.
    """
    return (*further, *_registered(), *FAMILIES)


@cache
def _registered() -> tuple[Family, ...]:
    # A search through all packages takes longer than the replacement of a small model.
    offered = []
    for point in metadata.entry_points(group=ENTRY_POINTS):
        family = point.load()
        if not isinstance(family, Family):
            raise UnsupportedError(
                f"an entry point of {ENTRY_POINTS} must be a Family: {point.name} ({point.value}) "
                f"is a {type(family).__name__}. Correct or remove the package that has it."
            )
        offered.append(family)
    return tuple(offered)


def find_family(name: str, further: Iterable[Family] = ()) -> Family | None:
    """Return the family of a model type or of a language model's class, or None.

    Args:
        name: Name such as ``llama`` or ``LlamaForCausalLM``.
        further: Families in addition to the others.
    """
    return next(
        (
            family
            for family in families(further)
            if name in (family.model_type, family.architecture)
        ),
        None,
    )


def family_of(name: str, further: Iterable[Family] = ()) -> Family:
    """Return the family of a model type or of a language model's class.

    Args:
        name: Name such as ``llama`` or ``LlamaForCausalLM``.
        further: Families in addition to the others.

    Raises:
        UnsupportedError: If there is no such family; the message lists the known ones.
    """
    match = find_family(name, further)
    if match is None:
        known = ", ".join(
            f"{family.model_type} ({family.architecture})" for family in families(further)
        )
        raise UnsupportedError(
            f"a model that is replaced as a whole must be of a known family: {name!r} is not. Use "
            f"one of {known}, or register your own Family."
        )
    return match
