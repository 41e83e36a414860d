"""Detection of user code in a step that cannot run on some pipeline stages, or not repeatedly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Self

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import ranks_of_call
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.modules.module_state import own_parts
from lightning_megatron.user_code import Line, runs_package, runs_torch


class StageGuard(TorchDispatchMode):
    """Mode that refuses collectives of user code over stages, and iterators that a step advances.

    With stages a step runs several times on each stage, and only the last stage runs it to its end.
    Collectives over several stages would therefore wait forever, and an iterator would give each
    run another item.
    """

    def __init__(self, module: nn.Module, step: str, mesh: ParallelMesh) -> None:
        super().__init__()
        self._step = step
        self._stages = frozenset(mesh.pp.ranks)
        self._parts = own_parts(module)
        self._before: list[frozenset[str]] = []

    def __enter__(self) -> Self:
        self._before = [frozenset(vars(part)) for _, part in self._parts]
        for name, part in self._parts:
            for key, value in _iterators(part):
                vars(part)[key] = _Unmoved(value, _path(name, key), self._step)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for (name, part), before in zip(self._parts, self._before, strict=True):
            for key, value in _iterators(part):
                if isinstance(value, _Unmoved):
                    vars(part)[key] = value.iterator
                elif key not in before:
                    _refuse_iterator(self._step, _path(name, key), "in the step")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            reader = _user_frame()
            ranks = ranks_of_call(args)
            is_within = ranks is not None and len(self._stages.intersection(ranks)) < 2
            if reader is not None and not is_within:
                name = func.name().partition("::")[2].strip("_")
                raise UnsupportedError(
                    f"{self._step} must not communicate between pipeline stages: {name} at "
                    f"{Line.of(reader)}. Only the last stage runs a step to its end, so that the "
                    "ranks would wait for each other. Use self.log with sync_dist=True or "
                    "self.all_gather, which combine the ranks that read different data, or "
                    "communicate in a hook such as on_train_batch_end."
                )
        return func(*args, **(kwargs or {}))


class _Unmoved:
    """Stand-in for an iterator, which refuses to give its next item."""

    def __init__(self, iterator: Iterator[Any], path: str, step: str) -> None:
        self.iterator = iterator
        self._path = path
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        frame = _user_frame()
        where = "in the step" if frame is None else f"at {Line.of(frame)}"
        _refuse_iterator(self._step, self._path, where)


def _refuse_iterator(step: str, path: str, where: str) -> NoReturn:
    raise UnsupportedError(
        f"{step} must get all its data as its batch with pp above 1: it takes an item of {path} "
        f"{where}. The step runs once for each microbatch, and several times on each stage, so "
        "that every run would get another item. Give the Trainer a CombinedLoader of both data "
        "sets, or take the item in a hook such as on_train_batch_start."
    ) from None


def _path(module: str, key: str) -> str:
    return f"self.{module}.{key}" if module else f"self.{key}"


def _iterators(part: nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, value in vars(part).items()
        if isinstance(value, Iterator) and not isinstance(value, nn.Module)
    ]


def _user_frame() -> FrameType | None:
    """Return the innermost frame outside of torch, modes and this file, if it is user code.

    If this package communicates itself, the result is None.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__
        or runs_torch(frame)
        or frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
    ):
        frame = frame.f_back
    return None if frame is None or runs_package(frame) else frame
