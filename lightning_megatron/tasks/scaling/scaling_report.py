"""Results of a scaling study: efficiencies, tables and files."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.tasks.scaling.scaling_cases import (
    TITLES,
    ScalingCase,
    Study,
    found_in_paper,
)


@dataclass(frozen=True)
class ScalingRow:
    """Result of one configuration of a study.

    Args:
        seconds_per_step: Mean time of a step; None if the configuration failed (s).
        peak_gib: Peak memory of rank 0; None on CPUs (GiB).
        failure: Reason why there is no result; empty if there is a result.
    """

    study: Study
    case: ScalingCase
    seconds_per_step: float | None
    peak_gib: float | None
    loss: float | None
    failure: str

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of all replicas (tokens/s)."""
        return self.case.tokens / self.seconds_per_step if self.seconds_per_step else None

    @property
    def tflops_per_device(self) -> float | None:
        """Model FLOP/s per device, as ``GPTConfig.flops_per_token`` counts FLOPs (TFLOP/s)."""
        if self.tokens_per_second is None:
            return None
        flops = self.case.config.flops_per_token(self.case.seq_length)
        return self.tokens_per_second * flops / self.case.devices / 1e12

    def efficiency(self, first: ScalingRow) -> float | None:
        """Return the FLOP/s per device divided by the FLOP/s per device of the baseline."""
        return _ratio(self.tflops_per_device, first.tflops_per_device)

    def speedup(self, first: ScalingRow) -> float | None:
        """Return the tokens per second divided by the tokens per second of the baseline."""
        return _ratio(self.tokens_per_second, first.tokens_per_second)


def records_of(rows: Sequence[ScalingRow]) -> list[dict[str, Any]]:
    """Return the rows as dictionaries; the first row of each study is its baseline."""
    firsts: dict[Study, ScalingRow] = {}
    records = []
    for row in rows:
        first = firsts.setdefault(row.study, row)
        records.append(
            {
                "study": row.study,
                **asdict(row.case),
                "parameters": row.case.parameters,
                "devices": row.case.devices,
                "seconds_per_step": row.seconds_per_step,
                "tokens_per_second": row.tokens_per_second,
                "tflops_per_device": row.tflops_per_device,
                "efficiency": row.efficiency(first),
                "speedup": row.speedup(first),
                "paper": found_in_paper(row.study, row.case),
                "peak_gib": row.peak_gib,
                "loss": row.loss,
                "failure": row.failure,
            }
        )
    return records


def table_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of each study as text."""
    parts = []
    for study, title in TITLES.items():
        chosen = [record for record in records if record["study"] == study]
        if chosen:
            lines = [_HEADER, *map(_cells, chosen)]
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            parts.append(f"{title}:")
            parts += ["  ".join(map(str.rjust, line, widths)) for line in lines]
            parts += [
                f"  {record['num_heads']} heads, tp {record['tp']}, dp {record['dp']}: "
                f"{record['failure']}"
                for record in chosen
                if record["failure"]
            ]
            parts.append("")
    return "\n".join(parts).rstrip()


def write_files(
    folder: Path, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``study.json`` and ``study.csv``.

    Args:
        settings: Settings that all rows share, such as the FLOP rule; only in the JSON file.
    """
    text = json.dumps({**settings, "rows": list(records)}, indent=2)
    (folder / "study.json").write_text(text + "\n", encoding="utf-8")
    with (folder / "study.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


_HEADER = tuple(
    """
    hidden heads layers parameters tp dp devices batch tokens/s TFLOP/s/device
    efficiency speed-up paper GiB
    """.split()
)


def _cells(record: Mapping[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        value = record[name]
        return "-" if value is None else format(value, form)

    return [
        shown("hidden_size", ""),
        shown("num_heads", ""),
        shown("num_layers", ""),
        _short(record["parameters"]),
        shown("tp", ""),
        shown("dp", ""),
        shown("devices", ""),
        shown("batch_size", ""),
        shown("tokens_per_second", ",.0f"),
        shown("tflops_per_device", ".4g"),
        shown("efficiency", ".1%"),
        shown("speedup", ".2f"),
        record["paper"] or "-",
        shown("peak_gib", ".1f"),
    ]


def _ratio(value: float | None, baseline: float | None) -> float | None:
    return value / baseline if value is not None and baseline is not None else None


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
