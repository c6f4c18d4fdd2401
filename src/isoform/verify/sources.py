"""Which line of a model's code is running."""

from __future__ import annotations

import inspect
from pathlib import Path

_OWN = str(Path(__file__).parent)


def source() -> str:
    """File and line of the innermost frame that is neither torch's nor of this package."""
    frame = inspect.currentframe()
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(_OWN)
    ):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
