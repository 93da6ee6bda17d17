"""Bounds over balls of inputs."""

from typing import Any

from lipbound import moved


def __getattr__(name: str) -> Any:
    """Names of the module that had this path before."""
    return moved.from_folder(__name__, name)
