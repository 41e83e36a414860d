"""The parameters that the optimizer changes: the model's own, or full-precision twins of half-precision ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of

_HALF = (torch.float16, torch.bfloat16)


class MainParameters:
    """Pair every parameter of this rank with the tensor that is trained in its place.

    With ``main_dtype`` every trainable parameter of half precision gets a twin of that dtype, its main parameter. After
    each backward its gradient is added to the main's in that dtype and freed, so that microbatches accumulate without
    rounding; after each step :meth:`copy_to_model` writes the mains back. All other parameters are their own mains. A
    parameter that appears under several names is kept once, under the first.

    Args:
        named_parameters: This rank's parameters by name; the names must not depend on the layout.
        main_dtype: float32 for half-precision models trained with full-precision mains; None means that every parameter
            is its own main.
    """

    def __init__(self, named_parameters: Mapping[str, nn.Parameter], main_dtype: torch.dtype | None = None) -> None:
        self.main_dtype = main_dtype
        self._parameters: dict[str, nn.Parameter] = {}
        self._mains: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named_parameters.items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            self._parameters[name] = parameter
            self._mains[name] = self._main_of(parameter)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_accumulate_into(self._mains[name]))
            for name, parameter in self._parameters.items()
            if self._mains[name] is not parameter
        ]

    def _main_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.main_dtype is None or parameter.dtype not in _HALF or not parameter.requires_grad:
            return parameter
        main = nn.Parameter(parameter.detach().to(self.main_dtype))
        return set_shard_spec(main, shard_spec_of(parameter))

    @property
    def names(self) -> tuple[str, ...]:
        """List the names of this rank's parameters, frozen ones included, in the order of the model."""
        return tuple(self._parameters)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pair the name of every parameter that requires a gradient now with its main parameter.

        Raises:
            UnsupportedError: If a half-precision parameter was frozen when the mains were made and is not any more.
        """
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            main = self._mains[name]
            if main is parameter and self.main_dtype is not None and parameter.dtype in _HALF:
                raise UnsupportedError(
                    "a parameter that is frozen when training starts must stay frozen under mixed precision: "
                    f"{name!r} is {parameter.dtype} and requires a gradient now. It has no {self.main_dtype} main "
                    "parameter to train. Freeze it after configure_model instead, or use full-precision parameters."
                )
            yield name, main

    def parameter(self, name: str) -> nn.Parameter:
        """Return the model's own parameter."""
        return self._parameters[name]

    def main(self, name: str) -> nn.Parameter:
        """Return the parameter that is trained: the twin where there is one, else the model's own."""
        return self._mains[name]

    def spec(self, name: str, tp_rank: int = 0) -> ShardSpec:
        """Return how the parameter lies in its full tensor; one without a spec is whole, as copy ``tp_rank``."""
        return shard_spec_of(self._parameters[name], tp_rank)

    def gradients(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """List the main gradients that exist, of the named trainable parameters or of all."""
        chosen = None if names is None else set(names)
        return [
            main.grad for name, main in self.trainable() if main.grad is not None and (chosen is None or name in chosen)
        ]

    def zero_grad(self) -> None:
        """Forget all gradients, of the mains and of the model's parameters."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._mains[name].grad = None

    def attach(self, optimizer: torch.optim.Optimizer, previous: MainParameters | None = None) -> None:
        """Make an optimizer train the mains, in place: schedulers and the user's references keep working.

        Parameters are exchanged inside ``param_groups``, and whatever state the optimizer already keeps for them moves
        along, in the dtype of the main. Calling this again changes nothing.

        Args:
            optimizer: One over the model's parameters.
            previous: Mains of the same names that it may hold instead.

        Raises:
            UnsupportedError: If the optimizer holds a parameter that is not one of these.
        """
        main_by_id = {id(self._parameters[name]): self._mains[name] for name in self._parameters}
        if previous is not None:
            main_by_id |= {id(previous.main(name)): self._mains[name] for name in self.names if name in previous.names}
        known = set(map(id, self._mains.values()))
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in known:
                    continue
                if id(parameter) not in main_by_id:
                    raise UnsupportedError(
                        f"an optimizer must hold the module's own parameters: group {index} of "
                        f"{type(optimizer).__name__} holds one of shape {tuple(parameter.shape)} that the module "
                        "does not have now. Its gradient would not be averaged over the ranks. Build the optimizer "
                        "in configure_optimizers, from self.parameters()."
                    )
                main = main_by_id[id(parameter)]
                group["params"][position] = main
                if parameter in optimizer.state:
                    optimizer.state[main] = _state_for(main, parameter, optimizer.state.pop(parameter))

    def names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """List the names of the parameters in each of an optimizer's groups, before or after :meth:`attach`."""
        name_by_id = {id(self._mains[name]): name for name in self._mains}
        name_by_id |= {id(parameter): name for name, parameter in self._parameters.items()}
        return [[name_by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the mains into the model's parameters, rounding once; call it after every optimizer step."""
        pairs = [
            (self._parameters[name], main) for name, main in self._mains.items() if main is not self._parameters[name]
        ]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [main for _, main in pairs])

    def detach_hooks(self) -> None:
        """Leave the model's parameters as they were found: gradients stay with them from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _accumulate_into(main: nn.Parameter) -> Callable[[Tensor], None]:
    """Return the hook that moves a fresh half-precision gradient into the main's."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if main.grad is None:
            main.grad = parameter.grad.detach().to(main.dtype)
        else:
            main.grad.add_(parameter.grad)
        parameter.grad = None

    return hook


def _state_for(main: nn.Parameter, parameter: nn.Parameter, state: object) -> object:
    """Convert what an optimizer already keeps for a parameter (Adagrad's sums) to the dtype of its main."""
    if main is parameter or not isinstance(state, dict):
        return state
    return {
        key: value.to(main.dtype)
        if isinstance(value, Tensor) and value.dtype == parameter.dtype and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }
