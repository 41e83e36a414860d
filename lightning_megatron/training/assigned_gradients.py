"""Assignment of reduced gradients to main parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from lightning_megatron.training.main_parameters import MainParameters


def assign_gradients(
    main: MainParameters,
    names: Collection[str],
    unused: Collection[str],
    gradient_of: Callable[[str], Tensor],
) -> None:
    """Set the gradient of every main parameter to this rank's part of the reduced gradient.

    The gradients of main parameters of unused or frozen parameters become None.

    Args:
        main: Main parameters of this rank.
        names: Names of the parameters whose gradients are reduced.
        unused: Names of the parameters for which no rank has a gradient.
        gradient_of: Function that returns the reduced gradient of a local parameter by its name.
    """
    slices = main.slices
    has_frozen = not main.are_trainable(names)
    for name in names:
        main_slice = slices.get(name)
        has_none = name in unused or (has_frozen and not main.is_trainable(name))
        if main.exposed_gradients.is_on and not has_none:
            main.exposed_gradients.expose(name, main.parameter(name), gradient_of(name))
        if main_slice is None:
            continue
        if has_none:
            main_slice.main.grad = None
        elif main_slice.gradient.dtype == main_slice.main.dtype:
            main_slice.main.grad = main_slice.gradient
        else:
            # The gradients were accumulated in bfloat16, and the main parameter is float32.
            main_slice.main.grad = main_slice.gradient.to(main_slice.main.dtype)
