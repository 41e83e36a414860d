"""Import of optional packages at first use, with an error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lightning_megatron.errors import MissingExtraError


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Full name of the module, such as ``matplotlib.figure``.
        extra: Name of the extra of this package that installs it.

    Raises:
        MissingExtraError: If the package is not installed; the message gives the install command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{package} is not installed. It belongs to the extra `{extra}`: "
            f'pip install "lightning-megatron[{extra}]".'
        ) from error
