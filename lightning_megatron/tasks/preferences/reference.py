"""Log-probabilities of preference pairs under the reference model, which is the untrained model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron.building_blocks import evaluation_mode
from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.shapes import Float, Int
from lightning_megatron.tasks.preferences.preference_datamodule import PreferenceDataModule


@dataclass(frozen=True, eq=False)
class _Part:
    """Log-probabilities of the pairs of one part of the data.

    Args:
        values: Log-probabilities of the chosen and the rejected answer of each pair (nats).
    """

    key: str
    pairs: Int[Tensor, " pairs"]
    values: Float[Tensor, "pairs 2"]


class ReferenceLogProbs:
    """Log-probabilities of the answers of all pairs under the reference model.

    The reference model is the model before training or, if it has adapters, the model without
    them. One pass over the data computes the values with the prediction steps of the strategy,
    which work in every layout.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        #: Whether the weights may differ from those before training.
        self.was_trained = False

    def of(self, part: str, pairs: Int[Tensor, " pairs"]) -> Float[Tensor, "pairs 2"]:
        """Return the log-probabilities of the chosen and the rejected answers of pairs (nats).

        Args:
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.
            pairs: Numbers of the pairs in the part. The result for number -1, a sample that only
                fills a batch, is arbitrary.

        Returns:
            Log-probabilities; NaN for a pair that a stream has read after its file changed.
        """
        known = self._parts[part]
        index = torch.searchsorted(known.pairs, pairs).clamp(max=len(known.pairs) - 1)
        is_known = (known.pairs[index] == pairs) | (pairs < 0)
        return known.values[index].where(is_known[:, None], torch.nan)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the log-probabilities of all parts, on the CPU."""
        return {
            name: {"key": part.key, "pairs": part.pairs.cpu(), "values": part.values.cpu()}
            for name, part in self._parts.items()
        }

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the log-probabilities of a checkpoint."""
        for name, part in state.items():
            if set(part) != {"key", "pairs", "values"}:
                raise CheckpointMismatchError(
                    f"the reference log-probabilities of the {name} pairs in a checkpoint must "
                    f"have key, pairs and values: they have {sorted(part)}. Use a checkpoint of "
                    "this version."
                )
        self._parts = {name: _Part(**part) for name, part in state.items()}

    def prepare(self, module: LightningModule, data: PreferenceDataModule, part: str) -> None:
        """Move a part's log-probabilities to the module's device; compute them if missing.

        Args:
            module: Module whose ``predict_step`` returns log-probabilities. Its ``model``, without
                an adapter if it has one, is the reference model.
            part: ``train``, ``val`` or ``test``, or a named set such as ``val/news``.

        Communication: if the values are missing, that of the prediction steps and two all-gathers
            over data-parallel ranks.
        """
        key = data.pairs_key(part)
        known = self._parts.get(part)
        if known is not None and known.key == key:
            device = module.device
            self._parts[part] = _Part(key, known.pairs.to(device), known.values.to(device))
            return
        if self.was_trained and not _has_adapter(module):
            _refuse(part, known is not None)
        self._parts[part] = _Part(key, *_computed(module, data, part))


def _refuse(part: str, has_others: bool) -> None:
    remedy = (
        "Use the data with which training started, or adapters (lora), whose reference model is "
        "the model without them, or reference_free=True."
    )
    if has_others:
        raise CheckpointMismatchError(
            f"the {part} pairs must be the pairs whose reference log-probabilities the checkpoint "
            "has: files, tokenizer, template, seq_length or too_long differ, and the model before "
            f"training, which computes log-probabilities of other pairs, no longer exists. {remedy}"
        )
    raise UnsupportedError(
        f"the reference log-probabilities of the {part} pairs must be computed before training, "
        f"and this model has been trained. {remedy}"
    )


def _computed(module: Any, data: PreferenceDataModule, part: str) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of all pairs of a part.

    Returns:
        The number of each pair in ascending order, and the log-probabilities, on every rank.
    """
    strategy = module.trainer.strategy
    rank_zero_info(f"Computing the reference log-probabilities of the {part} pairs.")
    numbers: list[Tensor] = []
    values: list[Tensor] = []
    # Training steps cannot use tensors of inference mode, in which Lightning runs evaluations.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(module),
        _without_adapter(module),
    ):
        for index, batch in enumerate(data.each_pair_once(part)):
            moved = strategy.batch_to_device(batch)
            values.append(strategy.predict_step(moved, index).to(module.device))
            numbers.append(moved["pairs"])
        # All ranks have the same number of samples, so they can gather them.
        all_numbers = module.all_gather(torch.cat(numbers)).flatten()
        all_values = module.all_gather(torch.cat(values)).reshape(-1, 2)
        # The number -1 fills batches.
        pairs, place = all_numbers.unique(return_inverse=True)
        computed = all_values.new_empty(len(pairs), 2)
        computed[place] = all_values
        is_pair = pairs >= 0
    return pairs[is_pair], computed[is_pair]


def _has_adapter(module: Any) -> bool:
    # Models of peft have this method before and after the strategy replaces their modules.
    return hasattr(module.model, "disable_adapter")


def _without_adapter(module: Any) -> AbstractContextManager[Any]:
    disabled: AbstractContextManager[Any] = nullcontext()
    return module.model.disable_adapter() if _has_adapter(module) else disabled
