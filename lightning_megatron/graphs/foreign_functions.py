"""Search of an autograd graph for functions that may keep tensors outside of
``save_for_backward``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

#: Modules whose functions keep tensors only by ``save_for_backward``, beside parameters and tensors
#: that keep their addresses.
_KNOWN = (
    "lightning_megatron.experts",
    "lightning_megatron.groups.collectives",
    "lightning_megatron.groups.in_flight",
    "lightning_megatron.kernels.triton",
    "lightning_megatron.layers.dropout",
    "lightning_megatron.layers.parameter_stack",
    "lightning_megatron.layers.regions",
    "torch.utils.checkpoint",
)


def runs_foreign(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Return whether the backward pass between results and inputs runs an unknown Python function.

    Such a function may keep a tensor as an attribute of its context. A recomputation does not
    replace it, so that the backward pass reads it from the first forward pass.

    Args:
        results: Results of a forward pass.
        inputs: Its inputs.
    """
    nodes = [result.grad_fn for result in results]
    visited = {tensor.grad_fn for tensor in inputs}
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_KNOWN):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
