"""Rank groups equal Megatron-Core's and satisfy the definition of a group."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import ParallelLayout

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "rank_groups.json").read_text(encoding="utf-8")
)["cases"]
ARGUMENTS = ("world_size", "tp", "pp", "cp", "ep", "etp", "order", "rank_offset")
SMALL = st.sampled_from([1, 2, 3])


def layout_of(case: dict[str, Any]) -> ParallelLayout:
    return ParallelLayout(**{name: case[name] for name in ARGUMENTS})


def text_of(groups: list[list[int]]) -> str:
    return "|".join(" ".join(map(str, group)) for group in groups)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp, cp, dp, pp, etp, ep = (draw(SMALL) for _ in range(6))
    # A world that both grids divide, with pp last so that they agree on the stages.
    world = tp * cp * dp * etp * ep * pp
    order = "-".join([*draw(st.permutations(["tp", "cp", "ep", "dp"])), "pp"])
    offset = draw(st.sampled_from([0, 5]))
    return ParallelLayout(
        world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order, rank_offset=offset
    )


def test_rank_groups_equal_megatron_core_for_every_order() -> None:
    compared = 0
    for case in GOLDEN:
        if "dense" not in case:
            continue
        layout = layout_of(case)
        for name, expected in case["dense"].items():
            assert text_of(layout.groups(name)) == expected, (case, name)
        for name, expected in case["expert"].items():
            assert text_of(layout.expert_groups(name)) == expected, (case, name)
        if "embedding" in case:
            assert text_of(layout.embedding_groups()) == case["embedding"], case
            assert text_of(layout.position_embedding_groups()) == case["position_embedding"], case
        compared += 1
    assert compared > 200
    orders = {case["order"] for case in GOLDEN if "dense" in case}
    assert {"-".join(order) for order in permutations(["tp", "cp", "ep", "dp", "pp"])} <= orders


def test_layouts_that_megatron_core_cannot_place_are_refused() -> None:
    refused = [case for case in GOLDEN if "dense" not in case]
    assert len(refused) > 50
    for case in refused:
        with pytest.raises(ParallelPlanError):
            layout_of(case)


@given(layouts())
def test_groups_partition_the_ranks(layout: ParallelLayout) -> None:
    all_ranks = list(range(layout.rank_offset, layout.rank_offset + layout.world_size))
    lists = [
        layout.groups(name) for name in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-dp-pp")
    ]
    lists += [layout.expert_groups(name) for name in ("etp", "ep", "edp", "pp", "etp-ep", "ep-edp")]
    for groups in lists:
        assert sorted(rank for group in groups for rank in group) == all_ranks
        assert all(group == sorted(group) for group in groups)
        assert len({len(group) for group in groups}) == 1


@given(layouts())
def test_a_group_of_an_axis_varies_only_that_axis(layout: ParallelLayout) -> None:
    grids = ((layout.groups, layout.coordinates), (layout.expert_groups, layout.expert_coordinates))
    for groups, coordinates in grids:
        for axis in coordinates(layout.rank_offset):
            for group in groups(axis):
                positions = [coordinates(rank) for rank in group]
                assert [position.pop(axis) for position in positions] == list(range(len(group)))
                assert all(position == positions[0] for position in positions)


@given(layouts())
def test_coordinates_name_every_rank_once(layout: ParallelLayout) -> None:
    ranks = range(layout.rank_offset, layout.rank_offset + layout.world_size)
    for coordinates in (layout.coordinates, layout.expert_coordinates):
        assert len({tuple(coordinates(rank).items()) for rank in ranks}) == layout.world_size
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    for rank in ranks:
        assert all(0 <= index < sizes[axis] for axis, index in layout.coordinates(rank).items())


@given(layouts())
def test_both_grids_agree_on_the_stages(layout: ParallelLayout) -> None:
    assert layout.groups("pp") == layout.expert_groups("pp")


def test_group_names_are_independent_of_the_order_of_their_axes() -> None:
    layout = ParallelLayout(16, tp=2, cp=2, pp=2)
    assert (
        layout.groups("dp-cp")
        == layout.groups("cp-dp")
        == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    )
    assert layout.expert_groups("etp-edp") == layout.expert_groups("dp-tp")


def test_groups_of_sixteen_ranks_match_a_worked_example() -> None:
    layout = ParallelLayout(16, tp=4, pp=2, etp=1, ep=4)
    assert (layout.dp, layout.edp, layout.etp, layout.has_experts) == (2, 2, 1, True)
    assert layout.groups("dp") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8, 12],
        [9, 13],
        [10, 14],
        [11, 15],
    ]
    assert layout.expert_groups("ep") == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert layout.embedding_groups()[0] == [0, 8]
    assert layout.position_embedding_groups()[:2] == [[0], [1]]
    assert layout.coordinates(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert layout.expert_coordinates(13) == {"etp": 0, "ep": 1, "edp": 1, "pp": 1}


def test_a_single_stage_has_one_embedding_rank_per_pipeline() -> None:
    assert ParallelLayout(2).embedding_groups() == [[0], [1]]


def test_etp_equals_tp_by_default() -> None:
    assert ParallelLayout(8, tp=4).etp == 4
    assert not ParallelLayout(8, tp=4).has_experts
    assert replace(ParallelLayout(8, tp=4, etp=2), pp=2).etp == 2


def test_equal_layouts_have_equal_hashes() -> None:
    assert (
        len({ParallelLayout(8, tp=2), ParallelLayout(8, tp=2, etp=2), ParallelLayout(8, tp=4)}) == 2
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1: it is 0."),
        (
            {"world_size": 4, "tp": 2.0},
            "tp must be a whole number of at least 1: it is 2.0, of type float.",
        ),
        (
            {"world_size": 16, "tp": 3},
            "world_size (16) must be a multiple of tp x cp x pp (3 x 1 x 1 = 3), because every copy of the dense "
            "layers takes that many ranks. Use tp of 1, 2, 4, 8 or 16, or a multiple of 3 ranks (devices x num_nodes of the Trainer).",
        ),
        (
            {"world_size": 16, "tp": 4, "pp": 8},
            "world_size (16) must be a multiple of tp x cp x pp (4 x 1 x 8 = 32), because every copy of the dense "
            "layers takes that many ranks. Use tp of 1 or 2, or pp of 1, 2 or 4, or a multiple of 32 ranks (devices x num_nodes of the Trainer).",
        ),
        (
            {"world_size": 16, "tp": 3, "pp": 5},
            "world_size (16) must be a multiple of tp x cp x pp (3 x 1 x 5 = 15), because every copy of the dense "
            "layers takes that many ranks. Use sizes whose product is 1, 2, 4, 8 or 16, or a multiple of 15 ranks (devices x num_nodes of the Trainer).",
        ),
        (
            {"world_size": 8, "tp": 2, "ep": 8},
            "world_size (8) must be a multiple of etp x ep x pp (2 x 8 x 1 = 16), because every copy of the experts "
            "takes that many ranks. Use etp of 1, or ep of 1, 2 or 4, or a multiple of 16 ranks (devices x num_nodes of the Trainer).",
        ),
        (
            {"world_size": 16, "order": "tp-tp-dp"},
            "order must name every axis at most once: 'tp-tp-dp' names tp 2 times, so its place is ambiguous. "
            "Use for example 'tp-dp'.",
        ),
        (
            {"world_size": 16, "order": "tp-dq"},
            "order must name parallel axes joined by dashes: 'tp-dq' names 'dq'. "
            "Use each of tp, cp, ep, dp or pp at most once.",
        ),
        (
            {"world_size": 16, "tp": 2, "order": "tp"},
            "order must name every axis of size above 1: 'tp' leaves out dp (8), so the order of its ranks is "
            "undefined. Use for example 'tp-cp-ep-dp-pp'.",
        ),
        (
            {"world_size": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "order": "tp-cp-ep-pp-dp"},
            "the dense and the expert grid must have the same stages: order is 'tp-cp-ep-pp-dp', dp is 4, edp is 2. "
            "Neighbouring stages are 2 ranks apart in the dense grid (tp 2, cp 1) and 4 in the expert grid (etp 2, ep "
            "2), so the experts of a layer would be on another stage than the layer. Put pp last in the order, e.g. "
            "'tp-cp-ep-dp-pp'.",
        ),
        (
            {"world_size": 4, "vpp": 2},
            "vpp (2) needs pp above 1, because chunks shorten the pipeline bubble, and one stage has no bubble. "
            "Use vpp of 1, or pp of 2 or 4.",
        ),
        (
            {"world_size": 4, "rank_offset": -1},
            "rank_offset must be a whole number of at least 0: it is -1.",
        ),
    ],
)
def test_errors_of_invalid_layouts_give_the_rule_and_valid_sizes(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelPlanError) as error:
        ParallelLayout(**arguments)
    assert str(error.value) == message


def test_an_unknown_group_name_lists_the_axes() -> None:
    layout = ParallelLayout(8, tp=2, ep=2)
    with pytest.raises(
        ParallelPlanError, match="'ep', but it is an axis of the expert grid. Use tp, cp, dp or pp"
    ):
        layout.groups("ep")
    with pytest.raises(ParallelPlanError, match="there is no such axis. Use etp, ep, edp or pp"):
        layout.expert_groups("expert")
    with pytest.raises(ParallelPlanError, match="has etp 2 times"):
        layout.expert_groups("tp-etp")


def test_a_rank_outside_of_the_layout_has_no_coordinates() -> None:
    with pytest.raises(ParallelPlanError, match="Use rank - rank_offset of 0 to 3"):
        ParallelLayout(4, rank_offset=4).coordinates(3)
