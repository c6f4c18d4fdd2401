"""Libraries that only one format needs, and that come with an extra of their own."""

from __future__ import annotations

import importlib
from typing import Any

from isoform.errors import ArtifactError


def need(package: str, extra: str, what: str) -> Any:
    """A library, imported.

    Args:
        package: the module's name.
        extra: the extra of this project that installs it.
        what: what it is needed for, to begin the message with.

    Raises:
        ArtifactError: it is not installed; with the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ArtifactError(
            f"{what} needs the {package} library, which is not installed: pip install 'isoform[{extra}]'"
        ) from None
