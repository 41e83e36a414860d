"""What is wrong with a machine, or could be better: a table of checks, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from lightning_megatron.cli.machine import Folder, Gpu, Machine
from lightning_megatron.cli.machine_speed import MachineSpeed, speed_rows
from lightning_megatron.plan.budget import GIB

Severity = Literal["must", "should"]
#: What a check reads of its subject: the values in its texts, once for each fault.
Reading = Callable[[Any], Iterable[Sequence[Any]]]
#: How bad a fault is, its reading, what is wrong, and what to do.
Check = tuple[Severity, Reading, str, str]
#: Compute capability from which the fused kernels and bfloat16 run.
_FUSED = (8, 0)
_FEW_FILES = 1024
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
_STARTED = {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}
#: Variables that move folders.
_MOVES = {
    "Triton kernels": "TRITON_CACHE_DIR",
    "Hugging Face": "HF_HOME",
    "temporary files": "TMPDIR",
}


@dataclass(frozen=True)
class Problem:
    """Something to fix.

    Args:
        severity: Whether jobs fail without it, or only run slower or lack a feature.
        symptom: What is wrong, with its values.
        remedy: What to do.
    """

    severity: Severity
    symptom: str
    remedy: str


def problems_of(machine: Machine) -> list[Problem]:
    """Return what is wrong with a machine."""
    return _found(_CHECKS, machine)


def problems_of_speed(gpus: tuple[Gpu, ...], speed: MachineSpeed) -> list[Problem]:
    """Return what measurements say is wrong."""
    return [*_found(_RESULTS, speed), *_found(_SLOWNESS, speed_rows(gpus, speed))]


def size_text(number: int) -> str:
    """Return a size in GiB or MiB as text."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / (1 << 20):.0f} MiB"


def _found(checks: Iterable[Check], subject: object) -> list[Problem]:
    return [
        Problem(severity, symptom.format(*values), remedy.format(*values))
        for severity, read, symptom, remedy in checks
        for values in read(subject)
    ]


# ---- readings


def _if(read: Callable[[Any], Any]) -> Reading:
    """Read one value of the subject, which is a fault unless it is empty; values: it, subject."""
    return lambda subject: [(value, subject)] if (value := read(subject)) else []


def _each(parts: Callable[[Any], Iterable[Any]], is_wrong: Callable[[Any], Any]) -> Reading:
    """Read the parts of the subject, of which some are faults; values: the part."""
    return lambda subject: [(one,) for one in parts(subject) if is_wrong(one)]


def _gpus(read: Callable[[Gpu], Any]) -> Reading:
    """Read a value of each GPU, which is a fault unless it is empty; values: index, it, state."""
    return lambda machine: [
        (index, value, gpu.state) for index, gpu in enumerate(machine.gpus) if (value := read(gpu))
    ]


def _folders(read: Callable[[Machine, str, Folder], Any]) -> Reading:
    """Read a value of each folder, which is a fault unless it is empty; values: use, path, it."""
    return lambda machine: [
        (use, folder.path, value)
        for use, folder in machine.folders.items()
        if (value := read(machine, use, folder))
    ]


def _read_only(is_needed: bool) -> Reading:
    """Read folders that take no files, needed for jobs or not."""

    def remedy(machine: Machine, use: str, folder: Folder) -> str:
        needed = use == "temporary files" or (use == "Triton kernels" and bool(machine.gpus))
        if folder.is_writable or needed != is_needed:
            return ""
        if use in _MOVES:
            return f"Set {_MOVES[use]} to a folder that is"
        return f"Give this user the right: chown {folder.path}"

    return _folders(remedy)


def _full_disks(least: int, most: int) -> Reading:
    """Read disks with so much free space (bytes), each at the first folder on it."""

    def read(machine: Machine) -> Iterable[Sequence[Any]]:
        small = {
            folder.disk: (use, folder.path, size_text(folder.free))
            for use, folder in reversed([*machine.folders.items()])
            if folder.is_writable and least <= folder.free < most
        }
        return small.values()

    return read


def _foreign_gpus(machine: Machine) -> Iterable[Sequence[Any]]:
    """Read GPUs for which torch has no code: of the same generation, or as PTX."""
    compiled = {one: divmod(int(re.sub(r"\D", "", one)), 10) for one in machine.cuda.architectures}
    for index, gpu in enumerate(machine.gpus if compiled else ()):
        own = gpu.capability
        if not any(
            version <= own and (name.startswith("compute") or version[0] == own[0])
            for name, version in compiled.items()
        ):
            yield index, ".".join(map(str, own)), ", ".join(compiled)


def _unfused(machine: Machine) -> Iterable[Sequence[Any]]:
    if machine.gpus and not machine.has_fused:
        is_new = min(gpu.capability for gpu in machine.gpus) >= _FUSED
        yield machine.fused, "pip install triton" if is_new else "Use GPUs from Ampere on"


def _strange_interfaces(machine: Machine) -> Iterable[Sequence[Any]]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = machine.variables.get(name, "^")
        # NCCL takes beginnings of names, =NAME for a whole one, and ^ for all but these.
        beginnings = tuple(one.strip().lstrip("=") for one in wanted.split(","))
        known = machine.host.interfaces
        if wanted[:1] != "^" and not any(one.startswith(beginnings) for one in known):
            yield name, wanted, ", ".join(known)


def _slow_variables(machine: Machine) -> Iterable[Sequence[Any]]:
    for name, (value, effect) in _SLOW_VARIABLES.items():
        is_idle = name == "NCCL_IB_DISABLE" and not machine.host.fabric
        if machine.variables.get(name) == value and not is_idle:
            yield name, value, effect


def _lost_ranks(machine: Machine) -> Iterable[Sequence[Any]]:
    found = [one for one in _RANK_VARIABLES if one in machine.variables]
    if found and not _STARTED & machine.variables.keys():
        yield ", ".join(found), " ".join(found)


def _apart(machine: Machine) -> str:
    """Return the pairs of GPUs that cannot read each other's memory."""
    return ", ".join(
        f"{index}-{peer}"
        for index, gpu in enumerate(machine.gpus)
        for peer, is_reached in enumerate(gpu.reaches[:index])
        if not is_reached
    )


# ---- checks

_PACKAGES = attrgetter("packages")
_INSTALL = 'pip install "{0.name}{0.needed}"'
_HIDDEN = "torch sees none of the {1.cuda.num_devices} GPU(s): {1.cuda.error}"
_FILES = "a process may open {1.host.open_files} files, few for data loaders and checkpoints"
_READ_ONLY = "{1} ({0}) is not writable"
_DISK = "the disk of {1} ({0}) has {2} free"
_CHECKS: tuple[Check, ...] = (
    ("must", _each(_PACKAGES, lambda one: not (one.extra or one.version)),
     "{0.name}, not installed, must be {0.name}{0.needed}", _INSTALL),
    ("must", _each(_PACKAGES, lambda one: one.is_refused and not one.extra),
     "{0.name} {0.version} must be {0.name}{0.needed}", _INSTALL),
    ("should", _each(_PACKAGES, lambda one: one.is_refused and one.extra),
     "{0.name} {0.version} is not admitted by the extra {0.extra}", _INSTALL),
    ("must", _if(lambda machine: re.match("torch ", machine.cuda.error)), _HIDDEN,
     "Install a CUDA build of torch: docs/installation.md says how"),
    # Perhaps on purpose: jobs train on CPUs.
    ("should", _if(lambda machine: re.match("CUDA_VISIBLE", machine.cuda.error)), _HIDDEN,
     "unset CUDA_VISIBLE_DEVICES"),
    ("must", _if(lambda machine: re.match("(?!torch |CUDA_VISIBLE).", machine.cuda.error)), _HIDDEN,
     "Update the driver, or install a build of torch for the driver's CUDA"),
    ("must", _foreign_gpus,
     "torch has no code for GPU {0} (compute capability {1}): only for {2}",
     "Install another build of torch, or leave the GPU out: CUDA_VISIBLE_DEVICES"),
    ("must", _gpus(lambda gpu: gpu.state.faults),
     "GPU {0} had {1:.0f} memory errors that it could not correct",
     "Restart the machine; replace the GPU if they return"),
    ("should", _gpus(lambda gpu: (used := gpu.state.used or 0) > 2048 and used / 1024),
     "GPU {0} has {1:.1f} GiB in use by other processes",
     "End them, or leave the GPU out: nvidia-smi lists them"),
    ("should", _gpus(lambda gpu: (gpu.state.power or 0) < 0.9 * (gpu.state.full_power or 0)),
     "GPU {0} may use {2.power:.0f} of its {2.full_power:.0f} W",
     "nvidia-smi -i {0} -pl {2.full_power:.0f}"),
    ("should", _gpus(lambda gpu: (gpu.state.lanes or 0) < (gpu.state.full_lanes or 0)),
     "GPU {0} uses {2.lanes:.0f} of its {2.full_lanes:.0f} PCIe lanes",
     "Seat the card again, or use another slot"),
    ("should", _unfused, "the fused kernels do not run: {0}", "{1}"),
    ("should", _if(lambda machine: machine.needs_kernels),
     "the CUDA kernels for experts are not built, so mixtures of experts train slower",
     "lightning-megatron kernels build"),
    ("should", _if(_apart),
     "GPUs {0} cannot read each other's memory: data pass through the host",
     "See nvidia-smi topo -p2p r; switch off ACS and the IOMMU, which may forbid it"),
    ("should", _if(lambda machine: len(set(map(attrgetter("name"), machine.gpus))) > 1),
     "the GPUs differ, and all ranks wait for the slowest",
     "Choose equal ones: CUDA_VISIBLE_DEVICES"),
    ("must", _if(lambda machine: machine.host.shared < GIB and size_text(machine.host.shared)),
     "/dev/shm has {0}, too little for data loaders and NCCL",
     "docker run --ipc=host (or --shm-size=16g), or mount -o remount,size=16g /dev/shm"),
    ("must", _if(lambda machine: machine.host.shared_free < GIB <= machine.host.shared
                 and f"{size_text(machine.host.shared_free)} of {size_text(machine.host.shared)}"),
     "/dev/shm is full: {0} are free", "Remove files of ended processes there: ls -l /dev/shm"),
    ("must", _if(lambda machine: 0 <= machine.host.open_files < _FEW_FILES), _FILES,
     "ulimit -n 65536"),
    ("should", _if(lambda machine: machine.gpus and machine.host.open_files == _FEW_FILES), _FILES,
     "ulimit -n 65536"),
    ("should", _if(lambda machine: machine.host.fabric and machine.host.locked_memory >= 0
                   and size_text(machine.host.locked_memory)),
     "a process may lock {0}, too little for InfiniBand",
     "ulimit -l unlimited (docker run --ulimit memlock=-1)"),
    ("should", _each(lambda machine: machine.host.fabric.items(), lambda port: port[1] != "ACTIVE"),
     "the port {0[0]} is {0[1]}", "Look at ibstat, cable, switch"),
    ("should", _if(lambda machine: machine.host.cores < 4 * (count := len(machine.gpus)) and count),
     "{1.host.cores} cores serve {0} GPUs, which wait for slow hosts",
     "Give the job at least 4 cores for each GPU"),
    ("must", _if(lambda machine: machine.gloo_error),
     "two ranks of this machine cannot communicate by gloo: {0}",
     "Let the host's name resolve (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"),
    ("must", _read_only(is_needed=True), _READ_ONLY, "{2}"),
    ("should", _read_only(is_needed=False), _READ_ONLY, "{2}"),
    ("must", _full_disks(0, GIB), _DISK, "Delete files, or use another disk"),
    ("should", _full_disks(GIB, 20 * GIB), _DISK, "Delete files, or use another disk"),
    ("must", _folders(lambda machine, use, folder: "kernels" in use and machine.gpus
                      and not folder.runs_programs),
     "{1} ({0}) is on a disk from which no program may run (noexec)",
     "mount -o remount,exec the disk of {1}, or move the cache"),
    ("should", _slow_variables, "{0}={1}: {2}", "unset {0}"),
    ("must", _strange_interfaces, "{0}={1} is none of the interfaces {2}",
     "unset {0}, or name one of these"),
    ("should", _lost_ranks,
     "{0} in this shell: a Trainer waits for ranks that nobody starts", "unset {1}"),
)  # fmt: skip
_FAILED = "the measurement failed: {1.failure}"
_RESULTS: tuple[Check, ...] = (
    ("must", _if(lambda speed: "out of memory" in speed.failure), _FAILED,
     "End other processes on the GPU: nvidia-smi lists them"),
    ("must", _if(lambda speed: speed.failure and "out of memory" not in speed.failure), _FAILED,
     "Run it with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 tells whether links are broken"),
    ("must", _each(lambda speed: enumerate(speed.devices), lambda device: not device[1].repeats),
     "GPU {0[0]} gave two results for one product",
     "Do not train on it: nvidia-smi -q -d ECC,PERFORMANCE; have it replaced"),
    ("must", _if(lambda speed: ", ".join(
        f"{one.source} to {one.target}" for one in speed.pairs if not one.is_right)),
     "copies between GPUs arrive changed: {0}",
     "Switch off ACS and the IOMMU in the firmware; until then set NCCL_P2P_DISABLE=1"),
    ("must", _if(lambda speed: speed.devices and not speed.sums_are_right),
     "an all-reduce gave wrong sums",
     "Update NCCL and driver; NCCL_P2P_DISABLE=1 tells whether links are broken"),
)  # fmt: skip
_SLOWNESS: tuple[Check, ...] = (
    ("should", lambda rows: [(one.name, one.speed / one.published) for one in rows if one.is_slow],
     "{0}: {1:.0%} of the published speed",
     "nvidia-smi -q -d PERFORMANCE names heat and power, nvidia-smi other processes, "
     "nvidia-smi nvlink -s broken links"),
)  # fmt: skip
