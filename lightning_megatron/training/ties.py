"""A tied embedding lives on the first and the last stage, and must be trained alike on both."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.training.main_parameters import MainParameters


def check_ties(optimizer: Optimizer, main: MainParameters) -> None:
    """Check that an optimizer trains the first stage's embedding and its copy on the last stage alike.

    Args:
        optimizer: One that is attached to ``main``.
        main: The parameters of this rank.

    Raises:
        UnsupportedError: On every stage, if their groups differ.

    Communication: one gather over pp where there are ties.
    """
    if not main.ties:
        return
    place: dict[str, str] = {}
    groups = zip(optimizer.param_groups, main.names_of(optimizer), strict=True)
    for number, (group, names) in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        place |= dict.fromkeys(names, f"group {number} with {settings}")
    stages = all_gather_objects(place, main.mesh.pp_cpu)
    everyone = {name: where for stage in stages for name, where in stage.items()}
    for original, copy in main.ties:
        first, last = everyone.get(original, "no group"), everyone.get(copy, "no group")
        if first != last:
            raise UnsupportedError(
                f"a tied embedding must be trained alike on the first and the last stage: {original!r} is in "
                f"{first}, its copy {copy!r} in {last}. The two would drift apart. Put both in the same group in "
                "configure_optimizers."
            )


def freeze_copies(main: MainParameters) -> None:
    """Train the last stage's copy of a tied embedding exactly if the first stage's embedding is trained.

    Code that freezes by names meets the embedding under its own name on the first stage alone.

    Args:
        main: The parameters of this rank.

    Communication: one gather over pp where there are ties.
    """
    if not main.ties:
        return
    held = [name for name, _ in main.ties if main.holds(name)]
    stages = all_gather_objects({name: main.parameter(name).requires_grad for name in held}, main.mesh.pp_cpu)
    is_trained = {name: flag for stage in stages for name, flag in stage.items()}
    for original, copy in main.ties:
        if main.holds(copy):
            main.parameter(copy).requires_grad_(is_trained[original])
