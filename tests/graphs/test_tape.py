"""A tape replays eager steps bit by bit, and refuses or reveals what a CUDA graph cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from tests.tape import TapeBackend


def captured(function: Callable[[], Any], backend: TapeBackend | None = None) -> Any:
    """Capture a function in a pool of its own."""
    backend = backend or TapeBackend()
    return backend.capture(function, backend.make_pool())


def test_a_replay_changes_no_version_counter_of_tensors():
    sums, x = torch.zeros(2), torch.ones(2)
    graph, output = captured(lambda: sums.add_(x) * 2)
    versions = sums._version, output._version
    graph.replay()
    assert (sums._version, output._version) == versions
    assert torch.equal(sums, x)
    assert torch.equal(output, 2 * x)


def test_outputs_that_a_gpu_may_overwrite_become_nan_at_later_replays():
    backend, x = TapeBackend(), torch.ones(2)
    pool = backend.make_pool()
    first, doubled = backend.capture(lambda: x * 2, pool)
    first.replay()
    output, given_up = doubled, pool.give_up(doubled)
    assert given_up.data_ptr() == output.data_ptr()
    pool.give_up(x)  # an input is not in the pool, and stays
    second, tripled = backend.capture(lambda: (x * 3, torch.arange(2)), pool)
    first.replay()
    assert torch.equal(output, 2 * x)
    second.replay()
    assert output.isnan().all()
    assert torch.equal(tripled[0], torch.full((2,), 3.0))
    first.replay()
    assert tripled[0].isnan().all(), "the first graph may use its memory"
    assert (tripled[1] < 0).all()
    assert torch.equal(x, torch.ones(2))


READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x[0].item(), "aten._local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "assignment by a mask": (lambda x: x.index_put_((x > 0,), x[0]), "aten.index_put_"),
    "repetitions": (lambda x: x.repeat_interleave(x.long()), "aten.repeat_interleave"),
}


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, read: Callable[[], Any]) -> Tensor:
        ctx.read = read
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.read()
        return grads[0], None


@pytest.mark.parametrize("name", READS)
def test_a_read_of_values_on_the_host_is_refused_with_the_operator_name(name):
    read, operator = READS[name]
    x, sums, backend = torch.ones(3), torch.zeros(3), TapeBackend()

    def forward():
        sums.add_(1)
        read(x)

    def backward():
        sums.add_(1)
        ReadInBackward.apply(x.clone().requires_grad_(), lambda: read(x)).sum().backward()

    for function in (forward, backward):
        with pytest.raises(UnsupportedError, match=rf"on the host: it called {operator}"):
            captured(function, backend)
        assert not backend.is_capturing
        assert torch.equal(sums, torch.zeros(3)), "operators that ran before the error are undone"
    assert x.tolist() == [1, 1, 1]
    assert x.numpy().sum() == 3
    graph, _ = captured(lambda: sums.add_(1), backend)
    graph.replay()
    assert torch.equal(sums, torch.ones(3))


def test_constants_of_the_host_may_be_read_and_are_restored_at_each_replay():
    def step():
        constant = torch.tensor([2.0, 3.0])
        assert constant.tolist() == [2.0, 3.0]
        constant.mul_(torch.tensor(0.5).item())
        return constant

    graph, constant = captured(step)
    for _ in range(3):
        graph.replay()
        assert torch.equal(constant, torch.tensor([1.0, 1.5]))


def test_unknown_generators_nested_captures_and_replays_after_release_are_refused():
    backend, generator = TapeBackend(), torch.Generator()
    with pytest.raises(UnsupportedError, match=r"aten.rand.generator draws from another one"):
        captured(lambda: torch.rand(3, generator=generator))
    with pytest.raises(RuntimeError, match="must not be nested"):
        captured(lambda: captured(lambda: torch.ones(2), backend), backend)
    graph, _ = captured(lambda: torch.ones(2), backend)
    for _ in range(2):
        graph.release()
    with pytest.raises(RuntimeError, match="has been released"):
        graph.replay()
