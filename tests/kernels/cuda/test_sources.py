"""The sources of the extension, as far as a machine without a GPU compiler can judge them."""

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


def test_the_library_has_the_variants_of_the_rule() -> None:
    assert read_sources().variants == VARIANTS


def test_each_variant_is_the_type_that_its_name_says() -> None:
    text = (read_sources().folder / "variants.h").read_text().replace("\\\n", "")
    types = re.findall(
        r"V\((\w+),\s*GroupedGemm<Kind::k(\w+), (\w+), (\d+), (\d+), (\d+), (\d+)(?:, Store::k(\w+))?>",
        text,
    )
    for name, kind, schedule, tile_m, tile_n, cluster_m, cluster_n, store in types:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        how = {"ReduceAdd": "_reduce", "ReadC": "_read", "": ""}[store]
        assert name == f"{words}{how}_{schedule.lower()}_{tile_m}x{tile_n}_{cluster_m}x{cluster_n}"
    assert len(types) == len(VARIANTS)


@pytest.mark.parametrize("architecture", [ARCHITECTURE, NEVER_RUN])
def test_every_list_of_variants_has_a_file(architecture: str) -> None:
    found = read_sources(architecture=architecture)
    lists = re.findall(
        r"#define (LM_\w+_VARIANTS)\(V\) \\\n", (found.folder / "variants.h").read_text()
    )
    defined = [
        re.search(r"(LM_\w+)\(LM_DEFINE", unit.read_text())
        for unit in found.translation_units
        if unit.suffix == ".cu"
    ]
    assert sorted(lists) == sorted(match[1] for match in defined if match)


def test_no_rule_names_a_variant_that_was_never_run() -> None:
    never_run = read_sources(architecture=NEVER_RUN).variants
    assert {pass_of(name) for name in never_run} == set(Pass) - {Pass.FORWARD_SWIGLU}
    assert not set(never_run) & set(VARIANTS)


def test_both_sides_have_the_same_limits() -> None:
    header = (read_sources().folder / "grouped_gemm.h").read_text()
    for name, value in {
        "kMaxGroups": MAX_GROUPS,
        "kWorkspaceAlignment": WORKSPACE_ALIGNMENT,
        "kBytesPerGroup": BYTES_PER_GROUP,
    }.items():
        assert f"{name} = {value};" in header


def test_the_key_follows_every_file(kit: FakeKit) -> None:
    first = kit.write_sources()
    assert kit.write_sources() == first
    (first.folder / "new.h").write_text("")
    assert kit.write_sources().key != first.key


def test_the_key_follows_the_flags_of_the_compiler(
    kit: FakeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kit.write_sources()
    monkeypatch.setitem(sources._FLAGS, ".cu", ("-O2",))
    assert kit.write_sources().key != first.key


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sources must be installed"):
        read_sources(tmp_path)


def test_the_walk_meets_every_tile_once(tmp_path: Path) -> None:
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
