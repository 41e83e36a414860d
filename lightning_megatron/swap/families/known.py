"""Registry of the families in this package and in installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families import (
    bert,
    deepseek,
    experts,
    gemma,
    gpt2,
    llama,
    llama_variants,
)
from lightning_megatron.swap.families.family import Family

#: Entry points by which packages register their own families.
ENTRY_POINTS = "lightning_megatron.families"

FAMILIES: tuple[Family, ...] = (
    *gpt2.FAMILIES,
    *llama.FAMILIES,
    *gemma.FAMILIES,
    *llama_variants.FAMILIES,
    *experts.FAMILIES,
    *deepseek.FAMILIES,
    *bert.BERTS,
    *bert.ROBERTAS,
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
    for family in families(further):
        if name in (family.model_type, family.architecture):
            return family
    return None


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
