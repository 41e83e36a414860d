"""Common base of the models that replace Hugging Face models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Set
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import computed_by
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.hugging_face.save_pretrained import check_arguments, save_folder
from lightning_megatron.swap.tensors.low_rank import Adapter, plain_name

#: Label that Hugging Face's models ignore.
IGNORED = -100


class ReplacedModel(nn.Module):
    """Mixin that computes a Hugging Face model's forward pass with sharded layers.

    The mixin becomes a base of the model's class. The model stays the same object, with its tree of
    modules and names.
    """

    #: Family of the model, and the adapter that peft has put into the model.
    family: Family
    adapter: Adapter | None
    #: Names of the class's parameters, in the order of the class. A shared parameter has several
    #: names.
    class_order: tuple[str, ...]

    @property
    def body(self) -> GPT | Encoder:
        """Return the layers that compute, which are outside the model's tree of modules."""
        layers = computed_by(self)
        assert isinstance(layers, (GPT, Encoder)), "the layers are set when the model is replaced"
        return layers

    @property
    def mesh(self) -> ParallelMesh:
        """Return the process groups of this rank."""
        return self.body.mesh

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.body.mesh.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return next(self.body.parameters()).dtype

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Recompute blocks in the backward pass instead of storing their activations."""
        self._recompute(True)

    def gradient_checkpointing_disable(self) -> None:
        """Store the activations of blocks instead of recomputing them."""
        self._recompute(False)

    def _recompute(self, is_on: bool) -> None:
        self.body.recompute = "full" if is_on else "none"
        # Hugging Face's models fill no cache while they recompute blocks.
        part: Any
        for part in self.modules():
            if hasattr(part, "gradient_checkpointing"):
                part.gradient_checkpointing = is_on

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        """Return an output, or a tuple if the call or the configuration says so."""
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return output if return_dict else output.to_tuple()

    def _fills_no_cache(self) -> bool:
        """Return whether this call recomputes blocks at the user's request."""
        is_training = self.training and torch.is_grad_enabled()
        return is_training and any(
            getattr(part, "gradient_checkpointing", False) for part in self.modules()
        )

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the full model's parameters; a shared one counts once (elements)."""
        if only_trainable and self.mesh.pp.size > 1:
            raise UnsupportedError(
                "num_parameters(only_trainable=True) needs pp=1, because each stage knows only its "
                f"own trained parameters: pp is {self.mesh.pp.size}. Count before training in one "
                "process, or use pp=1."
            )
        table = {
            tensor.target: prod(tensor.shape)
            for tensor in self.family.class_tensors(self.body.config)
        }
        left = set(table)
        if exclude_embeddings:
            left -= {
                f"{name}.weight"
                for name, part in self.named_modules()
                if isinstance(part, nn.Embedding)
            }
        if only_trainable:
            trained = {plain_name(name) for name, p in self.named_parameters() if p.requires_grad}
            left &= {self.family.present_name(name) for name in trained}
        return sum(table[name] for name in left)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str | None = None,
        **others: Any,
    ) -> None:
        """Write the full model as a folder for ``from_pretrained``; all ranks must call this.

        The files equal those of Hugging Face's method for the same weights. See
        :func:`save_folder`.

        Communication: that of :func:`save_folder`.
        """
        check_arguments(others)
        save_folder(self, save_directory, max_shard_size)

    # Hooks of the whole model run. Hooks of its parts would not run and are refused.
    register_forward_hook = nn.Module.register_forward_hook
    register_forward_pre_hook = nn.Module.register_forward_pre_hook
    register_full_backward_hook = nn.Module.register_full_backward_hook
    register_full_backward_pre_hook = nn.Module.register_full_backward_pre_hook
    compile = nn.Module.compile

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing, because weights that the configuration ties are one parameter."""

    def enable_input_require_grads(self) -> None:
        """Do nothing, because recomputed blocks need no gradients of their inputs."""

    def disable_input_require_grads(self) -> None:
        """Do nothing, like :meth:`enable_input_require_grads`."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def method(self: ReplacedModel, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name} cannot change a model that is cut over ranks, because each rank holds a part "
            f"of every weight: {type(self).__name__} has been replaced. Call it in "
            "configure_model, before the strategy replaces the model."
        )

    method.__doc__ = f"Refuse {name}."
    return method


for _name in tuple(
    """
    resize_token_embeddings set_input_embeddings set_output_embeddings init_weights
    post_init add_adapter load_adapter set_adapter delete_adapter enable_adapters
    disable_adapters set_attn_implementation dequantize push_to_hub
    resize_position_embeddings
    """.split()
):
    setattr(ReplacedModel, _name, _refusal(_name))


def replaced_models(module: nn.Module) -> Iterator[tuple[str, ReplacedModel]]:
    """List the Hugging Face models that compute with this package's layers, by name."""
    for name, part in module.named_modules():
        if isinstance(part, ReplacedModel):
            yield name, part


def pad_batch(ids: Tensor | None, extra: int, value: int, num_rows: int = 0) -> Tensor | None:
    """Append padding positions to all rows, and append padding rows.

    Shapes: ids ``(B, S)``; result ``(B + num_rows, S + extra)``.
    """
    return None if ids is None else F.pad(ids, (0, extra, 0, num_rows), value=value)


def refuse_arguments(
    arguments: Mapping[str, Any], irrelevant: Set[str], what: str, abilities: str
) -> None:
    """Refuse arguments of a call that would change the result of Hugging Face's model."""
    for name, value in arguments.items():
        if value is not None and value is not False and name not in irrelevant:
            raise UnsupportedError(
                f"a replaced {what} takes no {name}: {type(value).__name__} was given. {abilities} "
                f"Leave {name} out."
            )
