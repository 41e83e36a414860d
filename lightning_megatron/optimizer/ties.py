"""Equal training of tied embeddings on the first and the last stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.optimizer.main_parameters import MainParameters


@contextmanager
def name_copies_as_originals(module: nn.Module) -> Iterator[None]:
    """List copies of tied embeddings under the names of their originals inside the block.

    On a single device there are no copies, so code that builds parameter groups by names expects
    only the original's name. Inside this context, such code puts the last stage's copy into the
    group of the first stage's embedding. A copy whose original has no module on this stage keeps
    its name.
    """
    placed: list[tuple[nn.Module, str]] = []
    for name, parameter in list(module.named_parameters()):
        tied_to = shard_spec_of(parameter).tied_to
        place = None if tied_to is None else _find_original(module, name, tied_to)
        if place is not None:
            owner, key = place
            owner._parameters[key] = parameter
            placed.append(place)
    try:
        yield
    finally:
        for owner, key in placed:
            del owner._parameters[key]


def _find_original(module: nn.Module, copy: str, tied_to: str) -> tuple[nn.Module, str] | None:
    """Return the module and key of the original; None if it has no module on this stage."""
    modules = dict(module.named_modules())
    owner_name, _, key = tied_to.rpartition(".")
    parts = copy.split(".")
    for length in range(len(parts) - 1, -1, -1):
        owner = modules.get(".".join([*parts[:length], *([owner_name] if owner_name else [])]))
        if owner is not None and key not in owner._parameters:
            return owner, key
    return None


def check_ties(optimizer: Optimizer, main: MainParameters) -> None:
    """Check that an optimizer trains a tied embedding and its copy with the same settings.

    Communication: one gather over pp where there are ties.
    """
    if not main.ties:
        return
    local_group_of: dict[str, str] = {}
    groups = zip(optimizer.param_groups, main.names_of(optimizer), strict=True)
    for number, (group, names) in enumerate(groups):
        settings = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        local_group_of |= dict.fromkeys(names, f"group {number} with {settings}")
    stages = all_gather_objects(local_group_of, main.mesh.pp_cpu)
    group_of = {name: where for stage in stages for name, where in stage.items()}
    for original, copy in main.ties:
        first = group_of.get(original, "no group")
        last = group_of.get(copy, "no group")
        if first != last:
            raise UnsupportedError(
                "a tied embedding must be trained alike on the first and the last stage: "
                f"{original!r} is in {first}, its copy {copy!r} in {last}. The two would diverge. "
                "Build the same number of groups in the same order on every stage, empty ones "
                "included, in configure_optimizers."
            )


class TiedCopies:
    """Tied copies on the last stage, trained like their originals on the first stage.

    The embedding has its usual name only on the first stage. Code that freezes parameters by name,
    or puts them into an optimizer group by name, therefore misses the copy.
    """

    def __init__(self, main: MainParameters) -> None:
        self._main = main
        self._followed: Mapping[str, bool] = {}

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Freeze copies and assign them to optimizer groups like their originals.

        A copy does not move if its stage has no group with the number of the original's group;
        :func:`check_ties` then raises an error.

        Communication: one gather over pp where there are ties; one more at the first call.
        """
        main = self._main
        main.find_ties()
        if not main.ties:
            return
        held = [original for original, _ in main.ties if main.holds(original)]
        self._followed = {name: main.parameter(name).requires_grad for name in held}
        # Whether each original is trained, and its group in each optimizer (None for no group).
        local_training: dict[str, tuple[bool, list[int | None]]] = {}
        for name, is_trained in self._followed.items():
            groups = [_group_of(optimizer, main, name) for optimizer in optimizers]
            local_training[name] = is_trained, groups
        stages = all_gather_objects(local_training, main.mesh.pp_cpu)
        training = {name: state for stage in stages for name, state in stage.items()}
        for original, copy in main.ties:
            if main.holds(copy):
                is_trained, groups = training[original]
                main.parameter(copy).requires_grad_(is_trained)
                for optimizer, number in zip(optimizers, groups, strict=False):
                    _move(optimizer, main, copy, original, number)

    def check(self) -> None:
        """Check that no embedding was frozen or unfrozen on this stage since :meth:`follow`."""
        for name, was_trained in self._followed.items():
            if self._main.parameter(name).requires_grad != was_trained:
                raise UnsupportedError(
                    "with pp above 1 a tied embedding can be frozen and unfrozen only between "
                    f"epochs: {name!r} has requires_grad={not was_trained} now, and had "
                    f"{was_trained} when the epoch began. Its copy on the last stage is updated at "
                    "the beginning of an epoch. Set requires_grad in on_train_epoch_start, "
                    "on_train_start or configure_model, or use pp=1."
                )


def _group_of(optimizer: Optimizer, main: MainParameters, name: str) -> int | None:
    """Return the number of the group that contains a parameter or its main parameter."""
    groups = enumerate(main.names_of(optimizer))
    return next((number for number, names in groups if name in names), None)


def _move(
    optimizer: Optimizer, main: MainParameters, copy: str, original: str, number: int | None
) -> None:
    """Move a copy into a group of an optimizer, or remove it from its group."""
    before = _group_of(optimizer, main, copy)
    if before == number or (number is not None and number >= len(optimizer.param_groups)):
        return
    parameter: Any = main.parameter(copy)
    if before is not None:
        group = optimizer.param_groups[before]
        place = main.names_of(optimizer)[before].index(copy)
        parameter = group["params"].pop(place)
        if "param_names" in group:
            group["param_names"].pop(place)
    if number is not None:
        group = optimizer.param_groups[number]
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(original)
