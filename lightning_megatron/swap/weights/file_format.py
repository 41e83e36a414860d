"""Conversion between a Hugging Face model's tensors and those in its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import MissingExtraError, UnsupportedError
from lightning_megatron.extras import import_extra

#: Start of a tensor's name that contains a block of a list.
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")


@dataclass(frozen=True)
class FileFormat:
    """Conversion of a model's tensors to those that ``save_pretrained`` writes, by block."""

    twin: Any

    @classmethod
    def of(cls, model: Any) -> FileFormat | None:
        """Return the format of a model's files; None if the files have the model's tensors."""
        if not has_other_format(model):
            return None
        file_format = cls(_on_meta(type(model), model.config))
        if getattr(model, "_weight_conversions", None) is not None:
            # Conversions that were used when the model was read from files.
            file_format.twin._weight_conversions = model._weight_conversions
        return file_format

    @classmethod
    def of_class(cls, architecture: str, config: Mapping[str, Any]) -> FileFormat:
        """Return the format of the files of a Hugging Face class."""
        library = import_extra("transformers", "hf")
        kind: Any = getattr(library, architecture, None)
        is_class = isinstance(kind, type)
        if not is_class or not issubclass(kind, library.PreTrainedModel):
            raise UnsupportedError(
                "a model whose files store other tensors than it holds must have a class in "
                f"transformers, which converts them: {architecture!r} is not in transformers "
                f"{library.__version__}. Call save_pretrained of the model on all ranks, in a run "
                "that has loaded the checkpoint."
            )
        return cls(_on_meta(kind, kind.config_class.from_dict(dict(config))))

    def tensors(self, full: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert full tensors of the model to those of the files.

        Args:
            full: Names and values; the tensors of each :func:`block` must be adjacent.
        """
        revert = import_extra("transformers.core_model_loading", "hf").revert_weight_conversion
        for _, group in groupby(full, key=lambda item: block(item[0])):
            yield from revert(self.twin, dict(group)).items()


def has_other_format(model: Any) -> bool:
    """Return whether the files of a model may have other tensors than the model."""
    of_its_files = getattr(model, "_weight_conversions", None)
    if of_its_files is not None:
        return bool(of_its_files)
    try:
        mapping: Any = import_extra("transformers.conversion_mapping", "hf")
    except MissingExtraError:
        # Earlier versions of the library use the same tensors in models and files.
        return False
    return bool(mapping.get_model_conversion_mapping(model, add_legacy=False))


def block(name: str) -> str:
    """Return the block of a tensor by its name; files join or cut tensors within a block."""
    match = _BLOCK.match(name)
    return "" if match is None else match.group()


def _on_meta(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        return kind(deepcopy(config))
