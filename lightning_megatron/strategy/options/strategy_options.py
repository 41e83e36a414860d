"""Options of the strategy, with the checks that need no world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from math import lcm
from typing import Annotated, Any, Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.groups.nccl_options import read_nccl_options
from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.microbatches import MicrobatchRule
from lightning_megatron.plan.schedule import ScheduleName
from lightning_megatron.plan.settings import Count, Elements, Index, Range, coerce_fields

#: Durations above 31 years overflow the nanosecond clocks of communication libraries.
_PATIENCE = Range(above=0, most=1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Arguments of :class:`MegatronStrategy`, which documents them.

    Raises:
        ParallelPlanError: If a value has the wrong type or range, or no layout has these sizes.
        UnsupportedError: If this version does not support a value.
    """

    tp: Count
    pp: Count
    vpp: Count
    cp: Count
    ep: Count
    etp: Count | None
    sequence_parallel: bool | None
    schedule: ScheduleName | None
    microbatch_size: Count | Literal["batch"] | None
    microbatch_group_size: Count | None
    check_microbatches: bool
    order: str
    recompute: Recompute | None
    expert_transport: Transport
    tensor_parallel_plan: dict[str, str] | None
    pipeline_plan: dict[str, str] | None
    timeout: Annotated[float, _PATIENCE] | Annotated[timedelta, _PATIENCE] | None
    process_group_backend: Literal["nccl", "gloo"] | None
    nccl_options: dict[str, dict[str, Any]] | str | None
    signal_check_interval: Count
    zero: Literal[0, 1]
    optimizer_slices: Literal["auto", "elements", "parameters"]
    bucket_size: Elements
    gradient_dtype: Literal["float32", "bfloat16"]
    overlap_gradients: bool
    overlap_parameters: bool | None
    overlap_tensor_parallel: bool
    check_gradients: bool | None
    replica_check_interval: Index
    async_save: bool
    moments_dtype: Literal["float32", "bfloat16"]

    def __post_init__(self) -> None:
        # ParallelLayout checks one model replica here; the world size is checked when it is known.
        coerce_fields(self)
        etp = self.tp if self.etp is None else self.etp
        self._check_available()
        ParallelLayout(self.pp * lcm(self.tp * self.cp, etp * self.ep), **self.sizes())
        self._check_schedule()
        if self.sequence_parallel and self.tp == 1:
            raise ParallelPlanError(
                "sequence_parallel (True) needs tp above 1, because it cuts the sequence over the "
                "tensor-parallel ranks. Use tp of 2 or more, or leave sequence_parallel out."
            )
        if self.overlap_tensor_parallel and not self.shards_sequence:
            raise ParallelPlanError(
                f"overlap_tensor_parallel needs tp above 1 and sequence_parallel: tp is {self.tp}, "
                f"sequence_parallel {self.shards_sequence}. It cuts the products at the border of "
                "a sequence that is shared, which there is none of. Use tp of 2 or more with "
                "sequence_parallel, or leave it out."
            )
        if self.zero == 0 and self.optimizer_slices != "auto":
            raise ParallelPlanError(
                f"optimizer_slices ({self.optimizer_slices!r}) needs zero=1, because nothing is "
                "cut into slices where every rank has the whole state. Use zero=1, or leave "
                "optimizer_slices out."
            )
        # Ranks compare the content of the file, because its path may differ.
        object.__setattr__(self, "nccl_options", read_nccl_options(self.nccl_options))
        if self.nccl_options and self.process_group_backend == "gloo":
            raise ParallelPlanError(
                "nccl_options must be left out with process_group_backend 'gloo', which has no "
                "such settings. Use 'nccl'."
            )

    @classmethod
    def among(cls, names: Mapping[str, Any]) -> StrategyOptions:
        """Return the options found among the local names of a function that has them as arguments.

        Args:
            names: Values by name, such as ``locals()``; other names are ignored.
        """
        return cls(**{field.name: names[field.name] for field in fields(cls)})

    def sizes(self) -> dict[str, Any]:
        """Return the arguments of the layout other than the world size."""
        return {
            name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")
        }

    @property
    def shards_sequence(self) -> bool:
        """Return whether activations are sharded along the sequence."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def needs_tables(self) -> bool:
        """Return whether an argument needs a feature that only this package's models have."""
        asked = (
            self.ep > 1,
            bool(self.sequence_parallel),
            self.overlap_tensor_parallel,
            self.recompute is not None,
        )
        return any(asked)

    @property
    def schedule_name(self) -> ScheduleName:
        """Return the name of the pipeline schedule, with the default filled in."""
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    def microbatches(self, layout: ParallelLayout) -> MicrobatchRule:
        """Return the rule that cuts batches into microbatches under a layout."""
        group = self.microbatch_group_size
        return MicrobatchRule(
            self.microbatch_size, self.schedule_name, layout.pp, layout.vpp, group
        )

    @property
    def timeout_delta(self) -> timedelta | None:
        """Return the timeout as a timedelta, as torch expects."""
        return (
            timedelta(seconds=self.timeout)
            if isinstance(self.timeout, (int, float))
            else self.timeout
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return asdict(self)

    def notes(self, precision: str, device_type: str, has_models: bool) -> list[str]:
        """Return log lines about defaults and about options without effect."""
        notes = []
        if self.sequence_parallel is None and self.tp > 1 and has_models:
            notes.append(
                "sequence_parallel is on, because tp is above 1; sequences must divide by tp."
            )
        if precision == "bf16-mixed":
            notes.append(
                "precision bf16-mixed: bfloat16 parameters with float32 main parameters and "
                "gradients, no autocast. (On CPU Lightning replaces 16-mixed by it.)"
            )
        if self.overlap_tensor_parallel and (device_type != "cuda" or precision == "32-true"):
            notes.append(
                f"overlap_tensor_parallel has no effect with precision {precision} on "
                f"{device_type}: products in half types on GPUs are cut, others run after or "
                "before their communication."
            )
        if self.nccl_options and device_type != "cuda":
            notes.append(
                f"nccl_options have no effect on {device_type}: its groups are gloo's, which has "
                "no such settings."
            )
        return notes

    def _check_available(self) -> None:
        if self.cp > 1:
            raise UnsupportedError(
                f"cp ({self.cp}) above 1 is not available in this version, because no attention "
                "here works on a part of the sequence yet. Use cp=1, and sequence_parallel for "
                "long sequences."
            )

    def _check_schedule(self) -> None:
        if self.vpp > 1 and self.schedule_name != "interleaved":
            raise ParallelPlanError(
                f"schedule ({self.schedule!r}) must be 'interleaved' with vpp ({self.vpp}) above "
                "1, because only that one runs several chunks on a stage. Use "
                "schedule='interleaved', or vpp=1."
            )
        if self.vpp == 1 and self.schedule_name == "interleaved":
            raise ParallelPlanError(
                "schedule 'interleaved' needs vpp above 1, because it alternates between the "
                "chunks of a stage. Use vpp of 2 or more with pp above 1, or schedule='1f1b'."
            )
