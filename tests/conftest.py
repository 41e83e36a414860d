"""What every test starts from and leaves behind: seeds, environment, ranks and process groups as
they were.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

if find_spec("hypothesis") is None:
    raise SystemExit(
        "hypothesis is not installed, and the tests need it: "
        'pip install -c constraints.txt -e ".[test,text,hf,lora,plot]"'
    )

from hypothesis import settings

from tests.cpu_seconds import CpuSeconds
from tests.gpu.shared_gpu import num_ranks_at_most
from tests.not_run import NotRun
from tests.startup import shape_checks
from tests.sweeps import VARIABLE

# Worlds of several processes share few cores: one thread each, in this process and in those that it
# starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Before any room is imported.
shape_checks.install()

# Programs that tests start: see the file there.
STARTUP = str(Path(__file__).parent / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([STARTUP, *os.environ.get("PYTHONPATH", STARTUP).split(os.pathsep)])
)

# How long an example takes depends on what else runs. The few examples are always the same; new ones
# are looked for at night.
settings.register_profile("few", deadline=None, max_examples=15, derandomize=True, database=None)
settings.register_profile("sweeps", deadline=None, max_examples=200)

# What the tests began with: a fixture of a whole module may run a Trainer before any test could
# remember its variables, and a LOCAL_RANK that stays would make the next Trainer wait for processes
# that nobody starts.
ENVIRONMENT = dict(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs all cases of sweeps."""
    parser.addoption("--sweeps", action="store_true", help="run all cases of sweeps, not a few")
    parser.addoption("--cpu-log", metavar="FILE", help="append the CPU seconds of each test")
    parser.addini("cpu_budgets", "CPU seconds that a folder of tests may take", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Tell all processes whether sweeps run whole, and let warnings of slow paths pass.

    Tests compare slow paths with the fast ones. The settings in pyproject.toml cannot say this:
    pytest would import the package to find the category, before the checks of shapes are installed.
    """
    config.pluginmanager.register(NotRun())
    config.pluginmanager.register(CpuSeconds(config))
    settings.load_profile("sweeps" if config.getoption("--sweeps") else "few")
    if config.getoption("--sweeps"):
        for variables in (os.environ, ENVIRONMENT):
            variables[VARIABLE] = "1"
    config.addinivalue_line("filterwarnings", "default::lightning_megatron.errors.SpeedWarning")


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Seed the generators, then undo what a Trainer leaves in the process: variables, ranks,
    groups, dtype.
    """
    random.seed(0)
    torch.manual_seed(0)
    yield
    pytest_own = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_")}
    os.environ.clear()
    os.environ.update(ENVIRONMENT | pytest_own)
    torch.set_default_dtype(torch.float32)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    reset_rank_zero_only()
    reset_dataloaders()


def reset_rank_zero_only() -> None:
    """Forget the rank that a strategy told to Lightning's `rank_zero_only`."""
    for module in ("lightning_utilities.core.rank_zero", "lightning.fabric.utilities.rank_zero"):
        if module in sys.modules:
            sys.modules[module].rank_zero_only.rank = 0


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the files of a folder two at a time, where pytest-xdist is there: many tests wait for
    processes.
    """
    options = config.option
    if is_worker(config) or options.usepdb or getattr(options, "numprocesses", 0) is not None:
        return
    # Tests on GPUs take all of them.
    if not torch.cuda.is_available() and any(Path(argument).is_dir() for argument in config.args):
        options.numprocesses, options.dist, options.loadscopereorder = 2, "loadfile", False


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process runs the tests that another gives it."""
    return hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are, saying how many would do; two at a time begin with
    the longest.
    """
    available = num_ranks_at_most()
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2), ("gpu4", 4)):
            if item.get_closest_marker(marker) and available < needed:
                reason = f"they need {needed} GPU(s) and found {available}"
                item.add_marker(pytest.mark.skip(reason=reason))
    if is_worker(config):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Let garbage collections pass over all that was imported: a Trainer begins with one, of a
    quarter of a second.
    """
    gc.collect()
    gc.freeze()


def reset_dataloaders() -> None:
    """Give the classes of dataloaders back the methods that Lightning wraps while a dataloader hook
    runs: it does not if the hook raises, and refuses dataloaders that are built with wrapped ones.
    """
    for base in (DataLoader, BatchSampler):
        for one in (base, *subclasses(base)):
            for method in ("__init__", "__setattr__", "__delattr__"):
                saved = f"__old{method}"
                if saved in vars(one):
                    setattr(one, method, vars(one)[saved])
                    delattr(one, saved)


def subclasses(base: type) -> Iterator[type]:
    """Yield all classes below ``base``."""
    for one in base.__subclasses__():
        yield one
        yield from subclasses(one)
