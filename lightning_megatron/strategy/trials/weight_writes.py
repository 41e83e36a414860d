"""Detection and undoing of user code that writes weights in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.strategy.modules.module_state import ModuleState


@contextmanager
def refuse_weight_writes(module: nn.Module, step: str) -> Iterator[None]:
    """Refuse weights that a trial step in the block changes, such as those of a teacher."""
    before = _norms_of(module)
    try:
        yield
    except UnsupportedError:
        # Changed weights explain a changed loss, so their error takes precedence.
        _check(module, step, before)
        raise
    _check(module, step, before)


@contextmanager
def preserve_state(module: nn.Module, step: str) -> Iterator[None]:
    """Restore the module's buffers and attributes after a trial, and refuse changed weights."""
    state = ModuleState(module)
    try:
        with refuse_weight_writes(module, step):
            yield
    finally:
        state.restore()


def _check(module: nn.Module, step: str, before: Mapping[str, Tensor]) -> None:
    now = _norms_of(module)
    changed = [
        name for name, norm in before.items() if name in now and not torch.equal(norm, now[name])
    ]
    if changed:
        raise UnsupportedError(
            f"{step} must not write weights if batches are divided into microbatches or pp is "
            "above 1, because it runs more than once for a batch: "
            f"{', '.join(repr(name) for name in changed[:5])} has changed. Write them in a hook "
            "such as on_train_batch_end, or use pp=1 with microbatch_size='batch', or use "
            "job.check_microbatches=False if this is intended."
        )


@torch.no_grad()
def _norms_of(module: nn.Module) -> dict[str, Tensor]:
    # Version counters do not suffice: writes through .data do not increment that of the parameter.
    return {
        name: torch.linalg.vector_norm(parameter.detach(), dtype=torch.float64).nan_to_num()
        for name, parameter in module.named_parameters()
        if not parameter.is_meta and parameter.is_floating_point()
    }


class WeightWrites(TorchDispatchMode):
    """Mode that saves weights before writes inside the block, so that they can be undone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._storages = {
            parameter.untyped_storage().data_ptr()
            for parameter in module.parameters()
            if not parameter.is_meta
        }
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator after copying the weights that it writes."""
        options = dict(kwargs or {})
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            named = [
                *zip(arguments, args, strict=False),
                *((argument, options.get(argument.name)) for argument in arguments),
            ]
            for argument, value in named:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(value if isinstance(value, (list, tuple)) else [value])
        return func(*args, **options)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the saved weights."""
        while self._before:
            written, before = self._before.pop()
            written.copy_(before)

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if (
                isinstance(value, Tensor)
                and not value.is_meta
                and value.layout == torch.strided
                and value.untyped_storage().data_ptr() in self._storages
            ):
                self._before.append((value.detach(), value.detach().clone()))
