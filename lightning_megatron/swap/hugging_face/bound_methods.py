"""Methods of Hugging Face models and of peft's wrappers that a swap binds to the instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.layers.low_rank import LowRankUpdates
from lightning_megatron.models.stage import named_layers
from lightning_megatron.swap.hugging_face.peft_layers import is_peft_module
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.save_adapter import save_adapter
from lightning_megatron.swap.hugging_face.save_pretrained import save_as_it_is

#: Methods that search for peft's layers. A replaced model has no such layers, so the methods would
#: silently do nothing.
_PEFT_METHODS = tuple(
    """
    add_adapter add_weighted_adapter delete_adapter get_layer_status
    get_model_status load_adapter merge_adapter merge_and_unload push_to_hub
    set_adapter set_requires_grad unload unmerge_adapter
    """.split()
)
_BOUND = "base_model_prepare_inputs_for_generation"


def bind_methods(root: nn.Module, own_code: Iterable[Any]) -> None:
    """Bind methods that work on sharded weights to models and wrappers of peft.

    ``save_pretrained`` of a model that runs its own code, and of a wrapper, writes full tensors
    from all ranks. A wrapper around a replaced model keeps its configuration, ``generate``,
    ``disable_adapter`` and ``print_trainable_parameters``, which counts the parameters of this
    rank; methods that change or merge adapters raise an UnsupportedError.

    Args:
        own_code: Models inside the root that run their own code.
    """
    wrappers: list[Any] = list(root.modules())
    for wrapper in wrappers:
        if is_peft_module(wrapper) and hasattr(wrapper, "get_base_model"):
            model = wrapper.get_base_model()
            vars(wrapper)["save_pretrained"] = partial(save_adapter, wrapper)
            if isinstance(model, ReplacedModel):
                if hasattr(wrapper, _BOUND):
                    # The bound method of the original model would keep that model alive with all
                    # weights.
                    setattr(wrapper, _BOUND, model.prepare_inputs_for_generation)
                kind = type(wrapper)
                refusals = {name: _refused(name) for name in _PEFT_METHODS}
                wrapper.__class__ = type(
                    kind.__name__, (kind,), {"disable_adapter": _disabled, **refusals}
                )
    for model in own_code:
        vars(model)["save_pretrained"] = partial(save_as_it_is, model)


@contextmanager
def _disabled(wrapper: nn.Module) -> Iterator[None]:
    """Disable the adapter of a wrapped model inside the block."""
    saved = [
        name
        for part in wrapper.modules()
        if isinstance(part, ReplacedModel) and part.adapter
        for name in part.adapter.saved
    ]
    if saved:
        raise UnsupportedError(
            f"an adapter with modules_to_save cannot be switched off: {', '.join(saved)}. Their "
            "original weights are not kept. Leave modules_to_save out."
        )
    updates = [part for _, part in named_layers(wrapper) if isinstance(part, LowRankUpdates)]
    before = [part.is_enabled for part in updates]
    for part in updates:
        part.is_enabled = False
    try:
        yield
    finally:
        for part, was_enabled in zip(updates, before, strict=True):
            part.is_enabled = was_enabled


def _refused(name: str) -> Callable[..., Any]:
    def method(wrapper: Any, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{name} needs the layers of peft, which a {type(wrapper).__name__} that is cut over "
            "ranks does not have. Save a checkpoint, and write the adapter or the merged model "
            "with `lightning-megatron convert`."
        )

    return method
