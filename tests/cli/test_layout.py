"""The command ``layout``: its output, its picture and its errors."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

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


def test_every_group_of_both_grids_is_printed(printed: Any) -> None:
    words = " ".join(printed("layout --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4").split())
    assert "world size 16 = tp 4 x cp 1 x dp 2 x pp 2 = etp 1 x ep 4 x edp 2 x pp 2 " in words
    for name, groups in {
        **{name: MOE.groups(name) for name in ("tp", "dp", "pp", "dp-cp", "tp-pp")},
        "embedding": MOE.embedding_groups(),
        "position embedding": MOE.position_embedding_groups(),
        "ep": MOE.expert_groups("ep"),
        "edp": MOE.expert_groups("edp"),
    }.items():
        ranks = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)
        assert f"{name} {len(groups)} {len(groups[0])} {ranks}" in words


def test_without_experts_only_the_dense_grid_is_printed(printed: Any) -> None:
    text = printed("layout --world_size 8 --tp 2 --vpp 2 --pp 2 --order tp-dp-pp --rank-offset 8")
    assert "expert" not in text
    assert "etp" not in text
    assert "order tp-dp-pp, fastest axis first" in text
    assert "virtual stages: 2 chunks on each of 2 stages = 4" in text
    assert "[8 9] [10 11] [12 13] [14 15]" in text


def test_the_layers_of_every_stage_are_printed(printed: Any) -> None:
    for stage_layers in ("0,3,2,1", "[0, 3, 2, 1]", "E|(t*3|)tt|tL"):
        text = printed("layout --world-size 2 --pp 2 --vpp 2 --stage-layers", stage_layers)
        assert (
            "layers of each virtual stage: 0, 3, 2, 1\n"
            "stage 0  embedding; layers 3 to 4\n"
            "stage 1  layers 0 to 2; layer 5, head\n"
        ) in text, stage_layers


def test_groups_that_cross_nodes_are_marked() -> None:
    lines = describe_layout(MOE, experts=True, gpus_per_node=8).splitlines()
    rows = {" ".join(line.split()[:1]): line for line in lines if line[:1].isalpha()}
    assert "nodes of 8 ranks: 2; * marks a group that crosses nodes" in lines
    assert "all" in rows["tp"]
    assert "*" not in rows["tp"]
    assert "none" in rows["pp"]
    assert "[0 8]*" in rows["pp"]
    uneven = describe_layout(ParallelLayout(12, tp=4), gpus_per_node=6)
    assert "2 of 3" in uneven
    assert "[0 1 2 3] [4 5 6 7]* [8 9 10 11]" in uneven
    large = ParallelLayout(64, tp=4, pp=4, ep=8, etp=1)
    text = describe_layout(large, experts=True, gpus_per_node=8, width=90)
    assert max(map(len, text.splitlines())) <= 90


def test_invalid_arguments_end_the_command_with_a_message(refused: Any) -> None:
    for arguments, message in {
        "--world-size 2 --pp 2 --stage-layers Et|xL": "'Et|xL' has 'x' at position 4",
        "--world-size 16 --tp 3": "Use tp of 1, 2, 4, 8 or 16",
        "--world-size 4 --gpus-per-node 0": "must be a whole number of at least 1: it is '0'",
        "--world-size 4 --png map.doc": "'map.doc' must end in .png, .svg, .pdf",
        "--world-size 4 --png nowhere/map.png": "folder 'nowhere' does not exist",
    }.items():
        assert message in refused(f"layout {arguments}")


def test_the_rank_map_is_drawn_and_its_path_printed(tmp_path: Path, printed: Any) -> None:
    pytest.importorskip("matplotlib")
    draw_layout(ParallelLayout(64, tp=4, rank_offset=4), tmp_path / "map.png", experts=True)
    width, height = png_size(tmp_path / "map.png")
    assert (width > 500, height > 300) == (True, True)
    path = tmp_path / "map.svg"
    assert printed("layout --world-size 4 --tp 2 --png", path).endswith(f"nodes of 8: {path}\n")
    assert path.read_text(encoding="utf-8").startswith("<?xml")


def test_error_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[plot\]"'):
        draw_layout(MOE, tmp_path / "map.png")
