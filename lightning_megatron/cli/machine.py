"""What a machine has for training: packages, GPUs and their links, host, folders and variables."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_megatron.cli.kernels import Compilers, describe_installation
from lightning_megatron.data.worker_pool import default_workers
from lightning_megatron.groups.loopback import reason_against_gloo
from lightning_megatron.kernels.cuda import default_cache, find_library, read_sources
from lightning_megatron.kernels.cuda.library import reason_not_runnable
from lightning_megatron.layers.fused.choose_kernels import choose_kernels

#: Extras for who works on this package.
_DEVELOPMENT = {"test", "dev", "docs"}
#: Variables that change where and how fast a job runs.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH|TRITON|PYTORCH|CUDA)_\w+|NVIDIA_VISIBLE_DEVICES|OMP_NUM_THREADS|"
    r"SLURM_(JOB_ID|NTASKS|NNODES|PROCID|LOCALID)|MASTER_(ADDR|PORT)|(LOCAL_|NODE_)?RANK|"
    r"WORLD_SIZE|HF_HOME|HF_HUB_OFFLINE|TMPDIR|XDG_CACHE_HOME"
)
_STATES = (
    "uuid,memory.used,ecc.errors.uncorrected.volatile.total,power.limit,power.default_limit,"
    "pcie.link.width.current,pcie.link.width.max"
)


@dataclass(frozen=True)
class Package:
    """A package that this one needs or can use.

    Args:
        version: Installed version; None if it is not installed.
        needed: Versions that this package admits, such as ``">=2.11,<2.16"``; empty for all.
        extra: Extra that installs it; empty if this package always needs it.
    """

    name: str
    version: str | None
    needed: str = ""
    extra: str = ""

    @property
    def is_refused(self) -> bool:
        """Return whether it is installed in a version that this package does not admit."""
        wanted = SpecifierSet(self.needed)
        return self.version is not None and not wanted.contains(self.version, prereleases=True)


@dataclass(frozen=True)
class GpuState:
    """State of a GPU, as ``nvidia-smi`` tells it; None where it does not.

    Args:
        used: Memory that processes use (MiB).
        faults: Memory errors since the last start that could not be corrected.
        power: Limit of its power (W).
        full_power: The same, as delivered (W).
        lanes: Lanes of PCIe that are in use.
        full_lanes: Lanes of PCIe that it and its slot have.
    """

    used: float | None = None
    faults: float | None = None
    power: float | None = None
    full_power: float | None = None
    lanes: float | None = None
    full_lanes: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees.

    Args:
        memory: Size of its memory (bytes).
        reaches: For each GPU, whether this one can access its memory.
        links: For each GPU, the link to it as ``nvidia-smi topo -m`` names it; empty if unknown.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    reaches: tuple[bool, ...] = ()
    links: tuple[str, ...] = ()
    state: GpuState = GpuState()


@dataclass(frozen=True)
class CudaSoftware:
    """torch's CUDA, the driver and NCCL; each is empty where it is missing.

    Args:
        architectures: Architectures for which torch was compiled, such as ``"sm_90"``.
        num_devices: NVIDIA GPUs of which the driver shows device files.
        error: Why torch sees none of them; empty if it sees some, or there are none.
    """

    version: str = ""
    driver: str = ""
    nccl: str = ""
    architectures: tuple[str, ...] = ()
    num_devices: int = 0
    error: str = ""


@dataclass(frozen=True)
class Host:
    """Cores, memory and limits that this process may use (bytes where no unit is given).

    Args:
        shared: Size of ``/dev/shm``.
        shared_free: Free part of it.
        open_files: Limit of open files; -1 for no limit. `locked_memory` likewise.
        interfaces: Network interfaces.
        fabric: State of each port of InfiniBand or RoCE, such as ``"ACTIVE"``.
    """

    cores: int
    memory: int
    shared: int
    shared_free: int
    open_files: int
    locked_memory: int
    interfaces: tuple[str, ...] = ()
    fabric: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Folder:
    """A folder to which training writes.

    Args:
        is_writable: Whether it, or the nearest folder above it that exists, takes files.
        runs_programs: Whether files in it may be loaded as programs.
        disk: Number of its disk.
        free: Free space of the disk (bytes).
    """

    path: Path
    is_writable: bool
    runs_programs: bool
    disk: int
    free: int


@dataclass(frozen=True)
class Machine:
    """All that is known of a machine without using it.

    Args:
        kernels: Sources, compilers and library of the bundled CUDA kernels.
        needs_kernels: Whether its GPUs can run them, and they are not built.
        has_fused: Whether the fused Triton kernels run; `fused` is the reason.
        gloo_error: Why two ranks cannot communicate by gloo; empty if they can.
        folders: Folders by their use.
        variables: Environment variables that change where and how fast a job runs.
    """

    python: str
    system: str
    packages: tuple[Package, ...]
    cuda: CudaSoftware
    gpus: tuple[Gpu, ...]
    kernels: Mapping[str, str]
    needs_kernels: bool
    has_fused: bool
    fused: str
    host: Host
    gloo_error: str
    folders: Mapping[str, Folder]
    variables: Mapping[str, str]


def read_machine(environment: Mapping[str, str]) -> Machine:
    """Look at this machine, in a few seconds; GPUs are not used.

    Args:
        environment: Environment variables.
    """
    gpus = read_gpus()
    can_run = reason_not_runnable() is None
    names = [name for name in sorted(environment) if _VARIABLES.fullmatch(name)]
    choice = choose_kernels(torch.device("cuda", 0)) if gpus else None
    return Machine(
        platform.python_version(),
        platform.platform(),
        read_packages(),
        read_cuda(environment),
        gpus,
        describe_installation(Compilers()),
        can_run and find_library(default_cache(), read_sources()) is None,
        choice is not None and choice.kernels is not None,
        choice.reason if choice else "torch sees no GPU: operators of torch are used",
        read_host(),
        reason_against_gloo() or "",
        _folders(environment),
        {name: environment[name] for name in names},
    )


def read_packages() -> tuple[Package, ...]:
    """Return the packages that this one needs, then those of its extras.

    In a source tree that was never installed, no version is known to be needed.
    """
    try:
        lines = metadata.requires("lightning-megatron") or []
    except metadata.PackageNotFoundError:
        lines = ["torch", "lightning", "jsonargparse", 'transformers; extra == "hf"']
    packages = []
    # The CUDA builds of torch bring Triton.
    for one in map(Requirement, [*lines, 'triton; extra == "CUDA build of torch"']):
        extra = re.search(r'extra == "(.+)"', str(one.marker))
        name = extra[1] if extra else ""
        if one.name != "lightning-megatron" and name not in _DEVELOPMENT:
            packages.append(Package(one.name, _version(one.name), str(one.specifier), name))
    return tuple(packages)


def read_cuda(environment: Mapping[str, str]) -> CudaSoftware:
    """Return torch's CUDA, the driver, NCCL, and why torch sees no GPU where the driver has one."""
    driver = re.search(r"\s(\d{3,}\.[\d.]+)\s", _text("/proc/driver/nvidia/version"))
    num_devices = len([*Path("/dev").glob("nvidia[0-9]*")])
    has_cuda = torch.version.cuda is not None
    nccl = torch.cuda.nccl.version() if has_cuda else ()
    return CudaSoftware(
        torch.version.cuda or "",
        driver[1] if driver else "",
        ".".join(map(str, nccl)),
        tuple(torch.cuda.get_arch_list()),
        num_devices,
        _error_of_cuda(environment.get("CUDA_VISIBLE_DEVICES"), num_devices),
    )


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, with what ``nvidia-smi`` adds where it is installed."""
    if not torch.cuda.is_available():
        return ()
    states = parse_states(_smi(f"--query-gpu={_STATES}", "--format=csv,noheader,nounits"))
    links = parse_links(_smi("topo", "-m"))
    found = range(torch.cuda.device_count())
    properties = [torch.cuda.get_device_properties(index) for index in found]
    names = [f"GPU-{str(one.uuid).removeprefix('GPU-')}" for one in properties]
    # torch and nvidia-smi may number the GPUs differently.
    rows = [list(states).index(name) for name in names if name in states]
    knows_links = len(rows) == len(names) and len(links) == len(states)
    gpus = []
    for own, one in enumerate(properties):
        reaches = [peer == own or torch.cuda.can_device_access_peer(own, peer) for peer in found]
        linked = [links[rows[own]][row] for row in rows if knows_links]
        state = states.get(names[own], GpuState())
        capability = (one.major, one.minor)
        memory = one.total_memory
        gpus.append(Gpu(one.name, capability, memory, tuple(reaches), tuple(linked), state))
    return tuple(gpus)


def parse_states(text: str) -> dict[str, GpuState]:
    """Return the states of GPUs by name, from rows of ``nvidia-smi --query-gpu``."""
    states = {}
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.split(","))
        values = [float(cell) if re.fullmatch(r"[\d.]+", cell) else None for cell in cells]
        if name.startswith("GPU-") and len(values) == _STATES.count(","):
            states[name] = GpuState(*values)
    return states


def parse_links(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the links between GPUs, such as NV18 or PIX, as ``nvidia-smi topo -m`` prints them."""
    rows = re.findall(r"^GPU\d+\s+(.*)$", text, re.MULTILINE)
    return tuple(tuple(row.split()[: len(rows)]) for row in rows)


def read_host() -> Host:
    """Return cores, memory and limits, as a container or a job scheduler restricts them."""
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    cores = default_workers()
    if quota.isdigit():
        cores = max(1, min(cores, int(quota) // int(period)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = _text("/sys/fs/cgroup/memory.max").strip()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else (0, 0, 0)
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    fabric = {f"{one.parts[-4]}:{one.parts[-2]}": _text(one).split()[-1] for one in ports}
    return Host(
        cores,
        min(memory, int(most)) if most.isdigit() else memory,
        shared[0],
        shared[2],
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        tuple(name for _, name in socket.if_nameindex()),
        fabric,
    )


def read_folder(path: Path) -> Folder:
    """Return whether a folder takes files, which need not exist yet, and its free space."""
    path = path.absolute()
    # Unlike the methods of paths, these take a folder that must not be searched for a missing one.
    present = next(one for one in (path, *path.parents) if os.path.exists(one))
    is_writable = os.path.isdir(present) and os.access(present, os.W_OK | os.X_OK)
    runs_programs = not os.statvfs(present).f_flag & os.ST_NOEXEC
    free = shutil.disk_usage(present).free
    return Folder(path, is_writable, runs_programs, os.stat(present).st_dev, free)


def _folders(environment: Mapping[str, str]) -> dict[str, Folder]:
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    paths = {
        "current folder": Path.cwd(),
        "temporary files": Path(environment.get("TMPDIR", "/tmp")),
        "Triton kernels": Path(environment.get("TRITON_CACHE_DIR", Path.home() / ".triton/cache")),
        "CUDA kernels": default_cache(),
        "Hugging Face": Path(environment.get("HF_HOME", caches / "huggingface")),
    }
    return {use: read_folder(path) for use, path in paths.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _error_of_cuda(visible: str | None, num_devices: int) -> str:
    if not num_devices or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "the driver shows no GPU to this process"


def _smi(*arguments: str) -> str:
    """Return the output of ``nvidia-smi``; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: str | Path) -> str:
    """Return the text of a small file of the kernel; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
