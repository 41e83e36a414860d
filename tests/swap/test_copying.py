"""Tensors copied in concurrent pieces equal tensors that are filled in one go."""

from __future__ import annotations

import sys
from io import StringIO
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_megatron.swap.tensors.mapping import TensorMap, TensorsInMemory
from lightning_megatron.swap.weights import copying
from lightning_megatron.swap.weights.copying import Copy, copies_of, copy_all, interleave
from tests.swap.test_mapping import full_of, maps, values_of


def copies_to(full: Tensor, tensor: TensorMap, reader: TensorsInMemory) -> list[Copy]:
    return list(copies_of(tensor, full, [0] * full.dim(), tensor.shape, reader))


@pytest.mark.parametrize("kind", maps())
def test_copied_pieces_make_the_full_tensor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = maps()[kind]
    reader = TensorsInMemory(values_of(tensor))
    monkeypatch.setattr(copying, "PIECE_BYTES", 3 * 10 * 4)
    full = torch.full(tensor.shape, torch.nan)
    copies = copies_to(full, tensor, reader)
    piece_sizes = [reader.tensors[copy.name][copy.slices[0]].nbytes for copy in copies]
    assert max(piece_sizes) <= copying.PIECE_BYTES
    copy_all(copies, reader)
    assert torch.equal(full, full_of(tensor, reader))


def test_interleave_keeps_all_items_and_separates_neighbours() -> None:
    for number in range(40):
        order = interleave(range(number), 4)
        assert sorted(order) == list(range(number))
        assert all(abs(first - second) >= number // 4 - 1 for first, second in pairwise(order[:4]))


def test_error_of_a_failed_read_reaches_the_caller() -> None:
    copies = [Copy("a", (slice(0, 1),), torch.empty(1)), Copy("b", (slice(0, 1),), torch.empty(1))]
    with pytest.raises(KeyError, match="b"):
        copy_all(copies, TensorsInMemory({"a": torch.ones(1)}))


def test_copy_all_accepts_no_copies() -> None:
    reader = TensorsInMemory({"a": torch.ones(3)})
    copy_all([], reader)
    assert torch.equal(reader.tensors["a"], torch.ones(3))


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream_type", [Terminal, StringIO])
@pytest.mark.parametrize("shows_progress", [False, True])
def test_progress_bar_of_bytes_is_shown_only_on_a_terminal(
    stream_type: type[StringIO], shows_progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BAR_DELAY", 0)
    monkeypatch.setattr(sys, "stderr", stream_type())
    copies = [Copy("a", (slice(0, 500),), torch.empty(500))]
    copy_all(copies, TensorsInMemory({"a": torch.ones(500)}), shows_progress)
    shown = sys.stderr.getvalue()
    assert ("2.00k/2.00k" in shown) if shows_progress and stream_type is Terminal else shown == ""
