"""Validation of optimizer and scheduler states from checkpoint files of other strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from torch import Tensor

from lightning_megatron.errors import (
    CheckpointMismatchError,
    CorruptDataError,
    ParallelPlanError,
)
from lightning_megatron.plan.settings import Index, Pattern, coerced, shown

#: States of schedulers from which rates are computed.
_OF_RATES = ("last_epoch", "_step_count", "base_lrs", "lr_lambdas", "_schedulers", "milestones")


class _Counts(TypedDict):
    ready: Index
    completed: Index


class _Progress(TypedDict):
    total: _Counts
    current: _Counts


_FitLoop = TypedDict(
    "_FitLoop", {"epoch_progress": _Progress, "epoch_loop.batch_progress": _Progress}
)


class _Loops(TypedDict):
    fit_loop: _FitLoop


#: Entries that Lightning reads, and those that it reads only if a fit resumes.
_READ: Mapping[str, Any] = {
    "pytorch-lightning_version": Annotated[str, Pattern(r"\d.*", "that begins with a digit")]
}
_RESUMED: Mapping[str, Any] = {"loops": _Loops, "lr_schedulers": list[Any]}


def check_entries(checkpoint: Mapping[str, Any], path: str, *, is_resumed: bool) -> None:
    """Refuse a file without the entries that Lightning reads."""
    for name, kind in {**_READ, **(_RESUMED if is_resumed else {})}.items():
        try:
            coerced(name, checkpoint.get(name), kind)
        except ParallelPlanError as error:
            raise CorruptDataError(
                f"a checkpoint file must be written by Lightning: in {path} {error} The file is "
                "damaged or edited. Use another checkpoint, or load the weights in your module."
            ) from error


def check_training_states(
    checkpoint: Mapping[str, Any], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> None:
    """Refuse a file whose optimizers and schedulers are not those of the module."""
    states = checkpoint["optimizer_states"]
    if len(optimizers) != len(states):
        raise CheckpointMismatchError(
            f"a module must have the optimizers that were saved: {len(states)} were saved, "
            f"configure_optimizers returns {len(optimizers)}. States would be loaded into the "
            "wrong optimizers. Restore configure_optimizers as it was, or load only the weights."
        )
    # Further states of schedulers in the file are ignored, as by Lightning.
    for scheduler, state in zip(schedulers, checkpoint.get("lr_schedulers", ()), strict=False):
        for key, current in scheduler.state_dict().items():
            saved = state.get(key) if isinstance(state, Mapping) else state
            if key in _OF_RATES and not _is_like(saved, current):
                raise CorruptDataError(
                    "the state of a learning rate scheduler must have the form in which it was "
                    f"saved: {key} of {type(scheduler).__name__} is {shown(saved)} in the file, "
                    f"and {shown(current)} in the new scheduler. The fit would continue with other "
                    "learning rates. Restore configure_optimizers as it was, use another "
                    "checkpoint, or load only the weights."
                )


def _is_like(saved: Any, current: Any) -> bool:
    is_list = isinstance(current, list)
    return type(saved) is type(current) and (not is_list or len(saved) == len(current))


def check_states(
    groups: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Any],
) -> None:
    """Refuse states that differ in kind between parameters of one group.

    An optimizer has the same states for parameters with the same number of dimensions. Parameters
    without any state have not been trained.

    Args:
        states: States of each parameter by key, complete tensors.
    """
    for names in groups:
        for num_dims in {full[name].dim() for name in names}:
            similar = [name for name in names if full[name].dim() == num_dims and states[name]]
            forms = {}
            for name in similar:
                items = states[name].items()
                forms[name] = frozenset((key, *_kind_of(key, v, full[name])) for key, v in items)
            common = Counter(forms.values()).most_common(1)[0][0] if forms else frozenset()
            wrong = [name for name, form in forms.items() if form != common]
            if wrong:
                keys = sorted(key for key, *_ in forms[wrong[0]] ^ common)
                raise CorruptDataError(
                    "an optimizer's states must be of the same kind for all parameters of a group: "
                    f"{keys[0]!r} of {wrong[0]!r} is missing, or has another shape or dtype than "
                    f"for {len(forms) - len(wrong)} other parameter(s). The checkpoint is damaged "
                    "or edited. Use another one, or load only the weights."
                )


def _kind_of(key: str, value: Any, parameter: Tensor) -> tuple[Any, ...]:
    """Return the kind of a state value, which similar parameters must share."""
    if not isinstance(value, Tensor):
        return (False,)
    is_like = tuple(value.shape) == tuple(parameter.shape)
    shape = "like" if is_like and key != "step" and parameter.dim() else value.dim()
    return True, shape, value.is_floating_point(), value.is_complex()
