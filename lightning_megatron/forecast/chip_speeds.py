"""Times of single operators on a chip, read off measurements of operators of other sizes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.measured_layers import measured_models
from lightning_megatron.forecast.operator_trace import Operator
from lightning_megatron.forecast.traced_parts import PASSES, trace_stage
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.layout import ParallelLayout

#: Version of the files that ``doctor --calibrate`` writes.
_FORMAT = 1
_FOLDER = Path(__file__).with_name("speeds")
#: Measured neighbours from which a time is interpolated.
_NEIGHBOURS = 4
#: Part of the network's bandwidth that collectives reach, where nothing was measured.
_NETWORK_SHARE = 0.85
#: Time until the first byte between nodes arrives, where nothing was measured (s).
_NETWORK_LATENCY = 15e-6
#: Traffic of a rank over the bytes of the whole tensor, by the number of ranks.
_TRAFFIC = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "transfer": lambda ranks: 1.0,
}
_PASSES_OF_GROUPED = {"forward": 0, "forward_swiglu": 0, "data_grad": 1}


@dataclass(frozen=True)
class Link:
    """Group of ranks that communicate.

    Args:
        ranks: Number of ranks.
        per_node: Number of them on one node.
    """

    ranks: int
    per_node: int

    @property
    def crosses_nodes(self) -> bool:
        """Return whether some of the ranks are on other nodes."""
        return self.ranks > self.per_node


@dataclass(frozen=True)
class MeasuredRatios:
    """Times over those of an ideal chip, at some sizes.

    Args:
        sizes: Logarithms of the sizes.
        ratios: Logarithms of the ratios.
    """

    sizes: tuple[tuple[float, ...], ...]
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[float], float]]) -> MeasuredRatios:
        """Return the ratios of pairs of sizes and ratio."""
        sizes = tuple(tuple(map(math.log, row)) for row, _ in rows)
        return cls(sizes, tuple(math.log(ratio) for _, ratio in rows))

    def at(self, *sizes: float) -> float:
        """Return the ratio at other sizes, from the nearest ones."""
        here = tuple(map(math.log, sizes))
        near = sorted(
            (math.dist(here, known), ratio)
            for known, ratio in zip(self.sizes, self.ratios, strict=True)
        )[:_NEIGHBOURS]
        weights = [1 / (distance + 1e-3) ** 2 for distance, _ in near]
        products = (weight * ratio for weight, (_, ratio) in zip(weights, near, strict=True))
        return math.exp(sum(products) / sum(weights))


class ChipSpeeds:
    """Times of operators, collectives and steps of an optimizer on one kind of chip.

    Args:
        content: Content of a file of ``lightning-megatron doctor --calibrate``.
        source: Name of the file, for messages.
        network: Bandwidth between nodes, of each chip and direction (bytes/s).

    Raises:
        ParallelPlanError: If the content is no such file, or lacks what every forecast needs.
    """

    def __init__(self, content: Mapping[str, Any], source: str, network: float) -> None:
        if content.get("format") != _FORMAT:
            raise ParallelPlanError(
                f"{source} is no file of speeds of this version: its format is "
                f"{content.get('format')!r}. Write one by `lightning-megatron doctor --calibrate "
                "FILE`."
            )
        self._source = source
        self._content = content
        self._network = network
        self._calls: Mapping[str, Any] = content.get("calls", {})
        self._passes = self._needed("passes")
        # Smaller tensors stay in the cache.
        size, seconds = self._passes[-1]
        self._memory = size / seconds
        #: Time that the smallest kernel takes (s).
        self.latency: float = min(seconds for _, seconds in self._passes)
        self._ratios: dict[str, tuple[float, MeasuredRatios]] = {}

    @classmethod
    def read(cls, path: str | Path, network: float) -> ChipSpeeds:
        """Read a file of speeds."""
        return cls(_content_of(path), str(path), network)

    @classmethod
    def of_package(cls, gpu: str, network: float) -> ChipSpeeds:
        """Read the package's speeds of a GPU, which may be derived from those of another one."""
        path = _FOLDER / f"{gpu.lower()}.json"
        content = _content_of(path)
        base = content.get("derived_from")
        if base is not None:
            content = with_other_memory(_content_of(_FOLDER / f"{base}.json"), content["memory"])
        return cls(content, str(path), network)

    def _needed(self, part: str) -> Any:
        found = self._calls.get(part)
        if not found:
            raise self._lacks("calls", part)
        return found

    def _lacks(self, title: str, part: str) -> ParallelPlanError:
        failure = self._content.get("failures", {}).get(f"{title}: {part}", "it is missing")
        return ParallelPlanError(
            f"{self._source} has no times of {part}, which this forecast needs: {failure}. "
            "Measure them by `lightning-megatron doctor --calibrate FILE` on such a machine."
        )

    def seconds_of(self, operator: Operator) -> float:
        """Return the time of an operator, without its launch by the host (s)."""
        if operator.kind == "product":
            return self._product(operator)
        if operator.kind == "attention":
            return self._attention(operator)
        if operator.kind == "grouped":
            return self._grouped(operator)
        if operator.kind == "kernel":
            speed = self.kernels.get(operator.name)
            if speed is not None:
                return self.latency + operator.num_bytes / speed
        return self.seconds_of_pass(operator.num_bytes)

    def seconds_of_pass(self, num_bytes: float) -> float:
        """Return the time of a pass that reads and writes so many bytes (s)."""
        return _interpolated(self._passes, num_bytes)

    def optimizer(self, elements: float) -> float:
        """Return the time of an AdamW step of so many elements (s)."""
        if not elements:
            return 0.0
        return _interpolated(self._needed("optimizer"), elements)

    def _ideal(self, flops: float, num_bytes: float, peak: float) -> float:
        return self.latency + max(flops / peak, num_bytes / self._memory)

    def _product(self, operator: Operator) -> float:
        batch, m, n, k = operator.sizes
        dtype = operator.dtype
        if self.kind == "cuda" and dtype in (torch.float32, torch.float64):
            # Products in float32 are small, such as those of routers: passes over their factors.
            return max(self.seconds_of_pass(operator.num_bytes), operator.flops / _PLAIN_SPEED)
        part = "products"
        item = 2 if self.kind == "cuda" else 4
        if dtype is not None and dtype.itemsize == 1:
            part = "8-bit products"
            item = 1
        elif operator.name == "addmm":
            part = "sums of products"
        peak, ratios = self._table(part, item)
        ideal = self._ideal(operator.flops, operator.num_bytes, peak)
        return ideal * ratios.at(batch * m, n, k)

    def _table(self, part: str, item: int) -> tuple[float, MeasuredRatios]:
        """Return the highest speed of products (FLOP/s), and their ratios."""
        if part not in self._ratios:
            rows = self._needed(part)
            peak = max(2 * m * n * k / seconds for m, n, k, seconds in rows)
            result = 4 if part == "sums of products" else 2
            pairs = [
                (
                    (m, n, k),
                    seconds
                    / self._ideal(2 * m * n * k, item * (m * k + k * n) + result * m * n, peak),
                )
                for m, n, k, seconds in rows
            ]
            self._ratios[part] = peak, MeasuredRatios.of(pairs)
        return self._ratios[part]

    def _attention(self, operator: Operator) -> float:
        _, heads, queries, keys, head_dim, _ = operator.sizes
        backward = operator.name.endswith("_backward")
        part = f"attention {backward}"
        if part not in self._ratios:
            rows = self._needed("attention")
            pairs = []
            for batch, count, _, length, size, *times in rows:
                flops = (10 if backward else 4) * batch * count * size * length * length / 2
                pairs.append(((batch * count, length, length, size), times[backward] / flops))
            self._ratios[part] = 1.0, MeasuredRatios.of(pairs)
        return operator.flops * self._ratios[part][1].at(heads, queries, keys, head_dim)

    def _grouped(self, operator: Operator) -> float:
        groups, rows, n, k = operator.sizes
        number = _PASSES_OF_GROUPED.get(operator.name, 2)
        part = f"grouped {number}"
        if part not in self._ratios:
            measured = self._needed("grouped products")
            flops = [2 * row[0] * row[1] * row[2] * row[3] for row in measured]
            times = [row[4 + number] for row in measured]
            peak = max(flop / time for flop, time in zip(flops, times, strict=True))
            pairs = []
            for (count, each, out, inner, *_), flop, time in zip(
                measured, flops, times, strict=True
            ):
                weights = (4 if number == 2 else 2) * count * out * inner
                num_bytes = 2 * count * each * (out + inner) + weights
                ratio = time / self._ideal(flop, num_bytes, peak)
                pairs.append(((each, out, inner), ratio))
            self._ratios[part] = peak, MeasuredRatios.of(pairs)
        peak, ratios = self._ratios[part]
        ideal = self._ideal(operator.flops, operator.num_bytes, peak)
        return ideal * ratios.at(max(1, rows / groups), n, k)

    def collective(self, kind: str, num_bytes: float, link: Link) -> float:
        """Return the time of a collective over a tensor of all ranks' parts (s).

        Args:
            kind: Name of the collective; "transfer" is one between two ranks.
            num_bytes: Size of the whole tensor (bytes).
        """
        if link.ranks == 1:
            return 0.0
        traffic = _TRAFFIC.get(kind, _TRAFFIC["all_to_all"])
        kind = kind if kind in _TRAFFIC and kind != "broadcast" else "all_reduce"
        moved = traffic(link.ranks) * num_bytes
        links = self._content.get("links", {})
        within = links.get(f"node {kind}")
        if within is None:
            raise ParallelPlanError(
                f"{self._source} has no times of {kind}, which {link.ranks} ranks need. Measure "
                "them by `lightning-megatron doctor --calibrate FILE` on a machine with two GPUs "
                "or more."
            )
        inside = self._from(within, traffic, moved, min(link.ranks, link.per_node))
        if not link.crosses_nodes:
            return inside
        across = links.get(f"network {kind}")
        if across is not None:
            return max(inside, self._from(across, traffic, moved / link.per_node, link.ranks))
        nodes = link.ranks / link.per_node
        latency = _NETWORK_LATENCY * (1 + math.log2(nodes))
        if kind in ("all_to_all", "transfer"):
            # Each rank sends over its own adapter what leaves the node.
            moved *= (link.ranks - link.per_node) / max(1, link.ranks - 1)
            return latency + max(inside, moved / (_NETWORK_SHARE * self._network))
        # The ranks of a node share the traffic of a ring over all nodes.
        shared = moved / link.per_node
        return latency + max(inside, shared / (_NETWORK_SHARE * self._network))

    def _from(self, rows: Any, traffic: Any, moved: float, ranks: int) -> float:
        """Return the time of a collective with so much traffic of a rank, from measured ones."""
        if ranks == 1:
            return 0.0
        measured = rows[0][0]
        points = [(traffic(size) * whole, seconds) for size, whole, seconds in rows]
        # Each doubling of the ranks adds a message.
        more = max(0.0, math.log2(ranks / measured)) * points[0][1]
        return _interpolated(points, moved) + more

    def price(self, kind: str, crosses_nodes: bool) -> float:
        """Return what a collective adds to the time of products beside it, over its own time."""
        links = self._content.get("links", {})
        level = "network" if crosses_nodes and "network beside" in links else "node"
        prices: dict[str, float] = links.get(f"{level} beside", {})
        return prices.get(kind, max(prices.values(), default=0.0))

    @property
    def kind(self) -> str:
        """Return the kind of the measured device, "cuda" or "cpu"."""
        return "cpu" if self._content.get("gpu") == "cpu" else "cuda"

    @cached_property
    def host(self) -> Mapping[str, float]:
        """Return what the host needs for an operator (s), in forward and in backward passes."""
        counts: dict[str, int] = defaultdict(int)
        seconds: dict[str, float] = defaultdict(float)
        for times, passes in self._models("small"):
            for name, operators, duration in zip(PASSES, passes, times["host"], strict=False):
                counts[name] += len(operators)
                seconds[name] += duration
        if not counts:
            raise self._lacks("models", "model small")
        each = {name: seconds[name] / counts[name] for name in counts}
        return {**each, "weight_half": each["input_half"]}

    @cached_property
    def kernels(self) -> Mapping[str, float]:
        """Return the speeds of kernels of Triton by name (bytes/s), from measured models."""
        num_bytes: dict[str, float] = defaultdict(float)
        seconds: dict[str, float] = defaultdict(float)
        for times, passes in self._models(""):
            traced: dict[str, float] = defaultdict(float)
            for operator in chain.from_iterable(passes):
                if operator.kind == "kernel":
                    traced[operator.name] += operator.num_bytes
            for name, (count, duration) in times.get("kernels", {}).items():
                if name in traced:
                    num_bytes[name] += traced[name]
                    seconds[name] += max(0.1 * duration, duration - count * self.latency)
        return {name: num_bytes[name] / seconds[name] for name in seconds}

    def _models(self, prefix: str) -> Iterator[tuple[Any, tuple[tuple[Operator, ...], ...]]]:
        """Yield the measurements of some models, and their operators."""
        models = measured_models(self.kind == "cuda")
        for title, times in self._content.get("models", {}).items():
            model = models.get(title.removeprefix("model "))
            if model is None or title.startswith("model small") != bool(prefix):
                continue
            training = TrainingShape(seq_length=model.tokens, fp8=model.fp8)
            alone = ParallelLayout(world_size=1)
            yield times, trace_stage(model.config, alone, training, 0, self.kind).first


#: Products in float32 without tensor cores on Hopper (FLOP/s).
_PLAIN_SPEED = 45e12


def _content_of(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParallelPlanError(
            f"the speeds {str(path)!r} cannot be read: {error}. Write them by `lightning-megatron "
            "doctor --calibrate FILE`."
        ) from error


def with_other_memory(content: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """Return the times of a chip that differs from a measured one in the speed of its memory.

    Products, attention and links stay; passes, kernels of Triton and the optimizer are bound by
    memory.

    Args:
        ratio: Bandwidth of the memory over that of the measured chip.
    """
    calls = dict(content["calls"])
    for part in ("passes", "optimizer"):
        calls[part] = [[size, seconds / ratio] for size, seconds in calls[part]]
    models = {}
    for title, times in content["models"].items():
        kernels = times.get("kernels", {}).items()
        slower = {name: [count, seconds / ratio] for name, (count, seconds) in kernels}
        models[title] = {**times, "kernels": slower}
    return {**content, "calls": calls, "models": models}


def _interpolated(points: Sequence[Sequence[float]], at: float) -> float:
    """Return the time at a size, between measured sizes; beyond the largest one in proportion."""
    low = points[0]
    high = points[-1]
    if at <= low[0]:
        return low[1]
    if at >= high[0]:
        return high[1] * at / high[0]
    for left, right in zip(points, points[1:], strict=False):
        if at <= right[0]:
            share = (at - left[0]) / (right[0] - left[0])
            return left[1] + share * (right[1] - left[1])
    return high[1]
