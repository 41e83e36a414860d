"""What is wrong with a machine, or could be better, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.cli.machine import CudaSoftware, Gpu, Machine
from lightning_megatron.cli.machine_speed import MachineSpeed, speed_rows
from lightning_megatron.plan.budget import GIB

#: Compute capability from which the fused kernels and bfloat16 run.
_FUSED = (8, 0)
#: Sizes below which jobs fail, or will soon (bytes; files; MiB of a GPU).
_SMALL_SHARED = GIB
_SMALL_DISK = 20 * GIB
_FEW_FILES = 1024
_ADVISED_FILES = 65536
_MUCH_USED = 2048
_CORES_OF_GPU = 4
#: Variables that slow jobs down: the value that does, and what it does.
_SLOW_VARIABLES = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a host exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a host exchange data through the network"),
    "NCCL_IB_DISABLE": ("1", "hosts exchange data without InfiniBand and RoCE"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
}
#: Variables of launchers: a Trainer that finds them joins the ranks that they name.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")
_STARTED = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Problem:
    """Something to fix.

    Args:
        severity: Whether jobs fail without it, or only run slower or lack a feature.
        symptom: What is wrong, with its values.
        remedy: What to do.
    """

    severity: Literal["must", "should"]
    symptom: str
    remedy: str


def problems_of(machine: Machine) -> list[Problem]:
    """Return what is wrong with a machine."""
    return [
        *_problems_of_packages(machine),
        *_problems_of_cuda(machine.cuda, machine.gpus),
        *_problems_of_gpus(machine),
        *_problems_of_links(machine.gpus),
        *_problems_of_host(machine),
        *_problems_of_folders(machine),
        *_problems_of_variables(machine),
    ]


def problems_of_speed(gpus: tuple[Gpu, ...], speed: MachineSpeed) -> list[Problem]:
    """Return what measurements say is wrong."""
    return [*_problems_of_results(speed), *_problems_of_slowness(gpus, speed)]


def _problems_of_packages(machine: Machine) -> Iterator[Problem]:
    for one in machine.packages:
        wanted = f"{one.name}{one.needed}"
        if not one.extra and not one.is_admitted:
            state = f"{one.name} {one.version}" if one.version else f"{one.name}, not installed,"
            yield Problem("must", f"{state} must be {wanted}", f'pip install "{wanted}"')
        elif one.version and not one.is_admitted:
            yield Problem(
                "should",
                f"{one.name} {one.version} is not admitted by the extra {one.extra}",
                f'pip install "{wanted}"',
            )


def _problems_of_cuda(cuda: CudaSoftware, gpus: tuple[Gpu, ...]) -> Iterator[Problem]:
    if cuda.error:
        symptom = f"torch sees none of the {cuda.num_devices} GPU(s): {cuda.error}"
        remedy = "Update the driver, or install a build of torch for the driver's CUDA"
        if cuda.error.startswith("torch "):
            remedy = "Install a CUDA build of torch: docs/installation.md says how"
        if cuda.error.startswith("CUDA_VISIBLE_DEVICES"):
            # Perhaps on purpose: jobs train on CPUs.
            yield Problem("should", symptom, "unset CUDA_VISIBLE_DEVICES")
        else:
            yield Problem("must", symptom, remedy)
    for index, gpu in enumerate(gpus):
        if cuda.architectures and not _is_compiled_for(cuda.architectures, gpu.capability):
            yield Problem(
                "must",
                f"torch has no code for GPU {index} (compute capability "
                f"{'.'.join(map(str, gpu.capability))}): only for {', '.join(cuda.architectures)}",
                "Install another build of torch, or leave the GPU out: CUDA_VISIBLE_DEVICES",
            )


def _is_compiled_for(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return whether code for one of the architectures runs: of the same generation, or PTX."""
    for one in architectures:
        compiled = divmod(int(re.sub(r"\D", "", one)), 10)
        is_kin = one.startswith("compute") or compiled[0] == capability[0]
        if is_kin and compiled <= capability:
            return True
    return False


def _problems_of_gpus(machine: Machine) -> Iterator[Problem]:
    for index, gpu in enumerate(machine.gpus):
        state = gpu.state
        if state.faults:
            yield Problem(
                "must",
                f"GPU {index} had {state.faults:.0f} memory errors that it could not correct",
                "Restart the machine; replace the GPU if they return",
            )
        if (state.used or 0) > _MUCH_USED:
            yield Problem(
                "should",
                f"GPU {index} has {(state.used or 0) / 1024:.1f} GiB in use by other processes",
                "End them, or leave the GPU out: nvidia-smi lists them",
            )
        if (state.power or 0) < 0.9 * (state.full_power or 0):
            yield Problem(
                "should",
                f"GPU {index} may use {state.power:.0f} of its {state.full_power:.0f} W",
                f"nvidia-smi -i {index} -pl {state.full_power:.0f}",
            )
        if (state.lanes or 0) < (state.full_lanes or 0):
            yield Problem(
                "should",
                f"GPU {index} uses {state.lanes:.0f} of its {state.full_lanes:.0f} PCIe lanes",
                "Seat the card again, or use another slot",
            )
    if machine.gpus and not machine.has_fused:
        capability = min(gpu.capability for gpu in machine.gpus)
        remedy = "pip install triton" if capability >= _FUSED else "Use GPUs from Ampere on"
        yield Problem("should", f"the fused kernels do not run: {machine.fused}", remedy)
    if machine.needs_kernels:
        yield Problem(
            "should",
            "the CUDA kernels for experts are not built, so mixtures of experts train slower",
            "lightning-megatron kernels build",
        )


def _problems_of_links(gpus: tuple[Gpu, ...]) -> Iterator[Problem]:
    pairs = [
        f"{index}-{peer}"
        for index, gpu in enumerate(gpus)
        for peer, is_reached in enumerate(gpu.reaches[:index])
        if not is_reached
    ]
    if pairs:
        yield Problem(
            "should",
            f"GPUs {', '.join(pairs)} cannot read each other's memory: data pass through the host",
            "See nvidia-smi topo -p2p r; switch off ACS and the IOMMU, which may forbid it",
        )
    if len({gpu.name for gpu in gpus}) > 1:
        yield Problem(
            "should",
            "the GPUs differ, and all ranks wait for the slowest",
            "Choose equal ones: CUDA_VISIBLE_DEVICES",
        )


def _problems_of_host(machine: Machine) -> Iterator[Problem]:
    host = machine.host
    if host.shared < _SMALL_SHARED:
        yield Problem(
            "must",
            f"/dev/shm has {size_text(host.shared)}, too little for data loaders and NCCL",
            "docker run --ipc=host (or --shm-size=16g), or mount -o remount,size=16g /dev/shm",
        )
    elif host.shared_free < _SMALL_SHARED:
        yield Problem(
            "must",
            f"/dev/shm is full: {size_text(host.shared_free)} of {size_text(host.shared)} are free",
            "Remove files of ended processes there: ls -l /dev/shm",
        )
    if 0 <= host.open_files < _FEW_FILES or (machine.gpus and host.open_files == _FEW_FILES):
        yield Problem(
            "must" if host.open_files < _FEW_FILES else "should",
            f"a process may open {host.open_files} files, few for data loaders and checkpoints",
            f"ulimit -n {_ADVISED_FILES}",
        )
    if host.fabric and host.locked_memory >= 0:
        yield Problem(
            "should",
            f"a process may lock {size_text(host.locked_memory)}, too little for InfiniBand",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )
    for port, state in host.fabric.items():
        if state != "ACTIVE":
            yield Problem("should", f"the port {port} is {state}", "Look at ibstat, cable, switch")
    if host.cores < _CORES_OF_GPU * len(machine.gpus):
        yield Problem(
            "should",
            f"{host.cores} cores serve {len(machine.gpus)} GPUs, which wait for slow hosts",
            f"Give the job at least {_CORES_OF_GPU} cores for each GPU",
        )
    if machine.gloo_error:
        yield Problem(
            "must",
            f"two ranks of this machine cannot communicate by gloo: {machine.gloo_error}",
            "Let the host's name resolve (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo",
        )


def _problems_of_folders(machine: Machine) -> Iterator[Problem]:
    full = set()
    for use, folder in machine.folders.items():
        if not folder.is_writable:
            remedies = {
                "Triton kernels": "Set TRITON_CACHE_DIR to a folder that is",
                "Hugging Face": "Set HF_HOME to a folder that is",
                "temporary files": "Set TMPDIR to a folder that is",
            }
            needed = use == "temporary files" or (use == "Triton kernels" and machine.gpus)
            yield Problem(
                "must" if needed else "should",
                f"{folder.path} ({use}) is not writable",
                remedies.get(use, f"Give this user the right: chown {folder.path}"),
            )
        elif folder.free < _SMALL_DISK and folder.disk not in full:
            full.add(folder.disk)
            yield Problem(
                "must" if folder.free < GIB else "should",
                f"the disk of {folder.path} ({use}) has {size_text(folder.free)} free",
                "Delete files, or use another disk",
            )
        if "kernels" in use and machine.gpus and not folder.runs_programs:
            yield Problem(
                "must",
                f"{folder.path} ({use}) is on a disk from which no program may run (noexec)",
                f"mount -o remount,exec the disk of {folder.path}, or move the cache",
            )


def _problems_of_variables(machine: Machine) -> Iterator[Problem]:
    variables = machine.variables
    for name, (value, effect) in _SLOW_VARIABLES.items():
        if variables.get(name) == value and (name != "NCCL_IB_DISABLE" or machine.host.fabric):
            yield Problem("should", f"{name}={value}: {effect}", f"unset {name}")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = variables.get(name, "^")
        # NCCL takes beginnings of names, =NAME for a whole one, and ^ for all but these.
        beginnings = tuple(one.strip().lstrip("=") for one in wanted.split(","))
        known = machine.host.interfaces
        if wanted[:1] != "^" and not any(one.startswith(beginnings) for one in known):
            yield Problem(
                "must",
                f"{name}={wanted} is none of the interfaces {', '.join(known)}",
                f"unset {name}, or name one of these",
            )
    ranks = [name for name in _RANK_VARIABLES if name in variables]
    if ranks and not any(name in variables for name in _STARTED):
        yield Problem(
            "should",
            f"{', '.join(ranks)} in this shell: a Trainer waits for ranks that nobody starts",
            f"unset {' '.join(ranks)}",
        )


def _problems_of_results(speed: MachineSpeed) -> Iterator[Problem]:
    if speed.failure:
        remedy = "Run it with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 tells whether links are broken"
        if "out of memory" in speed.failure:
            remedy = "End other processes on the GPU: nvidia-smi lists them"
        yield Problem("must", f"the measurement failed: {speed.failure}", remedy)
    for rank, one in enumerate(speed.devices):
        if not one.repeats:
            yield Problem(
                "must",
                f"GPU {rank} gave two results for one product",
                "Do not train on it: nvidia-smi -q -d ECC,PERFORMANCE; have it replaced",
            )
    wrong = [f"{one.source} to {one.target}" for one in speed.pairs if not one.is_right]
    if wrong:
        yield Problem(
            "must",
            f"copies between GPUs arrive changed: {', '.join(wrong)}",
            "Switch off ACS and the IOMMU in the firmware; until then set NCCL_P2P_DISABLE=1",
        )
    if speed.devices and not speed.sums_are_right:
        yield Problem(
            "must",
            "an all-reduce gave wrong sums",
            "Update NCCL and driver; NCCL_P2P_DISABLE=1 tells whether links are broken",
        )


def _problems_of_slowness(gpus: tuple[Gpu, ...], speed: MachineSpeed) -> Iterator[Problem]:
    for row in speed_rows(gpus, speed):
        if row.is_slow:
            yield Problem(
                "should",
                f"{row.name}: {row.speed / (row.published or 1):.0%} of the published speed",
                "nvidia-smi -q -d PERFORMANCE names heat and power, nvidia-smi other processes, "
                "nvidia-smi nvlink -s broken links",
            )


def size_text(number: int) -> str:
    """Return a size in GiB or MiB as text."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / (1 << 20):.0f} MiB"
