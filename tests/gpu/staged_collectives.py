"""Collectives of GPU tensors that go through the memory of the host and gloo.

NCCL refuses two ranks on one GPU. After :meth:`StagedCollectives.install` the groups that a process
requests from NCCL are groups of gloo, and the collectives of ``torch.distributed`` copy their
tensors to the host, run there, and copy the results back when their handles are waited for. Groups
remain torch's own, so that symmetric memory finds their stores. ``get_backend`` returns ``nccl``
for them, so that callers take their GPU paths, such as means by the backend and results in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Packages whose modules may hold names of the collectives.
_USERS = ("lightning_megatron", "benchmarks", "tests")


class StagedWork:
    """Handle of a collective on the host; waiting for it copies the results to the GPU, if there are
    any. Host tensors are kept alive until then.
    """

    def __init__(
        self, work: Any, arrive: Callable[[], None] | None, keep: Sequence[Tensor]
    ) -> None:
        self._work, self._arrive, self._keep = work, arrive, tuple(keep)

    def wait(self, timeout: Any = None) -> bool:
        """Wait on the host, and copy the results on the current stream."""
        work, arrive = self._work, self._arrive
        self._work = self._arrive = None
        if work is not None:
            work.wait()
        if arrive is not None:
            arrive()
        self._keep = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective is complete on the host."""
        return self._work is None or bool(self._work.is_completed())


class StagedCollectives:
    """Replacements of collectives of ``torch.distributed``.

    Args:
        stages: Function that returns whether a tensor goes through the host; the collectives of
            all other tensors run unchanged.
    """

    def __init__(self, stages: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._stages = stages
        #: Names of the groups that were requested from NCCL.
        self._names: set[str] = set()
        self._torch = {
            name: getattr(dist, name)
            for name in (
                "init_process_group",
                "new_group",
                "get_backend",
                "barrier",
                "all_reduce",
                "broadcast",
                "all_to_all_single",
                "batch_isend_irecv",
                # Newer versions of torch rename two collectives, and keep the old names.
                "all_gather_into_tensor",
                "all_gather_single",
                "reduce_scatter_tensor",
                "reduce_scatter_single",
            )
            if hasattr(dist, name)
        }

    def install(self) -> None:
        """Replace the functions in torch and in modules that have imported them."""
        for name, function in self._torch.items():
            replacement = getattr(self, name)
            setattr(dist, name, replacement)
            for user, module in list(sys.modules.items()):
                if user.startswith(_USERS):
                    keys = [key for key, value in vars(module).items() if value is function]
                    for key in keys:
                        setattr(module, key, replacement)

    # ---- groups

    def init_process_group(self, backend: str | None = None, *args: Any, **options: Any) -> None:
        """Initialise the default group, by gloo if NCCL is requested."""
        self._names.clear()
        if backend == "nccl":
            options |= {"device_id": None, "pg_options": None}
        self._torch["init_process_group"](_on_host(backend), *args, **options)
        if backend == "nccl":
            world: Any = dist.group.WORLD
            self._names.add(world.group_name)

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        **options: Any,
    ) -> Any:
        """Create a group, by gloo if NCCL is requested."""
        backend = backend or self.get_backend()
        if backend == "nccl":
            options["device_id"] = pg_options = None
        group = self._torch["new_group"](ranks, timeout, _on_host(backend), pg_options, **options)
        if isinstance(group, dist.ProcessGroup):
            (self._names.add if backend == "nccl" else self._names.discard)(group.group_name)
        return group

    def get_backend(self, group: Any = None) -> str:
        """Return the name of the backend from which a group was requested."""
        backend = self._torch["get_backend"](group)
        asked: Any = dist.group.WORLD if group is None else group
        name = asked.group_name
        return "nccl" if name in self._names else str(backend)

    # ---- collectives

    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None
    ) -> Any:
        """Wait for all ranks on the host."""
        return self._torch["barrier"](group, async_op)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Reduce a tensor in place."""
        if not self._stages(tensor):
            return self._torch["all_reduce"](tensor, op, group, async_op)
        return self._reduced(tensor, tensor, slice(None), op, group, async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce a tensor; each rank gets a part of the result."""
        if not self._stages(output):
            name = _first_of(self._torch, "reduce_scatter_single", "reduce_scatter_tensor")
            return name(output, input, op, group, async_op)
        rows, rank = output.shape[0], dist.get_rank(group)
        part = slice(rows * rank, rows * (rank + 1))
        return self._reduced(output, input, part, op, group, async_op)

    reduce_scatter_single = reduce_scatter_tensor

    def _reduced(
        self, out: Tensor, x: Tensor, part: slice, op: Any, group: Any, async_op: bool
    ) -> Any:
        """Reduce over the ranks on the host; copy a part of the rows to ``out``."""
        host = _to_host(x)
        is_mean = op == dist.ReduceOp.AVG
        native = dist.ReduceOp.SUM if is_mean else op
        work = self._torch["all_reduce"](host, native, group, True)

        def arrive() -> None:
            if is_mean:
                host.div_(dist.get_world_size(group))
            _to_device(host[part] if host.dim() else host, out)

        return _start_or_wait(work, arrive, [host], async_op)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        """Copy a tensor of one rank to all."""
        if not self._stages(tensor):
            return self._torch["broadcast"](tensor, src, group, async_op, group_src)
        host = _to_host(tensor)
        work = self._torch["broadcast"](host, src, group, True, group_src)
        return _start_or_wait(work, lambda: _to_device(host, tensor), [host], async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Join the tensors of all ranks."""
        if not self._stages(output_tensor):
            name = _first_of(self._torch, "all_gather_single", "all_gather_into_tensor")
            return name(output_tensor, input_tensor, group, async_op)
        host = _to_host(input_tensor)
        parts = [torch.empty_like(host) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(parts, host, group=group, async_op=True)

        def arrive() -> None:
            _to_device(torch.stack(parts).view(output_tensor.shape), output_tensor)

        return _start_or_wait(work, arrive, [host, *parts], async_op)

    all_gather_single = all_gather_into_tensor

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Send rows to every rank, and join the received rows."""
        run, sizes = self._torch["all_to_all_single"], (output_split_sizes, input_split_sizes)
        if not self._stages(output):
            return run(output, input, *sizes, group, async_op)
        host, received = _to_host(input), torch.empty(output.shape, dtype=output.dtype)
        work = run(received, host, *sizes, group, True)
        return _start_or_wait(
            work, lambda: _to_device(received, output), [host, received], async_op
        )

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[Any]:
        """Start sends and receives, each with its own handle."""
        run = self._torch["batch_isend_irecv"]
        if not self._stages(p2p_op_list[0].tensor):
            return list(run(p2p_op_list))
        works: list[Any] = []
        for transfer in p2p_op_list:
            host = _to_host(transfer.tensor)
            (work,) = run(
                [dist.P2POp(transfer.op, host, transfer.peer, transfer.group, transfer.tag)]
            )
            arrive = partial(_to_device, host, transfer.tensor)
            works.append(StagedWork(work, None if transfer.op is dist.isend else arrive, [host]))
        return works


def _on_host(backend: str | None) -> str | None:
    return "gloo" if backend == "nccl" else backend


def _first_of(functions: dict[str, Any], *names: str) -> Any:
    return next(functions[name] for name in names if name in functions)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a collective of ranks that share a GPU goes through the host, so it cannot be captured"
        )
    return tensor.detach().to("cpu", copy=True).contiguous()


def _to_device(host: Tensor, out: Tensor) -> None:
    """Copy a result without autograd noticing, as with the writes of NCCL."""
    with torch.inference_mode(out.is_inference()):
        out.data.copy_(host)


def _start_or_wait(
    work: Any, arrive: Callable[[], None], keep: Sequence[Tensor], async_op: bool
) -> Any:
    staged = StagedWork(work, arrive, keep)
    if async_op:
        return staged
    staged.wait()
    return None
