"""Norms of matrices and of linear operators; knows no attention."""

from typing import Any

from lipbound.moved import from_folder


def __getattr__(name: str) -> Any:
    """Names of the module that had this path before."""
    return from_folder(__name__, name)
