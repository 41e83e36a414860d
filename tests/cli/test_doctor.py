"""Tests of the command `doctor`, with stand-ins for machines that have GPUs."""

from __future__ import annotations

import contextlib
import json
import operator
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_megatron.cli import doctor
from lightning_megatron.cli.machine import (
    CudaSoftware,
    Folder,
    Gpu,
    GpuState,
    Host,
    Machine,
    Package,
    parse_links,
    parse_states,
    read_folder,
)
from lightning_megatron.cli.machine_problems import problems_of, problems_of_speed
from lightning_megatron.cli.machine_speed import (
    DeviceSpeed,
    MachineSpeed,
    PairSpeed,
    pair_speeds,
    run_ranks,
    speed_rows,
)
from lightning_megatron.cli.main import main

GIB = 1 << 30
STATES = """GPU-1a, 531, 0, 700.00, 700.00, 16, 16
GPU-2b, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]
"""
LINKS = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""
STATE = parse_states(STATES)["GPU-1a"]
H200 = [
    Gpu("NVIDIA H200", (9, 0), 140 * GIB, (True, True), links, STATE)
    for links in parse_links(LINKS)
]
FOLDER = Folder(Path("/data"), is_writable=True, runs_programs=True, disk=1, free=900 * GIB)
HOST = Host(
    32, 256 * GIB, 128 * GIB, 100 * GIB, 1 << 20, -1, ("lo", "eth0"), {"mlx5_0:1": "ACTIVE"}
)
IN_ORDER = Machine(
    python="3.12.3",
    system="Linux",
    packages=(
        Package("torch", "2.13.0+cu130", ">=2.11,<2.16"),
        Package("peft", None, ">=0.18.1", "lora"),
    ),
    cuda=CudaSoftware("13.0", "580.159.04", "2.28.9", ("sm_80", "sm_90", "compute_120"), 2),
    gpus=tuple(H200),
    kernels={"library": "/cache/liblm_kernels.so"},
    needs_kernels=False,
    has_fused=True,
    fused="half type on a GPU",
    host=HOST,
    gloo_error="",
    folders=dict.fromkeys(("temporary files", "Triton kernels", "Hugging Face"), FOLDER),
    variables={"NCCL_SOCKET_IFNAME": "eth,ib", "NCCL_DEBUG": "INFO"},
)
SPEED = MachineSpeed(
    (DeviceSpeed(780e12, 4.2e12, True),) * 2,
    (PairSpeed(0, 1, 390e9, True), PairSpeed(1, 0, 391e9, True)),
    all_reduce=339e9,
)


def with_gpu(**changes: object) -> Machine:
    return replace(IN_ORDER, gpus=(H200[0], replace(H200[1], **changes)))


def with_host(**changes: object) -> Machine:
    return replace(IN_ORDER, host=replace(HOST, **changes))


def with_folder(use: str, **changes: object) -> Machine:
    return replace(IN_ORDER, folders={**IN_ORDER.folders, use: replace(FOLDER, **changes)})


def with_cuda(**changes: object) -> Machine:
    return replace(IN_ORDER, cuda=replace(IN_ORDER.cuda, **changes))


def with_variables(**variables: str) -> Machine:
    return replace(IN_ORDER, variables=variables)


def with_package(*values: str | None) -> Machine:
    return replace(IN_ORDER, packages=(Package(*values),))


#: Machines with one fault each: how bad it is, and texts of its symptom and its remedy.
FAULTS: dict[str, tuple[Machine, str, str, str]] = {
    "old torch": (with_package("torch", "2.10.0", ">=2.11"), "must", "torch 2.10.0 must", 'pip install "torch>=2.11"'),
    "no lightning": (with_package("lightning", None), "must", "lightning, not installed,", "pip install"),
    "old extra": (with_package("transformers", "5.1", ">=5.18", "hf"), "should", "the extra hf", "transformers>=5.18"),
    "driver": (with_cuda(error="The NVIDIA driver is too old"), "must", "none of the 2 GPU(s): The NVIDIA", "Update the driver"),
    "CPU build": (with_cuda(error="torch 2.13.0+cpu was built without CUDA"), "must", "without CUDA", "a CUDA build"),
    "hidden": (with_cuda(error="CUDA_VISIBLE_DEVICES is ''"), "should", "sees none", "unset CUDA_VISIBLE_DEVICES"),
    "old GPU": (with_gpu(capability=(7, 0)), "must", "no code for GPU 1 (compute capability 7.0)", "another build"),
    "faulty": (with_gpu(state=GpuState(faults=3)), "must", "GPU 1 had 3 memory errors", "replace"),
    "used": (with_gpu(state=GpuState(used=20480)), "should", "GPU 1 has 20.0 GiB in use", "nvidia-smi"),
    "capped": (with_gpu(state=GpuState(power=350, full_power=700)), "should", "350 of its 700 W", "-i 1 -pl 700"),
    "lanes": (with_gpu(state=GpuState(lanes=4, full_lanes=16)), "should", "4 of its 16 PCIe", "slot"),
    "apart": (with_gpu(reaches=(False, True)), "should", "GPUs 1-0 cannot read", "ACS"),
    "unequal": (with_gpu(name="NVIDIA H100 NVL"), "should", "the GPUs differ", "CUDA_VISIBLE_DEVICES"),
    "no Triton": (replace(IN_ORDER, has_fused=False, fused="no module"), "should", "do not run: no module", "pip install triton"),
    "no kernels": (replace(IN_ORDER, needs_kernels=True), "should", "are not built", "kernels build"),
    "shm": (with_host(shared=64 << 20), "must", "/dev/shm has 64 MiB", "--ipc=host"),
    "full shm": (with_host(shared_free=1 << 20), "must", "1 MiB of 128.0 GiB are free", "ls -l /dev/shm"),
    "few files": (with_host(open_files=256), "must", "may open 256 files", "ulimit -n 65536"),
    "default files": (with_host(open_files=1024), "should", "may open 1024 files", "ulimit"),
    "memlock": (with_host(locked_memory=8 << 20), "should", "may lock 8 MiB", "ulimit -l unlimited"),
    "port": (with_host(fabric={"mlx5_1:1": "DOWN"}), "should", "mlx5_1:1 is DOWN", "cable"),
    "cores": (with_host(cores=4), "should", "4 cores serve 2 GPUs", "4 cores for each"),
    "gloo": (replace(IN_ORDER, gloo_error="Unable to resolve"), "must", "by gloo: Unable", "/etc/hosts"),
    "read-only": (with_folder("temporary files", is_writable=False), "must", "is not writable", "TMPDIR"),
    "cache": (with_folder("Hugging Face", is_writable=False), "should", "is not writable", "HF_HOME"),
    "full": (with_folder("temporary files", free=1 << 20), "must", "has 1 MiB free", "Delete"),
    "filling": (with_folder("Hugging Face", free=5 * GIB), "should", "has 5.0 GiB free", "Delete"),
    "noexec": (with_folder("Triton kernels", runs_programs=False), "must", "noexec", "remount,exec"),
    "interface": (with_variables(GLOO_SOCKET_IFNAME="ens5"), "must", "none of the interfaces lo, eth0", "unset GLOO"),
    "no peers": (with_variables(NCCL_P2P_DISABLE="1"), "should", "through host memory", "unset NCCL_P2P"),
    "ranks": (with_variables(LOCAL_RANK="0", WORLD_SIZE="8"), "should", "LOCAL_RANK, WORLD_SIZE in", "unset LOCAL_RANK WORLD_SIZE"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_machine_is_named_alone_with_its_remedy(name):
    machine, severity, symptom, remedy = FAULTS[name]
    (problem,) = problems_of(machine)
    assert problem.severity == severity
    assert symptom in problem.symptom
    assert remedy in problem.remedy


def test_a_machine_in_order_has_nothing_to_fix_and_exits_with_zero(monkeypatch, printed):
    monkeypatch.setattr(doctor, "read_machine", lambda environment: IN_ORDER)
    text = printed("doctor")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "torch's CUDA 13.0, driver 580.159.04, NCCL 2.28.9" in lines
    assert "0 NVIDIA H200 9.0 140.0 GiB 0.5 GiB 700 W x16 - NV18" in lines
    assert "not installed: peft (lora)" in lines
    assert text.endswith(
        "to fix\n  nothing\n\nSpeeds of GPUs and links: lightning-megatron doctor --measure\n"
    )
    assert problems_of(with_variables(RANK="0", TORCHELASTIC_RUN_ID="1")) == []
    assert problems_of(with_variables(NCCL_SOCKET_IFNAME="^docker,lo")) == []


def test_the_exit_status_is_one_if_something_must_be_fixed(monkeypatch, capsys, printed):
    machine = replace(FAULTS["shm"][0], needs_kernels=True)
    monkeypatch.setattr(doctor, "read_machine", lambda environment: machine)
    with pytest.raises(SystemExit, match="1"):
        printed("doctor --json")
    content = json.loads(capsys.readouterr().out)
    assert [one["severity"] for one in content["problems"]] == ["must", "should"]
    assert content["machine"]["gpus"][1]["links"] == ["NV18", "X"]
    monkeypatch.setattr(doctor, "read_machine", lambda environment: FAULTS["no kernels"][0])
    assert "should  the CUDA kernels for experts are not built" in printed("doctor")


def test_states_and_links_of_gpus_are_read_from_the_text_of_nvidia_smi():
    assert parse_states(STATES) == {
        "GPU-1a": GpuState(531, 0, 700, 700, 16, 16),
        "GPU-2b": GpuState(),
    }
    assert parse_states("Failed to initialize NVML: Driver/library version mismatch") == {}
    assert parse_links(LINKS) == (("X", "NV18"), ("NV18", "X"))
    assert parse_links("") == ()


def test_measured_speeds_stand_beside_normal_ones_and_slow_ones_are_named():
    rows = {row.name: row for row in speed_rows(IN_ORDER.gpus, SPEED)}
    assert len(rows) == 7
    assert rows["GPU 1: copies"].published == 4.8e12
    assert rows["GPU 0 to GPU 1: copies"].published == 18 * 25e9
    assert problems_of_speed(IN_ORDER.gpus, SPEED) == []
    slow = replace(
        SPEED, devices=(DeviceSpeed(300e12, 2e12, True), SPEED.devices[1]), all_reduce=2e10
    )
    symptoms = [one.symptom for one in problems_of_speed(IN_ORDER.gpus, slow)]
    assert symptoms == [
        "GPU 0: bfloat16 products: 30% of the published speed",
        "GPU 0: copies: 42% of the published speed",
        "all ranks: all-reduce: 4% of the published speed",
    ]
    unknown = tuple(
        replace(gpu, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", links=()) for gpu in H200
    )
    assert problems_of_speed(unknown, slow) == []


def test_wrong_results_must_be_fixed():
    wrong = replace(
        SPEED,
        devices=(DeviceSpeed(780e12, 4.2e12, False), SPEED.devices[1]),
        pairs=(PairSpeed(0, 1, 390e9, False),),
        sums_are_right=False,
    )
    found = problems_of_speed(IN_ORDER.gpus, wrong)
    assert [one.severity for one in found] == ["must"] * 3
    assert "copies between GPUs arrive changed: 0 to 1" in found[1].symptom
    (failed,) = problems_of_speed((), MachineSpeed(failure="NCCL error"))
    assert failed.symptom == "the measurement failed: NCCL error"
    (failed,) = problems_of_speed((), MachineSpeed(failure="CUDA out of memory."))
    assert "End other processes" in failed.remedy


def test_copies_between_all_pairs_are_timed_and_compared():
    halves = iter([True, False] * 3)
    pairs = pair_speeds(
        [torch.device("cpu")] * 3, 4000, lambda copy: (next(halves) and copy(), 2e-6)[1]
    )
    found = [(pair.source, pair.target) for pair in pairs]
    assert found == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert {pair.speed for pair in pairs} == {2e9}
    assert [pair.is_right for pair in pairs] == [True, False] * 3


def test_a_full_disk_is_named_once():
    full = dict.fromkeys(IN_ORDER.folders, replace(FOLDER, free=0))
    assert len(problems_of(replace(IN_ORDER, folders=full))) == 1


def test_a_folder_below_a_file_takes_no_files(tmp_path):
    assert read_folder(tmp_path / "to" / "be" / "made").is_writable
    (tmp_path / "file").touch()
    assert not read_folder(tmp_path / "file" / "x").is_writable


def test_ranks_that_hang_or_fail_end_with_a_reason():
    assert run_ranks(time.sleep, 1, (), limit=0.1) == "it did not end within 0 seconds"
    assert run_ranks(operator.floordiv, 1, (0,), limit=60).startswith("ZeroDivisionError")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures GPUs")
def test_a_machine_without_gpus_is_checked_and_measured(capsys):
    # Something may have to be fixed on the machine that runs the tests.
    with contextlib.suppress(SystemExit):
        main(["doctor", "--measure", "--json"])
    content = json.loads(capsys.readouterr().out)
    machine = content["machine"]
    assert machine["gpus"] == []
    assert machine["gloo_error"] == ""
    assert machine["host"]["cores"] >= 1
    assert "torch" in {package["name"] for package in machine["packages"]}
    assert len(content["speed"]["devices"]) == 2
    assert all(one["repeats"] and one["products"] > 1e8 for one in content["speed"]["devices"])
    assert content["speed"]["all_reduce"] > 1e6
