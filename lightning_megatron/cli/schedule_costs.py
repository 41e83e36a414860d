"""Times and sizes of the stages of a pipeline: equal for all stages, or read from a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.live_microbatches import WEIGHT_HALF_SHARE
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import (
    MOST,
    Count,
    Positive,
    Range,
    coerce_fields,
    coerced,
    shown,
)
from lightning_megatron.plan.stage_costs import StageCosts, merge_size
from lightning_megatron.strict_json import parse_json, read_regular_file

MAX_COSTS_BYTES = 1 << 17
"""Largest accepted file: times of thousands of virtual stages."""

_REMEDY = (
    "Use lists of whole numbers, forward, input_half and weight_half, with one for each virtual "
    "stage."
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})(\.[0-9]+)?([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class PipelineCosts:
    """Times and sizes of virtual stages, in the order in which a microbatch passes them.

    Args:
        times: Times of the computations and transfers.
        kept: Size of the activations that a forward pass keeps for its backward pass, for each
            virtual stage (any unit).
        weight_half_share: Fraction of these activations that the weight half still needs after the
            input half.
    """

    times: StageCosts
    kept: tuple[float, ...]
    weight_half_share: float = WEIGHT_HALF_SHARE

    def of(self, num_virtual_stages: int) -> PipelineCosts:
        """Return the costs after consecutive virtual stages are merged.

        Args:
            num_virtual_stages: Number of virtual stages after the merge.

        Raises:
            ParallelPlanError: If the virtual stages cannot be merged evenly.
        """
        group_size = merge_size(len(self.kept), num_virtual_stages)
        sums = [
            sum(self.kept[start : start + group_size])
            for start in range(0, len(self.kept), group_size)
        ]
        return PipelineCosts(
            self.times.merged(num_virtual_stages), tuple(sums), self.weight_half_share
        )

    def kept_by_stage(self, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
        """Return the size of kept activations as ``[stage][chunk]`` of a schedule."""
        return schedule.placement.by_stage(self.kept)


def equal_costs(num_stages: int, num_parts: int) -> PipelineCosts:
    """Return equal costs: each computation of a part takes one tick, and a whole stage keeps 1.

    Args:
        num_stages: Pipeline-parallel size.
        num_parts: Number of equal parts into which each stage is divided.
    """
    count = num_stages * num_parts
    ticks = (1,) * count
    return PipelineCosts(StageCosts(ticks, ticks, ticks), (1 / num_parts,) * count)


@dataclass(frozen=True)
class _Fields:
    """Content of a file of costs; :func:`read_costs` describes it."""

    forward: tuple[Count, ...]
    input_half: tuple[Count, ...]
    weight_half: tuple[Count, ...]
    transfer: Annotated[int, Range(minimum=0, maximum=MOST)] = 0
    kept: tuple[Positive, ...] | None = None
    weight_half_share: Annotated[float, Range(minimum=0, maximum=1)] = WEIGHT_HALF_SHARE

    def __post_init__(self) -> None:
        coerce_fields(self)


def read_costs(path: Path, num_stages: int) -> PipelineCosts:
    """Read costs from a YAML or JSON file.

    The file has the lists ``forward``, ``input_half`` and ``weight_half`` with the time of each
    virtual stage (whole numbers, in any unit), and may have ``transfer`` (the time of a transfer),
    ``kept`` (a list of the sizes of the activations that a forward pass keeps, in any unit; by
    default each stage keeps 1) and ``weight_half_share``.

    Args:
        path: File of at most ``MAX_COSTS_BYTES``; ``.json`` is JSON, other names are YAML.
        num_stages: Pipeline-parallel size.

    Raises:
        CorruptDataError: If the file cannot be read, is too large, or is not valid JSON or YAML.
        ParallelPlanError: If a name or a value is not legal; the message names both.
    """
    content = read_regular_file(path, _REMEDY, MAX_COSTS_BYTES)
    if path.suffix.lower() == ".json":
        value = parse_json(content, str(path), _REMEDY)
    else:
        value = _parse_yaml(content, path)
    if not isinstance(value, dict):
        raise ParallelPlanError(
            f"{path}: costs must be a mapping of names to lists: they are {shown(value)}. {_REMEDY}"
        )
    try:
        fields = coerced("costs", value, _Fields)
        times = StageCosts(fields.forward, fields.input_half, fields.weight_half, fields.transfer)
        count = times.num_virtual_stages
        if count % num_stages:
            raise ParallelPlanError(
                f"costs must name the virtual stages of every stage, equally many: they name "
                f"{count}, pp is {num_stages}. Use {num_stages} times in each list, or a multiple "
                f"of {num_stages}."
            )
        kept = (num_stages / count,) * count if fields.kept is None else fields.kept
        if len(kept) != count:
            raise ParallelPlanError(
                f"kept must have a size for every virtual stage: it has {len(kept)}, forward has "
                f"{count}. Use {count} sizes."
            )
    except ParallelPlanError as error:
        raise ParallelPlanError(f"{path}: {error}") from error
    return PipelineCosts(times, kept, fields.weight_half_share)


def _parse_yaml(content: bytes, path: Path) -> Any:
    """Parse YAML without references; only numbers in JSON notation become numbers."""
    try:
        text = content.decode("utf-8")
        _check_events(yaml.parse(text, yaml.SafeLoader), path)
        return _value_of(yaml.compose(text, yaml.SafeLoader), path)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorruptDataError(f"{path} is not valid YAML: {reason}. {_REMEDY}") from error


def _check_events(events: Iterable[yaml.Event], path: Path) -> None:
    """Refuse references and deep nesting before the value is built.

    References could expand to a value of any size, and the time that the YAML parser takes grows
    with the square of the depth.
    """
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise CorruptDataError(f"{path} must not refer to its own parts (*name). {_REMEDY}")
        if depth > 2:
            raise CorruptDataError(
                f"{path} must hold lists in a mapping: it is nested more deeply. {_REMEDY}"
            )


def _value_of(node: yaml.Node | None, path: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        keys = [str(_value_of(key, path)) for key, _ in node.value]
        _check_unique(keys, path)
        return {
            key: _value_of(value, path) for key, (_, value) in zip(keys, node.value, strict=True)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_value_of(value, path) for value in node.value]
    if node is None:
        return None
    text = node.value
    is_quoted = node.style is not None
    if is_quoted or text in ("", "~", "null"):
        return text if is_quoted else None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return text
    return float(text) if match[1] or match[2] else int(text)


def _check_unique(keys: Sequence[str], path: Path) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise CorruptDataError(f"{path} must name every list once: {key!r} occurs twice.")
