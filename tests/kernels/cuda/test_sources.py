"""Tests of the sources of the CUDA extension that need no GPU compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda import read_sources, sources
from lightning_megatron.kernels.cuda.sources import ARCHITECTURE, NEVER_RUN
from lightning_megatron.plan.grouped_gemm import (
    BYTES_PER_GROUP,
    MAX_GROUPS,
    VARIANTS,
    WORKSPACE_ALIGNMENT,
    Pass,
    pass_of,
)
from tests.kernels.cuda.fake import FakeKit

WALK = """
#include <vector>
#include "tile_walk.h"
int main() {
  for (int m = 1; m < 14; ++m) for (int n = 1; n < 14; ++n) for (int along = 0; along < 2; ++along)
    for (int band = 0; band < 16; ++band) {
      std::vector<int> seen(m * n);
      for (int i = 0; i < m * n; ++i) {
        auto at = lm_kernels::walk_tiles(i, m, n, along, band);
        if (at.m < 0 || at.m >= m || at.n < 0 || at.n >= n || seen[at.m * n + at.n]++) return 1;
      }
    }
}
"""


def test_the_sources_define_the_variants_of_the_plan() -> None:
    assert read_sources().variants == VARIANTS


def test_names_of_variants_match_their_template_arguments() -> None:
    text = (read_sources().folder / "variants.h").read_text().replace("\\\n", "")
    types = re.findall(
        r"V\((\w+),\s*GroupedGemm<Kind::k(\w+), (\w+), (\d+), (\d+), (\d+), (\d+)(?:, Store::k(\w+))?>",
        text,
    )
    for name, kind, schedule, tile_m, tile_n, cluster_m, cluster_n, store in types:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        suffix = {"ReduceAdd": "_reduce", "ReadC": "_read", "": ""}[store]
        assert (
            name == f"{words}{suffix}_{schedule.lower()}_{tile_m}x{tile_n}_{cluster_m}x{cluster_n}"
        )
    assert len(types) == len(VARIANTS)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, NEVER_RUN])
def test_every_list_of_variants_is_defined_in_one_source_file(architecture: str) -> None:
    extension = read_sources(architecture=architecture)
    lists = re.findall(
        r"#define (LM_\w+_VARIANTS)\(V\) \\\n", (extension.folder / "variants.h").read_text()
    )
    defined = [
        re.search(r"(LM_\w+)\(LM_DEFINE", unit.read_text())
        for unit in extension.translation_units
        if unit.suffix == ".cu"
    ]
    assert sorted(lists) == sorted(match[1] for match in defined if match)


def test_never_run_variants_are_absent_from_the_variants_of_the_plan() -> None:
    never_run = read_sources(architecture=NEVER_RUN).variants
    assert {pass_of(name) for name in never_run} == set(Pass) - {Pass.FORWARD_SWIGLU}
    assert not set(never_run) & set(VARIANTS)


def test_the_header_and_the_plan_have_the_same_limits() -> None:
    header = (read_sources().folder / "grouped_gemm.h").read_text()
    for name, value in {
        "kMaxGroups": MAX_GROUPS,
        "kWorkspaceAlignment": WORKSPACE_ALIGNMENT,
        "kBytesPerGroup": BYTES_PER_GROUP,
    }.items():
        assert f"{name} = {value};" in header


def test_a_new_source_file_changes_the_key(kit: FakeKit) -> None:
    first = kit.write_sources()
    assert kit.write_sources() == first
    (first.folder / "new.h").write_text("")
    assert kit.write_sources().key != first.key


def test_changed_compiler_flags_change_the_key(
    kit: FakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kit.write_sources()
    monkeypatch.setitem(sources._FLAGS, ".cu", ("-O2",))
    assert kit.write_sources().key != first.key


def test_missing_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sources must be installed"):
        read_sources(tmp_path)


def test_the_tile_walk_visits_every_tile_once(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "walk.cpp").write_text(WALK)
    program = tmp_path / "walk"
    command = [
        compiler,
        "-O1",
        f"-I{read_sources().folder}",
        str(tmp_path / "walk.cpp"),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    assert subprocess.run([program]).returncode == 0
