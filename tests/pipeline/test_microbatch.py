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
    x: torch.Tensor
    y: torch.Tensor


class About(NamedTuple):
    split: str
    epoch: int


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]
    temperature: float


def test_the_last_microbatch_is_smaller_when_the_batch_does_not_divide():
    parts = split_batch(torch.arange(5), 2)
    assert [part.num_samples for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part.data for part in parts]), torch.arange(5))


def test_every_container_keeps_its_type():
    x, y = torch.arange(8).view(4, 2), torch.arange(4)
    batch: dict[str, Any] = {
        "pair": Pair(x, y),
        "list": [x, (y,)],
        "ordered": OrderedDict(a=x),
        "record": Record(x, ["a", "b", "c", "d"], 0.5),
        "scalar": torch.tensor(3.0),
        "text": "kept",
        "none": None,
    }
    first, second = (part.data for part in split_batch(batch, 2))
    assert isinstance(first["pair"], Pair)
    assert isinstance(first["ordered"], OrderedDict)
    assert torch.equal(torch.cat([first["pair"].x, second["pair"].x]), x)
    assert torch.equal(second["list"][1][0], y[2:])
    assert (first["record"].names, second["record"].names) == (["a", "b"], ["c", "d"])
    assert second["record"].temperature == 0.5
    assert first["scalar"] is batch["scalar"]
    assert first["text"] == "kept"
    assert first["none"] is None


def test_a_list_of_microbatches_is_not_split_again():
    parts = [Microbatch({"x": torch.zeros(3)}, 3), Microbatch({"x": torch.zeros(1)}, 1)]
    assert split_batch(parts, 2) == parts


def test_tensors_of_unequal_length_are_refused_by_name():
    with pytest.raises(ParallelPlanError, match=r"batch\['x'\]: 4, batch\['y'\]: 3"):
        split_batch({"x": torch.zeros(4), "y": torch.zeros(3)}, 2)


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(
        ParallelPlanError,
        match="must hold a tensor whose first dimension counts its samples: dict has none",
    ):
        split_batch({"x": "text"}, 2)


@pytest.mark.parametrize(
    "batch", ["text", {"x": torch.zeros(4), "y": torch.zeros(3, 4)}, [], torch.tensor(1.0)]
)
def test_without_a_size_a_batch_of_any_content_is_one_microbatch(batch: Any):
    (part,) = split_batch(batch, None)
    assert part.data is batch
    assert part.num_samples == (4 if isinstance(batch, dict) else 1)


def test_a_single_microbatch_is_the_batch_itself():
    batch = {"x": torch.arange(4), "names": ("a", "b")}
    (part,) = split_batch(batch, 4)
    assert part.data is batch
    assert part.num_samples == 4
    assert [part.num_samples for part in split_batch(batch, lambda samples: samples // 2)] == [2, 2]


def test_arrays_with_the_length_of_the_batch_are_split_and_others_are_kept():
    batch = {
        "x": torch.arange(4),
        "ids": np.arange(4),
        "table": np.ones((3, 4)),
        "one": np.array(2.0),
    }
    second = split_batch(batch, 2)[1].data
    assert second["ids"].tolist() == [2, 3]
    assert second["table"] is batch["table"]
    assert second["one"] is batch["one"]


def test_default_dicts_and_named_tuples_of_the_length_of_the_batch_keep_their_type():
    batch = defaultdict(list, x=torch.arange(2), about=About("train", 5))
    first = split_batch(batch, 1)[0].data
    assert isinstance(first, defaultdict)
    assert first["missing"] == []
    assert first["about"] == About("train", 5)
    assert batch["x"].tolist() == [0, 1]


def test_copied_containers_hold_the_same_tensors() -> None:
    batch = {"tokens": torch.arange(4), "more": [torch.ones(2), ("text", torch.zeros(1))]}
    copied = copy_containers(batch)
    assert copied["tokens"] is batch["tokens"]
    assert copied["more"][1][1] is batch["more"][1][1]
    copied.pop("tokens")
    copied["more"].clear()
    assert batch.keys() == {"tokens", "more"}
    assert len(batch["more"]) == 2


def test_a_copied_batch_keeps_its_values_when_the_copy_is_changed() -> None:
    tokens, weights = torch.arange(4), np.ones(4)
    batch = {"tokens": tokens, "more": [(tokens, weights)]}
    copied = copy_batch(batch)
    copied["tokens"].add_(1)
    copied["more"][0][1][:] = 0
    assert copied["more"][0][0] is copied["tokens"]
    assert tokens.tolist() == [0, 1, 2, 3]
    assert weights.tolist() == [1, 1, 1, 1]
