"""Microbatches hold every sample of a batch once, in containers of the same types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.pipeline.microbatch import (
    Microbatch,
    copy_batch,
    copy_containers,
    split_batch,
)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]
    temperature: float


def test_the_last_microbatch_is_smaller_when_the_batch_does_not_divide() -> None:
    parts = split_batch(torch.arange(5), 2)
    assert [part.num_samples for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.data for part in parts]), torch.arange(5))
    assert [part.num_samples for part in split_batch(torch.arange(4), lambda n: n // 2)] == [2, 2]


def test_every_container_keeps_its_type_and_what_is_no_sample_is_kept() -> None:
    x, y = torch.arange(8).view(4, 2), torch.arange(4)
    batch: Any = defaultdict(list)
    batch |= {"pair": Pair(x, y), "list": [x, (y,)], "ordered": OrderedDict(a=x)}
    batch |= {"record": Record(x, ["a", "b", "c", "d"], 0.5), "ids": np.arange(4)}
    kept = {"scalar": torch.tensor(3.0), "text": "kept", "none": None, "about": Pair("train", 5)}
    kept |= {"table": np.ones((3, 4)), "one": np.array(2.0)}
    first, second = (part.data for part in split_batch(batch | kept, 2))
    assert isinstance(first["pair"], Pair)
    assert isinstance(first["ordered"], OrderedDict)
    assert torch.equal(torch.cat([first["pair"].x, second["pair"].x]), x)
    assert torch.equal(second["list"][1][0], y[2:])
    assert (first["record"].names, second["record"].names) == (["a", "b"], ["c", "d"])
    assert second["record"].temperature == 0.5
    assert second["ids"].tolist() == [2, 3]
    for name in kept.keys() - {"about"}:
        assert first[name] is kept[name], name
    # The tuple has as many elements as a batch of two samples.
    (about, _) = split_batch({"x": torch.arange(2), "about": Pair("train", 5)}, 1)
    assert first["about"] == about.data["about"] == Pair("train", 5)
    assert first["missing"] == []


def test_a_complete_batch_of_any_content_and_a_list_of_microbatches_are_not_split() -> None:
    for batch in ("text", {"x": torch.zeros(4), "y": torch.zeros(3, 4)}, [], torch.tensor(1.0)):
        (part,) = split_batch(batch, None)
        assert part.data is batch
        assert part.num_samples == (4 if isinstance(batch, dict) else 1)
    whole = {"x": torch.arange(4), "names": ("a", "b")}
    (part,) = split_batch(whole, 4)
    assert (part.data is whole, part.num_samples) == (True, 4)
    parts = [Microbatch({"x": torch.zeros(3)}, 3), Microbatch({"x": torch.zeros(1)}, 1)]
    assert split_batch(parts, 2) == parts


def test_batches_without_one_number_of_samples_are_refused() -> None:
    for batch, message in (
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, r"batch\['x'\]: 4, batch\['y'\]: 3"),
        ({"x": "text"}, "must hold a tensor whose first dimension counts its samples"),
    ):
        with pytest.raises(ParallelPlanError, match=message):
            split_batch(batch, 2)


def test_a_copied_batch_keeps_its_values_and_copied_containers_hold_the_same_tensors() -> None:
    tokens, weights = torch.arange(4), np.ones(4)
    batch = {"tokens": tokens, "more": [(tokens, weights)]}
    copied = copy_batch(batch)
    copied["tokens"].add_(1)
    copied["more"][0][1][:] = 0
    assert copied["more"][0][0] is copied["tokens"]
    assert tokens.tolist() == [0, 1, 2, 3]
    assert weights.tolist() == [1, 1, 1, 1]
    containers = copy_containers(batch)
    assert containers["more"][0][0] is containers.pop("tokens") is tokens
    containers["more"].clear()
    assert (batch.keys(), len(batch["more"])) == ({"tokens", "more"}, 1)
