"""NCCL settings by axis: legal names, reading from a mapping or file, and conversion for torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import yaml

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.settings import Count, Index, Range, coerced, shown
from lightning_megatron.strict_json import read_regular_file

#: Axes with a process group.
GROUP_NAMES = (
    "world",
    "tp",
    "cp",
    "dp",
    "pp",
    "data",
    "model",
    "embedding",
    "position_embedding",
    "etp",
    "ep",
    "edp",
)
#: Names of the same axes in Megatron-LM's files.
_MEGATRON_NAMES = {
    "mp": "model",
    "dp_cp": "data",
    "embd": "embedding",
    "pos_embd": "position_embedding",
    "ep_tp": "etp",
    "ep_dp": "edp",
}
#: Types of the settings: the priority of streams, and the fields of ``ncclConfig_t`` that torch
#: passes on.
_SETTINGS: Mapping[str, Any] = {
    "high_priority": bool,
    "blocking": Literal[0, 1],
    "cga_cluster_size": Annotated[int, Range(minimum=0, maximum=8)],
    "min_ctas": Count,
    "max_ctas": Count,
    "net_name": str,
    "split_share": Literal[0, 1],
    "traffic_class": Index,
    "collnet_enable": Literal[0, 1],
    "cta_policy": Index,
    "shrink_share": Literal[0, 1],
    "nvls_ctas": Count,
}
_MEGATRON_SETTINGS = {"is_high_priority_stream": "high_priority"}
#: Maximum size of a file. A file with every axis and setting has less than a tenth of it (bytes).
_MAX_FILE_BYTES = 100_000

NcclOptions = Mapping[str, Mapping[str, Any]]


def read_nccl_options(options: Mapping[str, Any] | str | None) -> dict[str, dict[str, Any]]:
    """Return NCCL settings by axis, with this package's names.

    Args:
        options: Settings by axis, such as ``{"pp": {"max_ctas": 4}}``, or the path of a YAML file
            with such a mapping. Files for Megatron-LM's ``nccl_communicator_config_path`` are
            accepted: its names of axes and settings are translated. None means no settings.

    Raises:
        ParallelPlanError: For a file that cannot be read, and for an unknown axis, setting or
            value.
    """
    if isinstance(options, str):
        options = _read(options)
    options = {} if options is None else options
    by_axis = _named("job.nccl", options, _MEGATRON_NAMES, GROUP_NAMES)
    settings = {
        axis: _settings(f"job.nccl[{axis!r}]", of_axis) for axis, of_axis in by_axis.items()
    }
    # The installed NCCL must support the settings, if torch has NCCL.
    for of_axis in settings.values() if hasattr(dist, "ProcessGroupNCCL") else ():
        torch_options(of_axis)
    return settings


def torch_options(settings: Mapping[str, Any]) -> Any:
    """Convert the settings of one axis for ``torch.distributed.new_group``, or raise."""
    values = dict(settings)
    result = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=values.pop("high_priority", False)
    )
    for name, value in values.items():
        if not hasattr(result.config, name):
            known = sorted(
                setting
                for setting in _SETTINGS
                if setting == "high_priority" or hasattr(result.config, setting)
            )
            raise ParallelPlanError(
                f"job.nccl must be settings of the installed NCCL: {name!r} needs a newer "
                f"version. Use {', '.join(known)}."
            )
        setattr(result.config, name, value)
    return result


def _named(
    place: str, values: Any, aliases: Mapping[str, str], known: Collection[str]
) -> dict[str, Any]:
    """Return values by this package's names, each of which may occur once."""
    named: dict[str, Any] = {}
    for given, value in coerced(place, values, dict[Any, Any]).items():
        name = aliases.get(given, given)
        if name not in known:
            raise ParallelPlanError(
                f"{place} must have only names that exist: {shown(given)} is not one of them. Use "
                f"{', '.join(known)}."
            )
        if name in named:
            raise ParallelPlanError(
                f"{place} must name {name} once: {given} is another name of it."
            )
        named[name] = value
    return named


def _settings(place: str, values: Any) -> dict[str, Any]:
    settings = {
        name: coerced(f"{place}.{name}", value, _SETTINGS[name])
        for name, value in _named(place, values, _MEGATRON_SETTINGS, _SETTINGS).items()
    }
    if settings.get("min_ctas", 0) > settings.get("max_ctas", settings.get("min_ctas", 0)):
        raise ParallelPlanError(
            f"min_ctas ({settings['min_ctas']}) of {place} must be at most max_ctas "
            f"({settings['max_ctas']})."
        )
    return settings


def _read(path: str) -> Mapping[Any, Any]:
    try:
        content = read_regular_file(Path(path), "Use a small YAML file.", _MAX_FILE_BYTES)
        _check_keys(yaml.compose(content, yaml.SafeLoader), path)
        document = yaml.safe_load(content)
    except ParallelPlanError:
        raise
    except (CorruptDataError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ParallelPlanError(
            "job.nccl must be a mapping, or the path of a YAML file that holds one: "
            f"{shown(path)} cannot be read ({str(error)[:300]})."
        ) from error
    # YAML returns None for an empty file and for one with only comments.
    return coerced(f"the content of {path!r}", {} if document is None else document, dict[Any, Any])


def _check_keys(root: yaml.Node | None, path: str) -> None:
    """Raise if the file repeats a key; YAML would silently use the last one."""
    waiting = [root]
    seen = set[int]()
    while waiting:
        node = waiting.pop()
        # Aliases of aliases name one mapping in exponentially many places.
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:
            continue
        seen.add(id(node))
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, number in keys.items():
            if number > 1:
                raise ParallelPlanError(
                    f"{path!r} must name every axis and setting once: {shown(key)} occurs twice."
                )
        waiting += [value for _, value in node.value]
