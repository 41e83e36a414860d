"""Tests of the import of optional packages."""

from __future__ import annotations

import pytest

from lightning_megatron.errors import MissingExtraError
from lightning_megatron.extras import import_extra


def test_error_of_a_missing_package_names_its_extra() -> None:
    with pytest.raises(
        MissingExtraError, match=r'extra `plot`: pip install "lightning-megatron\[plot\]"'
    ):
        import_extra("a_package_that_nobody_has.figure", "plot")


def test_an_installed_package_is_imported() -> None:
    assert import_extra("json.decoder", "plot").__name__ == "json.decoder"
