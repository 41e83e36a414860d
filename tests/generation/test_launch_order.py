"""Replayed passes are launched before the host reads the token of the previous one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.generation import decoding


class FakeSession:
    """Session of one row that counts upwards. Passes are captured from the second pass on."""

    num_prompts = 1
    max_new_tokens = 5

    def __init__(self, events: list[str], can_capture: bool) -> None:
        self.events = events
        self.can_capture = can_capture
        self.num_passes = 0

    @property
    def is_captured(self) -> bool:
        return self.can_capture and self.num_passes > 1

    def logits(self, tokens: Tensor | None) -> Tensor:
        self.num_passes += 1
        self.events.append(f"pass {self.num_passes}")
        return torch.zeros(1, 9) if tokens is None else tokens[:, None].float()

    def broadcast_tokens(self, tokens: Tensor) -> Tensor:
        return tokens


def next_token(logits: Tensor) -> Tensor:
    return logits[:, 0].long() + 1


@pytest.mark.parametrize(
    ("can_capture", "expected"),
    [
        (False, "pass 1, got 1, pass 2, got 2, pass 3, got 3, pass 4, got 4, pass 5, got 5"),
        # The pass of the second token is the first captured one.
        (True, "pass 1, got 1, pass 2, pass 3, got 2, pass 4, got 3, pass 5, got 4, got 5"),
    ],
)
def test_a_replay_is_launched_before_the_last_token_is_read(
    can_capture: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def start_read(tokens: Tensor) -> Callable[[], list[int]]:
        # The copy is needed because the device holds later tokens when the host reads.
        return tokens.clone().tolist

    monkeypatch.setattr(decoding, "_start_read", start_read)
    session: Any = FakeSession(events, can_capture)
    sampler: Any = next_token
    for tokens in decoding._chosen_tokens(session, sampler):
        events.append(f"got {tokens[0]}")
    assert ", ".join(events) == expected


def test_one_pass_is_wasted_when_generation_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_start_read", lambda tokens: tokens.clone().tolist)
    events: list[str] = []
    session: Any = FakeSession(events, True)
    sampler: Any = next_token
    chosen = decoding._chosen_tokens(session, sampler)
    tokens_read = [next(chosen), next(chosen)]
    chosen.close()
    assert tokens_read == [[1], [2]]
    assert events == ["pass 1", "pass 2", "pass 3"]
