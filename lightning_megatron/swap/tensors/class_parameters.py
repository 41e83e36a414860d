"""Names of a table's tensors in the module tree of the Hugging Face class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_megatron.swap.tensors.mapping import Source, TensorMap
from lightning_megatron.swap.tensors.packed import Packed


@dataclass(frozen=True)
class ClassParameter:
    """Parameter of a Hugging Face class that contains rows of a full tensor.

    Args:
        name: Name of the parameter; for one tensor of a stack, the name of the stack and the index
            of the tensor.
        sources: Sources of the rows in the files.
    """

    name: str
    sources: tuple[Source, ...]

    @property
    def num_rows(self) -> int:
        """Count the rows (elements)."""
        return sum(source.num_rows for source in self.sources)


def class_parameters_of(
    tensor: TensorMap, packed: Iterable[Packed] = ()
) -> tuple[ClassParameter, ...]:
    """List the Hugging Face parameters that make up a full tensor, from the first row to the last.

    A joined layer has one parameter for each of its layers. A tensor that the class has packed or
    reordered has a single parameter.

    Args:
        tensor: Full tensor with its sources.
        packed: Rules of the packed tensors of the class.
    """
    rules = tuple(packed)
    named = [(_class_name(source.name, rules), source) for source in tensor.sources]
    return tuple(
        ClassParameter(name, tuple(source for _, source in group))
        for name, group in groupby(named, key=lambda named_source: named_source[0])
    )


def class_table(table: Iterable[TensorMap], packed: Iterable[Packed] = ()) -> tuple[TensorMap, ...]:
    """Convert a table to one with the parameters of the Hugging Face class as targets.

    Args:
        table: Sources of this package's full tensors.
        packed: Rules of the packed tensors of the class.
    """
    rules = tuple(packed)
    return tuple(
        replace(
            tensor,
            target=parameter.name,
            shape=(parameter.num_rows, *tensor.shape[1:]),
            sources=parameter.sources,
        )
        for tensor in table
        for parameter in class_parameters_of(tensor, rules)
    )


def _class_name(source: str, rules: tuple[Packed, ...]) -> str:
    for rule in rules:
        position = rule.position_of(source)
        if position is not None:
            whole, index, _ = position
            return f"{whole}.{index}" if rule.is_stack else whole
    return source
