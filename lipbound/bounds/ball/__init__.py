"""Bounds over balls of inputs."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Names of the module that once had this path, for one more release (`lipbound.moved` sees paths that are gone)."""
    new = "lipbound.bounds.ball.bound_over_ball"
    if name not in ("CERTIFIED_DELTA", "CERTIFIED_TOL", "over_ball"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} has moved to {new}; the old path will go with the next release", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(new), name)
