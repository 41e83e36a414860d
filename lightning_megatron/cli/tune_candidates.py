"""Options of the strategy that ``lightning-megatron tune`` compares, and when each one matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Bucket sizes of gradients and parameters (elements).
_BUCKET_SIZES = (10_000_000, 20_000_000, 40_000_000, 80_000_000, 160_000_000)
#: Largest numbers of NCCL's thread blocks; a block occupies one multiprocessor.
_MAX_CTAS = (4, 8, 16)


@dataclass(frozen=True)
class Machine:
    """What the first run of a tuning tells about the job.

    Args:
        on_gpu: Whether the ranks compute on GPUs.
        num_ranks: Number of ranks.
    """

    on_gpu: bool
    num_ranks: int


@dataclass(frozen=True)
class CandidateValues:
    """Values of one option of the strategy, which are tried one after the other.

    Args:
        option: Name of the option of ``MegatronStrategy``.
        values: Values to try, without the current one.
    """

    option: str
    values: Sequence[Any]


def candidates_of(strategy: Mapping[str, Any], machine: Machine) -> list[CandidateValues]:
    """Return the options that can change the speed of a job, in the order in which they are tried.

    Args:
        strategy: Options of the strategy of the job.
        machine: Kind of device and number of ranks of the job.
    """
    data_ranks = machine.num_ranks // (strategy["tp"] * strategy["pp"])
    candidates: list[CandidateValues] = []
    if strategy["tp"] > 1 and strategy["sequence_parallel"] is not False:
        candidates.append(CandidateValues("overlap_tensor_parallel", (True, False)))
    if machine.on_gpu:
        candidates.append(CandidateValues("cuda_graphs", (None, "segments")))
    if data_ranks > 1 and strategy["zero"] == 1:
        candidates.append(CandidateValues("bucket_size", _BUCKET_SIZES))
        candidates.append(CandidateValues("overlap_parameters", (True, False)))
    if data_ranks > 1 and machine.on_gpu and not isinstance(strategy["nccl_options"], str):
        candidates.append(
            CandidateValues("nccl_options", _channels(strategy["nccl_options"] or {}))
        )
    return [_without(values, strategy[values.option]) for values in candidates]


def _channels(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return NCCL settings with bounds on the thread blocks of the data-parallel collectives."""
    data = options.get("data", {})
    return [{**options, "data": {**data, "max_ctas": max_ctas}} for max_ctas in _MAX_CTAS]


def _without(candidates: CandidateValues, current: Any) -> CandidateValues:
    values = [value for value in candidates.values if value != current]
    return CandidateValues(candidates.option, values)
