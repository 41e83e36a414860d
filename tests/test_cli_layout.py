"""Tests of the command `layout`: its output, its picture and its errors."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli.draw_layout import NodeMap, draw_layout
from lightning_megatron.cli.layout import describe_layout, main
from lightning_megatron.errors import MissingExtraError, ParallelPlanError
from lightning_megatron.plan import ParallelLayout

MOE = ParallelLayout(16, tp=4, pp=2, etp=1, ep=4)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_every_group_of_both_grids_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--world-size", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4"])
    printed = capsys.readouterr().out
    assert (
        "world size 16 = tp 4 x cp 1 x dp 2 x pp 2\n              = etp 1 x ep 4 x edp 2 x pp 2\n"
        in printed
    )
    words = " ".join(printed.split())
    for name, groups in {
        "tp": MOE.groups("tp"),
        "dp": MOE.groups("dp"),
        "pp": MOE.groups("pp"),
        "dp-cp": MOE.groups("dp-cp"),
        "tp-pp": MOE.groups("tp-pp"),
        "embedding": MOE.embedding_groups(),
        "position embedding": MOE.position_embedding_groups(),
        "ep": MOE.expert_groups("ep"),
        "edp": MOE.expert_groups("edp"),
    }.items():
        ranks = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups)
        assert f"{name} {len(groups)} {len(groups[0])} {ranks}" in words


def test_without_experts_only_the_dense_grid_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--world_size",
            "8",
            "--tp",
            "2",
            "--vpp",
            "2",
            "--pp",
            "2",
            "--order",
            "tp-dp-pp",
            "--rank-offset",
            "8",
        ]
    )
    printed = capsys.readouterr().out
    assert "expert" not in printed
    assert "etp" not in printed
    assert "order tp-dp-pp, fastest axis first" in printed
    assert "virtual stages: 2 chunks on each of 2 stages = 4" in printed
    assert "[8 9] [10 11] [12 13] [14 15]" in printed


@pytest.mark.parametrize("stage_layers", ["0,3,2,1", "[0, 3, 2, 1]", "E|(t*3|)tt|tL"])
def test_the_layers_of_every_stage_are_printed(
    stage_layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--world-size", "2", "--pp", "2", "--vpp", "2", "--stage-layers", stage_layers])
    printed = capsys.readouterr().out
    assert (
        "layers of each virtual stage: 0, 3, 2, 1\n"
        "stage 0  embedding; layers 3 to 4\n"
        "stage 1  layers 0 to 2; layer 5, head\n"
    ) in printed


def test_an_unknown_letter_in_stage_layers_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match="'Et|xL' has 'x' at position 4"):
        main(["--world-size", "2", "--pp", "2", "--stage-layers", "Et|xL"])


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


def test_no_line_is_wider_than_the_given_width() -> None:
    text = describe_layout(
        ParallelLayout(64, tp=4, pp=4, ep=8, etp=1), experts=True, gpus_per_node=8, width=90
    )
    assert max(map(len, text.splitlines())) <= 90


def test_sizes_that_do_not_fit_are_refused_with_the_legal_values() -> None:
    with pytest.raises(ParallelPlanError, match="Use tp of 1, 2, 4, 8 or 16"):
        main(["--world-size", "16", "--tp", "3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus-per-node", "0"], "must be a whole number of at least 1: it is '0'"),
        (["--png", "map.doc"], "'map.doc' must end in .png, .svg, .pdf"),
        (["--png", "nowhere/map.png"], "folder 'nowhere' does not exist"),
    ],
)
def test_invalid_arguments_end_the_command_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--world-size", "4", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("world_size", [1, 16, 64])
def test_the_rank_map_is_drawn(world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    layout = ParallelLayout(world_size, tp=min(4, world_size), rank_offset=4)
    draw_layout(layout, tmp_path / "map.png", experts=True)
    width, height = png_size(tmp_path / "map.png")
    assert width > 500
    assert height > 300


def test_the_command_prints_the_path_of_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    main(["--world-size", "4", "--tp", "2", "--png", str(tmp_path / "map.svg")])
    assert (tmp_path / "map.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert capsys.readouterr().out.endswith(f"rank map, nodes of 8: {tmp_path / 'map.svg'}\n")


def test_error_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lightning-megatron\[plot\]"'):
        draw_layout(MOE, tmp_path / "map.png")


@pytest.mark.parametrize(
    ("num_ranks", "gpus_per_node", "offset"),
    [(16, 8, 0), (64, 8, 0), (12, 5, 3), (3, 1, 0), (64, 16, 4)],
)
def test_ranks_and_nodes_do_not_overlap(num_ranks: int, gpus_per_node: int, offset: int) -> None:
    node_map = NodeMap(num_ranks, offset, gpus_per_node)
    width, height = node_map.size
    corners = [node_map.rank_corner(rank) for rank in range(offset, offset + num_ranks)]
    assert len({(round(x, 6), round(y, 6)) for x, y in corners}) == num_ranks
    for rank, (x, y) in zip(range(offset, offset + num_ranks), corners, strict=True):
        left, top = node_map.node_corner(rank // gpus_per_node)
        assert left < x < left + node_map.node_size[0]
        assert top < y < top + node_map.node_size[1]
        assert 0 <= x <= width
        assert 0 <= y <= height
