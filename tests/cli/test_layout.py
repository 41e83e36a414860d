"""The command ``layout``: its output, its picture and its errors."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli.draw_layout import draw_layout
from lightning_megatron.cli.layout import describe_layout
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.plan import ParallelLayout

MOE = ParallelLayout(16, tp=4, pp=2, etp=1, ep=4)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_every_group_of_both_grids_is_printed(printed):
    words = " ".join(printed("layout --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4").split())
    assert "world size 16 = tp 4 x cp 1 x dp 2 x pp 2 = etp 1 x ep 4 x edp 2 x pp 2 " in words
    for name, groups in {
        **{name: MOE.groups(name) for name in ("tp", "dp", "pp", "dp-cp")},
        "embedding": MOE.embedding_groups(),
        "ep": MOE.expert_groups("ep"),
    }.items():
        ranks = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)
        assert f"{name} {len(groups)} {len(groups[0])} {ranks}" in words


def test_the_layers_of_every_stage_are_printed(printed):
    for stage_layers in ("0,3,2,1", "E|(t*3|)tt|tL"):
        text = printed("layout --world-size 2 --pp 2 --vpp 2 --stage-layers", stage_layers)
        assert "stage 0  embedding; layers 3 to 4\nstage 1  layers 0 to 2; layer 5, head\n" in text


def test_groups_that_cross_nodes_are_marked():
    text = describe_layout(ParallelLayout(12, tp=4), gpus_per_node=6)
    assert "nodes of 6 ranks: 2; * marks a group that crosses nodes" in text
    assert "2 of 3" in text
    assert "[0 1 2 3] [4 5 6 7]* [8 9 10 11]" in text
    large = ParallelLayout(64, tp=4, pp=4, ep=8, etp=1)
    text = describe_layout(large, experts=True, gpus_per_node=8, width=90)
    assert max(map(len, text.splitlines())) <= 90


def test_invalid_arguments_end_the_command_with_a_message(refused):
    for arguments, message in {
        "--world-size 2 --pp 2 --stage-layers Et|xL": "'Et|xL' has 'x' at position 4",
        "--world-size 16 --tp 3": "Use tp of 1, 2, 4, 8 or 16",
        "--world-size 4 --png map.doc": "'map.doc' must end in .png, .svg, .pdf",
        "--world-size 4 --png nowhere/map.png": "folder 'nowhere' does not exist",
    }.items():
        assert message in refused(f"layout {arguments}")


def test_the_rank_map_is_drawn_and_its_path_printed(tmp_path, printed):
    pytest.importorskip("matplotlib")
    draw_layout(ParallelLayout(64, tp=4, rank_offset=4), tmp_path / "map.png", experts=True)
    width, height = png_size(tmp_path / "map.png")
    assert (width > 500, height > 300) == (True, True)
    path = tmp_path / "map.svg"
    assert printed("layout --world-size 4 --tp 2 --png", path).endswith(f"nodes of 8: {path}\n")
    assert path.read_text(encoding="utf-8").startswith("<?xml")


def test_error_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[plot\]"'):
        draw_layout(MOE, tmp_path / "map.png")
