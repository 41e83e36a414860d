"""Settings of the trainings that ``benchmarks.graph_drift`` compares."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.shapes import Layout
from lightning_megatron.graphs.cuda import CudaGraph
from lightning_megatron.graphs.observation import Observation
from lightning_megatron.groups.axis import CollectiveLauncher, Work
from lightning_megatron.layers.attention import core as attention_core
from lightning_megatron.layers.attention.choose_core import CoreChoice
from lightning_megatron.models.config import GPTConfig
from tests.tape import TapeGraph

#: Name of the training without graphs.
EAGER = "eager"
_SEGMENTS: Mapping[str, Any] = {"mode": "segments", "on_failure": "error"}
_FULL: Mapping[str, Any] = {"mode": "full", "on_failure": "error"}
#: NCCL option: maximum number of thread blocks for gradient sums and parameter gathers.
_FEW_BLOCKS = {"data": {"max_ctas": 2}}
_SCOPES_OF_EXPERTS = (("experts",), ("router", "preprocess"), ("combine",))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def synchronised(after: bool = False) -> Iterator[None]:
    """Let the host wait for the device before each replay inside the block.

    Args:
        after: Whether the host also waits after each replay.
    """

    def waiting(replay: Callable[[Any], None]) -> Callable[[Any], None]:
        def replay_apart(graph: Any) -> None:
            _wait_for_device()
            replay(graph)
            if after:
                _wait_for_device()

        return replay_apart

    with (
        patch.object(CudaGraph, "replay", waiting(CudaGraph.replay)),
        patch.object(TapeGraph, "replay", waiting(TapeGraph.replay)),
    ):
        yield


@contextmanager
def serial() -> Iterator[None]:
    """Run each replay, and each collective outside graphs, while no other work runs."""
    original_start = CollectiveLauncher.start

    def start_and_wait(
        launcher: CollectiveLauncher, collective: Callable[[], Work], *written: Tensor
    ) -> Work:
        work = original_start(launcher, collective, *written)
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if launcher.recorder is None and not is_captured:
            work.wait()
            _wait_for_device()
        return work

    with synchronised(after=True), patch.object(CollectiveLauncher, "start", start_and_wait):
        yield


def without_cuts() -> AbstractContextManager[Any]:
    """Do not end graphs where a bucket of gradients is complete."""
    return patch.object(Observation, "begins", lambda observation: frozenset())


def math_attention() -> AbstractContextManager[Any]:
    """Compute attention by matrix products and a softmax, whose summation order is fixed."""
    choice = CoreChoice("sdpa", (SDPBackend.MATH,), False, True, "sums in one order")
    return patch.object(attention_core, "choose_core", lambda *arguments, **options: choice)


@contextmanager
def deterministic() -> Iterator[None]:
    """Allow only deterministic algorithms of torch, as ``Trainer(deterministic=True)`` does."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)


@dataclass(frozen=True)
class Setting:
    """Configuration of one training.

    Args:
        name: Name of the setting.
        graphs: Value of ``cuda_graphs``; None without graphs.
        options: Further arguments of the strategy.
        around: Function that returns a context manager around the training.
        has_own_twin: Whether the training must equal an eager training with the same options and
            context, because these change the bits.
        twin: Name of the earlier setting whose training it must equal, if ``has_own_twin`` is
            false.
    """

    name: str
    graphs: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_own_twin: bool = False
    twin: str = EAGER


def settings_of(config: GPTConfig, layout: Layout) -> list[Setting]:
    """Return all settings for a model and a layout, the most informative settings first."""
    settings = [
        Setting(EAGER),
        Setting("segments", _SEGMENTS),
        Setting("eager again"),
        Setting("segments again", _SEGMENTS, twin="segments"),
    ]
    if layout.data_ranks > 1:
        settings += [
            Setting("no overlap", _SEGMENTS, {"overlap_gradients": False}),
            Setting("no cuts", _SEGMENTS, around=without_cuts),
            Setting("few blocks of NCCL", _SEGMENTS, {"nccl_options": _FEW_BLOCKS}),
        ]
    settings += [
        Setting("deterministic", _SEGMENTS, around=deterministic, has_own_twin=True),
        Setting("synchronised", _SEGMENTS, around=synchronised),
        Setting("serial", _SEGMENTS, around=serial),
        Setting("math attention", _SEGMENTS, around=math_attention, has_own_twin=True),
        Setting("full", _FULL),
        Setting("deterministic full", _FULL, around=deterministic, has_own_twin=True),
    ]
    if layout.data_ranks > 1:
        settings += [
            Setting("one bucket", _SEGMENTS, {"bucket_size": 10**12}, has_own_twin=True),
            Setting("gathered at once", _SEGMENTS, {"overlap_parameters": False}),
        ]
    if layout.ep > 1:
        transport = {"expert_transport": "all_gather"}
        settings.append(Setting("all-gather", _SEGMENTS, transport, has_own_twin=True))
    layer_scopes = (("mlp",),) if config.experts is None else _SCOPES_OF_EXPERTS
    for scopes in (("attention",), *layer_scopes, ("head",), ("embedding",)):
        graphs = {**_SEGMENTS, "scopes": list(scopes)}
        settings.append(Setting(f"only {' and '.join(scopes)}", graphs))
    return settings


def chosen_settings(settings: Sequence[Setting], names: Collection[str]) -> list[Setting]:
    """Return the named settings and their twins; all settings if no name is given.

    Args:
        settings: All settings; each follows its twin.
        names: Names of the chosen settings.

    Raises:
        ValueError: If a name is unknown.
    """
    by_name = {setting.name: setting for setting in settings}
    unknown = sorted(set(names) - by_name.keys())
    if unknown:
        raise ValueError(
            f"settings must be among those of the model and layout: {', '.join(unknown)} are not. "
            f"Use {', '.join(by_name)}."
        )
    chosen = set(names or by_name)
    chosen |= {EAGER, *(by_name[name].twin for name in chosen)}
    return [setting for setting in settings if setting.name in chosen]
