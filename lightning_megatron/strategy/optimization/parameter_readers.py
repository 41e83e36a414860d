"""User code that reads parameters or gradients outside the step: hooks, and ``parameter.data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron.strategy.private.loops import is_overridden

#: Hooks between a step and the next forward pass in which the strategy itself does not wait for
#: updated parameters.
_HOOKS = tuple(
    """
    on_train_batch_start on_train_batch_end on_before_zero_grad on_train_epoch_start
    on_train_epoch_end on_train_end on_fit_end on_validation_start
    on_validation_epoch_start on_validation_batch_start on_validation_model_eval
    on_before_batch_transfer on_after_batch_transfer
    """.split()
)
#: Warning about a hook that reads gradients of a sharded model.
SHARDED_GRADIENTS_WARNING = (
    "reads in parameter.grad only the gradients of the parameters or parts of parameters that this "
    "rank holds, with tp, pp or ep above 1; norms of single parameters are computed over all their "
    "parts. trainer.precision_plugin.last_grad_norm is the norm over all ranks, where the Trainer "
    "clips by norm."
)
#: Hooks in which user code commonly reads gradients.
_GRADIENT_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
)
#: Hooks with mostly other purposes, which count only if their code names gradients.
_OTHER_HOOKS = (
    "optimizer_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
)
#: Names that contain "grad" but read no gradients: functions that clear gradients or control the
#: recording of graphs, and a norm that was computed before.
_NO_READERS = frozenset(
    {
        "zero_grad",
        "requires_grad",
        "requires_grad_",
        "no_grad",
        "enable_grad",
        "autograd",
        "set_grad_enabled",
        "is_grad_enabled",
        # The norm that the precision plugin has computed.
        "last_grad_norm",
    }
)
#: Maximum depth of function calls that the search follows.
_DEPTH = 4
#: Callbacks that read only counters, logged values and clocks, or save through the strategy.
_HARMLESS_PACKAGES = ("lightning_megatron.", "lightning.pytorch.callbacks.progress")
_HARMLESS_CALLBACKS = frozenset(
    """
    ModelCheckpoint OnExceptionCheckpoint EarlyStopping LearningRateMonitor Timer
    ModelSummary RichModelSummary DeviceStatsMonitor GradientAccumulationScheduler
    ThroughputMonitor
    """.split()
)
#: Torch's own descriptor, to which the replacement forwards.
_ORIGINAL: Any = torch.Tensor.data


def parameter_reader(trainer: Trainer) -> str | None:
    """Return a hook that may read the model's parameters after a step; None without one.

    Every hook counts, whatever its code does, except those of callbacks that are known not to read
    parameters.
    """
    return first_overridden(trainer, _HOOKS)


def backward_observer(trainer: Trainer) -> str | None:
    """Return a hook that receives the loss or replaces the backward pass; None without one."""
    return first_overridden(trainer, ("backward", "on_before_backward"))


def gradient_reader(trainer: Trainer) -> str | None:
    """Return a hook that may read ``parameter.grad``; None without one.

    A callback or module whose class sets ``reads_gradients = False`` does not count.
    """
    return first_overridden(trainer, _GRADIENT_HOOKS, _may_read_gradients) or first_overridden(
        trainer, _OTHER_HOOKS, _names_gradients
    )


def gradient_changer(trainer: Trainer) -> str | None:
    """Return a hook that may change gradients between accumulated batches; None without one.

    A callback or module whose class sets ``reads_gradients = False`` does not count.
    """
    batch_hooks = ("on_train_batch_start", "on_train_batch_end")
    return first_overridden(
        trainer, ("on_after_backward",), _may_read_gradients
    ) or first_overridden(trainer, batch_hooks, _names_gradients)


def first_overridden(
    trainer: Trainer, hooks: tuple[str, ...], counts: Callable[[Any], bool] = lambda hook: True
) -> str | None:
    """Return the first of the hooks that the module or a callback overrides and that ``counts``.

    Harmless callbacks do not count.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _is_harmless(type(callback)):
            continue
        for hook in hooks:
            if _overrides(callback, hook) and counts(getattr(callback, hook)):
                return f"{type(callback).__name__}.{hook}"
    module = trainer.lightning_module
    for hook in hooks:
        is_own = (
            hasattr(LightningModule, hook)
            and hook != "on_validation_model_eval"
            and is_overridden(hook, module)
        )
        if is_own and counts(getattr(module, hook)):
            return f"{type(module).__name__}.{hook}"
    return None


def _overrides(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a hook, by a method or (LambdaCallback) an attribute."""
    method = getattr(callback, hook, None)
    return getattr(method, "__func__", method) is not getattr(Callback, hook, None)


def _may_read_gradients(hook: Any) -> bool:
    return bool(getattr(getattr(hook, "__self__", None), "reads_gradients", True))


def _names_gradients(hook: Any) -> bool:
    """Return whether a hook or a function it calls uses gradients other than to clear them."""
    if not _may_read_gradients(hook):
        return False
    function = getattr(hook, "__func__", hook)
    if getattr(function, "__code__", None) is None:
        # A callable without Python code cannot be inspected, so it may read gradients.
        return True
    if any("grad" in name and name not in _NO_READERS for name in _names(function.__code__)):
        return True
    return _calls_grad(hook, None, _DEPTH, set())


def _calls_grad(function: Any, owner: object, depth: int, visited: set[FunctionType]) -> bool:
    """Return whether a function, or one that it may call, names ``grad``.

    Attribute names are resolved only on the hook's owner (a module or a callback). On arbitrary
    objects the same names would match unrelated methods.
    """
    owner = getattr(function, "__self__", owner)
    function = getattr(function, "__func__", function)
    is_function = isinstance(function, FunctionType) and function.__name__ != "zero_grad"
    if not is_function or function in visited:
        return False
    visited.add(function)
    names = _names(function.__code__)
    if "grad" in names or not depth:
        return "grad" in names
    called = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        # A variable may have no value yet.
        with suppress(ValueError):
            called.append(cell.cell_contents)
    for named in called[:]:
        if isinstance(named, ModuleType) and named.__name__.partition(".")[0] != "torch":
            called += [vars(named)[name] for name in names if name in vars(named)]
    methods = [] if owner is None else [getattr(type(owner), name, None) for name in names]
    if any(_calls_grad(method, owner, depth - 1, visited) for method in methods):
        return True
    return any(_calls_grad(inner, None, depth - 1, visited) for inner in called)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a code, and in the functions inside it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _is_harmless(kind: type) -> bool:
    home = kind.__module__
    return home.startswith(_HARMLESS_PACKAGES) or (
        home.startswith("lightning.") and kind.__name__ in _HARMLESS_CALLBACKS
    )


def memory_of(parameter: Tensor) -> Tensor:
    """Return ``parameter.data`` without triggering the detection."""
    return _ORIGINAL.__get__(parameter)


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    _ORIGINAL.__set__(parameter, value)


def is_accessor(code: CodeType) -> bool:
    """Return whether a frame's code belongs to this module."""
    return code.co_filename == memory_of.__code__.co_filename


@contextmanager
def record_data_access(note: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call a function before a parameter's ``data`` is read or assigned inside the block."""
    # Fits may be nested: the inner one restores the replacement of the outer one.
    before: Any = vars(nn.Parameter).get("data")

    def get(parameter: nn.Parameter) -> Tensor:
        note(parameter)
        return memory_of(parameter)

    def replace(parameter: nn.Parameter, value: Tensor) -> None:
        note(parameter)
        _set(parameter, value)

    nn.Parameter.data = property(get, replace)  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del nn.Parameter.data
        else:
            nn.Parameter.data = before
