"""No garbage is collected during a series of captures."""

from __future__ import annotations

import gc

import pytest

from lightning_megatron.graphs.backend import collection_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_disabled_during_captures_and_restored_afterwards(
    was_enabled: bool,
) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_objects_of_a_series_of_captures_stay_open_to_later_collections() -> None:
    before = gc.get_freeze_count()
    with collection_paused():
        graphs = [[number] for number in range(100)]
    assert gc.get_freeze_count() <= before
    assert all(gc.is_tracked(graph) for graph in graphs)
