"""Validation of optimizer and scheduler states from checkpoint files of other strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError

#: States of torch's optimizers that have the shape of their parameter.
_SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"}
    | {"grad_avg", "exp_inf", "prev"}
)

#: Counts in Lightning's checkpoint that decide where a fit resumes.
_PROGRESS = ("epoch_progress", "epoch_loop.batch_progress")


def check_entries(checkpoint: Mapping[str, Any], path: str, *, is_resumed: bool) -> None:
    """Refuse a file without the entries that Lightning reads.

    Args:
        checkpoint: Content of the file.
        path: Path of the file, for errors.
        is_resumed: Whether a fit resumes from the file.

    Raises:
        CorruptDataError: If an entry is missing or has no legal value.
    """
    reason = None
    version = checkpoint.get("pytorch-lightning_version")
    if not (isinstance(version, str) and version[:1].isdigit()):
        reason = f"pytorch-lightning_version is {version!r} and must be the version that wrote it"
    loops = checkpoint.get("loops")
    if is_resumed and not isinstance(loops, Mapping):
        reason = f"loops is {loops!r} and must be a mapping of loops with their counts"
    elif is_resumed and isinstance(loops, Mapping):
        if "lr_schedulers" not in checkpoint:
            reason = "lr_schedulers is missing"
        loop = loops.get("fit_loop")
        counts = loop if isinstance(loop, Mapping) else {}
        missing = [name for name in _PROGRESS if not _has_counts(counts.get(name))]
        if missing:
            reason = f"loops.fit_loop has no complete counts {missing[0]!r}"
    if reason is not None:
        raise CorruptDataError(
            f"a checkpoint file must be written by Lightning: in {path} {reason}. The file is "
            "damaged or edited. Use another checkpoint, or load the weights in your module."
        )


def check_training_states(
    checkpoint: Mapping[str, Any], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> None:
    """Refuse a file whose optimizers and schedulers are not those of the module.

    Args:
        checkpoint: Content of the file.
        optimizers: Optimizers of the module.
        schedulers: Learning rate schedulers of the module.

    Raises:
        CheckpointMismatchError: If the file has another number of optimizers.
        CorruptDataError: If the state of a scheduler lacks a value that rates are computed from.
    """
    states = checkpoint["optimizer_states"]
    if len(optimizers) != len(states):
        raise CheckpointMismatchError(
            f"a module must have the optimizers that were saved: {len(states)} were saved, "
            f"configure_optimizers returns {len(optimizers)}. States would be loaded into the "
            "wrong optimizers. Restore configure_optimizers as it was, or load only the weights."
        )
    _check_schedulers(schedulers, checkpoint.get("lr_schedulers", ()))


def check_states(
    groups: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Any],
    is_of_torch: bool,
) -> None:
    """Refuse states that differ in kind between parameters of one group.

    An optimizer has the same states for parameters with the same number of dimensions. Parameters
    without any state have not been trained.

    Args:
        groups: Names of the parameters of each group.
        states: States of each parameter by key, complete tensors.
        full: Complete parameters.
        is_of_torch: Whether the optimizer is one of ``torch.optim``, whose moments have the shape
            of their parameter.

    Raises:
        CorruptDataError: If a state is missing, or has another kind than that of other parameters.
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
                shown = sorted(key for key, *_ in forms[wrong[0]] ^ common)
                raise CorruptDataError(
                    "an optimizer's states must be of the same kind for all parameters of a group: "
                    f"{shown[0]!r} of {wrong[0]!r} is missing, or has another shape or dtype than "
                    f"for {len(forms) - len(wrong)} other parameter(s). The checkpoint is damaged "
                    "or edited. Use another one, or load only the weights."
                )
    for name, state in states.items():
        for key, value in state.items():
            is_sound = isinstance(value, Tensor) and _has_same_form(value, full[name])
            if is_of_torch and key in _SHAPED and value is not None and not is_sound:
                actual = (
                    f"{tuple(value.shape)} and {value.dtype}"
                    if isinstance(value, Tensor)
                    else repr(value)[:40]
                )
                raise CorruptDataError(
                    f"an optimizer's state must have the shape and dtype of its parameter: {key!r} "
                    f"of {name!r} is {actual}, the parameter is {tuple(full[name].shape)} and "
                    f"{full[name].dtype}. The checkpoint is damaged or edited, or its parameters "
                    "were numbered in another order. Use another one, or load only the weights."
                )


def _check_schedulers(schedulers: Sequence[Any], saved: Sequence[Any]) -> None:
    """Refuse states without the values that rates are computed from.

    Further states in the file are ignored, as by Lightning.
    """
    for number, (scheduler, state) in enumerate(zip(schedulers, saved, strict=False)):
        reason = None
        if not isinstance(state, Mapping):
            reason = f"{state!r} is not a mapping"
        else:
            for key, current in scheduler.state_dict().items():
                if key in ("last_epoch", "_step_count") and type(state.get(key)) is not int:
                    reason = f"{key} is {state.get(key)!r} and must be a whole number"
                is_list = key in ("lr_lambdas", "_schedulers", "milestones")
                if is_list and type(state.get(key)) is not type(current):
                    reason = f"{key} is {state.get(key)!r} and must be a {type(current).__name__}"
                if key == "base_lrs" and not _are_rates(state.get(key), current):
                    reason = (
                        f"{key} is {state.get(key)!r} and must be a list of {len(current)} rates"
                    )
        if reason is not None:
            raise CorruptDataError(
                "the state of a learning rate scheduler must have the form in which it was saved: "
                f"in the state of scheduler {number} ({type(scheduler).__name__}) {reason}. The "
                "fit would continue with other learning rates. Restore configure_optimizers as it "
                "was, use another checkpoint, or load only the weights."
            )


def _has_counts(progress: Any) -> bool:
    return isinstance(progress, Mapping) and all(
        isinstance(progress.get(part), Mapping) and {"ready", "completed"} <= progress[part].keys()
        for part in ("total", "current")
    )


def _kind_of(key: str, value: Any, parameter: Tensor) -> tuple[Any, ...]:
    """Return the kind of a state value, which similar parameters must share."""
    if not isinstance(value, Tensor):
        return (False,)
    is_like = tuple(value.shape) == tuple(parameter.shape)
    shape = "like" if is_like and key != "step" and parameter.dim() else value.dim()
    return True, shape, value.is_floating_point(), value.is_complex()


def _has_same_form(value: Tensor, parameter: Tensor) -> bool:
    return value.shape == parameter.shape and (
        value.is_floating_point() == parameter.is_floating_point()
        and value.is_complex() == parameter.is_complex()
    )


def _are_rates(value: Any, current: Sequence[Any]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(current)
        and all(isinstance(rate, (int, float, Tensor)) for rate in value)
    )
