"""Casts of weights to 8 bits that the microbatches of a batch share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import nn

from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.strategy.options.strategy_options import StrategyOptions


class SharedCasts:
    """Casts of weights to 8 bits that are computed once for all microbatches of a batch.

    Args:
        models: Models of this package in the user's module.
        options: Options of the strategy.
    """

    def __init__(self, models: Sequence[LayeredModule], options: StrategyOptions) -> None:
        casts_of_models = [model.weight_casts for model in models]
        self._casts = [casts for casts in casts_of_models if casts is not None]
        self._settings = options.products
        self._graphs = options.graph_mode

    def around(self, num_microbatches: int) -> AbstractContextManager[None]:
        """Return the context for the forward and backward passes of a training batch.

        Inside the context, microbatches share casts if the settings permit it.

        Args:
            num_microbatches: Microbatches of the batch.
        """
        settings = self._settings
        if settings is None or not settings.shares_casts(num_microbatches, self._graphs):
            return nullcontext()
        return self._sharing()

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for casts in self._casts:
                stack.enter_context(casts.shared())
            yield

    def note(self, parameter: nn.Parameter) -> None:
        """Stop sharing the casts of a parameter in this batch, because user code may write to it.

        Args:
            parameter: Parameter whose ``data`` is read or assigned.
        """
        for casts in self._casts:
            casts.stop(parameter)
