"""Stubs: modules with a replaced model's names, settings and parameters, which do not compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.layers.embedding import VocabParallelEmbedding


class ModuleStub(nn.Module):
    """Module with the names and parameters of a class, while other layers compute.

    A stub is still an instance of its former class, with its attributes, children and this rank's
    parts of the parameters. Operations that would have no effect raise an error: calls, hooks, and
    the replacement of parameters or children.
    """

    #: Layers that compute in place of the stub, the outermost first. They are not its children.
    counterparts: tuple[nn.Module, ...] = ()
    path_in_model = ""
    #: Names of all parameters that the class's module has, including those of other stages.
    parameter_keys: tuple[str, ...] = ()
    #: Layers whose buffers the stub has, by the names of a buffer in the stub and in the layer.
    buffer_owners: Mapping[tuple[str, str], nn.Module] = MappingProxyType({})

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Look up tokens in a token embedding, and refuse every other call.

        Shapes: tokens ``(B, S)``; output ``(B, S, D)``, complete on every rank.
        """
        is_elsewhere = isinstance(self, nn.Embedding) and not self._parameters
        for part in self.counterparts:
            if isinstance(part, VocabParallelEmbedding) and len(args) == 1 and not kwargs:
                if part.mesh.pp.size > 1:
                    is_elsewhere = True
                    break
                tokens = args[0]
                length = tokens.shape[1]
                if part.mesh.sequence_parallel:
                    # Ranks hold equal parts of the sequence between the two collectives.
                    tokens = F.pad(tokens, (0, -length % part.mesh.tp.size))
                hidden = part(tokens)
                if part.mesh.sequence_parallel:
                    hidden = gather_from_axis(hidden, part.mesh.tp, dim=0)
                # Some classes scale the vectors inside their embedding.
                return hidden[:length].transpose(0, 1) * getattr(self, "scalar_embed_scale", 1.0)
        if is_elsewhere:
            # All stages raise, because a stage that continued would wait for the others forever.
            self._refuse(
                "cannot be called with pp above 1",
                "Give input_ids to the whole model, or use pp=1",
                "Only the first stage has the embedding",
            )
        return self._refuse("cannot be called by itself", "Call the whole model")

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the stage of a parameter that is not on this rank."""
        is_on_stage = name in self._parameters or name in self._modules
        if name in self.parameter_keys and not is_on_stage:
            raise AttributeError(
                f"'{self.path_in_model}.{name}' is on another pipeline stage, and this rank has no "
                "such parameter. Use the parameters that named_parameters() lists on each rank, or "
                "pp=1."
            )
        return super().__getattr__(name)

    @override
    def extra_repr(self) -> str:
        """Return the class's settings, if they can be computed on this stage."""
        try:
            return super().extra_repr()
        except AttributeError:
            return "on another pipeline stage"

    @override
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layer that computes this part, on the pipeline stage that has it."""
        # The list of the layers is a counterpart, too, if this stage has one layer; it never runs.
        parts = [
            part
            for part in self.counterparts
            if not isinstance(part, nn.ModuleDict | nn.ModuleList)
        ]
        if parts:
            parts[0].compile(*args, **kwargs)
        elif not self._is_on_other_stage:
            self._refuse("cannot be compiled by itself", "Compile blocks, or the whole model")

    @property
    def _is_on_other_stage(self) -> bool:
        """Return whether the class's module has parameters, and all are on other stages."""
        has_keys = any(getattr(part, "parameter_keys", ()) for part in self.modules())
        return has_keys and next(self.parameters(), None) is None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            # Set by train and eval, and by code that restores the mode of single modules.
            for part in self.counterparts:
                part.training = value
        for kind in ("_parameters", "_modules", "_buffers"):
            held = self.__dict__.get(kind, {})
            if name in held and held[name] is not value:
                self._refuse(f"cannot have its {name!r} replaced", "Do that in configure_model")
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse to replace a parameter by another one."""
        if name in self._parameters and self._parameters[name] is not param:
            self._refuse(f"cannot have its {name!r} replaced", "Do that in configure_model")
        super().register_parameter(name, param)

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a hook, which would never run."""
        self._refuse(
            "cannot have hooks", "Register them on the whole model, or on the LightningModule"
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        # A parameter stays the same object, but a converted copy replaces a buffer, and the layer
        # must get this copy, too.
        for key, owner in self.buffer_owners.items():
            owner._buffers[key[1]] = self._buffers[key[0]]
        return result

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            self._refuse(
                "cannot have its tensors replaced by load_state_dict", "Leave assign=True out"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to write a part of the model."""
        self._refuse(
            "cannot be written by itself",
            "Call save_pretrained of the whole model on all ranks",
            "The files would contain only this rank's parts",
        )

    def _refuse(self, what: str, remedy: str, reason: str = "It would have no effect") -> NoReturn:
        path = self.path_in_model or "the model"
        raise UnsupportedError(
            f"a module of a model that is cut over ranks {what}: {path!r} ({type(self).__name__}) "
            "only holds parameters under their names, and layers of this package compute with "
            f"them. {reason}. {remedy}."
        )


def convert_to_stub(module: nn.Module, path: str) -> None:
    """Convert a module to a stub in place; it stays an instance of its class.

    The parameters and buffers of the module are dropped. The caller must have checked before that
    the module has no hooks.
    """
    # Absent parameters, such as the bias of a layer without one, must stay readable as None.
    keys = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    for name in keys:
        del module._parameters[name]
    module._buffers.clear()
    module._non_persistent_buffers_set.clear()
    vars(module).update(parameter_keys=keys, path_in_model=path)
    module.__class__ = stub_class(type(module))


def stub_class(kind: type[nn.Module], *before: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a class, with the same name, whose instances are stubs.

    Args:
        before: Base classes that precede ``ModuleStub`` in the order of method resolution.
    """
    return _class_of((*before, ModuleStub, kind))


@cache
def _class_of(bases: tuple[type[Any], ...]) -> type[nn.Module]:
    kind = bases[-1]
    # ``__module__`` names this package, so that no check for classes of the foreign package matches
    # a stub, which does not compute.
    return type(kind.__name__, bases, {"__module__": __name__, "__doc__": kind.__doc__})


def set_counterparts(stub: ModuleStub, parts: tuple[nn.Module, ...]) -> None:
    """Set the layers that compute in place of a stub, the outermost first."""
    stub.counterparts = parts
    for part in parts:
        part.training = stub.training


def share_buffer(stub: ModuleStub, key: str, owner: nn.Module, own_key: str) -> None:
    """Register a layer's buffer in a stub under another name."""
    stub.register_buffer(key, owner._buffers[own_key])
    stub.buffer_owners = {**stub.buffer_owners, (key, own_key): owner}
