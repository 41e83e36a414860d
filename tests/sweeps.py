"""Choice of the cases of a sweep: a few that together meet every axis, or all with ``--sweeps``.

A sweep is a list of cases, such as layouts, that check one rule. The few cases find a broken rule;
the other cases find a rule that breaks in a single layout or model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

#: Environment variable with which worlds of several processes also run all cases.
VARIABLE = "LIGHTNING_MEGATRON_SWEEPS"
Cases = TypeVar("Cases", Mapping[str, Any], Sequence[Any])


def all_run() -> bool:
    """Return whether all cases of sweeps run."""
    return os.environ.get(VARIABLE) == "1"


def chosen(cases: Cases, *few: Any) -> Any:
    """Return the cases of a sweep that run: the few, or all if ``--sweeps`` was given.

    Args:
        cases: All cases, by name or as a list.
        few: Names, or cases of a list, that always run.
    """
    unknown = [case for case in few if case not in cases]
    assert few, "a sweep needs a case that always runs"
    assert not unknown, f"no case of the sweep: {unknown}"
    if all_run():
        return cases
    if isinstance(cases, Mapping):
        return {name: case for name, case in cases.items() if name in few}
    return [case for case in cases if case in few]
