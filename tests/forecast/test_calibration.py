"""Tests of the measurements that forecasts are made of, on the cores of this machine."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_megatron.cli.calibration import Record
from lightning_megatron.cli.main import main
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.measured_layers import measured_models
from lightning_megatron.forecast.measured_links import KINDS
from lightning_megatron.forecast.step_time import estimate_time
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.layout import ParallelLayout


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures GPUs")
def test_doctor_calibrates_a_machine_without_gpus(tmp_path):
    file = tmp_path / "speeds.json"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--calibrate", str(file)])
    assert ended.value.code == 0
    content = json.loads(file.read_text())
    assert content["failures"] == {}
    assert content["gpu"] == "cpu"
    rows = [row for part in content["calls"].values() for row in part if isinstance(row, list)]
    assert len(rows) > 10
    assert all(0 < row[-1] < 1 for row in rows)
    assert set(content["links"]) == {f"node {kind}" for kind in KINDS}
    assert all(row[0] == 2 and row[-1] > 0 for part in content["links"].values() for row in part)
    for model in content["models"].values():
        forward, backward = model["host"]
        assert forward > 0 < backward
    # A forecast of such a machine is of the order of what its small models took.
    cluster = Cluster(num_gpus=1, gpu="cpu", memory=8, speeds=str(file))
    model = measured_models(on_gpu=False)["small"]
    sizes = dict.fromkeys(("parameter_bytes", "activation_bytes"), 4)
    training = TrainingShape(seq_length=model.tokens, main_bytes=0, **sizes)
    step = estimate_time(model.config, ParallelLayout(world_size=1), training, cluster)
    host = sum(content["models"]["model small"]["host"])
    assert 0.2 * host < step.host < 5 * host
    assert step.host <= step.seconds < 50 * host


def test_a_part_that_fails_is_named_and_left_out(tmp_path, capsys):
    file = tmp_path / "speeds.json"

    def fail():
        raise NotImplementedError("no 8-bit products\non this machine")

    Record(str(file), {"gpu": "cpu"}).take("calls", {"products": lambda: [1.0], "8 bits": fail})
    content = json.loads(file.read_text())
    assert content["calls"] == {"products": [1.0]}
    assert content["failures"] == {"calls: 8 bits": "NotImplementedError: no 8-bit products"}
    assert "left out: NotImplementedError" in capsys.readouterr().err
